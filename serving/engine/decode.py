"""Attention of sequences that have one new token in a step: over gathered keys, or in the cache."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch

from ...core import native
from ...core.errors import ContractError
from .scaled import scaled_attention

#: Keys and values of one layer's cache, each (places, heads, head width).
Views = tuple[torch.Tensor, torch.Tensor]


class Kept(NamedTuple):
    """What one sequence of one new token looks back on.

    Attributes:
        places: int64: where its keys lie, the first `before` of them; behind those the place of the
            new one, where it is known to be another.
        at: address of `places`.
        before: how many keys it has before the new one.
    """

    places: np.ndarray
    at: int
    before: int

    @classmethod
    def of(cls, places: Rows[int]) -> Kept:
        """Of the places before the new one."""
        made = np.array(places, dtype=np.int64)
        return cls(made, made.ctypes.data, len(places))


class Decodes(Protocol):
    """The sequences of one token, which come first in a step, and what they look back on."""

    @property
    def number(self) -> int:
        """How many they are."""
        ...

    def attend(
        self,
        views: Views,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float | None,
        softcap: float | None,
    ) -> torch.Tensor:
        """(number, heads, width), of query (number, heads, width); key and value alike."""
        ...


@dataclass(frozen=True, eq=False)
class GatheredDecodes:
    """Keys and values are gathered, padded to the longest, for torch's own attention.

    Attributes:
        number: how many sequences.
        read: int64 (number, longest): where keys and values lie, the rest points at any place.
        lengths: int64 (number,): keys before the new one.
        mask: (number, 1, 1, longest) added to scores: 0 or -inf; None where all are as long.
        reads_first: `read` lacks the place of the new key, which may overwrite one that is read.
    """

    number: int
    read: torch.Tensor
    lengths: torch.Tensor
    mask: torch.Tensor | None
    reads_first: bool

    @classmethod
    def of(
        cls, kept: Rows[Kept], dtype: torch.dtype, device: torch.device, *, reads_first: bool
    ) -> GatheredDecodes:
        """Of what sequences look back on.

        Args:
            kept: by sequence; the place of the new token is among its places unless `reads_first`.
            dtype: of the scores.
            device: of the cache.
            reads_first: see the class.
        """
        before = np.array([one.before for one in kept], dtype=np.int64)
        longest = int(before.max(initial=-1)) + 1
        read = np.zeros((len(kept), longest), dtype=np.int64)
        for row, one in enumerate(kept):
            places = one.places[: one.before + (not reads_first)]
            read[row, : len(places)] = places
        mask = None
        if len(kept) and int(before.min()) + 1 < longest:
            hidden = torch.from_numpy(np.arange(longest) > before[:, None]).to(device)
            mask = torch.zeros(hidden.shape, dtype=dtype, device=device)
            mask = mask.masked_fill_(hidden, -torch.inf)[:, None, None]
        on_device = torch.from_numpy(read).to(device), torch.from_numpy(before).to(device)
        return cls(len(kept), *on_device, mask, reads_first)

    def attend(
        self,
        views: Views,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float | None,
        softcap: float | None,
    ) -> torch.Tensor:
        k, v = (self._gather(cache, new) for cache, new in zip(views, (key, value), strict=True))
        rows, heads, width = query.shape
        grouped = query.reshape(rows, key.shape[1], -1, width)
        got = scaled_attention(grouped, k, v, self.mask, False, scaling, softcap)
        return got.reshape(rows, heads, -1)

    def _gather(self, cache: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        """(number, heads, longest, width)."""
        rows, longest = self.read.shape
        found = cache.index_select(0, self.read.view(-1)).view(rows, longest, *cache.shape[1:])
        if self.reads_first:
            found[torch.arange(rows, device=found.device), self.lengths] = new
        return found.transpose(1, 2)


class PagedDecodes:
    """The C kernel reads keys and values where they lie, and puts the new ones there.

    Args:
        kept: by sequence, what it looks back on.
        write: int64: the places of their new tokens, and others behind them.
    """

    def __init__(self, kept: Rows[Kept], write: np.ndarray) -> None:
        self.number = len(kept)
        read = np.array([one.at for one in kept], dtype=np.uint64)
        lengths = np.array([one.before for one in kept], dtype=np.int64)
        # The kernel is handed addresses: what they point at lives here.
        self._arrays = kept, read, lengths, write
        self._addresses = read.ctypes.data, lengths.ctypes.data, write.ctypes.data

    def attend(
        self,
        views: Views,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float | None,
        softcap: float | None,
    ) -> torch.Tensor:
        self._check(views, query, key, value)
        query, key, value = (
            x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value)
        )
        keys, values = views
        rows, heads, width = query.shape
        out = query.new_empty(rows, heads, value.shape[2])
        call = native.pack_attention(
            rows, heads, key.shape[1], width, value.shape[2], native.LORA_DTYPES[query.dtype],
            query.data_ptr(), query.stride(0), query.stride(1), keys.data_ptr(), values.data_ptr(),
            keys.stride(0), keys.stride(1), values.stride(0), values.stride(1),
            key.data_ptr(), value.data_ptr(), key.stride(0), key.stride(1), value.stride(0),
            value.stride(1), *self._addresses, out.data_ptr(),
            width**-0.5 if scaling is None else scaling, softcap or 0.0,
        )  # fmt: skip
        native.load().call("bl_attention", call, native.threads())
        return out

    @staticmethod
    def _check(views: Views, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """The kernel would read and write other memory."""
        for cache, new in zip(views, (key, value), strict=True):
            kinds = cache.dtype, new.dtype, query.dtype
            if cache.shape[1:] != new.shape[1:] or len(set(kinds)) > 1:
                raise ContractError(
                    "an attention layer",
                    f"keeps {new.dtype} {tuple(new.shape)} for queries of {query.dtype}, the "
                    f"cache holds {cache.dtype} {tuple(cache.shape[1:])} a token",
                    "load the model in one dtype, or use generate() of the library",
                )


def attends_in_place(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the C kernels are there, and read a cache of `dtype` on `device`."""
    return device.type == "cpu" and dtype in native.LORA_DTYPES and native.load().available
