"""Memory traffic of a site by route, from shapes alone: what each route costs beyond its input."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ..core.quant_key import QuantKey
from ..core.route import Route
from ..linear.parts import READS_RAW
from ..linear.registry import LayerRegistry
from .site import Site

_SHRUNK_BYTES = 4  # float32


@dataclass(frozen=True)
class SiteTraffic:
    """A site in one batch.

    Attributes:
        rows: M, all rows of the activation; between the projections of experts there is one for
            each pair of a token and an expert.
        columns: K.
        dtype: of the activation.
        key: what its consumers accept.
        adapter_rows: those whose adapter reads this site's output.
        shrink_width: columns of the shrunk rows, all consumers together.
    """

    rows: int
    columns: int
    dtype: torch.dtype
    key: QuantKey
    adapter_rows: int = 0
    shrink_width: int = 0

    def bytes_moved(self, route: Route) -> int:
        """Bytes written, and read again, until the codes and the shrunk rows are there.

        Reading the site's own input is the same in all routes and not counted; nor are the A
        matrices.  A branch reads raw rows once for all consumers.
        """
        row = self.columns * self.dtype.itemsize
        shrunk = self.adapter_rows * self.shrink_width * _SHRUNK_BYTES
        read_by_branch = self.adapter_rows * row
        if route == Route.FUSED:
            return self._codes()
        if route == Route.ABSORBED:
            return self._codes() + shrunk
        if route == Route.DUAL:
            return self._codes() + 2 * read_by_branch + shrunk
        written_and_quantised = 2 * self.rows * row
        return written_and_quantised + self._codes() + read_by_branch + shrunk

    def per_element(self, route: Route) -> float:
        """`bytes_moved` by element of the activation."""
        return self.bytes_moved(route) / max(1, self.rows * self.columns)

    def _codes(self) -> int:
        shape = (self.rows, self.columns)
        codes = math.prod(self.key.code_shape(shape))
        if self.key.static:
            return codes
        return codes + math.prod(self.key.scale_shape(shape)) * self.key.scale_dtype.itemsize


def traffic_of(
    site: Site,
    key: QuantKey,
    registry: LayerRegistry,
    live: Mapping[int, str],
    *,
    tokens: int,
    adapter_tokens: int,
    shrink_width: int,
) -> SiteTraffic:
    """A site in a batch whose adapters have as many tokens each.

    Args:
        site: the site.
        key: what its consumers accept.
        registry: of its linears.
        live: the adapters of the batch.
        tokens: of the batch.
        adapter_tokens: those of rows with an adapter.
        shrink_width: see `SiteTraffic`.
    """
    # What matters is which of the adapters read this site's output, not what else they hold.
    readers = {
        identity
        for layer in site.layers
        for identity, holder in registry.branches(layer, live.keys()).items()
        if holder.parts & READS_RAW
    }
    facts = site.facts
    rows = adapter_tokens * facts.rows_per_token
    return SiteTraffic(
        rows=tokens * facts.rows_per_token,
        columns=facts.columns,
        dtype=facts.dtype,
        key=key,
        adapter_rows=-(-rows * len(readers) // len(live)) if readers else 0,
        shrink_width=shrink_width,
    )
