"""The buffers that one call of a kernel writes: codes, scales, raw rows, shrunk rows."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch

from ..core.errors import ContractError
from ..core.quant_key import ScaleLayout
from ..core.quantized_activation import QuantizedActivation, RawOutput
from .contract import InputContract
from .rows import Rows, rows_of


@dataclass(frozen=True, eq=False)
class Shrink:
    """What one linear's branches multiply the raw activation with.

    Rows of the activation belong to requests in turn: with M rows and R requests, row m is of
    request ``m // (M / R)``.

    Attributes:
        consumer: name of the linear.
        a: (rows, K), the A matrices of all slots in one pool: bfloat16, float16 or float32,
            contiguous.
        starts: int32 (slots,), the row of the pool at which each slot begins.
        ranks: int32 (slots,), how many rows from there on count; others are not read.
        slots: int32 (R,), the slot of each request; -1 for none, which is never gathered.
        rank: the highest of `ranks` among the slots in use.
        width: columns of the shrunk rows: the highest rank that fits any slot.
    """

    consumer: str
    a: torch.Tensor
    starts: torch.Tensor
    ranks: torch.Tensor
    slots: torch.Tensor
    rank: int
    width: int

    @classmethod
    def stacked(
        cls, consumer: str, a: torch.Tensor, ranks: torch.Tensor, slots: torch.Tensor, rank: int
    ) -> Shrink:
        """Of matrices that all have room for the same rank: `a` (slots, width, K), contiguous."""
        number, width, columns = a.shape
        starts = _equal_starts(number, width, a.device)
        return cls(consumer, a.view(number * width, columns), starts, ranks, slots, rank, width)

    def gathered(self) -> torch.Tensor:
        """(R, width, K): each request's own A; zeros beyond its rank and without a slot."""
        return gather_slots(self.a, self.starts, self.ranks, self.slots, self.width)


@dataclass(frozen=True, eq=False)
class RawRequest:
    """The raw output that somebody wants beside the codes.

    Attributes:
        rows: bool (R,), which requests need it; M rows of the activation belong to R requests in
            turn, as in `Shrink`.  None for every row.
        compact: the rows that are asked for, and nothing else, one after the other: (n, K).
            Otherwise they lie in place, in a tensor of the activation's shape whose other rows
            are not written.
    """

    rows: torch.Tensor | None = None
    compact: bool = False

    # Worked out once: a batch's request is the same object in all of its forwards.

    @cached_property
    def row_map(self) -> torch.Tensor | None:
        """`Outputs.raw_map` for this request."""
        if self.rows is None:
            return None
        if self.compact:
            places = self.rows.cumsum(0, dtype=torch.int32) - 1
        else:
            places = torch.arange(self.rows.shape[0], dtype=torch.int32, device=self.rows.device)
        return torch.where(self.rows, places, -1).to(torch.int32)

    @cached_property
    def wanted(self) -> int:
        """How many requests need raw rows; asking waits for the device, once."""
        return 0 if self.rows is None else int(self.rows.sum())


@dataclass(eq=False, slots=True)
class Outputs:
    """What a kernel has to write, all of it allocated and nothing of it filled.

    Kernels write every byte of `codes` and `scale`, padding (zero bytes) included; of `raw` the
    rows that were asked for, and nothing else; of `shrunk` every element.

    Attributes:
        shape: of the activation, (..., K).
        dtype: of the activation.
        rows: M, its leading dimensions flattened.
        columns: K.
        contract: key and scales of the consumers; its key may be None: raw rows only.
        codes: `key.code_shape`, or None where there is no key.
        scale: `key.scale_shape`; for a static key the contract's own, not to be written.
        raw: where raw rows go; None where none are asked for.
        raw_map: int32 (R,): request r's raw rows are rows ``raw_map[r] * T`` to
            ``raw_map[r] * T + T`` of `raw`, with ``T = rows / R``; -1 where they are not written.
            None where every row is written in place.
        shrinks: what the activation is multiplied with.
        shrunk: float32 (M, width) for each of `shrinks`.
    """

    shape: torch.Size
    dtype: torch.dtype
    rows: int
    columns: int
    contract: InputContract
    codes: torch.Tensor | None
    scale: torch.Tensor | None
    raw: RawOutput | None = None
    raw_map: torch.Tensor | None = None
    shrinks: tuple[Shrink, ...] = ()
    shrunk: tuple[torch.Tensor, ...] = ()

    @property
    def requests(self) -> int:
        """R: how many requests the rows belong to; 1 where nothing counts them."""
        if self.raw_map is not None:
            return self.raw_map.shape[0]
        return self.shrinks[0].slots.shape[0] if self.shrinks else 1

    def activation(self, producer: str) -> QuantizedActivation:
        """The outputs as what consumers take."""
        key, given = self.contract.key, self.contract.global_scale
        assert key is not None
        assert self.codes is not None
        assert self.scale is not None
        shrunk = None
        if self.shrinks:
            names = (request.consumer for request in self.shrinks)
            shrunk = dict(zip(names, self.shrunk, strict=True))
        return QuantizedActivation.unchecked(
            codes=self.codes,
            scale=self.scale,
            orig_dtype=self.dtype,
            orig_shape=self.shape,
            quant_key=key,
            raw=self.raw,
            producer=producer,
            global_scale=None if given is None else given.value,
            shrunk=shrunk,
            shared_outputs=None,
        )


@lru_cache(maxsize=64)
def _equal_starts(number: int, width: int, device: torch.device) -> torch.Tensor:
    # Kept across calls, also those under inference mode.
    with torch.inference_mode(False):
        return torch.arange(number, dtype=torch.int32, device=device) * width


def gather_slots(
    pool: torch.Tensor, starts: torch.Tensor, ranks: torch.Tensor, slots: torch.Tensor, width: int
) -> torch.Tensor:
    """The rows of a pool that each request's slot holds.

    Args:
        pool: (rows, C), the rows of all slots one after another.
        starts: int32 (slots,), the first row of each.
        ranks: int32 (slots,), how many rows each holds; at most `width`.
        slots: int32 (R,), -1 for none.
        width: rows to return for each request.

    Returns:
        (R, width, C) in the pool's dtype; zeros beyond a slot's rank and without a slot, whatever
        lies in the pool.
    """
    number = slots.shape[0]
    if not pool.shape[0] or not starts.shape[0]:
        return pool.new_zeros((number, width, pool.shape[1]))
    slot = slots.clamp(min=0)
    held = torch.where(slots >= 0, ranks[slot], 0).unsqueeze(1)
    index = torch.arange(width, device=pool.device, dtype=torch.int32)
    live = index < held
    rows = torch.where(live, starts[slot].unsqueeze(1) + index, 0)
    return torch.where(live.unsqueeze(2), pool[rows], 0)


def empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Room for an output; tests fill it with NaN, so that a byte nobody wrote shows."""
    return torch.empty(shape, dtype=dtype, device=device)


def new_outputs(
    x: torch.Tensor,
    contract: InputContract,
    subject: str,
    *,
    raw: RawRequest | None = None,
    shrinks: tuple[Shrink, ...] = (),
) -> Outputs:
    """Allocate for an activation like `x` (..., K).

    Args:
        x: the activation, or any input of its shape, dtype and device.
        contract: key and scales; without a key, raw rows only.
        subject: who emits, for messages.
        raw: which raw rows, and where.
        shrinks: what to multiply the activation with.

    Raises:
        ScaleError: a scale that the key needs is missing.
        ContractError: rows that do not belong to the requests in turn, or matrices of other
            columns.
    """
    shape, key = x.shape, contract.key
    rows = rows_of(x)
    if shrinks or (raw is not None and raw.rows is not None):
        _check_requests(rows, subject, raw, shrinks)
    codes = scale = None
    if key is not None:
        code_shape, scale_shape = contract.code_and_scale_shape(shape)
        codes = empty(code_shape, key.code_dtype, x.device)
        if key.static:
            scale = contract.static_scale(subject).value
        elif key.layout == ScaleLayout.COLUMN_MAJOR:
            scale = empty(scale_shape[::-1], key.scale_dtype, x.device).t()
        else:
            scale = empty(scale_shape, key.scale_dtype, x.device)
        if key.global_scale:
            contract.required_global_scale(subject)
    raw_output, raw_map = (None, None) if raw is None else _raw_room(x, raw)
    return Outputs(
        shape,
        x.dtype,
        rows.number,
        rows.columns,
        contract,
        codes,
        scale,
        raw_output,
        raw_map,
        shrinks,
        tuple(empty((rows.number, s.width), torch.float32, x.device) for s in shrinks),
    )


def _check_requests(
    rows: Rows, subject: str, raw: RawRequest | None, shrinks: tuple[Shrink, ...]
) -> None:
    """Kernels take on trust what is checked here: they would read beyond the end."""
    counts = {request.slots.shape[0] for request in shrinks}
    if raw is not None and raw.rows is not None:
        counts.add(raw.rows.shape[0])
    (requests, *others) = counts
    if others or (rows.number % requests if requests else rows.number):
        named = " or ".join(map(str, sorted(counts)))
        raise ContractError(
            subject,
            f"{rows.number} rows do not belong to {named} requests in turn",
            "name as many requests as there are, each with the same number of rows",
        )
    for request in shrinks:
        if request.a.shape[-1] != rows.columns:
            raise ContractError(
                subject,
                f"{request.consumer} shrinks {request.a.shape[-1]} columns, the activation has "
                f"{rows.columns}",
                "pass the A matrices of this linear",
            )


def _raw_room(x: torch.Tensor, request: RawRequest) -> tuple[RawOutput, torch.Tensor | None]:
    if request.rows is None:
        return RawOutput(empty(x.shape, x.dtype, x.device)), None
    shape = x.shape
    if request.compact:
        rows = x.shape[:-1].numel() // max(request.rows.shape[0], 1) * request.wanted
        shape = (rows, x.shape[-1])
    values = empty(shape, x.dtype, x.device)
    return RawOutput(values, request.rows, request.compact), request.row_map
