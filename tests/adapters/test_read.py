"""Reading adapter folders: the public cases, single faults, and the digest."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from branchline.adapters.read import read_adapter
from branchline.core.errors import (
    AdapterCapacityError,
    AdapterFormatError,
    AdapterMismatchError,
    AdapterUnsupportedError,
    BranchlineError,
)
from tests.helpers import edit_adapter

CASES = {
    case["id"]: case
    for case in json.loads((Path(__file__).parent / "cases.json").read_text())["cases"]
}
DTYPES = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I8": torch.int8,
}


def fill(tensors, kind: str | None = None) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    filled = {}
    for name, shape, dtype in tensors:
        value = torch.randn(shape, generator=generator) * 0.02
        if kind == "zero-b" and ".lora_B." in name:
            value.zero_()
        filled[name] = value.to(DTYPES[dtype])
    if kind == "nan-first":
        filled[tensors[0][0]].view(-1)[0] = float("nan")
    return filled


def write(folder: Path, config, tensors: dict[str, torch.Tensor]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def write_case(folder: Path, name: str, **changes) -> Path:
    case = CASES[name]
    tensors = fill(case["tensors"], case["expect"].get("fill"))
    return write(folder, case["config"] | changes, tensors)


# --- the public cases -----------------------------------------------------------------------------


def assert_loads(case, weights):
    expect = case["expect"]
    stored = fill(case["tensors"], expect.get("fill"))
    if expect["scaling"] is None:
        assert_scaled_by(stored, weights)
    else:
        assert_products(expect["scaling"], stored, weights)
    if "layers" in expect:
        assert {int(name.split(".")[2]) for name in weights.layers} == set(expect["layers"])
    if "listing" in expect:
        assert any(expect["listing"] in note for note in weights.notes)
    if "raw_readers" in expect:
        readers = {name for name, parts in weights.layers.items() if parts.reads_raw}
        assert {name.split(".", 3)[3] for name in readers} == set(expect["raw_readers"])
    if case["id"] == "language-model-prefix":
        assert any("model.language_model" in note for note in weights.notes)


def assert_products(scalings, stored, weights):
    products = [name for name in stored if ".lora_A." in name]
    assert len(weights.layers) == len(products)
    for name, parts in weights.layers.items():
        layer, scaling = parts.low_rank, scalings
        if isinstance(scaling, dict):
            scaling = scaling[name.rpartition(".")[2]]
        assert layer.scaling == scaling
        assert any(torch.equal(layer.a, value) for value in stored.values())


def assert_scaled_by(stored, weights):
    """IA3: each stored vector is the gain of its layer, or the scale of its input."""
    assert len(weights.layers) == len(stored)
    for name, vector in stored.items():
        parts = weights.layers[name.removeprefix("base_model.model.").removesuffix(".ia3_l")]
        is_input = name.endswith("down_proj.ia3_l")
        used, other = (parts.in_scale, parts.gain)[:: 1 if is_input else -1]
        assert other is None
        assert torch.equal(used, vector.flatten())


@pytest.mark.parametrize("name", CASES)
def test_case(name, tmp_path, base, facts, tiny_llama, base_weights):
    case = CASES[name]
    expect = case["expect"]
    known = {"result", "scaling", "layers", "needs", "setting", "error_names", "any", "fill"}
    assert set(expect) <= known | {"listing", "note", "alt", "model_extra", "raw_readers"}, (
        "the case expects something new"
    )
    folder = write_case(tmp_path / name, name)
    high = "needs" in expect
    assert expect.get("needs", "max_lora_rank >= 64") == "max_lora_rank >= 64"
    assert expect.get("setting", "max_lora_rank=16") == "max_lora_rank=16"
    if "model_extra" in expect:
        assert expect["model_extra"] == "tie_word_embeddings=True"
        base = facts(tiny_llama(tie_word_embeddings=True))
    if expect["result"] != "refused":
        assert expect["result"] in ("loads", "loads-or-refused", "loads-as-dora-or-refused")
        weights = read_adapter(
            folder, base, max_rank=64 if high else 16, base_weights=base_weights(tiny_llama())
        )
        if name == "dora-flag":
            assert all(parts.gain is not None for parts in weights.layers.values())
        else:
            assert_loads(case | {"expect": {"scaling": 2.0} | expect}, weights)
    else:
        with pytest.raises(BranchlineError) as caught:
            read_adapter(folder, base, max_rank=16)
        found = [word in str(caught.value) for word in expect["error_names"]]
        assert any(found) if expect.get("any") else all(found), str(caught.value)


def test_all_cases_are_run():
    assert len(CASES) == 32


def test_dora_without_the_base_weights_is_refused_by_name(tmp_path, base):
    folder = write_case(tmp_path / "dora", "dora-flag")
    with pytest.raises(AdapterUnsupportedError, match=r"DoRA.*weights of the base model"):
        read_adapter(folder, base, max_rank=16)


def test_a_tied_head_that_may_not_take_a_branch_is_refused_by_name(tmp_path, facts, tiny_llama):
    case = CASES["lm-head-tied"]
    base = facts(tiny_llama(tie_word_embeddings=True), {"lm_head": "it is tied to the embedding"})
    folder = write_case(tmp_path / "tied", "lm-head-tied")
    with pytest.raises(AdapterUnsupportedError) as caught:
        read_adapter(folder, base, max_rank=16)
    assert all(word in str(caught.value) for word in case["expect"]["error_names"])


def test_the_error_for_a_high_rank_says_what_to_set(tmp_path, base):
    folder = write_case(tmp_path / "high", "rank-too-high")
    words = r"adapter has rank 64 but slots were sized for 16; wrap with max_lora_rank=64 "
    with pytest.raises(AdapterCapacityError, match=words + r"\(command line: --max-lora-rank 64\)"):
        read_adapter(folder, base, max_rank=16)
    assert read_adapter(folder, base, max_rank=64).rank == 64


ERROR_TYPES = {
    "rank-pattern-typo": AdapterMismatchError,
    "missing-half": AdapterFormatError,
    "leftover-tensor": AdapterMismatchError,
    "nothing-matches": AdapterMismatchError,
    "wrong-shape": AdapterMismatchError,
    "seq-cls-on-causal-lm": AdapterUnsupportedError,
    "implicit-head": AdapterUnsupportedError,
    "float8-weights": AdapterUnsupportedError,
    "nan-weights": AdapterFormatError,
    "mlx-lm": AdapterFormatError,
    "adapterhub": AdapterFormatError,
}


@pytest.mark.parametrize(("name", "kind"), ERROR_TYPES.items())
def test_the_class_of_the_error(name, kind, tmp_path, base):
    folder = write_case(tmp_path / name, name)
    with pytest.raises(kind):
        read_adapter(folder, base, max_rank=16)


# --- single checks --------------------------------------------------------------------------------


Q0 = "base_model.model.model.layers.0.self_attn.q_proj"


def z(*shape, dtype=torch.float32) -> torch.Tensor:
    return torch.full(shape, 0.5).to(dtype)


@pytest.mark.parametrize(
    ("changes", "config", "error", "words"),
    [
        ({}, {"target_modules": ["q_proj"]}, AdapterMismatchError, ["v_proj", "does not target"]),
        ({}, {"target_modules": "all-linear"}, AdapterMismatchError, ["k_proj", "no tensors"]),
        ({}, {"target_modules": []}, AdapterMismatchError, ["does not target"]),
        ({}, {"exclude_modules": ["v_proj"]}, AdapterMismatchError, ["v_proj"]),
        ({}, {"layers_to_transform": [0]}, AdapterMismatchError, ["layers.1", "does not target"]),
        ({}, {"target_modules": ["q_proj", "v_proj", "mlp"]}, AdapterUnsupportedError, ["mlp"]),
        ({}, {"alpha_pattern": {"k_proj": 4}}, AdapterMismatchError, ["alpha_pattern", "k_proj"]),
        ({}, {"alpha_pattern": {"proj": 4}}, AdapterMismatchError, ["alpha_pattern", "proj"]),
        ({}, {"rank_pattern": {"q_proj": 4}}, AdapterFormatError, ["rank 8", "says 4"]),
        ({}, {"r": 4}, AdapterFormatError, ["rank 8", "says 4", "8 problems"]),
        ({}, {"task_type": "SEQ_CLS"}, AdapterMismatchError, ["SEQ_CLS", "CAUSAL_LM"]),
        ({f"{Q0}.lora_A.weight": None}, {}, AdapterFormatError, ["q_proj", "lora_A"]),
        ({f"{Q0}.lora_A.weight": z(8, 48)}, {}, AdapterMismatchError, ["q_proj", "48", "64"]),
        ({f"{Q0}.lora_B.weight": z(64, 4)}, {}, AdapterFormatError, ["lora_B", "rank 4", "8"]),
        ({f"{Q0}.lora_A.weight": z(512)}, {}, AdapterFormatError, ["1 dimensions", "[512]"]),
        ({f"{Q0}.lora_A.weight": z(8, 64, 1)}, {}, AdapterFormatError, ["3 dimensions"]),
        ({f"{Q0}.lora_A.weight": z(0, 64)}, {}, AdapterFormatError, ["rank 0"]),
        (
            {f"{Q0}.lora_A.weight": z(8, 64, dtype=torch.float64)},
            {},
            AdapterUnsupportedError,
            ["F64", "q_proj"],
        ),
        (
            {f"{Q0}.lora_A.weight": z(8, 64, dtype=torch.int8)},
            {},
            AdapterUnsupportedError,
            ["I8"],
        ),
        (
            {f"{Q0}.lora_A.weight": z(8, 64, dtype=torch.float8_e5m2)},
            {},
            AdapterUnsupportedError,
            ["F8_E5M2", "float8"],
        ),
        (
            {f"{Q0}.lora_B.weight": z(64, 8) / 0},
            {},
            AdapterFormatError,
            ["infinity", f"{Q0}.lora_B.weight"],
        ),
        ({f"{Q0}.lora_B.bias": z(64)}, {}, AdapterUnsupportedError, ["lora_bias"]),
        ({f"{Q0}.base_layer.weight": z(64, 64)}, {}, AdapterUnsupportedError, ["base weight"]),
        ({f"{Q0}.bias": z(64)}, {}, AdapterUnsupportedError, ["trained bias"]),
        ({f"{Q0}.lora_what": z(64)}, {}, AdapterUnsupportedError, ["lora_what"]),
        (
            {"base_model.model.model.norm.lora_A.weight": z(8, 64)},
            {},
            AdapterMismatchError,
            ["model.norm", "no linear"],
        ),
    ],
)
def test_a_single_fault_is_found_and_named(changes, config, error, words, plain, base):
    edit_adapter(plain, changes, **config)
    with pytest.raises(error) as caught:
        read_adapter(plain, base, max_rank=16)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_all_findings_come_in_one_error(plain, base):
    edit_adapter(
        plain,
        {f"{Q0}.lora_A.weight": z(8, 48), "base_model.model.score.weight": z(2, 64)},
        task_type="SEQ_CLS",
        frobnicate=3,
        rank_pattern={"q_porj": 4},
    )
    with pytest.raises(AdapterUnsupportedError, match="5 problems") as caught:
        read_adapter(plain, base, max_rank=16)
    for word in ("48", "score", "SEQ_CLS", "frobnicate", "q_porj"):
        assert word in str(caught.value)


def test_no_tensor_is_read_before_all_headers_are_checked(plain, base, monkeypatch):
    edit_adapter(plain, {f"{Q0}.lora_A.weight": z(8, 48)})

    def refuse(*_):
        raise AssertionError("a tensor was read")

    monkeypatch.setattr("branchline.adapters.tensor_file.TensorFile.read", refuse)
    with pytest.raises(AdapterMismatchError):
        read_adapter(plain, base, max_rank=16)


def test_a_layer_that_cannot_take_a_branch_says_why(plain, facts, tiny_llama):
    name = "model.layers.1.self_attn.v_proj"
    base = facts(tiny_llama(), {name: "its codes have no plain input"})
    with pytest.raises(AdapterUnsupportedError, match=f"{name}.*no plain input"):
        read_adapter(plain, base, max_rank=16)


def test_null_targets_of_an_unknown_model_type_are_refused(plain, base, facts, tiny_llama):
    edit_adapter(plain, target_modules=None)
    assert len(read_adapter(plain, base, max_rank=16).layers) == 4
    unknown = facts(tiny_llama(), model_type="brand_new")
    with pytest.raises(AdapterUnsupportedError, match="brand_new"):
        read_adapter(plain, unknown, max_rank=16)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_kept_as_stored(dtype, plain, base):
    full = load_file(plain / "adapter_model.safetensors")
    edit_adapter(plain, {name: value.to(dtype) for name, value in full.items()})
    weights = read_adapter(plain, base, max_rank=16)
    layer = weights.layers["model.layers.0.self_attn.q_proj"].low_rank
    assert layer.a.dtype == layer.b.dtype == dtype
    assert torch.equal(layer.a, full[f"{Q0}.lora_A.weight"].to(dtype))
    assert (layer.rank, weights.rank) == (8, 8)


def test_entries_that_peft_passes_over_are_noted(plain, base):
    edit_adapter(
        plain,
        target_modules=["q_proj", "v_proj", "query_key_value"],
        alpha_pattern={"q_proj": 4, r"layers\.0\.self_attn\.q_proj": 8},
    )
    weights = read_adapter(plain, base, max_rank=16)
    assert any("query_key_value" in note for note in weights.notes)
    assert any("hidden" in note for note in weights.notes)
    # PEFT takes the first entry that matches, in the file's order.
    assert weights.layers["model.layers.0.self_attn.q_proj"].low_rank.scaling == 0.5


def test_a_scaling_of_zero_has_no_effect(plain, base):
    assert read_adapter(plain, base, max_rank=16).notes == ()
    edit_adapter(plain, lora_alpha=0)
    assert any("no effect" in note for note in read_adapter(plain, base, max_rank=16).notes)


# --- the digest -----------------------------------------------------------------------------------


def test_the_digest_follows_what_the_adapter_computes(plain, tmp_path, base):
    digest = read_adapter(plain, base, max_rank=16).digest
    assert len(bytes.fromhex(digest)) == 32
    copy = shutil.copytree(plain, tmp_path / "elsewhere")
    tensors = load_file(copy / "adapter_model.safetensors")
    save_file(dict(reversed(tensors.items())), copy / "adapter_model.safetensors", {"by": "x"})
    edit_adapter(copy, lora_dropout=0.5, inference_mode=False, target_modules=".*(q|v)_proj")
    edit_adapter(copy, alpha_pattern={"q_proj": 16})
    assert read_adapter(copy, base, max_rank=16).digest == digest
    assert read_adapter(edit_adapter(copy, lora_alpha=17), base, max_rank=16).digest != digest


def test_one_bit_changes_the_digest(plain, base):
    digest = read_adapter(plain, base, max_rank=16).digest
    path = plain / "adapter_model.safetensors"
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)
    assert read_adapter(plain, base, max_rank=16).digest != digest


def test_the_dtype_is_part_of_the_digest(plain, base):
    zeros = {name: v * 0 for name, v in load_file(plain / "adapter_model.safetensors").items()}
    full = read_adapter(edit_adapter(plain, zeros), base, max_rank=16).digest
    half = {name: value.half() for name, value in zeros.items()}
    assert read_adapter(edit_adapter(plain, half), base, max_rank=16).digest != full
