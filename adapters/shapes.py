"""Checks of the shapes and dtypes of an adapter's tensors, from their headers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..core.errors import AdapterError
from .base import BaseFacts
from .findings import Finding, damaged, listing, mismatch, unsupported
from .tensor_file import TensorHeader
from .tuners.base import Module, Shape, TunerType
from .tuners.config import TunerConfig

# safetensors' names of the dtypes that a branch can be computed in.
SERVED_DTYPES = frozenset({"F32", "F16", "BF16"})


# A module of the widest type has six, and may have weights and rows of its own beside them.
_MOST_OF_A_MODULE = 16
_MOST_SHARED = 64
_LONGEST_NAME = 1024


def check_sizes(headers: Sequence[TensorHeader], base: BaseFacts) -> list[Finding]:
    """What is beyond any adapter for this model, so that nothing else is worth a look."""
    most = _MOST_SHARED + _MOST_OF_A_MODULE * len(base.modules)
    # Files may hold both halves of each expert's linears.
    most += sum(2 * len(t.linears) * t.experts for t in base.experts.values())
    if len(headers) > most:
        text = f"the file holds {len(headers):,} tensors, but an adapter for this model at most "
        return [mismatch(f"{text}{most:,} ({len(base.modules):,} modules)")]
    long = [header.name for header in headers if len(header.name) > _LONGEST_NAME]
    if long:
        text = f"names of tensors with more than {_LONGEST_NAME:,} characters, which no module has"
        return [damaged(f"{text}: {listing(name[:80] for name in long)}")]
    return []


def check_dtypes(headers: Iterable[TensorHeader], findings: list[Finding]) -> None:
    """Add a finding for each dtype that no branch is computed in."""
    found: dict[str, list[str]] = {}
    for header in headers:
        if header.dtype not in SERVED_DTYPES:
            found.setdefault(header.dtype, []).append(header.name)
    for dtype, names in found.items():
        kind = f"{dtype} (float8)" if dtype.startswith("F8") else dtype
        text = f"tensors stored as {kind}: {listing(names)}"
        findings.append(unsupported(text, "save the adapter in float32, float16 or bfloat16"))


def check_shapes(
    tuner: TunerType[Any],
    config: TunerConfig,
    modules: Mapping[str, Module],
    shared: Mapping[str, str],
    headers: Mapping[str, TensorHeader],
    findings: list[Finding],
) -> None:
    """Add findings for parts that are missing, have no use, or have another shape."""
    for name, module in modules.items():
        try:
            expected = tuner.shapes(config, module)
        except AdapterError as error:
            text = f"layer {name!r}: {error.reason}"
            findings.append(Finding(type(error), text, error.remedy))
            continue
        for part, shape in expected.items():
            if part not in module.headers:
                text = f"layer {name!r} has no {part}"
                findings.append(damaged(text, "the file is incomplete: save it again"))
            else:
                found = module.headers[part].shape
                findings += _compare(tuner, f"layer {name!r}: {part}", part, found, shape)
        unused = [h.name for part, h in module.headers.items() if part not in expected]
        if unused:
            text = f"layer {name!r} has tensors that would not be used: {listing(unused)}"
            findings.append(damaged(text, "use the adapter_config.json that was saved with it"))
    least = tuner.shared_shapes(config, modules.values())
    for part, shape in least.items():
        if part not in shared:
            findings.append(damaged(f"the file has no {part}", "save it with PEFT again"))
            continue
        found = headers[shared[part]].shape
        if len(found) != len(shape) or any(a < b for a, b in zip(found, shape, strict=True)):
            text = f"{part} is {list(found)} but the layers need at least {list(shape)}"
            findings.append(mismatch(text))


def _compare(
    tuner: TunerType[Any], where: str, part: str, found: Shape, expected: Shape
) -> list[Finding]:
    if len(found) != len(expected):
        text = f"{where} has {len(found)} dimensions {list(found)} instead of {len(expected)}"
        return [damaged(text, "save the adapter with all shards gathered")]
    meanings = tuner.dimensions(part)
    if meanings is None:
        if found == expected:
            return []
        text = f"{where} is {list(found)}, but this layer and the config need {list(expected)}"
        return [mismatch(text)]
    findings = []
    for size, right, meaning in zip(found, expected, meanings, strict=True):
        if size == right:
            continue
        if meaning == "rank":
            text = f"{where} has rank {size} but the config says {right}"
            remedy = "use the adapter_config.json that was saved with these tensors"
            findings.append(damaged(text, remedy))
        else:
            findings.append(mismatch(f"{where} is for {size} {meaning} but the layer has {right}"))
    return findings
