"""Launches over `Outputs`: what both families of kernels have in common."""

from __future__ import annotations

from typing import Any

import torch
import triton

from ...core.quant_key import QuantKey, ScaleFormat, ScaleLayout
from ...linear.outputs import Outputs, empty
from .epilogue import Codes, Targets
from .plan import OPTIONS, Launch, plan_launch
from .shrink import ShrinkTarget, sum_partials_kernel

_SUMMED_ROWS = 16


def launch(kernel: Any, source: tuple[Any, ...], outputs: Outputs, op: str, *, norm: bool) -> None:
    """Fill `outputs` by one launch of `kernel` and, where columns were split, a small second one.

    Args:
        kernel: `activation_kernel` or `norm_kernel`.
        source: what it reads.
        outputs: where to.
        op: the activation, or the order of the norm.
        norm: which of the two.
    """
    if not outputs.rows:
        return
    codes = _codes(outputs.contract.key)
    targets = _targets(outputs)
    shrinks = _shrinks(outputs)
    planned = plan_launch(
        outputs.rows,
        outputs.columns,
        codes,
        by_row=norm,
        total_rows=max(outputs.rows, targets.code_rows, targets.scale_rows),
        scale_groups=targets.scale_groups if codes.group else 0,
        requests=outputs.requests,
        rank=max((max(request.rank, 1) for request in outputs.shrinks), default=0),
        consumers=len(shrinks),
        pieces=1 if all(request.a.dtype == torch.bfloat16 for request in outputs.shrinks) else 3,
    )
    partial = _partial(planned, outputs)
    kernel[(planned.programs,)](
        source,
        targets,
        shrinks,
        partial,
        planned.shape,
        OP=op,
        CODES=codes,
        PLAN=planned.plan,
        num_warps=planned.warps,
        num_stages=planned.stages,
        **OPTIONS,
    )
    if partial is not None:
        options: dict[str, Any] = {"num_warps": 1, **OPTIONS}
        sum_partials_kernel[(triton.cdiv(outputs.rows, _SUMMED_ROWS),)](
            partial,
            shrinks,
            outputs.rows,
            planned.chunks,
            ROWS=_SUMMED_ROWS,
            RANK=planned.plan.rank,
            **options,
        )


def _codes(key: QuantKey | None) -> Codes:
    if key is None:
        return Codes("none")
    return Codes(
        key.epilogue,
        key.granularity.size,
        key.scale_format == ScaleFormat.UE8M0,
        key.scale_dtype == torch.float8_e8m0fnu,
        key.layout == ScaleLayout.SWIZZLE_128X4,
    )


def _targets(outputs: Outputs) -> Targets:
    targets = Targets()
    key, contract = outputs.contract.key, outputs.contract
    if outputs.raw is not None:
        targets = targets._replace(raw=outputs.raw.values, raw_map=outputs.raw_map)
    if key is None:
        return targets
    codes, scale = outputs.codes, outputs.scale
    assert codes is not None
    assert scale is not None
    targets = targets._replace(
        codes=codes.view(torch.uint8),
        codes_stride=codes.shape[-1],
        code_rows=codes.shape[:-1].numel(),
    )
    if key.static:
        return targets._replace(given=scale)
    rows, groups = scale.shape[:-1].numel(), scale.shape[-1]
    column_major = key.layout == ScaleLayout.COLUMN_MAJOR
    return targets._replace(
        scale=scale if key.scale_dtype == torch.float32 else scale.view(torch.uint8),
        scale_rows=rows,
        scale_groups=groups,
        row_stride=1 if column_major else groups,
        group_stride=rows if column_major else 1,
        given=contract.global_scale.value if contract.global_scale is not None else None,
    )


def _shrinks(outputs: Outputs) -> tuple[ShrinkTarget, ...]:
    return tuple(
        ShrinkTarget(
            request.a,
            request.a.stride(0),
            request.starts,
            request.ranks,
            request.slots,
            out,
            request.width,
        )
        for request, out in zip(outputs.shrinks, outputs.shrunk, strict=True)
    )


def _partial(planned: Launch, outputs: Outputs) -> torch.Tensor | None:
    if not planned.plan.split:
        return None
    shape = (planned.chunks, outputs.rows, len(outputs.shrinks), planned.plan.rank)
    return empty(shape, torch.float32, outputs.shrunk[0].device)
