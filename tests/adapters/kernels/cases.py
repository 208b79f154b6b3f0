"""What low-rank kernels are compared on, and with what."""

from __future__ import annotations

import itertools

import torch

from branchline.adapters.kernels.base import LowRankStack

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
EPS = {BF16: 2.0**-8, F16: 2.0**-11, F32: 2.0**-23}


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def stack_of(ranks, columns: int, channels: int, dtype=F32, rooms=None) -> LowRankStack:
    """Slots of these ranks, in rooms of their own; what does not count is NaN."""
    rooms = rooms or [rank + slot % 3 for slot, rank in enumerate(ranks)]
    starts = list(itertools.accumulate(rooms, initial=0))
    a = torch.full((starts[-1], columns), torch.nan)
    b = torch.full((starts[-1], channels), torch.nan)
    for slot, rank in enumerate(ranks):
        own = slice(starts[slot], starts[slot] + rank)
        a[own] = random(rank, columns, seed=slot) / max(columns, 1) ** 0.5
        b[own] = random(rank, channels, seed=100 + slot)
    return LowRankStack(
        "q_proj",
        a.to(dtype),
        b.to(dtype),
        torch.tensor(starts[:-1], dtype=torch.int32),
        torch.tensor(ranks, dtype=torch.int32),
        torch.tensor([0.5 + slot for slot in range(len(ranks))]),
        max(rooms),
    )


def slots_of(*slots: int) -> torch.Tensor:
    return torch.tensor(slots, dtype=torch.int32)


def wanted(stack: LowRankStack, out, x, slots) -> tuple[torch.Tensor, torch.Tensor]:
    """float64, and how far float32 sums and one rounding may be from it."""
    exact, x = out.double().clone(), x.reshape(out.shape[0], x.shape[-1]).double()
    bound = exact.abs() * EPS[out.dtype]
    each = out.shape[0] // max(slots.shape[0], 1)
    for number, slot in enumerate(slots.tolist()):
        if slot < 0:
            continue
        start, rank = int(stack.starts[slot]), int(stack.ranks[slot])
        rows = slice(number * each, number * each + each)
        a, b = (pool[start : start + rank].double() for pool in (stack.a, stack.b))
        scaling = float(stack.scaling[slot])
        exact[rows] += scaling * (x[rows] @ a.mT) @ b
        size = scaling * (x[rows].abs() @ a.mT.abs()) @ b.abs()
        bound[rows] += size * 2e-6 + exact[rows].abs() * EPS[out.dtype] + 1e-7
    return exact, bound


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8)
