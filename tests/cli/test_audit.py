"""`branchline audit`, and what every command says of a model or an adapter that does not fit."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForSequenceClassification, LlamaModel

from branchline import Calibration, __version__, load_model
from tests.helpers import edit_json


def copy_of(folder: Path, target: Path) -> Path:
    shutil.copytree(folder, target)
    return target


def sites_of(report: dict[str, Any]) -> set[tuple[str, ...]]:
    return {tuple(site["consumers"]) for site in report["sites"]}


# --- what it prints


def test_json_is_all_of_stdout_and_holds_every_site(branchline, model_folder, sql, tone, all_sites):
    done = branchline(
        "audit", model_folder, "--adapter", f"sql={sql}", "--adapter", f"tone={tone}", "--json"
    )
    assert done.code == 0, done.err
    report = done.json
    assert sites_of(report) == all_sites
    assert report["adapter_sets"] == [[], ["sql"], ["tone"], ["sql", "tone"]]
    assert [adapter["name"] for adapter in report["adapters"]] == ["sql", "tone"]
    for site in report["sites"]:
        blamed = {tuple(r["adapters"]): tuple(r["blame"]) for r in site["routes"]}
        expected = {"down_proj": ("sql",), "q_proj": ("tone",)}
        first = site["consumers"][0].rpartition(".")[2]
        assert blamed[("sql", "tone")] == expected.get(first, ())
        assert blamed[()] == ()
        assert site["ran"] == {}
    assert "reading" in done.err
    assert "calibrat" not in done.err


def test_static_scales_are_calibrated_on_built_in_prompts_and_it_says_so(
    branchline, model_folder, all_sites
):
    done = branchline("audit", model_folder, "--load", "--quant", "fp8-static", "--json")
    assert done.code == 0, done.err
    assert {site["key"] for site in done.json["sites"]} == {"fp8-static-tensor"}
    assert sites_of(done.json) == all_sites
    assert "no --calibration given: calibrating on 24 built-in English prompts" in done.err


def test_the_table_names_sites_adapters_and_policy(branchline, model_folder, sql):
    done = branchline("audit", model_folder, "--adapter", f"sql={sql}", "--policy", "static")
    assert done.code == 0, done.err
    assert "policy static" in done.out
    for part in ("input_layernorm", "down_proj", "(no adapter)", "sql"):
        assert part in done.out


def test_what_a_library_prints_does_not_reach_stdout(branchline, model_folder, monkeypatch):
    def noisy(folder):
        print("loading shards")
        return load_model(folder)

    monkeypatch.setattr("branchline.serving.load.load_model", noisy)
    done = branchline("audit", model_folder, "--load", "--json")
    assert done.json["schema_version"] >= 5
    assert "loading shards" in done.err


def test_settings_reach_the_model(branchline, model_folder):
    done = branchline("audit", model_folder, "--ignore", "*.down_proj", "--json")
    keys = {site["consumers"][0].rpartition(".")[2]: site["key"] for site in done.json["sites"]}
    assert keys["down_proj"] is None
    assert keys["q_proj"] == "fp8-dynamic-token"


def test_a_setting_without_effect_is_refused(branchline, model_folder):
    line = branchline("audit", model_folder, "--load", "--percentile", "99.9").error
    assert "percentile" in line
    assert "fp8-static" in line


@pytest.mark.parametrize("architectures", [None, ["LlamaModel"]])
def test_a_model_without_a_head_is_read_too(branchline, model_folder, tmp_path, architectures):
    """The class is the one the checkpoint names, or the only one that its tensors fit."""
    config = LlamaConfig.from_pretrained(model_folder)
    LlamaModel(config).save_pretrained(tmp_path)
    edit_json(tmp_path / "config.json", {"architectures": architectures})
    done = branchline("audit", tmp_path, "--load", "--json")
    if architectures:
        assert done.code == 0, done.err
        assert "wrapping LlamaModel" in done.err
    else:
        # Only a guess is left then, and a wrong guess is no model.
        assert done.code == 2
        assert "lacks tensors of the model: lm_head.weight" in done.err


def test_an_architecture_with_another_head_is_read(branchline, model_folder, tmp_path):
    config = LlamaConfig.from_pretrained(model_folder, num_labels=3, pad_token_id=0)
    LlamaForSequenceClassification(config).save_pretrained(tmp_path)
    done = branchline("audit", tmp_path, "--load", "--json")
    assert done.code == 0, done.err
    assert "wrapping LlamaForSequenceClassification" in done.err


# --- calibration files


def test_a_file_of_prompts_calibrates(branchline, model_folder, tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("The quick brown fox\n\njumps over\n")
    done = branchline(
        "audit", model_folder, "--quant", "fp8-static", "--calibration", file, "--json"
    )
    assert done.code == 0, done.err
    assert "built-in" not in done.err


def test_saved_scales_need_no_tokenizer(branchline, model_folder, tmp_path):
    bare = copy_of(model_folder, tmp_path / "bare")
    for file in bare.glob("*token*"):
        file.unlink()
    linears = [
        f"model.layers.{layer}.{linear}"
        for layer in range(2)
        for linear in (
            *(f"self_attn.{x}_proj" for x in "qkvo"),
            *(f"mlp.{x}_proj" for x in ("gate", "up", "down")),
        )
    ]
    scales = tmp_path / "scales.json"
    Calibration(dict.fromkeys(linears, 4.0), 100.0, 1).save(scales)
    static = ("audit", bare, "--load", "--quant", "fp8-static", "--json")
    assert branchline(*static, "--calibration", scales).code == 0
    without = branchline(*static)
    assert without.code == 2
    assert "holds no readable tokenizer" in without.err


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("p.csv", "a", "is neither .json"),
        ("p.txt", " \n\n", "holds no prompts"),
        ("p.txt", None, "No such file"),
        ("p.txt", b"\xff\xfe", "decode"),
        ("p.json", "{}", "is of another kind"),
    ],
)
def test_an_unusable_calibration_file(branchline, model_folder, tmp_path, name, content, said):
    file = tmp_path / name
    if content is not None:
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
    done = branchline("audit", model_folder, "--quant", "fp8-static", "--calibration", file)
    assert done.code == 2
    assert str(file) in done.error
    assert said in done.error


def test_a_calibration_file_without_static_scales_is_a_usage_error(branchline, model_folder):
    done = branchline("audit", model_folder, "--calibration", "prompts.txt")
    assert done.code == 2
    assert "--quant fp8-dynamic has no static scales" in done.err


# --- errors: one line, no traceback


def test_a_model_folder_that_is_missing(branchline, tmp_path):
    assert "'nowhere': does not exist; pass the folder" in branchline("audit", "nowhere").error
    file = tmp_path / "model.gguf"
    file.write_text("")
    assert "is no folder" in branchline("audit", file).error
    assert "holds no config.json" in branchline("audit", tmp_path).error


def test_an_adapter_in_place_of_a_model(branchline, sql):
    assert "holds a PEFT adapter; pass its base model" in branchline("audit", sql).error


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ("{", "valid JSON"),
        ("{}", "model_type"),
        ('{"model_type": "no-such-type"}', "no-such-type"),
        (
            '{"model_type": "x", "auto_map": {"AutoConfig": "c.C"}, "architectures": ["X"]}',
            "custom code",
        ),
    ],
)
def test_a_config_that_cannot_be_read(branchline, tmp_path, config, said):
    (tmp_path / "config.json").write_text(config)
    (tmp_path / "c.py").write_text("raise SystemExit('code of a checkpoint ran')")
    line = branchline("audit", tmp_path).error
    assert str(tmp_path) in line
    assert said in line


def test_weights_that_are_missing_damaged_or_left_over(branchline, model_folder, tmp_path):
    broken = copy_of(model_folder, tmp_path / "model")
    weights = broken / "model.safetensors"
    tensors = load_file(weights)
    norm = tensors.pop("model.norm.weight")
    save_file(tensors, weights, {"format": "pt"})
    assert (
        "lacks tensors of the model: model.norm.weight"
        in branchline("audit", broken, "--load").error
    )
    more = {"model.norm.weight": norm, "model.layers.0.mlp.up_proj.weight_scale": torch.ones(1)}
    save_file({**tensors, **more}, weights, {"format": "pt"})
    assert "weight_scale" in branchline("audit", broken, "--load").error
    weights.write_bytes(b"not a safetensors file")
    assert "cannot read it" in branchline("audit", broken, "--load").error
    weights.unlink()
    assert "model.safetensors" in branchline("audit", broken, "--load").error


def test_an_adapter_that_does_not_fit(branchline, model_folder, sql, tmp_path):
    missing = branchline("audit", model_folder, "--load", "--adapter", f"sql={tmp_path / 'none'}")
    assert str(tmp_path / "none") in missing.error
    rank = branchline(
        "audit", model_folder, "--load", "--adapter", f"sql={sql}", "--max-lora-rank", 2
    )
    line = rank.error
    assert " 4" in line
    assert " 2" in line
    full = branchline("audit", model_folder, "--load", "--adapter", f"sql={sql}", "--max-loras", 0)
    assert "--max-loras" in full.error


@pytest.mark.parametrize(
    ("adapters", "said"),
    [
        (["sql"], "'sql' is not NAME=SOURCE"),
        (["=path"], "'=path' is not NAME=SOURCE"),
        (["sql="], "'sql=' is not NAME=SOURCE"),
        (["@sql=path"], "'@sql' cannot name an adapter"),
        (["my sql=path"], "'my sql' cannot name an adapter"),
        (["base=path"], "'base' cannot name an adapter"),
        (["sql=one", "sql=two"], "the name 'sql' is given twice: for one and for two"),
    ],
)
def test_usage_errors_come_before_anything_is_loaded(branchline, adapters, said):
    flags = [part for adapter in adapters for part in ("--adapter", adapter)]
    done = branchline("audit", "nowhere", *flags)
    assert done.code == 2
    assert not done.out
    assert said in done.err
    assert "--adapter" in done.err
    assert "loading" not in done.err


def test_a_path_may_hold_an_equals_sign(branchline, model_folder, sql, tmp_path):
    folder = copy_of(sql, tmp_path / "rank=4")
    done = branchline("audit", model_folder, "--adapter", f"sql={folder}", "--json")
    assert [adapter["name"] for adapter in done.json["adapters"]] == ["sql"]


# --- the program


def test_version_and_help(branchline):
    assert branchline("--version") == (0, f"branchline {__version__}\n", "")
    done = branchline("--help")
    assert done.code == 0
    assert "audit" in done.out
    assert "generate" in done.out
    assert "--policy" in branchline("audit", "--help").out


def program(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "branchline", *map(str, arguments)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        timeout=300,
        check=False,
    )


def test_as_a_program_stdout_is_json_and_stderr_holds_no_noise(model_folder, sql, all_sites):
    done = program("audit", model_folder, "--adapter", f"sql={sql}", "--json")
    assert done.returncode == 0, done.stderr
    assert sites_of(json.loads(done.stdout)) == all_sites
    assert done.stderr.splitlines() == [
        f"reading {model_folder}",
    ]


def test_as_a_program_an_error_is_one_line_and_exit_code_2():
    done = program("audit", "nowhere")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines() == [
        "reading nowhere",
        "error: model 'nowhere': does not exist; pass the folder of a transformers checkpoint "
        "(names on a hub are not looked up)",
    ]


def test_an_adapter_of_another_base_is_refused_unless_the_flag_allows_it(
    branchline, model_folder, sql, tmp_path
):
    served = tmp_path / "models--acme--Tiny" / "snapshots" / "0123456789abcdef"
    served.parent.mkdir(parents=True)
    served.symlink_to(model_folder)
    adapter = copy_of(sql, tmp_path / "sql")
    edit_json(adapter / "adapter_config.json", {"base_model_name_or_path": "acme/Tiny-Chat"})
    command = ("audit", served, "--load", "--adapter", f"sql={adapter}", "--json")
    error = branchline(*command).error
    assert "'acme/Tiny-Chat'" in error
    assert str(served) in error
    assert "--allow-base-mismatch" in error
    done = branchline(*command, "--allow-base-mismatch")
    assert done.code == 0, done.err
    assert any("acme/Tiny-Chat" in note for note in done.json["adapters"][0]["notes"])
