"""Served adapters on experts: PEFT's results, routes, isolation of rows, changes of the set."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from peft.tuners.lora.layer import LoraLayer, ParamWrapper
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel
from transformers.integrations.finegrained_fp8 import FP8Experts

import branchline
from branchline.core.errors import AdapterCapacityError, AdapterFormatError
from branchline.core.route import Route
from branchline.linear.experts import ExpertsLinear
from tests.moe.adapters import BOTH, loaded_by_peft, parameters_of, peft_logits, save
from tests.moe.models import build, token_ids

KINDS = ["mixtral", "qwen3_moe", "gpt_oss", "nemotron_h"]
ATTENTION = {kind: ["o_proj", "v_proj"] for kind in KINDS}
IDS = token_ids(4, 6)
# (parameters, modules, rank): ranks of four, some on experts alone, some on attention alone.
ADAPTERS: dict[str, tuple[tuple[str, ...] | None, list[str], int]] = {
    "experts": (BOTH, [], 4),
    "attn": (None, ["q_proj", "v_proj"], 8),
    "all": (BOTH, ["q_proj", "o_proj"], 16),
    "down": (("down_proj",), ["o_proj"], 32),
}
# Of all but the comparisons with PEFT: what is wrong in one layer is so in two.
SHAPE = {"num_hidden_layers": 1}
NAMES = ["experts", None, "attn", "all", "down"]
MIXED = token_ids(5, 6, seed=2)


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """The folders of the four adapters for Mixtral."""
    root = tmp_path_factory.mktemp("adapters")
    return {
        name: save(root / name, "mixtral", parameters, modules, shape=SHAPE, rank=rank, seed=index)
        for index, (name, (parameters, modules, rank)) in enumerate(ADAPTERS.items())
    }


def served_with(folders: dict[str, Path], dtype: torch.dtype = torch.bfloat16, **settings: Any):
    model = branchline.wrap(
        build("mixtral", dtype=dtype, **SHAPE),
        max_lora_rank=32,
        **{"quant": "fp8-block"} | settings,
    )
    for name, folder in folders.items():
        model.adapters.load(name, folder)
    return model


def dequantised(served: branchline.ServedModel, kind: str, **shape: Any) -> PreTrainedModel:
    """A float model with the weights that a served one multiplies with."""
    model = build(kind, dtype=torch.float32, **shape)
    for name, layer in served.registry.layers.items():
        weight = layer.kernel.dequantized().float()
        if not isinstance(layer, ExpertsLinear):
            model.get_submodule(name).weight.data.copy_(weight)
            continue
        path, _, projection = name.rpartition(".")
        experts = model.get_submodule(path)
        if projection == "gate_up_proj" and not experts.is_concatenated:
            weight = torch.stack(weight.chunk(2, 1), 2).flatten(1, 2)
        own = getattr(experts, projection)
        own.data.copy_(weight.mT if experts.is_transposed else weight)
    return model


# --- PEFT's results ----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_unquantised_is_what_peft_computes(kind, tmp_path):
    folder = save(tmp_path, kind, parameters_of(kind), ATTENTION[kind])
    wanted = peft_logits(build(kind, dtype=torch.float32), folder, IDS)
    served = branchline.wrap(build(kind, dtype=torch.float32), quant="none")
    base = served(IDS).logits
    served.adapters.load("a", folder)
    logits = served(IDS, adapter_names=["a", None, "a", "a"]).logits
    mine = [0, 2, 3]
    torch.testing.assert_close(logits[mine], wanted[mine], atol=2e-5, rtol=1e-4)
    # torch multiplies unquantised experts, in shapes that hang on where others are routed.
    torch.testing.assert_close(logits[1], base[1], atol=1e-5, rtol=1e-5)
    assert (wanted - base)[mine].abs().max() > 0.5


@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss"])
def test_on_codes_it_is_what_peft_computes_on_what_they_stand_for(kind, tmp_path):
    folder = save(tmp_path, kind, parameters_of(kind), ATTENTION[kind])
    served = branchline.wrap(build(kind, dtype=torch.float32), quant="fp8-weight-only")
    kernels = {layer.kernel.name for layer in served.registry if isinstance(layer, ExpertsLinear)}
    assert not any("float" in name for name in kernels)
    served.adapters.load("a", folder)
    logits = served(IDS, adapter_names=["a"] * 4).logits
    reference = dequantised(served, kind)
    with torch.no_grad():
        base = reference(IDS).logits
    torch.testing.assert_close(served(IDS).logits, base, atol=1e-4, rtol=1e-3)
    wanted = peft_logits(reference, folder, IDS)
    torch.testing.assert_close(logits, wanted, atol=1e-4, rtol=1e-3)
    assert (wanted - base).abs().max() > 0.5


def test_an_adapter_is_not_lost_in_the_scales_of_codes(folders):
    served = served_with({"experts": folders["experts"]}, torch.float32, quant="fp8-weight-only")
    base, reference = served(IDS).logits, dequantised(served, "mixtral", **SHAPE)
    wanted = peft_logits(reference, folders["experts"], IDS)
    change = wanted - base
    ours = served(IDS, adapter_names=["experts"] * 4).logits - base
    assert torch.cosine_similarity(ours.flatten(), change.flatten(), dim=0) > 0.9999
    assert float(ours.norm() / change.norm()) == pytest.approx(1, rel=1e-3)


class _EagerFp8Experts(FP8Experts):
    """transformers' FP8 experts; their products alone are torch's, for its kernels want a GPU."""

    def linear(self, input, weight, weight_scale_inv, activation_scale=None):
        assert weight.dtype == torch.float8_e4m3fn
        rows, columns = (n // s for n, s in zip(weight.shape, weight_scale_inv.shape, strict=True))
        scale = weight_scale_inv.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
        return torch.nn.functional.linear(input, weight.float() * scale)


def test_peft_on_fp8_experts_of_transformers_loses_the_adapter(folders):
    served = served_with({"experts": folders["experts"]}, torch.float32)
    reference, coded = (dequantised(served, "mixtral", **SHAPE) for _ in range(2))
    block = coded.model.layers[0].mlp
    coded.config._experts_implementation = "eager"
    experts = _EagerFp8Experts(coded.config, block_size=(128, 128))
    for projection in BOTH:
        kernel = served.registry.layers[f"model.layers.0.mlp.experts.{projection}"].kernel
        weight = kernel.quantized_weight()
        getattr(experts, projection).data = weight.codes()
        getattr(experts, f"{projection}_scale_inv").data = weight.scales()
    block.experts = experts
    with torch.no_grad():
        base = reference(IDS).logits
        torch.testing.assert_close(coded(IDS).logits, base, atol=1e-5, rtol=1e-4)
    # What an adapter should do, and what is left of it where PEFT adds it to codes, which are
    # hundreds of times as large as the weights that they stand for.
    change = peft_logits(reference, folders["experts"], IDS) - base
    adapted = loaded_by_peft(coded, folders["experts"])
    wrapped = [m for m in adapted.modules() if isinstance(m, ParamWrapper)]
    assert {m.parameter_name for m in wrapped} == set(BOTH)
    # It is there, and as large as it is for weights that are no codes.
    deltas = [m.get_delta_weight("default").float().abs().max() for m in wrapped]
    assert min(deltas) > 0.1
    with torch.no_grad():
        left = adapted(IDS).logits - base
    assert change.norm() > 0.1 * base.norm()
    assert left.norm() < 0.05 * change.norm()


def test_disabled_adapters_on_experts_leave_the_base_bytes(folders):
    served = served_with(folders)
    base = served(MIXED).logits
    names = ["experts", "down", "attn", "all", None]
    mixed = served(MIXED, adapter_names=names).logits
    assert [torch.equal(*rows) for rows in zip(mixed, base, strict=True)] == [
        name is None for name in names
    ]
    served.set_adapter("experts")
    active = served(MIXED).logits
    assert not torch.equal(active, base)
    with served.disable_adapter():
        assert torch.equal(served(MIXED).logits, base)
        assert torch.equal(served(MIXED, adapter_names=names).logits, base)
    assert torch.equal(served(MIXED).logits, active)
    with served.adapters.rows(names):
        with served.disable_adapter():
            assert torch.equal(served(MIXED).logits, base)
        assert torch.equal(served(MIXED).logits, mixed)


def test_adapters_of_a_live_model_are_taken_over(folders):
    model = loaded_by_peft(build("mixtral", dtype=torch.float32, **SHAPE), folders["all"])
    model.load_adapter(folders["experts"], adapter_name="experts")
    with torch.no_grad():
        wanted = model(IDS).logits
        model.set_adapter("experts")
        of_second = model(IDS).logits
    served = branchline.wrap(model, quant="none")
    assert {entry.name for entry in served.adapters.list()} == {"default", "experts"}
    logits = served(IDS, adapter_names=["default", "experts", "experts", "default"]).logits
    torch.testing.assert_close(logits[[0, 3]], wanted[[0, 3]], atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(logits[[1, 2]], of_second[[1, 2]], atol=2e-5, rtol=1e-4)


# --- routes and rows ---------------------------------------------------------------------------


@pytest.mark.parametrize("quant", ["fp8-block", "fp8-dynamic"])
def test_routes_give_the_same_bytes(quant, folders):
    wanted = None
    for policy, route in (
        ("static", Route.UNFUSED),
        ("dynamic", Route.UNFUSED),
        ("dual", Route.DUAL),
        ("absorbed", Route.ABSORBED),
    ):
        served = served_with(folders, quant=quant, policy=policy)
        logits = served(MIXED, adapter_names=NAMES).logits
        wanted = logits if wanted is None else wanted
        assert torch.equal(logits, wanted)
        between = [s for s in served.discovery.sites if s.facts.consumers[0].endswith("down_proj")]
        assert between
        assert all(set(site.counters.routes()) == {route} for site in between)
        assert not any(site.counters.fallbacks() for site in served.discovery.sites)
        # An adapter that reads nothing between the projections leaves their site fused.
        served(MIXED, adapter_names=["attn"] * 5)
        fused = Route.UNFUSED if policy == "static" else Route.FUSED
        assert all(fused in site.counters.routes() for site in between)


def test_rows_are_their_own(folders):
    served = served_with(folders)
    base = served(MIXED).logits
    together = served(MIXED, adapter_names=NAMES).logits
    assert torch.equal(together[1], base[1])
    for row, name in enumerate(NAMES):
        alone = served(MIXED[row : row + 1], adapter_names=[name]).logits
        assert torch.equal(alone[0], together[row])
        assert torch.equal(together[row], base[row]) == (name is None)


def test_packed_rows(folders):
    served = served_with(folders)
    together = served(MIXED, adapter_names=NAMES).logits
    flat = MIXED.reshape(1, -1)
    places = torch.arange(6).repeat(5).unsqueeze(0)
    row = torch.arange(5).repeat_interleave(6)
    # Each sequence sees itself alone, and of itself what came before.
    mask = (row[:, None] == row[None]) & torch.ones(30, 30).tril().bool()
    blocked = torch.where(mask, 0.0, torch.finfo(torch.bfloat16).min).bfloat16()
    with served.adapters.rows(NAMES, tokens=[6] * 5):
        packed = served(flat, position_ids=places, attention_mask=blocked[None, None]).logits
    torch.testing.assert_close(packed.view_as(together), together, atol=0.2, rtol=0.05)
    with served.adapters.rows([None] * 5, tokens=[6] * 5):
        base = served(flat, position_ids=places, attention_mask=blocked[None, None]).logits
    assert torch.equal(packed[0, 6:12], base[0, 6:12])
    assert not torch.equal(packed[0, :6], base[0, :6])


def test_mixtures_are_weighted_sums(folders):
    served = served_with({n: folders[n] for n in ("experts", "attn", "all")}, torch.float32,
                         quant="none")  # fmt: skip
    mixture = {"experts": 0.5, "all": -0.25, "attn": 1.5}
    logits = served(IDS, adapter_names=[mixture, None, "experts", mixture]).logits
    model = build("mixtral", dtype=torch.float32, **SHAPE)
    # A weighted sum of products is a product of weighted changes of the base.
    for name, weight in mixture.items():
        loaded = loaded_by_peft(model, folders[name])
        for module in loaded.modules():
            if isinstance(module, LoraLayer):
                module.scaling["default"] *= weight
        model = loaded.merge_and_unload()
    with torch.no_grad():
        wanted = model(IDS).logits
    mine = [0, 3]
    torch.testing.assert_close(logits[mine], wanted[mine], atol=5e-5, rtol=1e-3)
    torch.testing.assert_close(logits[1], served(IDS).logits[1], atol=1e-5, rtol=1e-5)
    plain = served(IDS, adapter_names=["experts"] * 4).logits
    torch.testing.assert_close(logits[2], plain[2], atol=1e-5, rtol=1e-5)


def test_activated_adapters_beside_adapters_on_experts(folders, tmp_path):
    calling = save(
        tmp_path, "mixtral", None, ["q_proj"], shape=SHAPE, alora_invocation_tokens=[7, 9]
    )
    served = served_with({"experts": folders["experts"]})
    served.adapters.load("calling", calling)
    ids = IDS.clone()
    ids[1, 2:4] = torch.tensor([7, 9])
    logits = served(ids, adapter_names=["experts", "calling", None, "experts"]).logits
    wanted = served(ids, adapter_names=["experts"] * 4).logits
    base = served(ids).logits
    assert torch.equal(logits[[0, 3]], wanted[[0, 3]])
    assert torch.equal(logits[2], base[2])
    assert torch.equal(logits[1, :2], base[1, :2])
    assert not torch.equal(logits[1, 3:], base[1, 3:])


def test_generation(folders):
    served = served_with({"all": folders["all"]}, torch.float32, quant="none")
    loaded = loaded_by_peft(build("mixtral", dtype=torch.float32, **SHAPE), folders["all"])
    settings = {"max_new_tokens": 5, "do_sample": False, "use_cache": True}
    wanted = loaded.generate(input_ids=IDS, **settings)
    assert torch.equal(served.generate(IDS, adapter_names=["all"] * 4, **settings), wanted)


# --- changes of the set ------------------------------------------------------------------------


def test_load_swap_and_unload(folders):
    served = served_with({}, max_loras=2)
    base = served(IDS).logits
    served.adapters.load("a", folders["all"])
    of_all = served(IDS, adapter_names=["a"] * 4).logits
    served.adapters.swap("a", folders["experts"])
    of_experts = served(IDS, adapter_names=["a"] * 4).logits
    assert not torch.equal(of_all, of_experts)
    fresh = served_with({"a": folders["experts"]}, max_loras=2)
    assert torch.equal(fresh(IDS, adapter_names=["a"] * 4).logits, of_experts)
    served.adapters.unload("a")
    # What has no adapter on experts leaves nothing of the one before in its slot.
    served.adapters.load("b", folders["attn"])
    served.adapters.load("c", folders["down"])
    beside = served_with({n: folders[f] for n, f in (("b", "attn"), ("c", "down"))}, max_loras=2)
    names = ["b", "c", None, "b"]
    logits = served(IDS, adapter_names=names).logits
    assert torch.equal(logits, beside(IDS, adapter_names=names).logits)
    assert torch.equal(logits[2], base[2])
    assert torch.equal(served(IDS).logits, base)


def test_adapters_take_turns_in_few_slots(folders):
    served = served_with({}, max_loras=1, max_cpu_loras=4)
    wanted = {}
    for name, folder in folders.items():
        served.adapters.load(name, folder)
        wanted[name] = served(IDS, adapter_names=[name] * 4).logits
    for name, logits in wanted.items():
        assert torch.equal(served(IDS, adapter_names=[name] * 4).logits, logits)


def test_a_bad_adapter_changes_nothing(folders, tmp_path):
    served = served_with({"experts": folders["experts"]}, max_loras=2)
    before = served(IDS, adapter_names=["experts"] * 4).logits
    wide = save(tmp_path / "wide", "mixtral", BOTH, [], shape=SHAPE, rank=64)
    with pytest.raises(AdapterCapacityError, match="rank 64 but slots were sized for 32"):
        served.adapters.load("wide", wide)
    other = save(tmp_path / "other", "mixtral", BOTH, [], shape=SHAPE, rank=4)
    tensors = load_file(other / "adapter_model.safetensors")
    name = next(name for name in tensors if name.endswith("experts.lora_B.weight"))
    save_file(tensors | {name: tensors[name] * math.nan}, other / "adapter_model.safetensors")
    with pytest.raises(AdapterFormatError, match="NaN"):
        served.adapters.swap("experts", other)
    del tensors[name]
    save_file(tensors, other / "adapter_model.safetensors")
    with pytest.raises(AdapterFormatError, match=r"has no experts\.lora_B"):
        served.adapters.swap("experts", other)
    assert [entry.name for entry in served.adapters.list()] == ["experts"]
    assert torch.equal(served(IDS, adapter_names=["experts"] * 4).logits, before)
