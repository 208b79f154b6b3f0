"""An audit of headers and config says what the audit of the loaded model says."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from branchline import load_model, wrap
from branchline.core.devices import device_spec
from branchline.core.errors import KernelUnavailableError, WrapError
from branchline.core.platform import detect_platform
from branchline.policies.audit.report import AuditReport
from branchline.policies.cost import cost_model_for, cost_model_of
from branchline.policies.policy import make_policy
from branchline.serving.config import WrapConfig
from branchline.serving.hollow.audit import Fleet, FolderAudit
from branchline.serving.hollow.model import LARGE, hollow_model
from branchline.serving.skeleton import Skeleton
from tests import models
from tests.checkpoints import PROMPTS, build_wide, quantize
from tests.moe import models as moe_models
from tests.moe.checkpoints import fine_grained, fp8_config, write

POLICIES = ("dynamic", "static", "dual", "absorbed")
# What only a served model has, or only a folder.
_OWN = {"source", "epoch", "assumptions", "branches", "checkpoint"}


def headers_only(folder: Path) -> None:
    """Cut off every byte behind the headers."""
    for file in folder.glob("*.safetensors"):
        with file.open("r+b") as opened:
            opened.truncate(8 + int.from_bytes(opened.read(8), "little"))


def audit_folder(
    folder: Path,
    adapters: dict[str, str] | None = None,
    policies: tuple[str, ...] = POLICIES,
    fleet: Fleet | None = None,
    **settings: Any,
) -> AuditReport:
    model = cost_model_of(detect_platform())
    config = WrapConfig.checked(**settings)
    made = tuple(map(make_policy, policies))
    platform = model.device.platform
    return FolderAudit(folder, config, platform, model, made, adapters or {}, fleet).run()


def told(report: AuditReport) -> dict[str, Any]:
    """What both must say."""
    found = report.model_dump(exclude=_OWN)
    for adapter in found["adapters"]:
        # A served one lies in a slot.
        adapter.pop("tier")
    return found


def loaded_audit(folder: Path, adapters: dict[str, str], **settings: Any) -> AuditReport:
    served = wrap(load_model(folder), **settings)
    for name, source in adapters.items():
        served.adapters.load(name, source)
    return served.audit(policy=POLICIES)


def adapters_for(model: torch.nn.Module, family: str, folder: Path) -> dict[str, str]:
    found = {}
    for index, targets in enumerate((*models.TARGETS[family], "all-linear")):
        target = folder / f"adapter{index}"
        models.save_adapter(model, target, targets, rank=4 + 4 * index, seed=index)
        found[f"a{index}"] = str(target)
    return found


@pytest.mark.parametrize("family", models.CONFIGS)
def test_headers_tell_what_the_loaded_model_tells(family, tmp_path):
    model = models.build(family)
    model.save_pretrained(tmp_path / "model")
    adapters = adapters_for(models.build(family), family, tmp_path)
    wanted = told(loaded_audit(tmp_path / "model", adapters))
    headers_only(tmp_path / "model")
    report = audit_folder(tmp_path / "model", adapters)
    assert told(report) == wanted
    assert report.source == "folder"
    assert not report.problems


@pytest.mark.parametrize("kind", moe_models.MODELS)
def test_of_mixtures_of_experts_too(kind, tmp_path):
    moe_models.MODELS[kind]().save_pretrained(tmp_path)
    wanted = told(loaded_audit(tmp_path, {}))
    headers_only(tmp_path)
    assert told(audit_folder(tmp_path)) == wanted


@pytest.mark.parametrize("quant", ["none", "fp8-block", "fp8-weight-only", "mxfp8"])
def test_under_every_way_to_quantise(quant, tmp_path):
    models.build("llama").save_pretrained(tmp_path)
    settings = {"quant": quant, "ignore": ("*.up_proj",) if quant != "none" else ()}
    given = {name: value for name, value in settings.items() if value}
    wanted = told(loaded_audit(tmp_path, {}, **given))
    assert told(audit_folder(tmp_path, **given)) == wanted


@pytest.mark.parametrize("scheme", ["fp8-static", "fp8-block", "nvfp4", "fp8-weight-only"])
def test_of_quantised_checkpoints(scheme, tmp_path):
    build_wide("llama").save_pretrained(tmp_path / "model")
    quantize(tmp_path / "model", tmp_path / "quantised", scheme)
    wanted = loaded_audit(tmp_path / "quantised", {})
    headers_only(tmp_path / "quantised")
    report = audit_folder(tmp_path / "quantised")
    found, expected = told(report), told(wanted)
    calibrated = scheme in ("fp8-static", "nvfp4")
    assert bool(report.assumptions) == calibrated
    if calibrated:
        for kernel in (*found["kernels"], *expected["kernels"]):
            kernel.pop("scales")
    assert found == expected
    assert report.checkpoint is not None
    assert wanted.checkpoint is not None
    assert report.checkpoint.unmatched == wanted.checkpoint.unmatched


def test_of_quantised_experts(tmp_path):
    model = moe_models.MODELS["qwen3_moe"]()
    write(tmp_path, model, fine_grained(), fp8_config())
    wanted = told(loaded_audit(tmp_path, {}))
    headers_only(tmp_path)
    assert told(audit_folder(tmp_path)) == wanted


def test_calibrated_scales_are_assumed_alike_and_it_says_so(tmp_path):
    models.build("llama").save_pretrained(tmp_path)
    served = wrap(load_model(tmp_path), quant="fp8-static", calibration=PROMPTS)
    wanted = told(served.audit(policy=POLICIES))
    report = audit_folder(tmp_path, quant="fp8-static")
    assert told(report) == wanted
    assert "taken to have the same" in report.assumptions[0]


# --- other devices -------------------------------------------------------------------------------


def test_a_device_that_is_not_here_is_planned_for(tmp_path):
    models.build("llama").save_pretrained(tmp_path)
    model = cost_model_for("h200")
    config = WrapConfig.checked(quant="fp8-block")
    policies = (make_policy("dynamic"),)
    report = FolderAudit(tmp_path, config, device_spec("h200").platform, model, policies).run()
    assert "sm_90" in report.platform
    assert {k.name for k in report.kernels if k.key} <= {"triton-block", "torch-scaled-mm"}
    assert {route.producer for site in report.sites for route in site.routes} == {"triton"}
    assert report.device.kind == "h200"
    assert not report.device.measured


def test_a_kernel_that_the_device_does_not_have_is_refused(tmp_path):
    models.build("llama").save_pretrained(tmp_path)
    with pytest.raises(KernelUnavailableError, match="torch-scaled-mm"):
        audit_folder(tmp_path, linear_kernel="torch-scaled-mm")


# --- adapters ------------------------------------------------------------------------------------


def test_what_cannot_be_read_is_a_problem_and_the_rest_is_audited(tmp_path):
    model = models.build("llama")
    model.save_pretrained(tmp_path / "model")
    good = tmp_path / "fleet" / "good"
    models.save_adapter(model, good, ["q_proj"], rank=4, seed=0)
    shutil.copytree(good, tmp_path / "fleet" / "cut")
    headers_only(tmp_path / "fleet" / "cut")
    shutil.copytree(good, tmp_path / "fleet" / "wide")
    edited = tmp_path / "fleet" / "wide" / "adapter_config.json"
    edited.write_text(json.dumps({**json.loads(edited.read_text()), "r": 64}))
    (tmp_path / "fleet" / "empty").mkdir()
    report = audit_folder(
        tmp_path / "model", {"gone": str(tmp_path / "none")}, fleet=Fleet(tmp_path / "fleet")
    )
    assert [a.name for a in report.adapters] == ["good"]
    assert {p.part for p in report.problems} == {
        "adapter 'gone'", "adapter 'cut'", "adapter 'wide'", "adapter 'empty'",
    }  # fmt: skip
    assert all(p.reason and p.remedy for p in report.problems)
    assert report.sites


def test_a_folder_of_adapters_that_is_missing_is_a_problem(tmp_path):
    models.build("llama").save_pretrained(tmp_path / "model")
    report = audit_folder(tmp_path / "model", fleet=Fleet(tmp_path / "none"))
    (problem,) = report.problems
    assert str(tmp_path / "none") in problem.part


def test_adapters_of_one_shape_share_their_plans(tmp_path):
    model = models.build("llama")
    model.save_pretrained(tmp_path / "model")
    for index in range(6):
        targets = ["q_proj"] if index % 2 else ["down_proj"]
        models.save_adapter(model, tmp_path / "fleet" / f"a{index}", targets, rank=4, seed=index)
    report = audit_folder(tmp_path / "model", fleet=Fleet(tmp_path / "fleet", {"a0": 3, "a1": 1}))
    assert report.fleet is not None
    assert (report.fleet.adapters, report.fleet.shapes) == (6, 2)
    costs = {target.targets: target for target in report.fleet.targets}
    assert costs[("down_proj",)].weight == pytest.approx(0.75)
    assert costs[("q_proj",)].weight == pytest.approx(0.25)
    assert costs[("q_proj",)].adapters == 3


def test_adapters_that_need_the_base_are_told_without_it(tmp_path):
    model = models.build("llama")
    model.save_pretrained(tmp_path / "model")
    models.save_adapter(model, tmp_path / "dora", ["q_proj"], rank=4, seed=0, use_dora=True)
    adapters = {"dora": str(tmp_path / "dora")}
    report = audit_folder(tmp_path / "model", adapters)
    wanted = loaded_audit(tmp_path / "model", adapters)
    assert told(report)["sites"] == told(wanted)["sites"]
    assert report.adapters[0].costs == wanted.adapters[0].costs
    assert "told by a load" in " ".join(report.adapters[0].notes)


# --- models --------------------------------------------------------------------------------------


def test_a_folder_with_a_config_alone_is_taken_as_unquantised(tmp_path):
    models.build("llama").config.save_pretrained(tmp_path)
    report = audit_folder(tmp_path)
    assert "holds no weights" in report.assumptions[0]
    assert report.sites


def test_a_folder_that_is_no_model_is_refused(tmp_path):
    with pytest.raises(WrapError, match=r"config\.json"):
        audit_folder(tmp_path)


def test_large_weights_take_no_memory(tmp_path):
    config = LlamaConfig(
        hidden_size=1024, intermediate_size=4096, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=2, vocab_size=1000, dtype="bfloat16",
        architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    model = hollow_model(Skeleton.of(tmp_path))
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage() for p in model.parameters()}
    assert sum(storage.nbytes() for storage in storages.values()) < 4 * LARGE
    table = model.get_input_embeddings()
    rows = table(torch.arange(1000))
    assert len({tuple(row.tolist()) for row in rows[:, :8].float()}) > 900
