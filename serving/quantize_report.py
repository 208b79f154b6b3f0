"""What quantising a checkpoint cost: its errors by layer, as JSON and as a table."""

from __future__ import annotations

import math

import torch
from rich.console import Console
from rich.table import Table

from ..core.report import ReportPart

SCHEMA_VERSION = 1
_WORST = 10


class LayerReport(ReportPart):
    """One quantised linear.

    Attributes:
        name: in the checkpoint.
        shape: (N, K).
        sqnr_db: power of the weight over that of its error, in dB; null where there is no error.
        saturated: share of the calibration's activations that lie outside the input's range; null
            where inputs have no calibrated range, or only its result was given.
    """

    name: str
    shape: tuple[int, int]
    sqnr_db: float | None
    saturated: float | None


class LeftOut(ReportPart):
    """A linear that stays unquantised."""

    name: str
    reason: str


class QuantizationReport(ReportPart):
    """What `quantization_report.json` holds.

    Attributes:
        schema_version: of this document.
        scheme: name of the scheme.
        format: that the checkpoint is written in.
        layers: in the order of the checkpoint's files.
        unquantized: the other linears.
        bytes_before: of all tensors of the source.
        bytes_after: of all tensors written.
    """

    schema_version: int = SCHEMA_VERSION
    scheme: str
    format: str
    layers: tuple[LayerReport, ...]
    unquantized: tuple[LeftOut, ...]
    bytes_before: int
    bytes_after: int

    def worst(self, count: int = _WORST) -> list[LayerReport]:
        """The layers with the largest errors, the worst first."""
        return sorted(self.layers, key=_sqnr)[:count]

    def render(self, console: Console) -> None:
        """Print it for a person."""
        share = self.bytes_after / self.bytes_before if self.bytes_before else 0.0
        console.print(
            f"{self.scheme} as {self.format}: {len(self.layers)} linears quantised, "
            f"{len(self.unquantized)} left; {self.bytes_after:,} bytes, {share:.0%} of the source",
            highlight=False,
        )
        saturated = any(layer.saturated is not None for layer in self.layers)
        table = Table("worst layers", "shape", "SQNR (dB)", box=None)
        if saturated:
            table.add_column("activations out of range")
        for layer in self.worst():
            sqnr = "exact" if layer.sqnr_db is None else f"{layer.sqnr_db:.1f}"
            row = [layer.name, " x ".join(map(str, layer.shape)), sqnr]
            if saturated:
                row.append("-" if layer.saturated is None else f"{layer.saturated:.4%}")
            table.add_row(*row)
        console.print(table)


def _sqnr(layer: LayerReport) -> float:
    return math.inf if layer.sqnr_db is None else layer.sqnr_db


def sqnr_db(weight: torch.Tensor, read: torch.Tensor) -> float | None:
    """Power of `weight` over that of its difference to `read`, in dB.

    Args:
        weight: (N, K), of any float dtype.
        read: float32 (N, K), what its codes stand for.

    Returns:
        None where they are equal.
    """
    error = torch.linalg.vector_norm(read - weight.float(), dtype=torch.float64).item()
    if error == 0.0:
        return None
    return 20.0 * math.log10(torch.linalg.vector_norm(weight, dtype=torch.float64).item() / error)
