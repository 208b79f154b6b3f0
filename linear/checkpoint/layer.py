"""One quantised linear: which tensors it has, and what they say where the metadata is silent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ...core.block_shape import BlockShape
from ...core.errors import CheckpointError
from ...core.quant_key import ScaleFormat
from ...core.scheme import PER_CHANNEL, PER_TENSOR, LinearScheme, WeightScheme
from .fp8 import DEFAULT_BLOCK, block_scheme, input_key
from .policy import Group, Policy, StoredNames

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
#: Dtypes under which files keep packed four-bit codes, and e8m0 scales.
FP4_CARRIERS = (torch.uint8, torch.int8, torch.float4_e2m1fn_x2)
E8M0_CARRIERS = (torch.float8_e8m0fnu, torch.uint8)
_CODES = ("weight", "weight_packed")
#: Scales of the KV cache, which some formats store with the projections into it.
KV_CACHE_SCALES = ("k_scale", "v_scale", "q_scale", "kv_scale", "output_scale")
_RESTORE = "restore the checkpoint's files"


class TensorHeader(NamedTuple):
    """What a file says about a tensor before its bytes.

    Args:
        dtype: of its elements.
        shape: its sizes.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Layer:
    """Where the tensors of a quantised linear lie.

    Attributes:
        name: the linear.
        scheme: its quantisation.
        stored: the names behind the linear's, the usual one first; the one there is if it is known.
    """

    name: str
    scheme: LinearScheme
    stored: StoredNames

    def roles(self) -> dict[str, tuple[str, ...]]:
        """The names of each tensor that the scheme needs."""
        roles = {"weight": self.stored.codes, "weight scale": self.stored.scale}
        if self.scheme.weight.global_scale:
            roles["weight's global scale"] = self.stored.global_scale
        if self.scheme.calibrated:
            roles["input scale"] = self.stored.input_scale
        return roles

    def tensor_names(self) -> tuple[str, ...]:
        """Full names of its tensors."""
        return tuple(f"{self.name}.{names[0]}" for names in self.roles().values())


class Parts:
    """The tensors of each linear, by the last part of their names."""

    def __init__(self, found: Mapping[str, Mapping[str, TensorHeader]]) -> None:
        self._found = found

    @classmethod
    def of(cls, linears: Sequence[str], headers: Mapping[str, TensorHeader]) -> Parts:
        """The parts of these linears among all tensors of a checkpoint."""
        found: dict[str, dict[str, TensorHeader]] = {name: {} for name in linears}
        for full, header in headers.items():
            module, _, part = full.rpartition(".")
            if module in found:
                found[module][part] = header
        return cls(found)

    def __getitem__(self, linear: str) -> Mapping[str, TensorHeader]:
        return self._found[linear]

    def weight_dtype(self, linear: str) -> torch.dtype | None:
        """The dtype of its codes or weight; None without either."""
        found = (self._found[linear].get(part) for part in _CODES)
        return next((header.dtype for header in found if header is not None), None)

    def float_weight(self, linear: str) -> bool:
        """Whether it has a weight of 16 bits or more."""
        return is_float(self.weight_dtype(linear))

    def coded(self, linear: str) -> bool:
        """Whether it has codes."""
        dtype = self.weight_dtype(linear)
        return dtype is not None and not is_float(dtype)

    def tied(self, linear: str, head: bool) -> bool:
        """Whether it is a head that has no tensors: it shares those of the embedding."""
        return head and not self._found[linear]

    def all_float(self, linears: Sequence[str], heads: Sequence[str]) -> bool:
        """Whether every linear has a float weight, tied heads excepted."""
        wanted = [n for n in linears if not self.tied(n, n.rpartition(".")[2] in heads)]
        return bool(wanted) and all(map(self.float_weight, wanted))


def wide(shape: tuple[int, ...]) -> tuple[int, ...]:
    """A scale's shape without the dimensions of size 1, which formats add and leave out."""
    return tuple(size for size in shape if size != 1)


def is_float(dtype: torch.dtype | None) -> bool:
    """Whether a dtype is that of an unquantised weight."""
    return dtype in _FLOATS


def settle(
    policy: Policy,
    group: Group,
    scheme: LinearScheme,
    name: str,
    parts: Parts | None,
    notes: list[str],
) -> Layer:
    """The layer of a linear that is quantised by `scheme`, where the tensors do not say otherwise.

    Args:
        policy: for messages.
        group: with the names that the format stores, and what it left open.
        scheme: of the group.
        name: the linear.
        parts: None to answer from the metadata alone.
        notes: takes what is decided here.

    Raises:
        CheckpointError: a tensor that is missing, that the scheme does not have, of two names, or
            codes of another format.
    """
    if parts is None:
        notes += [f"{policy.source} leaves {what} open: the default" for what in sorted(group.open)]
        return Layer(name, scheme, group.stored)
    found = parts[name]
    _check_codes(policy, group, scheme, name, found)
    stored = _present(group.stored, name, found)
    scheme = _by_tensors(policy, group, scheme, name, found, stored, notes)
    layer = Layer(name, scheme, stored)
    _check_complete(policy, group, layer, found)
    _check_unused(policy, layer, found, notes)
    return layer


def _check_codes(
    policy: Policy,
    group: Group,
    scheme: LinearScheme,
    name: str,
    found: Mapping[str, TensorHeader],
) -> None:
    part = group.stored.codes[0]
    header = found.get(part)
    if header is None:
        others = f" (but {', '.join(sorted(found))})" if found else ""
        raise CheckpointError(name, f"has no tensor {name}.{part}{others}", _RESTORE)
    served = FP4_CARRIERS if scheme.weight.global_scale else (torch.float8_e4m3fn,)
    if header.dtype not in served:
        said = f"{policy.source} ({group.where}) says {scheme}"
        reason = f"{said}, but {name}.{part} is {header.dtype}, which does not go with it"
        raise CheckpointError(name, reason, "convert the weights, or mend the metadata")


def _present(stored: StoredNames, name: str, found: Mapping[str, TensorHeader]) -> StoredNames:
    """The names with those first, and alone, that are there."""
    picked = {}
    for role in ("scale", "global_scale", "input_scale"):
        names: tuple[str, ...] = getattr(stored, role)
        there = tuple(part for part in names if part in found)
        if len(there) > 1:
            reason = f"has {' and '.join(there)}, two names of one scale"
            raise CheckpointError(name, reason, "remove the one that is not of these codes")
        picked[role] = there or names
    return StoredNames(stored.codes, divisor=stored.divisor, **picked)


def _by_tensors(
    policy: Policy,
    group: Group,
    scheme: LinearScheme,
    name: str,
    found: Mapping[str, TensorHeader],
    stored: StoredNames,
    notes: list[str],
) -> LinearScheme:
    """The scheme, what is open taken from the tensors."""
    scale = found.get(stored.scale[0])
    if not group.open or scale is None:
        return scheme
    weight, static = scheme.weight, scheme.static
    if "blocks" in group.open:
        weight = _blocks(name, found[stored.codes[0]].shape, scale.shape)
    ue8m0 = scheme.weight.scale_format == ScaleFormat.UE8M0
    if "scale format" in group.open:
        ue8m0 = scale.dtype in E8M0_CARRIERS
    if weight.blockwise:
        weight = block_scheme(BlockShape(weight.rows, weight.columns), ue8m0=ue8m0)
    if "inputs" in group.open:
        static = stored.input_scale[0] in found
    settled = LinearScheme(weight, input_key(weight, static))
    opened = ", ".join(sorted(group.open))
    notes.append(f"{policy.source} leaves open: {opened}; the tensors say {settled}")
    return settled


def _blocks(name: str, shape: tuple[int, ...], scale: tuple[int, ...]) -> WeightScheme:
    if len(shape) == 3 and len(scale) == 3 and scale[0] == shape[0]:
        # Of one expert; where all of them lie in one tensor, they have one scheme.
        return _blocks(name, shape[1:], scale[1:])
    sizes = tuple(size for size in scale if size != 1)
    if not sizes:
        # One block of 128x128 and a whole small weight are the same, its input's key is not.
        smallest = min(DEFAULT_BLOCK.rows, DEFAULT_BLOCK.columns)
        small = len(scale) == 2 and max(shape) <= smallest
        return block_scheme(DEFAULT_BLOCK, ue8m0=False) if small else PER_TENSOR
    if len(shape) == 2:
        block = block_scheme(DEFAULT_BLOCK, ue8m0=False)
        if tuple(scale) == block.scale_shape(*shape):
            return block
        if sizes == (shape[0],) and scale[0] == shape[0]:
            return PER_CHANNEL
    reason = f"its weight scale has shape {scale}, no scheme that is known for a weight {shape}"
    raise CheckpointError(name, reason, "add weight_block_size to config.json")


def _check_complete(
    policy: Policy, group: Group, layer: Layer, found: Mapping[str, TensorHeader]
) -> None:
    for role, names in layer.roles().items():
        if names[0] not in found:
            reason = (
                f"{policy.source} ({group.where}) says {layer.scheme}, but it has no {role}: "
                f"no tensor {' or '.join(f'{layer.name}.{part}' for part in names)}"
            )
            raise CheckpointError(layer.name, reason, _RESTORE)


def _check_unused(
    policy: Policy, layer: Layer, found: Mapping[str, TensorHeader], notes: list[str]
) -> None:
    used = {names[0] for names in layer.roles().values()}
    for part in sorted(found.keys() - used - {"bias"}):
        if part not in KV_CACHE_SCALES:
            reason = (
                f"{policy.source} says {layer.scheme}, but there is a tensor {layer.name}.{part}, "
                "which such a layer has not"
            )
            raise CheckpointError(layer.name, reason, "mend the metadata, or remove the tensor")
        notes.append(f"{part} tensors are of the KV cache and not used")
