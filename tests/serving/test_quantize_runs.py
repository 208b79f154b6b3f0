"""`quantize_checkpoint`: runs that are stopped and continued, and what is refused."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from torch import nn

from branchline.core.errors import (
    CalibrationError,
    CheckpointError,
    ConfigError,
    ScaleError,
    WrapError,
)
from branchline.linear.calibration import Calibration
from branchline.serving import quantize_checkpoint
from branchline.serving.load import load_model
from tests.checkpoints import (
    CALIBRATED,
    PROMPTS,
    WideModels,
    build_wide,
    contents,
    linears_of,
    quantize,
)


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> tuple[nn.Module, Path]:
    return WideModels(tmp_path_factory.mktemp("sources"))("llama")


# --- stopped and continued


class StopError(Exception):
    pass


def stop_after(file: Path):
    """A progress that stops the run at the first tensor behind `file`, once that is finished."""

    def progress(what: str, done: int, total: int) -> None:
        if file.is_file():
            raise StopError

    return progress


@pytest.mark.parametrize("scheme", ["fp8-dynamic", "nvfp4"])
def test_a_stopped_run_is_continued_and_gives_the_same_bytes(llama, tmp_path, scheme, monkeypatch):
    _, source = llama
    quantize(source, tmp_path / "whole", scheme)
    first, *others = sorted(path.name for path in source.glob("*.safetensors"))
    out, partial = tmp_path / "out", tmp_path / "out.partial"
    with pytest.raises(StopError):
        quantize(source, out, scheme, progress=stop_after(partial / first))
    assert not out.exists()
    assert (partial / first).is_file()
    assert not any((partial / name).exists() for name in others)
    with pytest.raises(WrapError, match=r"holds no config\.json"):
        load_model(partial)
    stamp = (partial / first).stat()
    # What a kill in the middle of a write would leave.
    (partial / f"{others[0]}.part").write_bytes(b"half a file")
    told: list[str] = []
    if scheme in CALIBRATED:
        monkeypatch.setattr("branchline.serving.quantize.observe_inputs", None)
    quantize(source, out, scheme, progress=lambda what, done, total: told.append(what))
    assert (out / first).stat().st_mtime_ns == stamp.st_mtime_ns
    assert (out / first).stat().st_ino == stamp.st_ino
    assert f"{first}, as an earlier run left it" in told
    assert not partial.exists()
    assert contents(out) == contents(tmp_path / "whole")


@pytest.fixture
def stopped(llama, tmp_path) -> Path:
    """The leftovers of a run to `out` in the same folder."""
    _, source = llama
    first = min(path.name for path in source.glob("*.safetensors"))
    partial = tmp_path / "out.partial"
    with pytest.raises(StopError):
        quantize(source, tmp_path / "out", "fp8-dynamic", progress=stop_after(partial / first))
    return partial


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"scheme": "mxfp8"}, "its scheme is not this run's"),
        ({"ignore": ("*.k_proj",)}, "its settings is not this run's"),
        ({"scheme": "nvfp4"}, "its scheme, calibration is not this run's"),
    ],
)
def test_another_runs_leftovers_are_refused(llama, stopped, changes, said):
    _, source = llama
    before = contents(stopped)
    with pytest.raises(CheckpointError, match=said) as error:
        quantize(source, stopped.with_name("out"), **{"scheme": "fp8-dynamic", **changes})
    assert "out.partial" in error.value.subject
    assert contents(stopped) == before


def test_leftovers_of_another_source_are_refused(llama, stopped, tmp_path):
    _, source = llama
    shutil.copytree(source, tmp_path / "source")
    (shard, *_) = sorted((tmp_path / "source").glob("*.safetensors"))
    save_file(load_file(shard), shard, {"format": "pt"})
    with pytest.raises(CheckpointError, match="its source is not this run's"):
        quantize(tmp_path / "source", stopped.with_name("out"), "fp8-dynamic")


def test_a_damaged_shard_is_not_taken_over(llama, stopped):
    _, source = llama
    (shard,) = stopped.glob("*.safetensors")
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    with pytest.raises(CheckpointError, match="is not what the run") as error:
        quantize(source, stopped.with_name("out"), "fp8-dynamic")
    assert shard.name in error.value.subject
    shard.unlink()
    with pytest.raises(CheckpointError, match="is not what the run"):
        quantize(source, stopped.with_name("out"), "fp8-dynamic")


@pytest.mark.parametrize("text", ["", "{}", '{"version": 1, "origin": 3}'])
def test_a_damaged_manifest_is_refused(llama, stopped, text):
    _, source = llama
    (stopped / "quantize-manifest.json").write_text(text)
    with pytest.raises(CheckpointError, match="damaged or of another version"):
        quantize(source, stopped.with_name("out"), "fp8-dynamic")


def test_a_folder_of_somebody_else_is_left_alone(llama, tmp_path):
    _, source = llama
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial" / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match=r"holds notes\.txt, but no"):
        quantize(source, tmp_path / "out", "fp8-dynamic")
    assert contents(tmp_path / "out.partial") == {"notes.txt": b"mine"}
    (tmp_path / "taken").mkdir()
    with pytest.raises(ConfigError, match="exists already"):
        quantize(source, tmp_path / "taken", "fp8-dynamic")


# --- refusals


@pytest.mark.parametrize(
    ("settings", "error", "said"),
    [
        ({"scheme": "fp9"}, ConfigError, "unknown scheme; choose one of fp8-static"),
        ({"scheme": "fp8-dynamic", "colour": 1}, ConfigError, "known settings: scheme"),
        ({"scheme": "fp8-dynamic", "ignore": ("*.gate",)}, ConfigError, "matches no linear"),
        ({"scheme": "fp8-dynamic", "ignore": ("*",)}, ConfigError, "leaves no linear"),
        ({"scheme": "fp8-static"}, CalibrationError, "no calibration was given"),
        ({"scheme": "mxfp8", "calibration": PROMPTS}, ConfigError, "no scales to calibrate"),
        ({"scheme": "mxfp8", "percentile": 99.0}, ConfigError, "only counts where scales"),
        ({"scheme": "nvfp4", "calibration": []}, CalibrationError, "no prompts were given"),
    ],
)
def test_settings_that_cannot_work(llama, tmp_path, settings, error, said):
    _, source = llama
    with pytest.raises(error, match=said):
        quantize_checkpoint(source, tmp_path / "out", **settings)
    assert not (tmp_path / "out").exists()


def test_ranges_that_do_not_cover_the_model(llama, tmp_path):
    model, source = llama
    names = [name for name in linears_of(model) if name != "lm_head"]
    ranges = Calibration(dict.fromkeys(names[1:], 4.0), 100.0, 1)
    with pytest.raises(CalibrationError, match=f"input scale of {names[0]}: was not observed"):
        quantize(source, tmp_path / "out", "fp8-static", calibration=ranges)
    ranges = Calibration(dict.fromkeys([*names, "model.other"], 4.0), 100.0, 1)
    with pytest.raises(CalibrationError, match="is of another model"):
        quantize(source, tmp_path / "out", "fp8-static", calibration=ranges)
    ranges = Calibration(dict.fromkeys(names, 4.0), 100.0, 1)
    report = quantize(source, tmp_path / "out", "fp8-static", calibration=ranges)
    assert {layer.saturated for layer in report.layers} == {None}


def test_groups_that_do_not_divide_a_layer(tmp_path):
    build_wide("llama", intermediate_size=192).save_pretrained(tmp_path / "source")
    with pytest.raises(ConfigError, match=r"2 of 14 linears .* \*\.down_proj \(192\)") as refusal:
        quantize(tmp_path / "source", tmp_path / "out", "fp8-block")
    report = quantize(tmp_path / "source", tmp_path / "out", "fp8-block", ignore=("*.down_proj",))
    assert report.layers
    assert "--ignore '*.down_proj'" in str(refusal.value)


def test_a_quantised_source_is_refused(llama, tmp_path):
    _, source = llama
    quantize(source, tmp_path / "out", "fp8-dynamic")
    with pytest.raises(CheckpointError, match="is quantised already"):
        quantize(tmp_path / "out", tmp_path / "again", "fp8-dynamic")


def test_weights_that_cannot_be_quantised(tmp_path):
    model = build_wide("llama")
    model.model.layers[1].mlp.up_proj.weight[3, 5] = float("nan")
    model.save_pretrained(tmp_path / "source")
    with pytest.raises(ScaleError, match=r"model\.layers\.1\.mlp\.up_proj: its weight holds NaN"):
        quantize(tmp_path / "source", tmp_path / "out", "fp8-dynamic")
    assert not (tmp_path / "out").exists()


def test_damaged_and_missing_source_files_are_named(llama, tmp_path):
    _, original = llama
    source = tmp_path / "source"
    shutil.copytree(original, source)
    shard = sorted(source.glob("*.safetensors"))[1]
    content = shard.read_bytes()
    shard.write_bytes(content[:-10])
    with pytest.raises(CheckpointError, match=f"{shard.name}': cannot be read"):
        quantize(source, tmp_path / "out", "fp8-dynamic")
    shard.unlink()
    with pytest.raises(CheckpointError, match=f"lacks {shard.name}"):
        quantize(source, tmp_path / "out", "fp8-dynamic")
    for file in source.glob("model*"):
        file.unlink()
    (source / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"but pytorch_model\.bin"):
        quantize(source, tmp_path / "out", "fp8-dynamic")
    with pytest.raises(WrapError, match="does not exist"):
        quantize(tmp_path / "none", tmp_path / "out", "fp8-dynamic")
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "out.partial").exists()


def test_two_runs_do_not_share_a_folder(llama, tmp_path):
    _, source = llama
    seen = []

    def second(what, done, total):
        if not seen:
            seen.append(what)
            with pytest.raises(ConfigError, match="another run is writing it"):
                quantize(source, tmp_path / "out", "fp8-dynamic")

    quantize(source, tmp_path / "out", "fp8-dynamic", progress=second)
    assert seen
    modes = {path.stat().st_mode & 0o777 for path in (tmp_path / "out").iterdir()}
    assert len(modes) == 1
