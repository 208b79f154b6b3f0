"""`load_model`: quantised linears stay codes, and nothing of a checkpoint is made up or dropped."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, LlamaModel

import branchline
from branchline.core.errors import CheckpointError, ScaleError, WrapError
from branchline.core.scheme import SCHEMES
from branchline.linear.quantized_linear import QuantizedLinear
from branchline.serving import quantize_checkpoint
from branchline.serving.quantize_format import quantization_config
from tests.helpers import edit_json
from tests.models import build, token_ids

UP = "model.layers.0.mlp.up_proj"


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Path:
    """A float checkpoint."""
    folder = tmp_path_factory.mktemp("plain")
    with torch.no_grad():
        build("llama").save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def quantized(plain, tmp_path_factory) -> Path:
    """The same, quantised."""
    out = tmp_path_factory.mktemp("quantized") / "out"
    quantize_checkpoint(plain, out, scheme="fp8-dynamic")
    return out


@pytest.fixture
def folder(quantized, tmp_path) -> Path:
    """A copy of it, to be damaged."""
    shutil.copytree(quantized, tmp_path / "model")
    return tmp_path / "model"


def edit(folder: Path, **changes: torch.Tensor | None) -> None:
    """Replace tensors, or remove those that are None; names with two underscores for a dot."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for name, tensor in changes.items():
        name = name.replace("__", ".")
        tensors.pop(name, None)
        if tensor is not None:
            tensors[name] = tensor
    save_file(tensors, file, {"format": "pt"})


def part(name: str) -> str:
    return f"{UP}.{name}".replace(".", "__")


def quantized_linears(model: nn.Module) -> dict[str, QuantizedLinear]:
    return {name: m for name, m in model.named_modules() if isinstance(m, QuantizedLinear)}


# --- what is loaded


def test_an_unquantised_checkpoint_loads_as_from_pretrained_does(plain):
    loaded = branchline.load_model(str(plain))
    other = AutoModelForCausalLM.from_pretrained(plain, dtype="auto")
    assert type(loaded) is type(other)
    given, wanted = loaded.state_dict(), other.state_dict()
    assert given.keys() == wanted.keys()
    assert all(torch.equal(given[name], wanted[name]) for name in wanted)
    assert not hasattr(loaded, "branchline_checkpoint")
    assert branchline.load_model(plain, dtype=torch.float32).dtype == torch.float32


def test_every_quantised_linear_holds_the_files_own_bytes(quantized):
    model = branchline.load_model(quantized)
    stored = load_file(quantized / "model.safetensors")
    linears = quantized_linears(model)
    assert len(linears) == 14
    for name, linear in linears.items():
        weight = linear.quantized_weight()
        codes = stored[f"{name}.weight"]
        assert torch.equal(weight.codes.view(torch.uint8), codes.view(torch.uint8))
        assert torch.equal(weight.scale, stored[f"{name}.weight_scale"])
        assert linear.name == name
    assert not model.training
    assert not any(module.training for module in model.modules())
    assert not any(parameter.is_meta for parameter in model.parameters())


def test_transformers_does_not_take_the_model_for_quantised(quantized, tmp_path):
    model = branchline.load_model(quantized)
    for name in ("is_quantized", "hf_quantizer", "quantization_method"):
        assert not hasattr(model, name)
    assert "quantization" not in model.config.to_json_string()
    assert "_is_quantized" not in vars(model.config)
    model.config.save_pretrained(tmp_path)
    assert "quant" not in (tmp_path / "config.json").read_text()


def test_what_was_read_is_noted_on_the_model(quantized):
    noted = branchline.load_model(quantized).branchline_checkpoint
    assert set(map(str, noted.schemes.values())) == {"fp8-channel x fp8-dynamic-token"}
    assert noted.unquantized == ("lm_head",)
    assert noted.unmatched == ()
    assert any("config.json" in line for line in noted.decisions)


def test_the_dtype_is_of_what_is_not_quantised(quantized):
    model = branchline.load_model(quantized, dtype=torch.float32)
    assert model.lm_head.weight.dtype == torch.float32
    for linear in quantized_linears(model).values():
        assert linear.dtype == torch.float32
        assert linear.quantized_weight().codes.dtype == torch.float8_e4m3fn


def test_without_a_dtype_in_the_config_the_float_weights_say_it(folder):
    edit_json(folder / "config.json", {"dtype": None})
    assert branchline.load_model(folder).dtype == torch.bfloat16
    edit(folder, model__norm__weight=torch.ones(64))
    with pytest.raises(CheckpointError, match="names no dtype"):
        branchline.load_model(folder)
    assert branchline.load_model(folder, dtype="bfloat16").dtype == torch.bfloat16


def test_what_a_model_keeps_in_float32_does_not_cast_codes(quantized, monkeypatch):
    monkeypatch.setattr(LlamaForCausalLM, "_keep_in_fp32_modules_strict", {"up_proj", "lm_head"})
    model = branchline.load_model(quantized)
    assert model.lm_head.weight.dtype == torch.float32
    weight = model.get_submodule(UP).quantized_weight()
    assert weight.codes.dtype == torch.float8_e4m3fn
    assert weight.scale.dtype == torch.float32


def test_a_checkpoint_of_the_model_without_its_head(tmp_path):
    """transformers adds the prefix that the names lack; the metadata has them as they are."""
    config = build("llama").config
    config.tie_word_embeddings = True
    LlamaModel(config).to(torch.bfloat16).save_pretrained(tmp_path / "base")
    ignored = "layers.0.mlp.up_proj"
    settings = {"scheme": "fp8-dynamic", "ignore": (ignored,)}
    quantize_checkpoint(tmp_path / "base", tmp_path / "out", **settings)
    edit_json(tmp_path / "out" / "config.json", {"architectures": ["LlamaForCausalLM"]})
    model = branchline.load_model(tmp_path / "out")
    assert type(model) is LlamaForCausalLM
    assert f"model.{ignored}" not in quantized_linears(model)
    assert len(quantized_linears(model)) == 13
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_scales_of_the_kv_cache_are_left_and_noted(folder):
    name = "model__layers__0__self_attn__k_scale"
    edit(folder, **{name: torch.ones(1)})
    model = branchline.load_model(folder)
    noted = model.branchline_checkpoint.decisions
    assert "of the KV cache and not used: model.layers.0.self_attn.k_scale" in noted


# --- what is refused


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        ({part("weight_scale"): None}, CheckpointError, f"{UP}: .*no tensor {UP}.weight_scale"),
        ({part("weight"): None}, CheckpointError, f"{UP}: has no tensor {UP}.weight"),
        ({part("extra"): torch.ones(1)}, CheckpointError, f"{UP}.extra"),
        ({part("weight_scale"): torch.zeros(128, 1)}, ScaleError, f"{UP}: .*0.0"),
        ({part("weight_scale"): torch.ones(64, 1)}, ScaleError, f"{UP}: .*shape"),
        (
            {part("weight"): torch.zeros(128, 32).to(torch.float8_e4m3fn)},
            CheckpointError,
            rf"{UP}: its weight has shape \(128, 32\)",
        ),
        ({"model__norm__weight": None}, WrapError, "lacks tensors of the model: model.norm.weight"),
        ({"model__nrom": torch.ones(2)}, WrapError, "does not have: model.nrom"),
        ({"model__norm__weight": torch.ones(3)}, WrapError, "other shapes .*model.norm.weight"),
        (
            {"lm_head__weight": torch.zeros(256, 64).to(torch.float8_e4m3fn)},
            CheckpointError,
            "lm_head: .*leaves it unquantised",
        ),
        (
            {"model__embed_tokens__weight": torch.zeros(256, 64).to(torch.float8_e4m3fn)},
            CheckpointError,
            "model.embed_tokens.weight: holds codes",
        ),
    ],
)
def test_damage_is_named(folder, changes, error, said):
    edit(folder, **changes)
    with pytest.raises(error, match=said):
        branchline.load_model(folder)


def test_a_quantised_head_that_the_config_ties(plain, tmp_path):
    quantize_checkpoint(plain, tmp_path / "out", scheme="fp8-dynamic", quantize_lm_head=True)
    edit_json(tmp_path / "out" / "config.json", {"tie_word_embeddings": True})
    with pytest.raises(CheckpointError, match="lm_head: is quantised, but the config ties"):
        branchline.load_model(tmp_path / "out")


def test_quantised_weights_come_from_safetensors_only(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin"):
        branchline.load_model(folder)


def test_a_file_that_is_cut_short(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises((CheckpointError, WrapError), match="read"):
        branchline.load_model(folder)


def test_codes_without_metadata_are_not_cast_away(folder):
    edit_json(folder / "config.json", {"quantization_config": None})
    edit(folder, **dict.fromkeys(scales(folder)))
    with pytest.raises(CheckpointError, match="nothing says how it is quantised"):
        branchline.load_model(folder)


def scales(folder: Path) -> list[str]:
    names = load_file(folder / "model.safetensors")
    return [name.replace(".", "__") for name in names if name.endswith("_scale")]


# --- memory

_MEASURE = """
import sys
from pathlib import Path
import torch
import branchline
from branchline.linear.quantized_linear import QuantizedLinear

def peak():
    status = Path("/proc/self/status").read_text()
    (line,) = [line for line in status.splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) * 1024

def load(folder):
    model = branchline.load_model(folder)
    # Files are mapped: only what was read counts.
    for module in model.modules():
        if isinstance(module, QuantizedLinear):
            module.quantized_weight().codes.view(torch.uint8).max()
    for parameter in model.parameters():
        parameter.max()
    return model

small = load(sys.argv[1])
before = peak()
kept = load(sys.argv[2])
print(peak() - before)
"""


def big_checkpoint(folder: Path) -> int:
    """Some 130 MB of random codes, in two files; its size."""
    config = LlamaConfig(
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=8,
        num_attention_heads=8,
        vocab_size=256,
        dtype="bfloat16",
        architectures=["LlamaForCausalLM"],
    )
    with torch.device("meta"):
        shapes = {name: p.shape for name, p in LlamaForCausalLM(config).named_parameters()}
    shards: list[dict[str, torch.Tensor]] = [{}, {}]
    for index, (name, shape) in enumerate(shapes.items()):
        shard = shards[index % 2]
        if name.endswith("_proj.weight"):
            codes = torch.randint(0, 0x70, shape, dtype=torch.uint8)
            shard[name] = codes.view(torch.float8_e4m3fn)
            shard[f"{name}_scale"] = torch.full((shape[0], 1), 0.01)
        else:
            shard[name] = torch.ones(shape, dtype=torch.bfloat16)
    folder.mkdir()
    files = {f"model-{i}.safetensors": shard for i, shard in enumerate(shards)}
    for file, shard in files.items():
        save_file(shard, folder / file, {"format": "pt"})
    where = {name: file for file, shard in files.items() for name in shard}
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": where})
    )
    config.save_pretrained(folder)
    edit_json(
        folder / "config.json",
        {"quantization_config": quantization_config(SCHEMES["fp8-dynamic"], ["lm_head"])},
    )
    return sum(tensor.nbytes for shard in shards for tensor in shard.values())


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak is read from /proc")
def test_loading_takes_little_more_memory_than_the_checkpoint(quantized, tmp_path):
    size = big_checkpoint(tmp_path / "big")
    assert size > 100e6
    done = subprocess.run(
        [sys.executable, "-c", _MEASURE, str(quantized), str(tmp_path / "big")],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert 0.8 * size < int(done.stdout) < 1.2 * size


def test_a_loaded_model_is_served_and_given_back(quantized):
    model = branchline.load_model(quantized)
    ids = token_ids(2, 5)
    with pytest.raises(WrapError, match="holds quantised codes and no kernel yet"):
        model(input_ids=ids)
    served = branchline.wrap(model)
    first = served(input_ids=ids).logits
    served.unwrap()
    assert len(quantized_linears(model)) == 14
    assert torch.equal(branchline.wrap(model)(input_ids=ids).logits, first)
