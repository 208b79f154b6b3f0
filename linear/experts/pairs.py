"""Which expert computes which token: what a router chose, sorted for kernels."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from ...core.errors import ContractError
from . import native

_ROUTING = "the experts' routing"


@dataclass(eq=False)
class Pairs:
    """The (token, expert) pairs of one forward, sorted by expert.

    With T tokens and k choices there are P = T * k pairs: pair ``t * k + j`` is choice j of token
    t.  Kernels see them by *position*, sorted by expert and, within one expert, by pair.  Pairs of
    experts that are not here (of another rank) lie behind all others and are computed by nobody.

    Attributes:
        tokens: T.
        top_k: k.
        experts: E, how many experts are here.
        order: int64 (P,), the pair at each position.
        expert: int32 (P,), the expert at each position; E for none.
        offsets: int32 (E + 1,), the position at which each expert's pairs begin; the last one is
            the number of pairs that somebody computes.
        partial: whether some pairs may be computed by nobody.
    """

    tokens: int
    top_k: int
    experts: int
    order: torch.Tensor
    expert: torch.Tensor
    offsets: torch.Tensor
    partial: bool = False

    @classmethod
    def of(cls, index: torch.Tensor, experts: int, *, partial: bool = False) -> Pairs:
        """The pairs of a router's choice.

        Args:
            index: (T, k), integers: the expert of each choice.
            experts: E.
            partial: choices may name experts outside of [0, E), which are not here.

        A choice outside of [0, E) that is not allowed is refused where its value can be looked at.
        Elsewhere that would wait for the device: nobody computes it, and it adds nothing to its
        token, so that pairs are always `partial` there.

        Raises:
            ContractError: `index` has other dimensions, or, on the CPU and not `partial`, names an
                expert outside of [0, E).
        """
        if index.dim() != 2:
            raise ContractError(
                _ROUTING,
                f"has shape {tuple(index.shape)}, expected (tokens, choices)",
                "hand the experts what their router returns",
            )
        if not native.sorts(index):
            return cls.defined(index, experts, partial=partial)
        made = native.sort_pairs(index, experts)
        if made.absent and not partial:
            _refuse_absent(experts)
        tokens, top_k = index.shape
        pairs = cls(tokens, top_k, experts, made.order, made.expert, made.offsets, partial)
        pairs.token, pairs.position = made.token, made.position
        return pairs

    @classmethod
    def defined(cls, index: torch.Tensor, experts: int, *, partial: bool = False) -> Pairs:
        """As `of`, of choices (T, k), by torch: the definition, on any device."""
        flat = index.reshape(-1)
        here = (flat >= 0) & (flat < experts)
        if not partial and can_look(index):
            if not bool(here.all()):
                _refuse_absent(experts)
        else:
            partial, flat = True, torch.where(here, flat, experts)
        expert, order = torch.sort(flat, stable=True)
        edges = torch.arange(experts + 1, dtype=expert.dtype, device=expert.device)
        offsets = torch.searchsorted(expert, edges, out_int32=True)
        tokens, top_k = index.shape
        return cls(tokens, top_k, experts, order, expert.to(torch.int32), offsets, partial)

    def __len__(self) -> int:
        return self.order.shape[0]

    @cached_property
    def token(self) -> torch.Tensor:
        """int64 (P,): the token at each position."""
        return torch.div(self.order, self.top_k, rounding_mode="floor")

    @cached_property
    def position(self) -> torch.Tensor:
        """int64 (P,): the position of each pair."""
        places = torch.empty_like(self.order)
        places[self.order] = torch.arange(len(self), device=self.order.device)
        return places

    @cached_property
    def bounds(self) -> tuple[int, ...]:
        """`offsets` as numbers; asking waits for the device, once."""
        return tuple(self.offsets.tolist())


def can_look(index: torch.Tensor) -> bool:
    """Whether choices can be checked without waiting for a device."""
    return index.device.type == "cpu"


def combine(out: torch.Tensor, weights: torch.Tensor, pairs: Pairs) -> torch.Tensor:
    """What a token's experts make of it, weighted and added up.

    Products and sums are float32, in the order of the choices: no token's bytes depend on another.

    Args:
        out: (P, N), by position.
        weights: (T, k), by choice.
        pairs: of the forward.

    Returns:
        float32 (T, N).

    Raises:
        ContractError: rows or weights that are not these pairs'.
    """
    check_combined(out, weights, pairs)
    if native.combines(out, weights):
        return native.combine(out, weights, pairs.position, pairs.offsets)
    return combine_defined(out, weights, pairs)


def check_combined(out: torch.Tensor, weights: torch.Tensor, pairs: Pairs) -> None:
    """Refuse what `combine` cannot add up: a kernel takes the shapes on trust.

    Raises:
        ContractError: rows or weights that are not these pairs'.
    """
    if out.shape[:-1] != (len(pairs),) or weights.shape != (pairs.tokens, pairs.top_k):
        raise ContractError(
            "what experts made",
            f"is {tuple(out.shape)}, weighted by {tuple(weights.shape)}, for {pairs.tokens} tokens "
            f"with {pairs.top_k} choices each",
            "combine what was computed for these pairs, with the weights of their router",
        )


def combine_defined(out: torch.Tensor, weights: torch.Tensor, pairs: Pairs) -> torch.Tensor:
    """As `combine`, by torch: the definition, on any device."""
    by_pair = out[pairs.position].float()
    if pairs.partial:
        here = (pairs.expert < pairs.experts)[pairs.position]
        # What nobody computed was never written: a product with zero would keep its NaN.
        by_pair = torch.where(here.unsqueeze(1), by_pair, 0.0)
    by_choice = by_pair.view(pairs.tokens, pairs.top_k, out.shape[1])
    scaled = by_choice * weights.float().unsqueeze(2)
    total = scaled.new_zeros(pairs.tokens, out.shape[1])
    for choice in scaled.unbind(1):
        total = total + choice
    return total


def _refuse_absent(experts: int) -> None:
    raise ContractError(
        _ROUTING,
        f"names an expert outside of 0 to {experts - 1}",
        "hand the experts what their own router returns",
    )
