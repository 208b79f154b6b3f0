"""Quantise a checkpoint, file by file: one of them in memory at a time, the model never."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from ..core.errors import BranchlineError, CalibrationError, CheckpointError, ConfigError
from ..linear.calibration import Calibration, Observer
from ..linear.checkpoint import read_metadata
from ..linear.checkpoint.describe import tensor_nbytes
from ..linear.quantized_weight import QuantizedWeight
from .folder import UNREADABLE, check_folder, one_line, unreadable
from .inputs import Prompts, calibration_batches
from .load import load_model
from .observe import observe_inputs
from .quantize_format import format_of, quantization_config, stored_tensors
from .quantize_plan import QuantizeConfig, QuantizePlan, plan_quantization
from .quantize_report import LayerReport, LeftOut, QuantizationReport, sqnr_db
from .quantize_workplace import (
    Origin,
    Workplace,
    refuse_existing,
    sha256_of,
    sha256_of_json,
    source_files,
)
from .shards import INDEX, read_headers, shard_files

#: Called with what is being done, and bytes of the source that are done and that there are.
Progress = Callable[[str, int, int], None]

REPORT = "quantization_report.json"
_CONFIG = "config.json"
#: Small files that belong to a model and do not depend on its weights.
_COPIED = (
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "spiece.model",
    "sentencepiece*.model",
    "*.tiktoken",
    "chat_template*",
    "*processor_config.json",
    "LICENSE*",
)
_READ_BY_MODEL = "the model reads its weight itself"


def quantize_checkpoint(
    folder: str | Path,
    out: str | Path,
    *,
    calibration: Prompts | Calibration | str | Path | None = None,
    tokenizer: Any = None,
    progress: Progress | None = None,
    **settings: Any,
) -> QuantizationReport:
    """Write the checkpoint in `folder`, quantised, to `out`.

    A run that was interrupted is continued by the same call; until it is done, `out` does not
    exist, and what lies in `out` + ".partial" is no checkpoint.

    Args:
        folder: of a float checkpoint in safetensors files.
        out: a folder that does not exist yet.
        calibration: for schemes whose inputs have a stored scale: prompts (texts, token ids or
            keyword arguments), or what an earlier calibration saved.
        tokenizer: for prompts that are texts; found in `folder` where None.
        progress: told of every tensor.
        **settings: fields of `QuantizeConfig`: scheme, ignore, quantize_lm_head, percentile.

    Returns:
        the report, which also lies in `out`.

    Raises:
        ConfigError: a setting that cannot work, or `out` exists.
        CalibrationError: missing or unusable calibration.
        CheckpointError: a source that is quantised or damaged, or the leftovers of another run.
        WrapError: no folder of a model that transformers can read.
        ScaleError: a weight that holds NaN or infinities.
    """
    folder, out = Path(folder), Path(out)
    config = QuantizeConfig.checked(**settings)
    check_folder(folder)
    refuse_existing(out)
    if read_metadata(folder) is not None:
        raise CheckpointError(
            f"model {str(folder)!r}", "is quantised already", "pass the checkpoint it was made from"
        )
    try:
        run = _Run(folder, out, config, progress or _no_progress)
    except BranchlineError:
        raise
    except UNREADABLE as error:
        raise unreadable(folder, error) from error
    try:
        with torch.no_grad():
            run.observe(calibration, tokenizer)
            return run.write()
    except (OSError, SafetensorError) as error:
        raise ConfigError(
            f"quantising {str(folder)!r} into {str(out)!r}",
            f"reading or writing failed: {one_line(error)}",
            "see that the source is whole and the disk has room, then run it again",
        ) from error
    finally:
        run.close()


def _no_progress(what: str, done: int, total: int) -> None:
    """Where nobody asks."""


class _Run:
    """One call of `quantize_checkpoint`."""

    def __init__(self, folder: Path, out: Path, config: QuantizeConfig, progress: Progress) -> None:
        self.folder, self.out, self.config, self.progress = folder, out, config, progress
        self.files = shard_files(folder)
        headers = read_headers(self.files)
        self.plan: QuantizePlan = plan_quantization(folder, headers, config)
        self.bytes_before = sum(map(tensor_nbytes, headers.values()))
        self.ranges: Calibration | None = None
        self.saturated: Mapping[str, float] = {}
        self.sizes = {file: file.stat().st_size for file in self.files}
        self.done = 0
        self._workplace: Workplace | None = None

    @property
    def workplace(self) -> Workplace:
        """The folder that the result grows in; there once inputs were observed."""
        assert self._workplace is not None
        return self._workplace

    def close(self) -> None:
        """Let another run have that folder."""
        if self._workplace is not None:
            self._workplace.close()

    # --- calibration ----------------------------------------------------------------------------

    def observe(
        self, calibration: Prompts | Calibration | str | Path | None, tokenizer: Any
    ) -> None:
        """Open the folder that the result grows in, with the input ranges at hand."""
        self._check_calibration(calibration)
        if isinstance(calibration, str | Path):
            calibration = Calibration.load(calibration)
        if calibration is None:
            self._workplace = Workplace(self.out, self._origin(None))
        elif isinstance(calibration, Calibration):
            self.ranges = calibration
            calibration.check_belongs({*self.plan.linears.values(), *self.plan.unquantized})
            self._check_ranges(calibration)
            self._workplace = Workplace(
                self.out, self._origin(sha256_of_json(dict(calibration.input_amax)))
            )
        else:
            self._run_prompts(calibration, tokenizer)

    def _run_prompts(self, prompts: Prompts, tokenizer: Any) -> None:
        self.progress("loading the model to calibrate", 0, 0)
        model = load_model(self.folder)
        batches = list(calibration_batches(model, prompts, tokenizer))
        self._workplace = Workplace(self.out, self._origin(_digest(batches)))
        seen = self.workplace.observed()
        if seen is None:
            self.progress("calibrating", 0, 0)
            seen = observe_inputs(model, batches, Observer(self.config.percentile))
            self.workplace.keep(seen)
        self.ranges, self.saturated = seen.ranges, seen.saturated
        self.plan = self.plan.without(seen.read_weights, _READ_BY_MODEL)
        self._check_ranges(self.ranges)

    def _check_calibration(self, calibration: object) -> None:
        needed, subject = self.config.linear_scheme.calibrated, f"scheme {self.config.scheme}"
        if needed and calibration is None:
            raise CalibrationError(
                subject,
                "needs input ranges, but no calibration was given",
                "pass calibration=, prompts or a saved one (command line: --calibration FILE)",
            )
        if not needed and calibration is not None:
            raise ConfigError(
                subject,
                "has no scales to calibrate",
                "drop it, or use scheme='fp8-static' (command line: --scheme fp8-static)",
            )
        saved = isinstance(calibration, str | Path | Calibration)
        if "percentile" in self.config.model_fields_set and (saved or not needed):
            raise ConfigError(
                f"percentile={self.config.percentile}",
                "only counts where scales are calibrated from prompts",
                "drop it, or pass calibration=prompts (command line: a --calibration of prompts)",
            )

    def _check_ranges(self, ranges: Calibration) -> None:
        """Before hours of work, not after."""
        for name in self.plan.linears.values():
            ranges.input_scale(name)

    def _origin(self, calibration: str | None) -> Origin:
        return Origin(
            version=version("branchline"),
            scheme=self.config.scheme,
            settings=self.config.model_dump_json(exclude={"scheme"}),
            config=sha256_of(self.folder / _CONFIG),
            source=source_files(self.files),
            calibration=calibration,
        )

    # --- files ----------------------------------------------------------------------------------

    def write(self) -> QuantizationReport:
        """Every file, then what makes them a checkpoint."""
        for file in self.files:
            if file.name in self.workplace.finished:
                self.done += self.sizes[file]
                self._tell(f"{file.name}, as an earlier run left it")
            else:
                self._quantize_file(file)
        report = self._report()
        self._write_index()
        for pattern in _COPIED:
            for source in self.folder.glob(pattern):
                if source.is_file():
                    self.workplace.copy(source)
        self.workplace.write_text(REPORT, report.model_dump_json(indent=2) + "\n")
        # Last, since a folder without it is no checkpoint.
        document = json.loads((self.folder / _CONFIG).read_text(encoding="utf-8"))
        document["quantization_config"] = quantization_config(
            self.config.linear_scheme, self.plan.ignore
        )
        self.workplace.write_text(_CONFIG, json.dumps(document, indent=2) + "\n")
        self.workplace.publish()
        return report

    def _quantize_file(self, file: Path) -> None:
        written: dict[str, torch.Tensor] = {}
        layers = []
        try:
            with safe_open(file, "pt") as opened:
                for name in opened.keys():  # noqa: SIM118
                    tensor = opened.get_tensor(name)
                    stored = name.removesuffix(".weight")
                    if name.endswith(".weight") and stored in self.plan.linears:
                        made = self._quantize(stored, tensor)
                        layers.append(made.report)
                        written |= {f"{stored}.{part}": t for part, t in made.tensors.items()}
                    else:
                        # A copy: all tensors of a file share one storage, which is not written.
                        written[name] = tensor.clone()
                    self.done += tensor.numel() * tensor.element_size()
                    self._tell(name)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"file {str(file)!r}",
                f"cannot be read ({one_line(error)})",
                "restore the file",
            ) from error
        self.workplace.add(file.name, written, tuple(layers))

    def _quantize(self, stored: str, tensor: torch.Tensor) -> _Quantized:
        name, scheme = self.plan.linears[stored], self.config.linear_scheme
        weight = tensor if self.plan.dtype is None else tensor.to(self.plan.dtype)
        quantized = QuantizedWeight.from_float(weight, stored, scheme.weight)
        report = LayerReport(
            name=stored,
            shape=(quantized.out_features, quantized.in_features),
            sqnr_db=sqnr_db(weight, quantized.dequantize()),
            saturated=self.saturated.get(name),
        )
        return _Quantized(stored_tensors(scheme, quantized, name, self.ranges), report)

    def _write_index(self) -> None:
        if len(self.files) == 1 and not (self.folder / INDEX).is_file():
            return
        shards = self.workplace.finished
        where = {tensor: name for name, shard in shards.items() for tensor in shard.tensors}
        document = {"metadata": {"total_size": self._bytes_after()}, "weight_map": where}
        self.workplace.write_text(INDEX, json.dumps(document, indent=2) + "\n")

    def _bytes_after(self) -> int:
        return sum(sum(shard.tensors.values()) for shard in self.workplace.finished.values())

    def _report(self) -> QuantizationReport:
        shards = self.workplace.finished
        layers = [layer for file in self.files for layer in shards[file.name].layers]
        return QuantizationReport(
            scheme=self.config.scheme,
            format=format_of(self.config.linear_scheme),
            layers=tuple(layers),
            unquantized=tuple(
                LeftOut(name=name, reason=reason) for name, reason in self.plan.unquantized.items()
            ),
            bytes_before=self.bytes_before,
            bytes_after=self._bytes_after(),
        )

    def _tell(self, what: str) -> None:
        self.progress(what, min(self.done, self._total), self._total)

    @property
    def _total(self) -> int:
        return sum(self.sizes.values())


@dataclass(frozen=True)
class _Quantized:
    tensors: Mapping[str, torch.Tensor]
    report: LayerReport


def _digest(batches: Sequence[Mapping[str, torch.Tensor]]) -> str:
    """SHA-256 of what the model is run on."""
    digest = hashlib.sha256()
    for part in _parts(batches):
        digest.update(part)
    return digest.hexdigest()


def _parts(batches: Iterable[Mapping[str, torch.Tensor]]) -> Iterable[bytes]:
    for batch in batches:
        for name, value in sorted(batch.items()):
            yield f"{name} {value.dtype} {tuple(value.shape)} ".encode()
            yield value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
