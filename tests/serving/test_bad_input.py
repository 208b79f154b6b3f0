"""Refusals: a typed error with name, reason and remedy, and a model that is what it was."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import branchline
from branchline.core import errors
from branchline.core.errors import ConfigError
from tests.helpers import edit_adapter
from tests.models import build, save_adapter, token_ids

IDS = token_ids(2, 7)
CALIBRATION = [token_ids(4, 12, seed=9)]


@pytest.fixture
def copy_of(llama, tmp_path):
    """A copy of the attention adapter that the test may damage."""
    return shutil.copytree(llama.folders["attn"], tmp_path / "copy")


def missing(folder):
    shutil.rmtree(folder)


def other_tool(folder):
    (folder / "adapter_config.json").write_text(
        json.dumps({"fine_tune_type": "lora", "num_layers": 8, "lora_parameters": {"rank": 8}})
    )


def truncated(folder):
    path = folder / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def other_task(folder):
    edit_adapter(folder, task_type="SEQ_CLS")


def other_type(folder):
    edit_adapter(folder, peft_type="SHIRA")


def nan_weights(folder):
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    next(iter(tensors.values())).view(-1)[3] = float("nan")
    save_file(tensors, path)


def wrong_base(folder):
    path = folder / "adapter_model.safetensors"
    tensors = {
        name: torch.zeros(t.shape[0], 96) if "lora_A" in name else t
        for name, t in load_file(path).items()
    }
    save_file(tensors, path)


@pytest.mark.parametrize(
    ("damage", "error", "words"),
    [
        (missing, errors.AdapterNotFoundError, ["copy"]),
        (other_tool, errors.AdapterFormatError, ["mlx"]),
        (truncated, errors.AdapterFormatError, ["adapter_model.safetensors"]),
        (other_task, errors.AdapterMismatchError, ["SEQ_CLS", "CAUSAL_LM"]),
        (other_type, errors.AdapterUnsupportedError, ["SHIRA"]),
        (nan_weights, errors.AdapterFormatError, ["NaN", "lora_"]),
        (wrong_base, errors.AdapterMismatchError, ["96", "64", "q_proj"]),
    ],
)
@pytest.mark.parametrize("operation", ["load", "swap"])
def test_a_bad_adapter_changes_nothing(llama, copy_of, damage, error, words, operation):
    served = llama.served()
    before = [served(IDS).logits]
    with served.adapters.rows(["attn", "mlp"]):
        before.append(served(IDS).logits)
    listing, epoch = served.adapters.list(), served.registry.epoch
    damage(copy_of)
    name = "new" if operation == "load" else "attn"
    with pytest.raises(error) as caught:
        getattr(served.adapters, operation)(name, copy_of)
    assert isinstance(caught.value, branchline.BranchlineError)
    assert all(word in str(caught.value) for word in words)
    assert caught.value.remedy
    assert served.adapters.list() == listing
    assert served.registry.epoch == epoch
    assert torch.equal(served(IDS).logits, before[0])
    with served.adapters.rows(["attn", "mlp"]):
        assert torch.equal(served(IDS).logits, before[1])


def with_names(served, *names: str | None) -> torch.Tensor:
    with served.adapters.rows(names):
        return served(IDS).logits


def test_rank_above_the_maximum(llama):
    served = llama.wrap(max_lora_rank=8)
    served.adapters.load("attn", llama.folders["attn"])
    before = with_names(served, "attn", None)
    for operation, name in (("load", "all"), ("swap", "attn")):
        with pytest.raises(errors.AdapterCapacityError, match="16") as caught:
            getattr(served.adapters, operation)(name, llama.folders["all"])
        assert "8" in str(caught.value)
        assert "max_lora_rank" in str(caught.value)
        assert torch.equal(with_names(served, "attn", None), before)


def test_names(llama):
    served = llama.served()
    before = with_names(served, "attn", "mlp")
    with pytest.raises(errors.AdapterExistsError, match="attn"):
        served.adapters.load("attn", llama.folders["mlp"])
    for name in ("", "  ", "__base__"):
        with pytest.raises(errors.ConfigError, match="reserved"):
            served.adapters.load(name, llama.folders["mlp"])
    for call in (served.adapters.unload, lambda n: served.adapters.swap(n, "x")):
        with pytest.raises(errors.AdapterNotFoundError, match=r"nobody.*attn"):
            call("nobody")
    with (
        pytest.raises(errors.AdapterNotFoundError, match="nobody"),
        served.adapters.rows(["attn", "nobody"]),
    ):
        pass
    assert all(info.batches == 0 for info in served.adapters.list())
    assert torch.equal(with_names(served, "attn", "mlp"), before)


def test_too_many_adapters(llama):
    served = llama.wrap(max_loras=1)
    for name in ("attn", "mlp"):
        served.adapters.load(name, llama.folders[name])
    alone = {name: with_names(served, name, name) for name in ("attn", "mlp", "attn")}
    with pytest.raises(errors.AdapterCapacityError, match="max_loras=1"):
        with_names(served, "attn", "mlp")
    for name, expected in alone.items():
        assert torch.equal(with_names(served, name, name), expected)
    off = llama.wrap(max_loras=0)
    with pytest.raises(errors.AdapterCapacityError, match="max_loras=0"):
        off.adapters.load("a", llama.folders["attn"])


@pytest.mark.parametrize("names", ["attn", [], ["attn"], ["attn", None, None]])
def test_rows_must_fit_the_batch(llama, names):
    served = llama.served()
    with pytest.raises(errors.BatchError), served.adapters.rows(names):
        served(IDS)
    with pytest.raises(errors.BatchError):
        served(IDS, adapter_names=names)


def test_settings(llama):
    for settings, words in [
        ({"quant": "fp4"}, "quant"),
        ({"policy": "guess"}, "guess"),
        ({"max_lora": 3}, "max_loras"),
        ({"max_loras": -1}, "max_loras"),
        ({"max_cpu_loras": -1}, "max_cpu_loras"),
        ({"eviction": "fifo"}, "eviction"),
        ({"lora_slots": "8"}, "rank:count"),
        ({"lora_slots": {8: 0}}, "count below 1"),
        ({"lora_slots": "2000:1"}, "rank outside"),
        ({"lora_slots": "8:1,8:2"}, "twice"),
        ({"lora_slots": "8:1", "max_loras": 4}, "in the place of max_loras"),
        ({"ignore": ["model.layers.7.*"]}, r"layers\.7"),
        ({"percentile": 0.0}, "percentile"),
        ({"quant": "fp8-dynamic", "calibration": CALIBRATION}, "no static scales"),
        ({"quant": "none", "ignore": ["nonsense"]}, "nonsense"),
        ({"percentile": 99.0, "calibration": llama.wrap().calibration}, "percentile"),
        ({"percentile": 99.0, "quant": "fp8-dynamic"}, "percentile"),
    ]:
        with pytest.raises(errors.ConfigError, match=words):
            llama.wrap(**settings)
    for settings in ({}, {"quant": "none"}, {"quant": "fp8-dynamic"}):
        with pytest.raises(errors.KernelUnavailableError, match="triton"):
            llama.wrap(producer="triton", **settings)


def test_the_calibration_of_another_model(llama, make_family):
    with pytest.raises(errors.CalibrationError, match="another model"):
        llama.wrap(calibration=make_family("gpt2").wrap().calibration)


def test_weights_beyond_the_dtype_of_the_slots(llama, copy_of):
    path = copy_of / "adapter_model.safetensors"
    tensors = load_file(path)
    next(iter(tensors.values())).view(-1)[3] = 1e5
    save_file(tensors, path)
    served = llama.wrap(lora_dtype="float16")
    with pytest.raises(errors.AdapterUnsupportedError, match="lora_dtype"):
        served.adapters.load("big", copy_of)
    assert served.adapters.list() == ()
    served = llama.wrap(lora_dtype="float32")
    served.adapters.load("big", copy_of)


def test_a_failed_wrap_leaves_the_model_alone():
    model = build("llama")
    before = {name: type(module) for name, module in model.named_modules()}
    logits = model(IDS).logits
    for calibration, error in [
        (None, errors.CalibrationError),
        ([], errors.CalibrationError),
        (["some text"], errors.CalibrationError),
        ([3], errors.CalibrationError),
        ("no/such/file.json", errors.CalibrationError),
    ]:
        with pytest.raises(error):
            branchline.wrap(model, quant="fp8-static", calibration=calibration)
        assert {name: type(module) for name, module in model.named_modules()} == before
        assert torch.equal(model(IDS).logits, logits)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[0, 0] = float("inf")
    with pytest.raises(errors.ScaleError, match="up_proj"):
        branchline.wrap(model, quant="fp8-dynamic")
    assert {name: type(module) for name, module in model.named_modules()} == before


def test_what_cannot_be_wrapped():
    with pytest.raises(errors.WrapError, match="linear"):
        branchline.wrap(nn.Sequential(nn.Embedding(10, 4)))
    with pytest.raises(errors.WrapError, match="example"):
        branchline.wrap(nn.Sequential(nn.Linear(4, 4)))
    with pytest.raises(errors.WrapError, match="module"):
        branchline.wrap("a model")
    served = branchline.wrap(build("llama"))
    with pytest.raises(errors.WrapError, match="already"):
        branchline.wrap(served)


def test_a_served_model_stays_where_it_is(llama):
    served = llama.wrap()
    for change in (lambda: served.to(torch.float16), lambda: served.half(), served.train):
        with pytest.raises(errors.ConfigError):
            change()


def test_unwrap_gives_the_model_back(llama):
    plain = llama.plain()
    logits = plain(IDS).logits
    served = branchline.wrap(plain, quant="fp8-static", calibration=CALIBRATION)
    served.adapters.load("all", llama.folders["all"])
    assert not torch.equal(served(IDS).logits, logits)
    with served.adapters.rows(["all", None]), pytest.raises(errors.ConfigError, match="in flight"):
        served.unwrap()
    assert served.unwrap() is plain
    assert torch.equal(plain(IDS).logits, logits)
    assert not any(module._forward_hooks for module in plain.modules())


def test_an_adapter_for_another_family_is_refused(make_family, tmp_path):
    served = make_family("llama").wrap()
    folder = save_adapter(build("gpt2"), tmp_path / "gpt2", ["c_attn"], rank=4, seed=0)
    with pytest.raises(errors.AdapterMismatchError, match=r"transformer\.h"):
        served.adapters.load("gpt2", folder)


@pytest.mark.parametrize("name", [3, None, "", "  ", "a\nb", "a\x00b", "__base__"])
def test_names_that_are_none(llama, name):
    served = llama.wrap(quant="none")
    with pytest.raises(ConfigError, match="adapter name"):
        served.adapters.load(name, llama.folders["all"])


def test_a_linear_whose_weights_went_into_an_adapter_keeps_them(llama, tmp_path):
    folder = save_adapter(
        llama.plain(), tmp_path / "dora", ["q_proj"], rank=4, seed=1, use_dora=True
    )
    served = llama.served()
    served.adapters.load("dora", folder)
    name = "model.layers.0.self_attn.q_proj"
    with pytest.raises(ConfigError, match="its weights went into adapter 'dora'"):
        served.requantize(name, "none")
    served.requantize("model.layers.0.mlp.down_proj", "none")
    served.adapters.unload("dora")
    served.requantize(name, "none")
