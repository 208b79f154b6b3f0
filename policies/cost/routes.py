"""What a route of a site costs, as measured: five numbers that are fitted to many batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ...core.report import ReportPart
from ...core.route import Route
from ...fusion.traffic import SiteTraffic


class RouteCost(ReportPart):
    """Seconds of one route for one kind of site and one `QuantKey`.

    Attributes:
        kind: "activation" or "norm".
        key: text of the `QuantKey`.
        route: name of the route.
        call: what a batch costs whatever its size: launches, and what Python does about them.
        element: for each element of the activation.
        adapter_call: what a batch with adapters costs beyond, whatever its size.
        adapter_element: for each element of rows with adapters.
        product: for each element of rows with adapters, and each column of their shrunk rows.
    """

    kind: str
    key: str
    route: str
    call: float
    element: float
    adapter_call: float = 0.0
    adapter_element: float = 0.0
    product: float = 0.0

    def seconds(self, traffic: SiteTraffic) -> float:
        """Of a site in one batch."""
        facts = _facts(traffic)
        numbers = (
            self.call, self.element, self.adapter_call, self.adapter_element, self.product
        )  # fmt: skip
        return sum(number * fact for number, fact in zip(numbers, facts, strict=True))


@dataclass(frozen=True)
class Timing:
    """One measured batch.

    Attributes:
        traffic: of it.
        seconds: the median.
    """

    traffic: SiteTraffic
    seconds: float


def fitted(kind: str, route: Route, timings: Sequence[Timing]) -> RouteCost:
    """The numbers that come closest to the timings, relatively, none of them below zero.

    Args:
        kind: of the site.
        route: that was measured.
        timings: of one `QuantKey`; at least one.
    """
    facts = torch.tensor([_facts(t.traffic) for t in timings], dtype=torch.float64)
    seconds = torch.tensor([t.seconds for t in timings], dtype=torch.float64)
    if bool(facts[:, 2].all()):
        # A route for batches with adapters alone: there is no call without them to tell apart.
        facts[:, 2] = 0
    relative = facts / seconds.unsqueeze(1)
    numbers = _least_squares(relative, torch.ones_like(seconds))
    call, element, adapter_call, adapter_element, product = numbers
    return RouteCost(
        kind=kind,
        key=str(timings[0].traffic.key),
        route=str(route),
        call=call,
        element=element,
        adapter_call=adapter_call,
        adapter_element=adapter_element,
        product=product,
    )


def _facts(traffic: SiteTraffic) -> tuple[float, float, float, float, float]:
    adapted = float(traffic.adapter_rows * traffic.columns)
    return (
        1.0,
        float(traffic.rows * traffic.columns),
        float(traffic.adapter_rows > 0),
        adapted,
        adapted * traffic.shrink_width,
    )


def _least_squares(matrix: torch.Tensor, wanted: torch.Tensor) -> list[float]:
    """Least squares; columns whose number would be negative are left out, the worst first."""
    # Columns of very different size would be lost in rounding.
    size = matrix.norm(dim=0)
    kept = [column for column in range(matrix.shape[1]) if size[column] > 0]
    found = [0.0] * matrix.shape[1]
    while kept:
        part = matrix[:, kept] / size[kept]
        solved = torch.linalg.lstsq(part, wanted.unsqueeze(1), driver="gelsd").solution[:, 0]
        worst = int(solved.argmin())
        if solved[worst] >= 0:
            for column, value in zip(kept, solved / size[kept], strict=True):
                found[column] = float(value)
            break
        del kept[worst]
    return found
