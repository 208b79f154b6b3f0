"""Grouped kernels built beside the emulated one, routings, and how far results may be apart."""

from __future__ import annotations

from typing import NamedTuple

import torch

from branchline.core.quantized_activation import QuantizedActivation
from branchline.core.scheme import LinearScheme
from branchline.linear.contract import InputContract, InputScale
from branchline.linear.experts.kernels.base import GroupedConfig, QuantizedGroupedKernel
from branchline.linear.experts.kernels.each import EmulatedExperts
from branchline.linear.experts.pairs import Pairs
from branchline.linear.experts.weight import ExpertsWeight
from branchline.linear.kernels.base import LinearConfig
from branchline.linear.quantizers import quantize_input

NAME = "layers.0.mlp.experts.down_proj"

#: (T, k) choices among four experts.  Expert 2 has no token in "some"; in "all-on-one", others.
ROUTINGS = {
    "some": [[0, 3], [3, 1], [0, 1], [1, 0], [3, 0]],
    "top-1": [[2], [0], [2], [2]],
    "top-8": [[7, 1, 0, 3, 2, 5, 6, 4], [0, 1, 2, 3, 4, 5, 6, 7]],
    "all-on-one": [[1], [1], [1], [1], [1], [1]],
    "one-token": [[2, 0]],
}


class Both(NamedTuple):
    """A kernel and the emulated one, of the same weights, bias and scales."""

    kernel: QuantizedGroupedKernel
    emulated: EmulatedExperts
    weight: ExpertsWeight


def build(
    cls: type[QuantizedGroupedKernel],
    scheme: LinearScheme,
    shape: tuple[int, int, int],
    bias: bool = False,
    device: str = "cpu",
    values: torch.Tensor | None = None,
) -> Both:
    """Of random weights (E, N, K), or of `values`."""
    experts, n, k = shape
    generator = torch.Generator().manual_seed(n * 1000 + k)
    if values is None:
        values = torch.randn(shape, generator=generator)
    weight = ExpertsWeight.from_float(values.to(device), NAME, scheme.weight)
    b = torch.randn(experts, n, generator=generator).to(device) if bias else None
    key = scheme.input
    static = InputScale.checked(torch.tensor([0.0217], device=device), NAME) if key.static else None
    consumed = cls.consumes(GroupedConfig(experts, LinearConfig(k, n, scheme)))
    return Both(
        cls(weight, b, InputContract(consumed, static)),
        EmulatedExperts(weight, b, InputContract(key, static)),
        weight,
    )


def routed(
    name: str, experts: int, device: str = "cpu", *, partial: bool = False
) -> Pairs:  # fmt: skip
    """Pairs of one of `ROUTINGS`."""
    return Pairs.of(torch.tensor(ROUTINGS[name], device=device), experts, partial=partial)


def random_pairs(tokens: int, top_k: int, experts: int, device: str = "cpu") -> Pairs:
    """Choices at random, none twice a token."""
    generator = torch.Generator().manual_seed(tokens)
    scores = torch.rand(tokens, experts, generator=generator)
    return Pairs.of(scores.topk(top_k, dim=1).indices.to(device), experts)


def rows_for(
    pairs: Pairs,
    k: int,
    *,
    by_token: bool,
    dtype: torch.dtype = torch.bfloat16,
    device: str = "cpu",
) -> torch.Tensor:
    """An activation that `pairs` read."""
    rows = pairs.tokens if by_token else len(pairs)
    generator = torch.Generator().manual_seed(rows + k)
    return (torch.randn(rows, k, generator=generator) * 3).to(dtype).to(device)


def codes_for(x: torch.Tensor, kernel: QuantizedGroupedKernel) -> QuantizedActivation:
    """`x` as the kernel's producer emits it."""
    return quantize_input(x, kernel.contract, NAME)


def assert_close(
    both: Both,
    x: torch.Tensor,
    pairs: Pairs,
    out: torch.Tensor,
    *,
    by_token: bool,
    accumulation: float = 2.0**-20,
) -> None:
    """Equal but for the order of float32 sums and one rounding to the dtype of `x`.

    Args:
        both: who computed.
        x: raw.
        pairs: who computes what.
        out: of `both.kernel`.
        by_token: how `x` lies.
        accumulation: how much of the sum of magnitudes a sum may be wrong by.
    """
    wanted = both.emulated.apply(x, pairs, NAME, by_token=by_token)
    assert (out.dtype, out.shape, out.device) == (wanted.dtype, wanted.shape, wanted.device)
    live = pairs.expert < pairs.experts
    rows = x[pairs.token] if by_token else x
    norms = both.weight.dequantize().double().norm(dim=2)[pairs.expert[live]]
    lengths = rows[live].double().norm(dim=1, keepdim=True) * norms
    rounding = 2.0 ** -{torch.bfloat16: 7, torch.float16: 10, torch.float32: 22}[out.dtype]
    found, wanted = out[live].double(), wanted[live].double()
    bound = wanted.abs() * rounding + lengths * accumulation + 2.0**-24
    assert bool(((found - wanted).abs() <= bound).all())
