from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from branchline.core.errors import CalibrationError, ConfigError
from branchline.linear.branching import RowLayout
from branchline.linear.calibration import Calibration, Observer, calibrate
from branchline.linear.kernels.float import FloatLinear
from branchline.linear.registry import LayerRegistry
from branchline.linear.routed import RoutedLinear

K = 16


class Flat(nn.Module):
    """Two routed linears: one sees (rows, tokens, K), one the same tokens as (rows * tokens, K)."""

    def __init__(self) -> None:
        super().__init__()
        self.registry = LayerRegistry()
        for index, name in enumerate(("deep", "flat", "pooled")):
            layer = RoutedLinear(
                name,
                index,
                FloatLinear(nn.Linear(K, K)),
                self.registry,
                torch.float32,
                torch.device("cpu"),
            )
            setattr(self, name, layer)
            self.registry.add(layer)
        # As the recorded forward finds it before a model is calibrated.
        self.flat.row_layout = RowLayout.FLAT

    def forward(self, x: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        self.flat(x.view(-1, K))
        self.pooled(x[:, 0])
        return self.deep(x)


def observed(batches: list[dict], percentile: float = 100.0) -> Calibration:
    model = Flat()
    return calibrate(model, model.registry, batches, Observer(percentile))


def known(seed: int = 0, rows: int = 3, tokens: int = 5) -> torch.Tensor:
    """Data that bfloat16 holds exactly."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, tokens, K, generator=generator).bfloat16().float()


# --- observers ---------------------------------------------------------------------------------


def test_maximum():
    x = known()
    result = observed([{"x": x}])
    assert result.input_amax["deep"] == x.abs().max().item()
    assert result.input_amax["pooled"] == x[:, 0].abs().max().item()
    assert result.tokens == 15
    assert result.percentile == 100.0
    assert result.input_scale("deep") == x.abs().max().item() / 448


def test_maximum_is_over_all_batches():
    small, large = known(1), known(2) * 8
    result = observed([{"x": small}, {"x": large}, {"x": small}])
    assert result.input_amax["deep"] == large.abs().max().item()
    assert result.tokens == 45


@pytest.mark.parametrize("percentile", [0.1, 1, 25, 50, 90, 99, 99.9, 99.99, 100])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_percentiles_are_numpys_inverted_cdf(percentile, count):
    batches = [known(seed, rows=4, tokens=7) for seed in range(count)]
    magnitudes = torch.cat([x.flatten() for x in batches]).abs().double().numpy()
    expected = np.percentile(magnitudes, percentile, method="inverted_cdf")
    result = observed([{"x": x} for x in batches], percentile)
    assert result.input_amax["deep"] == expected


def test_a_percentile_ignores_the_outlier_that_the_maximum_keeps():
    x = known()
    x[0, 0, 0] = 1000.0
    assert observed([{"x": x}]).input_amax["deep"] == 1000
    assert observed([{"x": x}], 99).input_amax["deep"] < 10


@pytest.mark.parametrize("percentile", [0.0, -1.0, 100.1, math.nan, math.inf])
def test_percentiles_out_of_range(percentile):
    with pytest.raises(CalibrationError, match="percentile"):
        Observer(percentile)


def test_histogram_of_nothing():
    assert Observer().choose(torch.zeros(2**15, dtype=torch.int64)) == 0.0


# --- what is counted ---------------------------------------------------------------------------


def padded() -> tuple[torch.Tensor, torch.Tensor]:
    x = known()
    mask = torch.ones(3, 5, dtype=torch.int64)
    mask[1, 3:] = 0
    mask[2, 1:] = 0
    x[mask == 0] = 512.0
    return x, mask


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float32])
def test_masked_padding_is_not_counted(dtype):
    x, mask = padded()
    result = observed([{"x": x, "attention_mask": mask.to(dtype)}])
    assert result.input_amax["deep"] == x[mask.bool()].abs().max().item()
    assert observed([{"x": x}]).input_amax["deep"] == 512


def test_masked_padding_is_not_counted_where_tokens_lie_flat():
    x, mask = padded()
    result = observed([{"x": x, "attention_mask": mask}])
    assert result.input_amax["flat"] < 512


def test_a_mask_is_not_taken_for_a_mask_of_features():
    # As many tokens as features: the pooled layer's (rows, K) looks like the mask's (rows, tokens).
    x = known(tokens=K)
    mask = torch.ones(3, K, dtype=torch.int64)
    mask[:, 4:] = 0
    x[:, 0, 9] = 77.0
    result = observed([{"x": x, "attention_mask": mask}])
    assert result.input_amax["pooled"] == 77.0


def test_no_hook_is_left_behind():
    model = Flat()
    calibrate(model, model.registry, [{"x": known()}], Observer())
    assert not any(model.registry.requires_unquantized_input(layer) for layer in model.registry)
    bad = known()
    bad[0, 0, 0] = math.nan
    with pytest.raises(CalibrationError, match="NaN"):
        calibrate(model, model.registry, [{"x": bad}], Observer())
    assert not any(model.registry.requires_unquantized_input(layer) for layer in model.registry)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_activations_that_are_not_finite_are_refused_with_their_layer(value):
    x = known()
    x[1, 1, 1] = value
    with pytest.raises(CalibrationError, match=r"input of (flat|deep)"):
        observed([{"x": x}])


def test_no_prompts():
    with pytest.raises(CalibrationError, match="no prompts"):
        observed([])


@pytest.mark.parametrize("amax", [0.0, -1.0, math.nan, math.inf])
def test_a_range_that_makes_no_scale(amax):
    with pytest.raises(CalibrationError, match="mlp"):
        Calibration({"mlp": amax}, 100.0, 1).input_scale("mlp")


def test_a_layer_that_was_not_observed():
    with pytest.raises(CalibrationError, match=r"lm_head.*not observed"):
        Calibration({}, 100.0, 1).input_scale("lm_head")


# --- files -------------------------------------------------------------------------------------


def example() -> Calibration:
    return Calibration({"a.b": 0.1 + 0.2, "c": 3.4e38, "d": 1e-30}, 99.9, 7)


def test_round_trip_is_exact(tmp_path):
    path = tmp_path / "ranges.json"
    example().save(path)
    assert Calibration.load(path) == example()
    assert Calibration.load(str(path)) == example()
    assert [entry.name for entry in tmp_path.iterdir()] == ["ranges.json"]


def test_saving_replaces_what_was_there(tmp_path):
    path = tmp_path / "ranges.json"
    path.write_text("old")
    example().save(str(path))
    assert Calibration.load(path).tokens == 7


def test_a_save_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "ranges.json"
    example().save(path)
    before = path.read_bytes()
    write = Path.write_text

    def half(self, data, *args, **kwargs):
        write(self, data[: len(data) // 2])
        raise OSError("no space left on device")

    monkeypatch.setattr(Path, "write_text", half)
    with pytest.raises(OSError, match="no space"):
        dataclasses.replace(example(), tokens=8).save(path)
    assert path.read_bytes() == before


def test_a_save_that_fails_leaves_no_litter(tmp_path, monkeypatch):
    def fail(self, target):
        raise OSError("no such volume")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OSError, match="no such volume"):
        example().save(tmp_path / "ranges.json")
    assert list(tmp_path.iterdir()) == []


def document(**changes: object) -> str:
    fields = {
        "format": "branchline-calibration",
        "version": 1,
        "percentile": 100.0,
        "tokens": 3,
        "input_amax": {"a": 1.0},
    }
    return json.dumps({**fields, **changes})


def test_the_good_document_loads(tmp_path):
    path = tmp_path / "ranges.json"
    path.write_text(document())
    assert Calibration.load(path) == Calibration({"a": 1.0}, 100.0, 3)


BAD = {
    "empty": b"",
    "no json": b"{",
    "not utf-8": b"\xff\xfe{}",
    "list": b"[]",
    "number": b"3",
    "null": b"null",
    "foreign": b'{"format": "something"}',
    "no format": b'{"input_amax": {}}',
    "version 2": document(version=2).encode(),
    "version text": document(version="1").encode(),
    "no version": document(version=None).encode(),
    "no ranges": document(input_amax=None).encode(),
    "ranges list": document(input_amax=[1.0]).encode(),
    "range text": document(input_amax={"a": "1.0"}).encode(),
    "range null": document(input_amax={"a": None}).encode(),
    "range bool": document(input_amax={"a": True}).encode(),
    "range list": document(input_amax={"a": [1.0]}).encode(),
    "percentile text": document(percentile="all").encode(),
    "percentile null": document(percentile=None).encode(),
    "tokens text": document(tokens="many").encode(),
    "nested": b"[" * 200_000,
}


@pytest.mark.parametrize("content", BAD.values(), ids=BAD.keys())
def test_bad_files_are_refused_by_name(tmp_path, content):
    path = tmp_path / "ranges.json"
    path.write_bytes(content)
    with pytest.raises(CalibrationError, match=r"ranges\.json") as caught:
        Calibration.load(path)
    assert isinstance(caught.value, ConfigError)


@pytest.mark.parametrize("amax", ["NaN", "Infinity", "-1.0", "0", "1" + "0" * 400])
def test_numbers_that_make_no_scale_are_refused_at_the_latest_when_used(tmp_path, amax):
    path = tmp_path / "ranges.json"
    path.write_text(document().replace('"a": 1.0', f'"a": {amax}'))
    with pytest.raises(CalibrationError):
        Calibration.load(path).input_scale("a")


def test_missing_file_and_folder(tmp_path):
    for path in (tmp_path / "none.json", tmp_path):
        with pytest.raises(CalibrationError):
            Calibration.load(path)
