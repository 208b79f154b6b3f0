"""Static input scales from calibration inputs: observers, and the file they are saved in."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import torch
from torch import nn

from ..core.errors import BranchlineError, CalibrationError
from ..core.oracle import FP4_MAX, FP8_MAX
from .branching import RowLayout
from .experts.layer import ExpertsLinear
from .experts.pairs import Pairs
from .quantized_weight import storable_global_scale
from .registry import LayerRegistry
from .routed import RoutedLayer

_FORMAT = "branchline-calibration"
_VERSION = 1
_BINS = 2**15
_BF16_MAX = 0x7F7F
_FLOAT32_MAX = torch.finfo(torch.float32).max


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
            histogram: int64 (32768,), how often each non-negative BF16 encoding was seen,
                magnitudes being rounded up to the next one.
        """
        total = int(histogram.sum())
        if total == 0:
            return 0.0
        rank = min(total, max(1, -int(-total * self.percentile // 100)))
        encoding = int(torch.searchsorted(histogram.cumsum(0), rank))
        return float(torch.tensor(encoding, dtype=torch.int16).view(torch.bfloat16))

    def saturated(self, histogram: torch.Tensor) -> float:
        """The share of the counted magnitudes, 0 to 1, that lie above the chosen one."""
        total = int(histogram.sum())
        chosen = torch.tensor([self.choose(histogram)], dtype=torch.bfloat16).view(torch.int16)
        return int(histogram[int(chosen) + 1 :].sum()) / total if total else 0.0


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
            CalibrationError: the layer was not observed, saw nothing but zeros, or its range is
                none of float32.
        """
        amax = self.input_amax.get(layer)
        if amax is None or not 0.0 < amax <= _FLOAT32_MAX:
            raise CalibrationError(
                f"input scale of {layer}",
                "was not observed" if amax is None else f"its observed range is {amax!r:.40}",
                "calibrate with prompts that reach the layer, leave it out with ignore= (command "
                "line: --ignore), or use a dynamic scheme, such as fp8-dynamic",
            )
        return amax / FP8_MAX

    def global_scale(self, layer: str) -> float:
        """amax / (6 * 448): the largest block scale of NVFP4 becomes the largest e4m3 number.

        Raises:
            CalibrationError: as `input_scale`.
        """
        scale = torch.tensor([self.input_scale(layer) / FP4_MAX])
        return storable_global_scale(scale).item()

    def check_belongs(self, layers: Container[str]) -> None:
        """Refuse the calibration of another model.

        Raises:
            CalibrationError: it names a layer that the model does not have.
        """
        strangers = [name for name in self.input_amax if name not in layers]
        if strangers:
            raise CalibrationError(
                "the calibration",
                f"is of another model: {len(strangers)} of its layers are not in this one, "
                f"such as {strangers[0]}",
                "calibrate this model with prompts",
            )

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
        try:
            partial_file.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
            partial_file.replace(path)
        finally:
            partial_file.unlink(missing_ok=True)

    @classmethod
    def load(cls, path: str | Path) -> Calibration:
        """Read what `save` wrote.

        Raises:
            CalibrationError: no such file, or not one of ours.
        """
        subject, remedy = f"calibration file {path}", "calibrate again and save the result"
        try:
            document = json.loads(Path(path).read_text(encoding="utf-8"))
            reason = _document_fault(document)
        # ValueError: no UTF-8, no JSON, or a number with more digits than Python converts.
        except (OSError, ValueError, RecursionError) as error:
            raise CalibrationError(subject, str(error), remedy) from error
        if reason:
            raise CalibrationError(subject, reason, remedy)
        return cls(document["input_amax"], document["percentile"], document["tokens"])


def _document_fault(document: Any) -> str | None:
    """Why a decoded file is none of ours."""
    if not isinstance(document, dict) or document.get("format") != _FORMAT:
        return "is of another kind"
    if document.get("version") != _VERSION:
        return f"has version {document.get('version')!r:.40}, this library reads {_VERSION}"
    ranges = document.get("input_amax")
    if not isinstance(ranges, dict) or not all(map(_is_number, ranges.values())):
        return "its ranges are no numbers"
    percentile, tokens = document.get("percentile"), document.get("tokens")
    if not _is_number(percentile) or not 0 < percentile <= 100:
        return f"its percentile is {percentile!r:.40}, expected a number in (0, 100]"
    if not _is_number(tokens) or not isinstance(tokens, int) or tokens < 0:
        return f"its tokens are {tokens!r:.40}, expected a count"
    return None


def _is_number(value: Any) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


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
    return choose_ranges(registry, count_magnitudes(model, registry, batches), observer)


def count_magnitudes(
    model: nn.Module, registry: LayerRegistry, batches: Iterable[Mapping[str, Any]]
) -> dict[str, torch.Tensor]:
    """Run `batches` as `calibrate` does; how often each layer saw each magnitude.

    Returns:
        int64 (32768,) by layer name; see `Observer.choose`.

    Raises:
        CalibrationError: no batches, or an activation that is not finite.
    """
    histograms: dict[str, torch.Tensor] = {}
    seen = 0
    for batch in batches:
        mask = batch.get("attention_mask")
        with torch.no_grad(), _observing(registry, histograms, mask):
            _run(model, batch)
        seen += 1
    if not seen:
        raise CalibrationError("calibration", "no prompts were given", "pass a few typical prompts")
    return histograms


def choose_ranges(
    registry: LayerRegistry, histograms: Mapping[str, torch.Tensor], observer: Observer
) -> Calibration:
    """The input range of each layer that `count_magnitudes` saw."""
    tokens = 0
    for layer in registry:
        if layer.name in histograms:
            tokens = max(tokens, int(histograms[layer.name].sum()) // layer.in_features)
    ranges = {name: observer.choose(histogram) for name, histogram in histograms.items()}
    return Calibration(ranges, observer.percentile, tokens)


def _run(model: nn.Module, batch: Mapping[str, Any]) -> None:
    try:
        model(**batch)
    except BranchlineError:
        raise
    except (RuntimeError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise CalibrationError(
            f"a calibration prompt ({', '.join(batch)})",
            f"cannot be run: {type(error).__name__}: {error}",
            "pass texts, token ids of this model's vocabulary, or what its forward takes",
        ) from error


@contextmanager
def _observing(
    registry: LayerRegistry, histograms: dict[str, torch.Tensor], mask: torch.Tensor | None
) -> Iterator[None]:
    handles = []
    try:
        for layer in registry:
            hook = _observer(histograms, mask)
            handles.append(layer.register_forward_pre_hook(hook, with_kwargs=True))
        yield
    finally:
        for handle in handles:
            handle.remove()


def _observer(
    histograms: dict[str, torch.Tensor], mask: torch.Tensor | None
) -> Callable[[RoutedLayer, tuple[Any, ...], dict[str, Any]], None]:
    def observe(layer: RoutedLayer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given: torch.Tensor = args[0] if args else kwargs["input"]
        if isinstance(layer, ExpertsLinear) and not layer.by_token:
            pairs = (args[1] if len(args) > 1 else kwargs["rows"]).pairs
            x = _unmasked_pairs(given.detach(), pairs, mask)
        else:
            x = _unmasked(given.detach(), layer.row_layout, mask)
        if not bool(x.isfinite().all()):
            raise CalibrationError(
                f"the input of {layer.name}", "holds NaN or inf", "check the model and the prompts"
            )
        counts = torch.bincount(_encodings(x), minlength=_BINS).cpu()
        before = histograms.get(layer.name)
        histograms[layer.name] = counts if before is None else before + counts

    return observe


def _unmasked(x: torch.Tensor, layout: RowLayout, mask: torch.Tensor | None) -> torch.Tensor:
    """The rows of `x` (..., K) that `mask` (rows, tokens) keeps, where `x` has its positions."""
    if mask is None or mask.dim() != 2:
        return x
    # A pooled (rows, K) can look like the mask: its features are no tokens.
    if x.dim() >= 3 and x.shape[:2] == mask.shape:
        return x[mask.bool()]
    if layout == RowLayout.FLAT and x.dim() == 2 and x.shape[0] == mask.numel():
        return x[mask.flatten().bool()]
    return x


def _unmasked_pairs(x: torch.Tensor, pairs: Pairs, mask: torch.Tensor | None) -> torch.Tensor:
    """The rows of `x` (P, K), by position, that somebody computes, of tokens that `mask` keeps."""
    kept = pairs.expert < pairs.experts
    if mask is not None and mask.dim() == 2 and mask.numel() == pairs.tokens:
        kept &= mask.flatten().bool()[pairs.token]
    return x[kept]


def _encodings(x: torch.Tensor) -> torch.Tensor:
    """BF16 encodings of the magnitudes of a finite `x`, flat.

    Rounded up, so that no range is chosen below what was seen: the nearest one could be 0.4 % too
    low.  Only what lies above the largest finite encoding gets that one.
    """
    bits = x.abs().float().flatten().view(torch.int32)
    return bits.add_(0xFFFF).bitwise_right_shift_(16).clamp_(max=_BF16_MAX)
