"""Static input scales from calibration inputs: observers, and the file they are saved in."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..core.errors import CalibrationError
from ..core.oracle import FP8_MAX
from .registry import LayerRegistry

_FORMAT = "branchline-calibration"
_VERSION = 1
_BINS = 2**15


@dataclass(frozen=True)
class Observer:
    """How a layer's input range is chosen from the magnitudes that were seen.

    Attributes:
        percentile: share of the magnitudes, in percent, that must not saturate; 100 is the
            maximum.
    """

    percentile: float = 100.0

    def __post_init__(self) -> None:
        if not 0.0 < self.percentile <= 100.0:
            raise CalibrationError(
                f"percentile {self.percentile}", "lies outside (0, 100]", "100 means the maximum"
            )

    def choose(self, histogram: torch.Tensor) -> float:
        """The magnitude below which `percentile` of the counted ones lie.

        Args:
            histogram: int64 (32768,), how often each non-negative BF16 encoding was seen.
        """
        total = int(histogram.sum())
        if total == 0:
            return 0.0
        rank = min(total, max(1, -int(-total * self.percentile // 100)))
        encoding = int(torch.searchsorted(histogram.cumsum(0), rank))
        return float(torch.tensor(encoding, dtype=torch.int16).view(torch.bfloat16))


@dataclass(frozen=True)
class Calibration:
    """Observed input ranges.

    Attributes:
        input_amax: layer name -> largest magnitude that must not saturate.
        percentile: of the observer that chose them.
        tokens: how many rows of activations each layer saw, at most.
    """

    input_amax: Mapping[str, float]
    percentile: float
    tokens: int

    def input_scale(self, layer: str) -> float:
        """amax / 448, in float32's range.

        Raises:
            CalibrationError: the layer was not observed, or saw nothing but zeros.
        """
        amax = self.input_amax.get(layer)
        if amax is None or not 0.0 < amax < float("inf"):
            raise CalibrationError(
                f"input scale of {layer}",
                "was not observed" if amax is None else f"its observed range is {amax}",
                "calibrate with prompts that reach the layer, or use quant='fp8-dynamic'",
            )
        return amax / FP8_MAX

    def save(self, path: str | Path) -> None:
        """Write the ranges as JSON; the file appears whole or not at all."""
        path = Path(path)
        document = {
            "format": _FORMAT,
            "version": _VERSION,
            "percentile": self.percentile,
            "tokens": self.tokens,
            "input_amax": dict(self.input_amax),
        }
        partial_file = path.with_name(f"{path.name}.{os.getpid()}.part")
        partial_file.write_text(json.dumps(document, indent=1) + "\n")
        partial_file.replace(path)

    @classmethod
    def load(cls, path: str | Path) -> Calibration:
        """Read what `save` wrote.

        Raises:
            CalibrationError: no such file, or not one of ours.
        """
        remedy = "calibrate again and save the result"
        try:
            document = json.loads(Path(path).read_text())
        except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
            raise CalibrationError(f"calibration file {path}", str(error), remedy) from error
        if not isinstance(document, dict) or document.get("format") != _FORMAT:
            raise CalibrationError(f"calibration file {path}", "is of another kind", remedy)
        if document.get("version") != _VERSION:
            reason = f"has version {document.get('version')}, this library reads {_VERSION}"
            raise CalibrationError(f"calibration file {path}", reason, remedy)
        ranges = document.get("input_amax")
        if not isinstance(ranges, dict) or not all(
            isinstance(v, int | float) and not isinstance(v, bool) for v in ranges.values()
        ):
            raise CalibrationError(f"calibration file {path}", "its ranges are no numbers", remedy)
        return cls(ranges, document.get("percentile", 100.0), document.get("tokens", 0))


def calibrate(
    model: nn.Module,
    registry: LayerRegistry,
    batches: Iterable[Mapping[str, Any]],
    observer: Observer,
) -> Calibration:
    """Run `batches` through the unquantised model and choose each layer's input range.

    Args:
        model: its linears are routed and still unquantised.
        registry: those linears.
        batches: keyword arguments of one forward each.  Positions that an `attention_mask` of
            shape (rows, tokens) leaves out are not counted.
        observer: chooses the range.

    Raises:
        CalibrationError: no batches, or an activation that is not finite.
    """
    histograms: dict[str, torch.Tensor] = {}
    seen = 0
    for batch in batches:
        mask = batch.get("attention_mask")
        with torch.no_grad(), _observing(registry, histograms, mask):
            model(**batch)
        seen += 1
    if not seen:
        raise CalibrationError("calibration", "no prompts were given", "pass a few typical prompts")
    tokens = 0
    for layer in registry:
        if layer.name in histograms:
            tokens = max(tokens, int(histograms[layer.name].sum()) // layer.in_features)
    ranges = {name: observer.choose(histogram) for name, histogram in histograms.items()}
    return Calibration(ranges, observer.percentile, tokens)


@contextmanager
def _observing(
    registry: LayerRegistry, histograms: dict[str, torch.Tensor], mask: torch.Tensor | None
) -> Iterator[None]:
    handles = []
    try:
        for layer in registry:
            hook = partial(_observe, layer.name, histograms, mask)
            handles.append(layer.register_forward_pre_hook(hook))
        yield
    finally:
        for handle in handles:
            handle.remove()


def _observe(
    name: str,
    histograms: dict[str, torch.Tensor],
    mask: torch.Tensor | None,
    module: nn.Module,
    args: tuple[torch.Tensor, ...],
) -> None:
    x = args[0].detach()
    if mask is not None and mask.dim() == 2 and x.shape[:2] == mask.shape:
        x = x[mask.bool()]
    magnitude = x.abs().to(torch.bfloat16)
    if not bool(magnitude.isfinite().all()):
        raise CalibrationError(
            f"the input of {name}", "holds NaN or inf", "check the model and the prompts"
        )
    encodings = magnitude.flatten().view(torch.int16).to(torch.int64)
    counts = torch.bincount(encodings, minlength=_BINS).cpu()
    histograms[name] = histograms[name] + counts if name in histograms else counts
