"""Thousands of layers and adapters: the audit's time, and what folders of large models take."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig

from branchline.core.platform import detect_platform
from branchline.policies.cost import cost_model_of
from branchline.policies.policy import make_policy
from branchline.serving.config import WrapConfig
from branchline.serving.hollow.audit import Fleet, FolderAudit, HollowModel

LAYERS, ADAPTERS = 1000, 10_000
HIDDEN, INTERMEDIATE, RANK = 64, 128, 2
LINEARS = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.v_proj": (HIDDEN, HIDDEN // 2),
    "mlp.up_proj": (HIDDEN, INTERMEDIATE),
    "mlp.down_proj": (INTERMEDIATE, HIDDEN),
}


# What `getrusage` says of a child begins with what its parent held when it forked.
_AUDIT = """
import atexit, sys
from branchline.cli import main
atexit.register(lambda: sys.stderr.write(open("/proc/self/status").read()))
sys.argv = ["branchline", "audit", sys.argv[1], "--device", "h200", "--json"]
main()
"""


def save_config(folder: Path, **settings: int) -> None:
    LlamaConfig(**settings, dtype="bfloat16", architectures=["LlamaForCausalLM"]).save_pretrained(
        folder
    )


def save_adapter(folder: Path, targets: list[str], layers: range) -> None:
    folder.mkdir(parents=True)
    tensors = {}
    for layer in layers:
        for target in targets:
            inputs, outputs = LINEARS[target]
            module = f"base_model.model.model.layers.{layer}.{target}"
            tensors[f"{module}.lora_A.weight"] = torch.ones(RANK, inputs, dtype=torch.bfloat16)
            tensors[f"{module}.lora_B.weight"] = torch.ones(outputs, RANK, dtype=torch.bfloat16)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": RANK,
        "target_modules": [target.rpartition(".")[2] for target in targets],
        "layers_to_transform": list(layers),
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(config))


def save_fleet(folder: Path, layers: int = LAYERS) -> None:
    """Adapters of three shapes; their files are links, which reading does not notice."""
    last = range(layers - 50, layers)
    kinds = (["self_attn.q_proj", "self_attn.v_proj"], ["mlp.down_proj"], ["mlp.up_proj"])
    for index, targets in enumerate(kinds):
        save_adapter(folder / f"adapter{index:05}", targets, last)
    for index in range(len(kinds), ADAPTERS):
        own = folder / f"adapter{index:05}"
        own.mkdir()
        for file in (folder / f"adapter{index % len(kinds):05}").iterdir():
            os.link(file, own / file.name)


def test_ten_thousand_adapters_on_a_thousand_layers_take_seconds(tmp_path):
    save_config(
        tmp_path / "model", hidden_size=HIDDEN, intermediate_size=INTERMEDIATE,
        num_hidden_layers=LAYERS, num_attention_heads=4, num_key_value_heads=2, vocab_size=256,
    )  # fmt: skip
    save_fleet(tmp_path / "fleet")
    costs = cost_model_of(detect_platform())
    config, platform = WrapConfig(), costs.device.platform
    asked = FolderAudit(
        tmp_path / "model", config, platform, costs, (make_policy("dynamic"),),
        fleet=Fleet(tmp_path / "fleet"),
    )  # fmt: skip
    with ExitStack() as undo:
        hollow = HollowModel.of(tmp_path / "model", config, platform, undo)
        begun = time.perf_counter()
        report = asked.of(hollow)
        text = report.model_dump_json()
        seconds = time.perf_counter() - begun
    assert seconds < 10
    assert len(report.sites) == 3 * LAYERS
    assert len(report.adapters) == ADAPTERS
    assert report.fleet is not None
    assert report.fleet.shapes == 3
    assert report.adapters[0].costs[0].sites_unfused == 50
    assert len(text) < 50e6


def test_a_thousand_linears_and_ten_thousand_adapters_are_audited_from_files_in_ten_seconds(
    tmp_path,
):
    # Seven linears a layer; the whole of it, from the config to the report as JSON.
    layers = 143
    save_config(
        tmp_path / "model", hidden_size=HIDDEN, intermediate_size=INTERMEDIATE,
        num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=2, vocab_size=256,
    )  # fmt: skip
    save_fleet(tmp_path / "fleet", layers)
    costs = cost_model_of(detect_platform())
    asked = FolderAudit(
        tmp_path / "model", WrapConfig(), costs.device.platform, costs, (make_policy("dynamic"),),
        fleet=Fleet(tmp_path / "fleet"),
    )  # fmt: skip
    begun = time.perf_counter()
    report = asked.run()
    text = report.model_dump_json()
    assert time.perf_counter() - begun < 10
    assert len(text) < 50e6
    assert sum(len(site.consumers) for site in report.sites) + layers > 1000
    assert len(report.adapters) == ADAPTERS


def test_a_folder_of_seventy_billion_parameters_is_audited_in_seconds_and_two_gigabytes(tmp_path):
    save_config(
        tmp_path, hidden_size=8192, intermediate_size=28672, num_hidden_layers=80,
        num_attention_heads=64, num_key_value_heads=8, vocab_size=128256,
    )  # fmt: skip
    begun = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", _AUDIT, str(tmp_path)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        timeout=120,
        check=False,
    )
    seconds = time.perf_counter() - begun
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert len(report["sites"]) == 240
    assert {route["route"] for site in report["sites"] for route in site["routes"]} == {"fused"}
    assert sum(k["weight_bytes"] for k in report["kernels"]) > 70e9
    assert seconds < 30
    peak = re.search(r"VmHWM:\s+(\d+) kB", done.stderr)
    assert peak is not None
    assert int(peak[1]) * 1024 < 2e9
