"""From the linears of single experts, as a checkpoint holds them, to one projection of all experts.

Nothing is quantised again: codes stay as they are, and scales are repeated until gates and ups
have one scheme.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from ...core.errors import CheckpointError
from ...core.native import PANEL
from ...core.scheme import WeightScheme
from ..contract import InputContract, InputScale
from ..quantized_weight import QuantizedWeight

_ALIKE = "quantise all experts of a layer by one scheme"


def halves_scheme(halves: Sequence[WeightScheme], features: int, subject: str) -> WeightScheme:
    """The scheme that holds several weights, stacked along their channels, to the bit.

    One scale a tensor becomes one a channel.  Blocks of more channels than one that would
    straddle two of the weights become blocks of fewer.

    Args:
        halves: of each weight (gates, ups); one or more.
        features: channels of each of them.
        subject: the projection, for messages.

    Raises:
        CheckpointError: there is no such scheme.
    """
    first = halves[0]
    if len(halves) == 1:
        return first
    # No scheme of blocks and none without is the other one's.
    alike = {replace(scheme, rows=1) if not scheme.blockwise else scheme for scheme in halves}
    if len(alike) > 1:
        reason = f"its gates and ups are quantised differently: {' and '.join(map(str, halves))}"
        raise CheckpointError(subject, reason, _ALIKE)
    if not first.blockwise:
        return replace(first, rows=1)
    if features % first.rows == 0:
        return first
    rows = math.gcd(features, first.rows)
    # The C matmul takes blocks of whole panels of channels, or of one channel.
    return replace(first, rows=rows if rows % PANEL == 0 else 1)


def stack_halves(
    halves: Sequence[QuantizedWeight], scheme: WeightScheme, subject: str
) -> QuantizedWeight:
    """One weight of several that lie one after the other along their channels.

    Args:
        halves: one or more, of one shape (N, K).
        scheme: what `halves_scheme` says of theirs.
        subject: the projection, for messages.

    Returns:
        (len(halves) * N, K).  Its codes are a copy, but for a single weight.

    Raises:
        CheckpointError: global scales that differ: codes and block scales hang on them.
    """
    first = halves[0]
    if len(halves) == 1:
        return first
    given = {None if w.global_scale is None else w.global_scale.item() for w in halves}
    if len(given) > 1:
        reason = f"its gates and ups have the global scales {' and '.join(map(str, given))}"
        raise CheckpointError(subject, reason, "quantise gates and ups with one global scale")
    return QuantizedWeight(
        _stacked([weight.codes for weight in halves]),
        _stacked([_with_rows(weight, scheme) for weight in halves]),
        scheme,
        first.in_features,
        first.global_scale,
    )


def _stacked(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    # As bytes where torch has no `cat` for the dtype.
    if parts[0].dtype.itemsize > 1:
        return torch.cat(list(parts))
    return torch.cat([part.view(torch.uint8) for part in parts]).view(parts[0].dtype)


def _with_rows(weight: QuantizedWeight, scheme: WeightScheme) -> torch.Tensor:
    """Its scales, repeated for blocks of `scheme.rows` channels."""
    scale = weight.scale
    before, channels = weight.scheme.rows or weight.out_features, weight.out_features
    if before == scheme.rows:
        return scale
    one_byte = scale.dtype.itemsize == 1
    bits = scale.view(torch.uint8) if one_byte else scale
    repeated = bits.repeat_interleave(before // scheme.rows, 0)[: channels // scheme.rows]
    return repeated.view(scale.dtype) if one_byte else repeated


def common_contract(contracts: Sequence[InputContract], subject: str) -> InputContract:
    """What all experts of a projection consume.

    A token is quantised once, whichever experts read it: of static scales, and of global ones,
    the largest is everyone's, so that no expert's inputs are clipped that were not before.

    Args:
        contracts: of each expert's linears; one or more.
        subject: the projection, for messages.

    Raises:
        CheckpointError: their keys differ.
    """
    keys = {contract.key for contract in contracts}
    if len(keys) > 1:
        found = " and ".join(sorted(str(key or "unquantised inputs") for key in keys))
        raise CheckpointError(subject, f"its experts take different inputs: {found}", _ALIKE)
    return InputContract(
        contracts[0].key,
        _largest([contract.scale for contract in contracts]),
        _largest([contract.global_scale for contract in contracts]),
    )


def _largest(scales: Sequence[InputScale | None]) -> InputScale | None:
    there = [scale for scale in scales if scale is not None]
    return max(there, key=lambda scale: scale.number) if there else None
