"""One forward of the engine: its inputs, and the logits that it gives."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import dataclass

import numpy as np
import torch
from transformers.generation.continuous_batching.cache_allocators import (
    CacheAllocator,
    FullAttentionCacheAllocator,
    SlidingAttentionCacheAllocator,
)

from ...core.errors import WrapError
from ..model import ServedModel
from .attention import AttentionPlan, AttentionScope, Prefill, StepAttention
from .cache import AdapterCache
from .decode import GatheredDecodes, Kept, PagedDecodes, attends_in_place
from .scaled import causal_mask
from .scheduler import Share
from .sequence import Sequence


@dataclass(frozen=True, eq=False)
class Step:
    """What is fed to the model at once: sequences one after the other.

    Attributes:
        shares: of the sequences, those of one token first.
        ids: int64 (1, tokens).
        positions: int64 (1, tokens).
        logits: places of the tokens whose logits are wanted.
        chosen: the sequences whose next token they choose, in that order.
        attention: for the attention layers.
    """

    shares: tuple[Share, ...]
    ids: torch.Tensor
    positions: torch.Tensor
    logits: tuple[int, ...]
    chosen: tuple[Sequence, ...]
    attention: StepAttention


class StepRunner:
    """Makes and runs steps.

    Args:
        served: the model.
        cache: its paged cache.
    """

    def __init__(self, served: ServedModel, cache: AdapterCache) -> None:
        self._served = served
        self._cache = cache
        self._dtype = cache.dtype
        self._device = torch.device(cache.device)
        self._views = {
            layer: allocator._kv_token_views[layer]
            for allocator in cache.cache_allocators.values()
            if isinstance(allocator, FullAttentionCacheAllocator)
            for layer in allocator.layer_indices
        }
        self._in_place = attends_in_place(self._dtype, self._device)
        slices = getattr(served.model, "_supports_logits_to_keep", None)
        self._slices_logits = callable(slices) and bool(slices())

    def prepare(self, shares: Rows[Share]) -> Step:
        """The inputs of a step; blocks for its tokens are reserved already."""
        ids: list[int] = []
        positions: list[int] = []
        logits: list[int] = []
        for share in shares:
            sequence, begin = share.sequence, share.sequence.position
            ids += sequence.tokens[begin : begin + share.tokens]
            positions += range(begin, begin + share.tokens)
            if share.completes:
                logits.append(len(ids) - 1)
        plans: dict[int, AttentionPlan] = {}
        for allocator in self._cache.cache_allocators.values():
            plan = self._attention(allocator, shares)
            plans.update(dict.fromkeys(allocator.layer_indices, plan))
        return Step(
            tuple(shares),
            torch.tensor([ids], device=self._device),
            torch.tensor([positions], device=self._device),
            tuple(logits),
            tuple(share.sequence for share in shares if share.completes),
            StepAttention(self._views, plans),
        )

    def run(self, step: Step) -> torch.Tensor:
        """Feed a step to the model.

        Returns:
            the logits, float32 (places, vocabulary), of the places of `step.logits`.

        Raises:
            Exception: whatever the model raises; see also `AdapterManager.rows`.
        """
        rows = [share.sequence.lease for share in step.shares]
        tokens = [share.tokens for share in step.shares]
        # A head that is fed nothing is not asked for: the last token stands in.
        places = step.logits or (step.ids.shape[1] - 1,)
        at = torch.tensor(places, device=self._device)
        keep = {"logits_to_keep": at} if self._slices_logits else {}
        with (
            torch.no_grad(),
            self._served.adapters.rows(
                rows, tokens=tokens, logits=places if self._slices_logits else None
            ),
            AttentionScope(step.attention) as attention,
        ):
            out = self._served.model(
                input_ids=step.ids, position_ids=step.positions, use_cache=False, **keep
            ).logits[0]
        if attention.seen != attention.plans.keys():
            raise WrapError(
                f"model {type(self._served.model).__name__}",
                "computes attention without transformers' attention interface",
                "use generate() of the library",
            )
        if not self._slices_logits:
            out = out[at]
        return out[: len(step.logits)].float()

    def advance(self, step: Step) -> None:
        """The tokens of a step lie in the cache now."""
        for share in step.shares:
            share.sequence.position += share.tokens
            self._cache.share_complete(share.sequence)

    # --- attention ------------------------------------------------------------------------------

    def _attention(self, allocator: CacheAllocator, shares: Rows[Share]) -> AttentionPlan:
        if isinstance(allocator, SlidingAttentionCacheAllocator):
            return self._windowed(allocator, shares)
        return self._full(allocator, shares)

    def _full(self, allocator: CacheAllocator, shares: Rows[Share]) -> AttentionPlan:
        write: list[int] = []
        prefills: list[Prefill] = []
        kept: list[Kept] = []
        for share in shares:
            sequence, past, tokens = share.sequence, share.sequence.position, share.tokens
            places = allocator.get_write_indices(sequence.request_id, past, tokens)
            sequence.index[past : past + tokens] = places
            if share.decodes:
                kept.append(Kept(sequence.index, sequence.index_at, past))
            else:
                begin = len(write)
                read = mask = None
                if past:
                    read = self._tensor(sequence.index[:past])
                    mask = causal_mask(tokens, past + tokens, None, self._dtype, self._device)
                prefills.append(Prefill(begin, begin + tokens, read, mask))
            write += places
        return self._plan(write, kept, prefills, reads_first=False)

    def _windowed(
        self, allocator: SlidingAttentionCacheAllocator, shares: Rows[Share]
    ) -> AttentionPlan:
        window = allocator.sliding_window
        write: list[int] = []
        prefills: list[Prefill] = []
        kept: list[Kept] = []
        for share in shares:
            sequence, past, tokens = share.sequence, share.sequence.position, share.tokens
            places = allocator.get_read_indices(sequence.request_id, past, 0)
            if share.decodes:
                kept.append(Kept.of(places))
            else:
                begin, keys = len(write), len(places) + tokens
                read = self._tensor(np.array(places)) if places else None
                mask = None
                if past or keys > window:
                    mask = causal_mask(tokens, keys, window, self._dtype, self._device)
                prefills.append(Prefill(begin, begin + tokens, read, mask))
            write += allocator.get_write_indices(sequence.request_id, past, tokens)
        return self._plan(write, kept, prefills, reads_first=True)

    def _plan(
        self, write: Rows[int], kept: Rows[Kept], prefills: Rows[Prefill], *, reads_first: bool
    ) -> AttentionPlan:
        """A plan.

        Args:
            write: where the tokens of the step go.
            kept: what sequences of one token look back on.
            prefills: see `AttentionPlan`.
            reads_first: see `AttentionPlan`.
        """
        places = np.array(write, dtype=np.int64)
        if self._in_place:
            begin, decodes = len(kept), PagedDecodes(kept, places)
            return AttentionPlan(
                self._tensor(places[begin:]), begin, decodes, tuple(prefills), reads_first
            )
        gathered = GatheredDecodes.of(kept, self._dtype, self._device, reads_first=reads_first)
        return AttentionPlan(self._tensor(places), 0, gathered, tuple(prefills), reads_first)

    def _tensor(self, numbers: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(numbers)).to(self._device)
