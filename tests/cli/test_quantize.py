"""`branchline quantize`, and the other commands on what it writes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from branchline import Calibration, load_model
from branchline.linear.quantized_linear import QuantizedLinear
from branchline.serving.quantize_report import QuantizationReport
from tests.checkpoints import contents


def last_line(done) -> str:
    return done.err.splitlines()[-1]


def test_json_is_all_of_stdout_and_lies_beside_the_weights(branchline, model_folder, tmp_path):
    out = tmp_path / "out"
    done = branchline("quantize", model_folder, out, "--scheme", "fp8-dynamic", "--json")
    assert done.code == 0, done.err
    report = QuantizationReport.model_validate_json(done.out)
    assert report == QuantizationReport.model_validate_json(
        (out / "quantization_report.json").read_text()
    )
    assert len(report.layers) == 14
    assert report.bytes_after < report.bytes_before
    assert f"quantising {model_folder} as fp8-dynamic" in done.err
    names = {path.name for path in out.iterdir()}
    assert {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"} <= names
    linears = [m for m in load_model(out).modules() if isinstance(m, QuantizedLinear)]
    assert len(linears) == 14


def test_the_table_names_the_worst_layers(branchline, model_folder, tmp_path):
    done = branchline("quantize", model_folder, tmp_path / "out", "--scheme", "fp8-static")
    assert done.code == 0, done.err
    assert "fp8-static as compressed-tensors: 14 linears quantised, 1 left" in done.out
    for part in ("worst layers", "SQNR (dB)", "activations out of range", "down_proj", "0.0000%"):
        assert part in done.out
    assert "calibrating on 24 built-in English prompts" in done.err


@pytest.mark.parametrize("scheme", ["fp8-weight-only", "fp8-static", "nvfp4"])
def test_the_other_commands_take_the_result(branchline, model_folder, sql, tmp_path, scheme):
    out = tmp_path / "out"
    assert branchline("quantize", model_folder, out, "--scheme", scheme).code == 0
    done = branchline("audit", out, "--adapter", f"sql={sql}", "--json")
    assert done.code == 0, done.err
    keys = {site["key"] for site in done.json["sites"]}
    assert len(keys) == 1
    assert (keys == {None}) == (scheme == "fp8-weight-only")
    done = branchline("generate", out, "--prompt", "Hello!", "--max-new-tokens", 2)
    assert done.code == 0, done.err


def test_a_calibration_file_is_used(branchline, model_folder, tmp_path):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("The quick brown fox\njumps over\n")
    arguments = ("quantize", model_folder, tmp_path / "out", "--scheme", "fp8-static")
    done = branchline(*arguments, "--calibration", prompts, "--percentile", 95, "--json")
    assert done.code == 0, done.err
    assert "built-in" not in done.err
    assert max(layer["saturated"] for layer in done.json["layers"]) > 0
    linears = [layer["name"] for layer in done.json["layers"]]
    ranges = tmp_path / "ranges.json"
    Calibration(dict.fromkeys(linears, 4.0), 100.0, 1).save(ranges)
    arguments = ("quantize", model_folder, tmp_path / "saved", "--scheme", "fp8-static")
    done = branchline(*arguments, "--calibration", ranges, "--json")
    assert done.code == 0, done.err
    linear = load_model(tmp_path / "saved").get_submodule(linears[0])
    assert linear.contract.scale.number == pytest.approx(4.0 / 448)


def test_flags_reach_the_result(branchline, model_folder, tmp_path):
    flags = ("--quantize-lm-head", "--ignore", "*.q_proj", "--ignore", "*.k_proj")
    done = branchline(
        "quantize", model_folder, tmp_path / "out", "--scheme", "mxfp8", *flags, "--json"
    )
    assert done.code == 0, done.err
    assert "lm_head" in {layer["name"] for layer in done.json["layers"]}
    left = {entry["name"].rpartition(".")[2] for entry in done.json["unquantized"]}
    assert left == {"q_proj", "k_proj"}


# --- errors


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ((), "Missing option '--scheme'"),
        (("--scheme", "int4"), "unknown scheme; choose one of fp8-static"),
        (("--scheme", "mxfp8", "--calibration", "p.txt"), "has no scales to calibrate"),
        (("--scheme", "fp8-static", "--percentile", "0"), "--percentile"),
    ],
)
def test_usage_errors_come_before_anything_is_read(branchline, tmp_path, flags, said):
    done = branchline("quantize", "nowhere", tmp_path / "out", *flags)
    assert done.code == 2
    assert said in done.err
    assert not done.out


def test_errors_are_one_line(branchline, model_folder, tmp_path):
    scheme = ("--scheme", "fp8-dynamic")
    done = branchline("quantize", "nowhere", tmp_path / "out", *scheme)
    assert done.code == 1
    assert last_line(done).startswith("error: model 'nowhere': does not exist")
    done = branchline("quantize", "nowhere", tmp_path / "out", "--scheme", "nvfp4")
    assert last_line(done).startswith("error: model 'nowhere': does not exist")
    done = branchline("quantize", model_folder, tmp_path, *scheme)
    assert last_line(done) == (
        f"error: output {str(tmp_path)!r}: exists already; choose another place, or remove it"
    )
    done = branchline("quantize", model_folder, tmp_path / "out", "--scheme", "fp8-block")
    assert "takes inputs in groups of 128" in last_line(done)
    assert "Traceback" not in done.err


# --- a killed run

_KILLED = """
import os, signal, sys
from pathlib import Path
import branchline.cli.quantize
from branchline.cli import app

first, arguments = Path(sys.argv[1]), sys.argv[2:]
whole = branchline.cli.quantize.quantize_checkpoint

def killed(*args, progress, **settings):
    def tell(what, done, total):
        if first.is_file():
            os.kill(os.getpid(), signal.SIGKILL)
        progress(what, done, total)
    return whole(*args, progress=tell, **settings)

branchline.cli.quantize.quantize_checkpoint = killed
app(arguments)
"""


def test_a_killed_run_leaves_no_checkpoint_and_is_continued(branchline, model_folder, tmp_path):
    config = LlamaConfig.from_pretrained(model_folder, num_hidden_layers=4)
    source, out, partial = tmp_path / "source", tmp_path / "out", tmp_path / "out.partial"
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(source, max_shard_size="30KB")
    first, *others = sorted(path.name for path in source.glob("*.safetensors"))
    command = ("quantize", source, out, "--scheme", "fp8-dynamic")
    done = subprocess.run(
        [sys.executable, "-c", _KILLED, str(partial / first), *map(str, command)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        timeout=300,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert not out.exists()
    assert (partial / first).is_file()
    assert not any((partial / name).exists() for name in others)
    audit = branchline("audit", partial)
    assert audit.code == 2
    assert "holds no config.json" in last_line(audit)
    written = (partial / first).stat().st_mtime_ns
    assert branchline(*command).code == 0
    assert (out / first).stat().st_mtime_ns == written
    whole = tmp_path / "whole"
    assert branchline("quantize", source, whole, "--scheme", "fp8-dynamic").code == 0
    assert contents(out) == contents(whole)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == {first, *others}
