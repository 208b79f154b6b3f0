"""Adapters on experts: names, forms and shapes of their tensors, against PEFT's own arithmetic."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

import peft
import pytest
import torch
from peft.tuners.lora.layer import ParamWrapper
from safetensors.torch import load_file, save_file

from branchline.adapters.base import BaseFacts
from branchline.adapters.describe import describe_adapter
from branchline.adapters.from_peft import unwrap_peft, weights_from_peft
from branchline.adapters.read import read_adapter
from branchline.adapters.weights import AdapterWeights
from branchline.core.errors import (
    AdapterCapacityError,
    AdapterFormatError,
    AdapterMismatchError,
    AdapterUnsupportedError,
)
from branchline.serving.base_facts import base_facts
from tests.moe.adapters import BOTH, delta, loaded_by_peft, parameters_of, save, with_adapter
from tests.moe.models import build

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
KINDS = ["mixtral", "qwen3_moe", "gpt_oss", "nemotron_h"]
EXPERTS = "base_model.model.model.layers.{}.mlp.experts"


@pytest.fixture(scope="module")
def facts() -> dict[str, BaseFacts]:
    """Facts about each kind of model."""
    return {kind: base_facts(build(kind)) for kind in KINDS}


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """An adapter on both projections of Mixtral's experts and on o_proj."""
    return save(tmp_path_factory.mktemp("saved"), "mixtral", BOTH, ["o_proj"])


@pytest.fixture
def folder(saved, tmp_path) -> Path:
    """A copy of it that a test may change."""
    for name in (CONFIG, TENSORS):
        (tmp_path / name).write_bytes((saved / name).read_bytes())
    return tmp_path


def edit_config(folder: Path, **changes) -> None:
    config = json.loads((folder / CONFIG).read_text()) | changes
    (folder / CONFIG).write_text(json.dumps(config))


def read(folder: Path, base: BaseFacts, rank: int = 16) -> AdapterWeights:
    return read_adapter(folder, base, max_rank=rank)


def peft_deltas(model: peft.PeftModel) -> dict[str, torch.Tensor]:
    """PEFT's change of each parameter, as (E, N, K), gates before ups."""
    found = {}
    for path, module in model.get_base_model().named_modules():
        if not isinstance(module, ParamWrapper):
            continue
        change = module.get_delta_weight("default").detach()
        experts = module.get_base_layer()
        if experts.is_transposed:
            change = change.mT
        if module.parameter_name == "gate_up_proj" and not experts.is_concatenated:
            change = torch.cat([change[:, ::2], change[:, 1::2]], 1)
        while path.endswith(".base_layer"):
            path = path.removesuffix(".base_layer")
        found[f"{path}.{module.parameter_name}"] = change
    return found


# --- forms of files ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "which"),
    [
        ("mixtral", (0, 1)),
        ("mixtral", (0,)),
        ("mixtral", (1,)),
        *((kind, (1, 0)) for kind in KINDS[1:]),
    ],
    ids=str,
)
def test_parameters_are_found_whatever_their_nesting(kind, which, facts, tmp_path):
    names = [parameters_of(kind)[index] for index in which]
    model = with_adapter(build(kind, dtype=torch.float32), names, ["o_proj"])
    model.save_pretrained(tmp_path)
    weights = read(tmp_path, facts[kind])
    wanted = peft_deltas(model)
    assert weights.experts.keys() == wanted.keys()
    assert all(name.endswith(tuple(names)) for name in wanted)
    for name, parts in weights.experts.items():
        found = delta(parts, wanted[name].shape[0])
        torch.testing.assert_close(found, wanted[name], atol=1e-6, rtol=1e-5)
    assert weights.layers
    assert weights.rank == 4
    # Out of the live model comes the same adapter, and the model is left without it.
    taken = weights_from_peft(model, "default", base_facts(model), max_rank=16)
    assert taken.digest == weights.digest
    plain, _ = unwrap_peft(model)
    assert not any(isinstance(module, ParamWrapper) for module in plain.modules())
    assert base_facts(plain).experts == facts[kind].experts


def test_the_last_registered_parameter_is_outermost(saved):
    # The layout that all of this reading stands on.
    tensors = load_file(saved / TENSORS)
    experts = EXPERTS.format(0)
    assert tensors[f"{experts}.base_layer.lora_B.weight"].shape == (256, 16)
    assert tensors[f"{experts}.lora_B.weight"].shape == (128, 16)


def test_rank_and_scaling_of_one_projection(tmp_path, facts):
    settings = {"rank_pattern": {"experts.down_proj": 7}, "alpha_pattern": {"down_proj": 5}}
    save(tmp_path, "mixtral", BOTH, [], use_rslora=True, **settings)
    weights = read(tmp_path, facts["mixtral"])
    by_name = {name.rpartition(".")[2]: parts for name, parts in weights.experts.items()}
    assert (by_name["down_proj"].rank, by_name["down_proj"].scaling) == (7, 5 / math.sqrt(7))
    assert (by_name["gate_up_proj"].rank, by_name["gate_up_proj"].scaling) == (4, 8 / 2)
    assert weights.rank == 7
    edit_config(tmp_path, rank_pattern={"experts.down_proj": 7, "nothing": 3})
    with pytest.raises(AdapterMismatchError, match="nothing"):
        read(tmp_path, facts["mixtral"])


@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss"])
def test_files_of_peft_before_inputs_and_outputs_were_in_order(kind, facts, tmp_path):
    model = with_adapter(build(kind, dtype=torch.float32), BOTH, [])
    model.save_pretrained(tmp_path)
    wanted = peft_deltas(model)
    if kind == "mixtral":
        # As PEFT 0.18 makes them: A has N columns and B has K rows, and
        # delta[e, n, k] is the sum over r of B[k, r, e] * A[e, r, n].
        tensors = load_file(tmp_path / TENSORS)
        for name in [name for name in tensors if "lora_A" in name]:
            a, b = tensors[name], tensors[other := name.replace("lora_A", "lora_B")]
            by_expert, last = a.view(4, 4, -1), b.view(-1, 4, 4)
            tensors[name] = last.permute(2, 1, 0).reshape(16, -1).contiguous()
            tensors[other] = by_expert.permute(2, 1, 0).reshape(-1, 16).contiguous()
        save_file(tensors, tmp_path / TENSORS)
    edit_config(tmp_path, peft_version="0.18.1")
    for name, parts in read(tmp_path, facts[kind]).experts.items():
        torch.testing.assert_close(delta(parts, 4), wanted[name], atol=1e-6, rtol=1e-5)
    edit_config(tmp_path, peft_version="0.19.0")
    if kind == "mixtral":
        # The new layout has other shapes wherever inputs and outputs differ.
        with pytest.raises(AdapterMismatchError, match=r"gate_up_proj.*is for 256 inputs"):
            read(tmp_path, facts[kind])
    for version in (None, "0.18.2.dev0", 18):
        edit_config(tmp_path, peft_version=version)
        if kind == "gpt_oss":
            assert read(tmp_path, facts[kind]).experts
            continue
        with pytest.raises(AdapterUnsupportedError, match=r"down_proj.*as many inputs as outputs"):
            read(tmp_path, facts[kind])


# --- checkpoints with each expert by itself ----------------------------------------------------


def apart(
    folder: Path, kind: str, ranks: dict[str, int], *, alpha: int = 8, experts: int = 4, **config
) -> Path:
    """An adapter as it was trained on a model whose experts were linears.

    Args:
        folder: where it is written.
        kind: "mixtral" or "qwen3_moe".
        ranks: by linear.
        alpha: of all.
        experts: how many have tensors.
        **config: further keys.
    """
    path = "block_sparse_moe.experts" if kind == "mixtral" else "mlp.experts"
    generator = torch.Generator().manual_seed(3)
    tensors = {}
    for layer, expert, (linear, rank) in itertools.product(range(2), range(experts), ranks.items()):
        name = f"base_model.model.model.layers.{layer}.{path}.{expert}.{linear}"
        for half, shape in (("lora_A", (rank, 128)), ("lora_B", (128, rank))):
            tensors[f"{name}.{half}.weight"] = torch.randn(shape, generator=generator) * 0.1
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / TENSORS)
    first = next(iter(ranks.values()))
    base = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": first, "lora_alpha": alpha}
    base |= {"target_modules": list(ranks), "lora_dropout": 0.0, "peft_version": "0.15.0"}
    patterns = {linear: rank for linear, rank in ranks.items() if rank != first}
    (folder / CONFIG).write_text(json.dumps(base | {"rank_pattern": patterns} | config))
    return folder


@pytest.mark.parametrize(
    ("kind", "linears"),
    [("mixtral", ("w1", "w2", "w3")), ("qwen3_moe", ("gate_proj", "up_proj", "down_proj"))],
)
def test_experts_apart_become_what_peft_makes_of_them(kind, linears, facts, tmp_path):
    apart(tmp_path, kind, dict.fromkeys(linears, 4))
    weights = read(tmp_path, facts[kind])
    loaded = loaded_by_peft(build(kind, dtype=torch.float32), tmp_path)
    wanted = peft_deltas(loaded)
    assert weights.experts.keys() == wanted.keys()
    for name, parts in weights.experts.items():
        torch.testing.assert_close(delta(parts, 4), wanted[name], atol=1e-6, rtol=1e-5)
    # Gates and ups are one product with the ranks of both.
    assert {name.rpartition(".")[2]: parts.rank for name, parts in weights.experts.items()} == {
        "gate_up_proj": 8,
        "down_proj": 4,
    }
    with pytest.raises(AdapterCapacityError, match="rank 8 but slots were sized for 4"):
        read(tmp_path, facts[kind], rank=4)


def test_linears_of_experts_with_ranks_and_scalings_of_their_own(facts, tmp_path):
    apart(tmp_path, "mixtral", {"w1": 4, "w3": 2})
    weights = read(tmp_path, facts["mixtral"])
    tensors = load_file(tmp_path / TENSORS)
    (name, *_), parts = zip(*weights.experts.items(), strict=True)
    assert name.endswith("layers.0.mlp.experts.gate_up_proj")
    change = delta(parts[0], 4)
    for expert in range(4):
        path = f"base_model.model.model.layers.0.block_sparse_moe.experts.{expert}"
        for half, (linear, scaling) in zip(
            change[expert].chunk(2), {"w1": 8 / 4, "w3": 8 / 2}.items(), strict=True
        ):
            a, b = (tensors[f"{path}.{linear}.lora_{x}.weight"] for x in "AB")
            torch.testing.assert_close(half, scaling * (b @ a), atol=1e-6, rtol=1e-5)
    # Which PEFT does not do: half of a projection has no gates without ups there.
    apart(tmp_path, "mixtral", {"w3": 4})
    only = next(iter(read(tmp_path, facts["mixtral"]).experts.values()))
    assert only.rank == 4
    assert not delta(only, 4)[:, :128].any()


def test_experts_apart_and_config_agree(facts, tmp_path):
    base = facts["mixtral"]
    apart(tmp_path, "mixtral", {"w1": 4, "w2": 4}, target_modules=["w1", "w2", "w3"])
    with pytest.raises(AdapterMismatchError, match=r"no tensors.*experts\.0\.w3"):
        read(tmp_path, base)
    apart(tmp_path, "mixtral", {"w1": 4, "w2": 4}, target_modules=["w1"])
    with pytest.raises(AdapterMismatchError, match=r"does not target.*experts\.down_proj"):
        read(tmp_path, base)
    apart(tmp_path, "mixtral", {"w2": 4}, experts=3)
    with pytest.raises(AdapterFormatError, match=r"has no 3\.w2\.lora_A"):
        read(tmp_path, base)
    apart(tmp_path, "mixtral", {"w2": 4}, experts=5)
    with pytest.raises(AdapterMismatchError, match=r"no module of the model.*experts\.4\.w2"):
        read(tmp_path, base)
    apart(tmp_path, "mixtral", {"w2": 4}, use_dora=True)
    with pytest.raises(AdapterUnsupportedError, match="has DoRA on experts"):
        read(tmp_path, base)
    apart(tmp_path, "mixtral", {"w2": 4}, rank_pattern={"experts.1.w2": 3})
    with pytest.raises(AdapterFormatError, match="rank 4 but the config says 3"):
        read(tmp_path, base)


# --- halves that are stacked, or shared --------------------------------------------------------


@pytest.mark.parametrize("shared", ["lora_A", "lora_B", "both", "none"])
def test_stacked_halves_of_which_experts_share_some(shared, facts, tmp_path):
    generator = torch.Generator().manual_seed(1)
    tensors, wanted = {}, {}
    for layer in range(2):
        name = f"model.layers.{layer}.mlp.experts.gate_up_proj"
        a_number = 1 if shared in ("lora_A", "both") else 4
        b_number = 1 if shared in ("lora_B", "both") else 4
        a = torch.randn(a_number, 4, 128, generator=generator)
        b = torch.randn(b_number, 256, 4, generator=generator)
        tensors[f"base_model.model.{name}.lora_A.weight"] = a
        tensors[f"base_model.model.{name}.lora_B.weight"] = b
        wanted[name] = 2.0 * (b.expand(4, -1, -1) @ a.expand(4, -1, -1))
    save_file(tensors, tmp_path / TENSORS)
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["gate_up_proj"]}
    (tmp_path / CONFIG).write_text(json.dumps(config))
    weights = read(tmp_path, facts["mixtral"])
    for name, parts in weights.experts.items():
        torch.testing.assert_close(delta(parts, 4), wanted[name])
    assert weights.nbytes == sum(tensor.nbytes for tensor in tensors.values())
    first = next(iter(wanted))
    tensors[f"base_model.model.{first}.lora_A.weight"] = torch.randn(3, 4, 128)
    save_file(tensors, tmp_path / TENSORS)
    with pytest.raises(AdapterMismatchError, match="is for 3 experts but the layer has 4"):
        read(tmp_path, facts["mixtral"])


# --- what is refused ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        # Linears beside the experts then lack tensors, which is graver.
        ({"use_dora": True}, AdapterFormatError, "target_parameters together with use_dora"),
        ({"lora_bias": True}, AdapterFormatError, "together with lora_bias"),
        ({"lora_dropout": 0.1}, AdapterUnsupportedError, "together with lora_dropout"),
        ({"fan_in_fan_out": True}, AdapterUnsupportedError, "together with fan_in_fan_out"),
        (
            {"target_parameters": [*BOTH, "q_proj.weight"]},
            AdapterUnsupportedError,
            r"target_parameters names 'q_proj\.weight'.*projections of experts",
        ),
        ({"target_parameters": [*BOTH, "weight"]}, AdapterUnsupportedError, "names 'weight'"),
        ({"target_parameters": ["down_proj"]}, AdapterMismatchError, "base_layer.lora_A"),
        ({"target_parameters": None}, AdapterMismatchError, "would not be used"),
        ({"target_parameters": "down_proj"}, AdapterFormatError, "target_parameters"),
        ({"target_parameters": [*BOTH, 3]}, AdapterFormatError, "target_parameters"),
        ({"r": 8}, AdapterFormatError, "is for 16 ranks of all experts but the layer has 32"),
        (
            {"modules_to_save": ["mlp"]},
            AdapterUnsupportedError,
            r"modules_to_save keeps modules with experts: 'model\.layers\.0\.mlp'",
        ),
    ],
    ids=str,
)
def test_configs_that_cannot_be_served(change, error, words, folder, facts):
    edit_config(folder, **change)
    with pytest.raises(error, match=words):
        read(folder, facts["mixtral"])


def test_tensors_of_experts_that_no_parameter_names(folder, facts):
    edit_config(folder, target_parameters=None)
    with pytest.raises(AdapterMismatchError) as caught:
        read(folder, facts["mixtral"])
    assert "name their parameters in target_parameters: " in caught.value.remedy
    assert "'model.layers.0.mlp.experts.gate_up_proj'" in caught.value.remedy


def test_entries_that_name_nothing_are_noted(folder, facts):
    edit_config(folder, target_parameters=[*BOTH, "other_proj"])
    weights = read(folder, facts["mixtral"])
    assert any("'other_proj'" in note for note in weights.notes)


def test_no_default_of_modules_is_needed_beside_parameters(tmp_path, facts):
    save(tmp_path, "gpt_oss", BOTH, [])
    edit_config(tmp_path, target_modules=None)
    weights = read(tmp_path, facts["gpt_oss"])
    assert weights.experts
    assert not weights.layers


def test_damaged_tensors(folder, facts):
    base, tensors = facts["mixtral"], load_file(folder / TENSORS)
    experts = EXPERTS.format(1)

    def refused(error, words, **changes):
        changed = tensors | {name.replace("__", "."): value for name, value in changes.items()}
        kept = {name: value for name, value in changed.items() if value is not None}
        save_file(kept, folder / TENSORS)
        with pytest.raises(error, match=words):
            read(folder, base)

    name = f"{experts}.lora_B.weight"
    refused(AdapterFormatError, r"down_proj' has no experts\.lora_B", **{name: None})
    refused(AdapterFormatError, "NaN", **{name: torch.full((128, 16), math.nan)})
    refused(AdapterMismatchError, "12 ranks of all experts", **{name: torch.zeros(128, 12)})
    refused(AdapterMismatchError, "64 outputs", **{name: torch.zeros(64, 16)})
    refused(AdapterFormatError, "3 dimensions", **{name: torch.zeros(4, 128, 4)})
    # Both of a layer in the other's place: inner and outer wrapper are not interchangeable.
    inner = f"{experts}.base_layer.lora_B.weight"
    swapped = {name: tensors[inner], inner: tensors[name]}
    refused(AdapterMismatchError, r"gate_up_proj.*is for 128 outputs", **swapped)
    half = {n: None for n in tensors if n.startswith(f"{experts}.base_layer")}
    refused(AdapterMismatchError, r"no tensors: 'model\.layers\.1\.mlp\.experts\.gate_up", **half)


def test_experts_of_another_number(folder, facts):
    other = base_facts(build("mixtral", num_local_experts=2))
    with pytest.raises(AdapterMismatchError, match="16 ranks of all experts but the layer has 8"):
        read(folder, other)
    with pytest.raises(AdapterMismatchError, match="no tensor names a linear"):
        read(folder, facts["nemotron_h"])


def test_capacity_and_refusals_of_the_model(folder, facts):
    base = facts["mixtral"]
    with pytest.raises(AdapterCapacityError, match="rank 4 but slots were sized for 2"):
        read(folder, base, rank=2)
    refusing = base.with_refusals({"model.layers.0.mlp.experts": "they are their own"})
    with pytest.raises(AdapterUnsupportedError, match="they are their own"):
        read(folder, refusing)


def test_a_digest_of_what_experts_compute(folder, facts):
    base = facts["mixtral"]
    before = read(folder, base)
    assert before.digest == read(folder, base).digest
    assert before.parameters == sum(t.numel() for t in load_file(folder / TENSORS).values())
    edit_config(folder, lora_alpha=9)
    assert read(folder, base).digest != before.digest
    zeros = {n: t * ("lora_A" in n) for n, t in load_file(folder / TENSORS).items()}
    save_file(zeros, folder / TENSORS)
    assert any("no effect" in note for note in read(folder, base).notes)


def test_what_is_told_without_a_model(saved):
    summary = describe_adapter(saved)
    assert summary.problem is None
    assert any("on a model only" in note for note in summary.notes)
