"""LoRA on the experts of a layer, from each of the forms in which files keep it.

    y_e = base_e(x) + scaling * (x @ A_e.T) @ B_e.T        for every expert e

* Of a parameter (PEFT's `target_parameters`): `lora_A (E * r, K)` with the expert slowest, `lora_B
  (N, r * E)` with the expert fastest, as `ParamWrapper.get_delta_weight` takes them apart.  PEFT
  before 0.19 took the two sizes of a parameter `(E, N, K)` for inputs and outputs in this order:
  there `lora_A` is `(E * r, N)` and `lora_B` is `(K, r * E)`, each the other's place.
* Stacked: `lora_A (E, r, K)`, `lora_B (E, N, r)`; a half that all experts share has a 1 for E.
* Apart: linears of each expert, as checkpoints had them before experts became parameters.  Linears
  that are one parameter now become one product: A's below one another, B's block by block, which
  adds up their ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from ...core.errors import AdapterUnsupportedError
from ..base import TargetExperts
from ..weights import ExpertsWeights
from .base import BaseLinear, Shapes, checked
from .lora import LoraSettings

#: Parts of a module whose halves are those of a parameter.
PARAMETER = ("experts.lora_A", "experts.lora_B")
#: The same of stacked halves.
STACKED = ("stacked.lora_A", "stacked.lora_B")


@dataclass(frozen=True)
class Apart:
    """One linear of one expert.

    Attributes:
        expert: its number.
        linear: which linear it is, as the file calls it.
        settings: after all patterns.
    """

    expert: int
    linear: str
    settings: LoraSettings

    @property
    def parts(self) -> tuple[str, str]:
        """Names of its halves."""
        return f"{self.expert}.{self.linear}.lora_A", f"{self.expert}.{self.linear}.lora_B"


def parameter_shapes(settings: LoraSettings, target: TargetExperts, *, swapped: bool) -> Shapes:
    """The halves of a parameter; `swapped` for files of PEFT before 0.19, see the module."""
    ranks = target.experts * settings.rank
    inputs, outputs = target.in_features, target.out_features
    if swapped:
        inputs, outputs = outputs, inputs
    return dict(zip(PARAMETER, ((ranks, inputs), (outputs, ranks)), strict=True))


def stacked_shapes(
    settings: LoraSettings, target: TargetExperts, *, shared: tuple[bool, bool]
) -> Shapes:
    """Stacked halves, of which A, B or both are `shared` by all experts."""
    a_number, b_number = (1 if one else target.experts for one in shared)
    rank = settings.rank
    a, b = (a_number, rank, target.in_features), (b_number, target.out_features, rank)
    return dict(zip(STACKED, (a, b), strict=True))


def apart_shapes(linears: Sequence[Apart], target: TargetExperts) -> Shapes:
    """The halves of all linears: `lora_A (r, K)` and `lora_B (N / linears, r)` of each."""
    shapes: Shapes = {}
    for one in linears:
        a, b = one.parts
        shapes[a] = (one.settings.rank, target.in_features)
        shapes[b] = (target.linear_features, one.settings.rank)
    return shapes


def lower_parameter(
    tensors: Mapping[str, torch.Tensor],
    settings: LoraSettings,
    target: TargetExperts,
    *,
    swapped: bool,
) -> ExpertsWeights:
    """The parts of LoRA on a parameter; halves stay as stored where no row changes its place.

    Args:
        tensors: of `parameter_shapes`.
        settings: of this parameter.
        target: the parameter.
        swapped: see the module.

    Raises:
        AdapterFormatError, AdapterMismatchError, AdapterUnsupportedError: see `checked`.
        AdapterUnsupportedError: DoRA, a bias or blocks.
    """
    check_plain(settings, target)
    given = _checked(tensors, parameter_shapes(settings, target, swapped=swapped), target)
    first, second = (given[part] for part in PARAMETER)
    by_expert = first.view(target.experts, settings.rank, -1)
    last_by_expert = second.view(second.shape[0], settings.rank, target.experts).permute(2, 0, 1)
    a, b = by_expert, last_by_expert
    if swapped:
        a, b = last_by_expert.mT, by_expert.mT
    return ExpertsWeights(a, _in_order(b, target), settings.scaling)


def lower_stacked(
    tensors: Mapping[str, torch.Tensor], settings: LoraSettings, target: TargetExperts
) -> ExpertsWeights:
    """The parts of LoRA whose halves are stacked expert by expert.

    Args:
        tensors: of `stacked_shapes`.
        settings: of this projection.
        target: the projection.

    Raises:
        AdapterFormatError, AdapterMismatchError, AdapterUnsupportedError: as `lower_parameter`.
    """
    check_plain(settings, target)
    shared = tuple(part in tensors and tensors[part].shape[0] == 1 for part in STACKED)
    expected = stacked_shapes(settings, target, shared=(shared[0], shared[1]))
    given = _checked(tensors, expected, target)
    a, b = (given[part] for part in STACKED)
    return ExpertsWeights(a, _in_order(b, target), settings.scaling)


def lower_apart(
    tensors: Mapping[str, torch.Tensor], linears: Sequence[Apart], target: TargetExperts
) -> ExpertsWeights:
    """The parts of LoRA on linears of each expert, which are one parameter now.

    Args:
        tensors: of `apart_shapes`.
        linears: the same ones of every expert; ranks and scalings may differ.
        target: the parameter.

    Raises:
        AdapterFormatError, AdapterMismatchError, AdapterUnsupportedError: as `lower_parameter`.
    """
    for one in linears:
        check_plain(one.settings, target)
    given = _checked(tensors, apart_shapes(linears, target), target)
    scalings = {one.settings.scaling for one in linears}
    scaling = scalings.pop() if len(scalings) == 1 else None
    starts, ranks = _columns(linears, target)
    # Of one scaling the halves keep their dtype; else each B takes its own in.
    dtypes = {tensor.dtype for tensor in given.values()}
    dtype = dtypes.pop() if len(dtypes) == 1 and scaling is not None else torch.float32
    a = torch.zeros(target.experts, ranks, target.in_features, dtype=dtype)
    b = torch.zeros(target.experts, target.out_features, ranks, dtype=dtype)
    size = target.linear_features
    for one in linears:
        a_half, b_half = (given[part] for part in one.parts)
        start, rank = starts[one.linear], one.settings.rank
        if scaling is None:
            b_half = b_half.float() * one.settings.scaling
        row = target.linears.index(one.linear) * size
        a[one.expert, start : start + rank] = a_half
        b[one.expert, row : row + size, start : start + rank] = b_half
    return ExpertsWeights(a, b, 1.0 if scaling is None else scaling)


def apart_rank(linears: Sequence[Apart], target: TargetExperts) -> int:
    """The rank of the product that `lower_apart` makes."""
    return _columns(linears, target)[1]


def _columns(linears: Sequence[Apart], target: TargetExperts) -> tuple[dict[str, int], int]:
    """Where the ranks of each linear begin among those of their product, and how many those are."""
    widest: dict[str, int] = {}
    for one in linears:
        widest[one.linear] = max(widest.get(one.linear, 0), one.settings.rank)
    starts, total = {}, 0
    for linear in target.linears:
        starts[linear] = total
        total += widest.get(linear, 0)
    return starts, total


def _in_order(b: torch.Tensor, target: TargetExperts) -> torch.Tensor:
    """(E, N, r) with all gates before all ups."""
    return torch.cat([b[:, ::2], b[:, 1::2]], 1) if target.interleaved else b


def _checked(
    tensors: Mapping[str, torch.Tensor], expected: Shapes, target: TargetExperts
) -> dict[str, torch.Tensor]:
    return checked(
        tensors, expected, BaseLinear(target.name, target.in_features, target.out_features)
    )


def check_plain(settings: LoraSettings, target: TargetExperts) -> None:
    """Refuse variants that PEFT does not have on parameters.

    Raises:
        AdapterUnsupportedError: DoRA, a bias or blocks.
    """
    variants = {
        "DoRA": settings.use_dora,
        "lora_bias": settings.lora_bias,
        "block-diagonal LoRA": settings.a_blocks > 1 or settings.b_blocks > 1,
    }
    if used := [variant for variant, is_used in variants.items() if is_used]:
        raise AdapterUnsupportedError(
            f"adapter on {target.name}",
            f"has {' and '.join(used)} on experts",
            "train the experts with plain LoRA",
        )
