"""Activations by definition: what a site computes, to the bit."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F

from ..errors import ConfigError

_ENCODINGS = 65536
_CUSTOM_PREFIX = "custom-"


def _relu2(x: torch.Tensor) -> torch.Tensor:
    return F.relu(x).square()


def _gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x, approximate="tanh")


@dataclass(frozen=True)
class Activation:
    """One line of `ACTIVATIONS`.

    Attributes:
        function: the definition, on float32.
        computed: kernels compute it, and torch gives an element the same bytes wherever it lies.
            Any other is looked up in a table of all encodings of a two-byte dtype (`unary_table`).
    """

    function: Callable[[torch.Tensor], torch.Tensor]
    computed: bool = False


#: Unary activations by name.  Adding one is one line here.
ACTIVATIONS: dict[str, Activation] = {
    "identity": Activation(lambda x: x, computed=True),
    "relu": Activation(F.relu, computed=True),
    "relu2": Activation(_relu2, computed=True),
    "silu": Activation(F.silu, computed=True),
    "gelu_tanh": Activation(_gelu_tanh),
    "gelu_erf": Activation(F.gelu),
}

#: What a limit, and the magnitude of an offset or a multiplier, may be.
LIMITS, OFFSETS, FACTORS = (2.0**-14, 65504.0), (2.0**-14, 65504.0), (2.0**-64, 2.0**64)

#: Tables of activations that no name is known for, as a model's own module gave them.
_custom: dict[str, torch.Tensor] = {}


@dataclass(frozen=True)
class ActivationSemantics:
    """What an activation site computes.

    ``act(gate)``, or ``act(gate) * up`` if gated.  Before that ``gate = gate * multiplier``,
    rounded; then ``gate = min(gate, limit)``, and ``up = clamp(up, -limit, limit)``; last
    ``up = up + up_offset``, rounded.

    The table of a custom activation is the gate's whole side, whatever is clamped or multiplied
    in it, and before or after the activation.  Its `limit` is that of `up` alone.

    An offset is a sum in registers where a table of `up` would be a second look-up of each element.

    Attributes:
        activation: a name of `ACTIVATIONS`, or what `define_custom` returned.
        gated: multiplied with a second tensor.
        limit: rounded to the dtype of the tensors before it is compared; None for none.
        multiplier: of the gate, float32; None for none.
        up_offset: added to `up` in float32, as given; None for none, which zero is not: it would
            make +0.0 of -0.0.

    Raises:
        ConfigError: a limit, multiplier or offset out of range; an offset without an `up`; a custom
            activation with a multiplier, or with a limit and no `up`.
    """

    activation: str
    gated: bool
    limit: float | None = None
    multiplier: float | None = None
    up_offset: float | None = None

    def __post_init__(self) -> None:
        for what, size, (least, most) in (
            ("limit", self.limit, LIMITS),
            ("multiplier", _magnitude(self.multiplier), FACTORS),
            ("up_offset", _magnitude(self.up_offset), OFFSETS),
        ):
            # Not zero, whose sign would count; and finite in every dtype.
            if size is not None and not least <= size <= most:
                raise ConfigError(
                    f"{what} of {self.activation}",
                    f"is {getattr(self, what):g}",
                    f"pass a finite {what} from {least:g} to {most:g}, or none",
                )
        if self.up_offset is not None and not self.gated:
            raise ConfigError(
                str(self), "adds an offset to an `up` that it has not", "leave the offset out"
            )
        if not self.custom:
            return
        stray = "multiplier" if self.multiplier is not None else "limit"
        if self.multiplier is not None or (self.limit is not None and not self.gated):
            raise ConfigError(
                str(self),
                f"a custom activation's table holds its {stray} already",
                "make the table of the whole gate's side, and leave the parameter out",
            )

    @property
    def custom(self) -> bool:
        """Whether a table, and no known name, says what the gate's side is."""
        return self.activation.startswith(_CUSTOM_PREFIX)

    @property
    def family(self) -> str:
        """The name without parameters: what producers are registered for."""
        name = "custom" if self.custom else self.activation
        return f"{name}_mul" if self.gated else name

    @property
    def tabled(self) -> bool:
        """Whether kernels look the gate's side up in `unary_table`, and do not compute it."""
        known = ACTIVATIONS.get(self.activation)
        return known is None or not known.computed

    def __str__(self) -> str:
        name = f"{self.activation}_mul" if self.gated else self.activation
        facts = [
            f"{what}={value:g}"
            for what, value in (
                ("limit", self.limit),
                ("multiplier", self.multiplier),
                ("up_offset", self.up_offset),
            )
            if value is not None
        ]
        return f"{name}[{', '.join(facts)}]" if facts else name


def _magnitude(value: float | None) -> float | None:
    return None if value is None else abs(value)


def define_custom(values: torch.Tensor) -> str:
    """Name an activation by its table.

    Args:
        values: (65536,), a two-byte float dtype: the result for each encoding, in the order of the
            encodings as unsigned integers.

    Returns:
        a name for `ActivationSemantics`, the same for the same table.
    """
    table = values.detach().cpu().clone()
    digest = hashlib.sha256(table.view(torch.uint8).numpy().tobytes())
    digest.update(str(table.dtype).encode())
    name = f"{_CUSTOM_PREFIX}{digest.hexdigest()[:12]}"
    _custom[name] = table
    return name


# Never evicted: kernels, and captured graphs of them, hold a table's address.
@cache
def unary_table(
    semantics: ActivationSemantics, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """The gate's side of `semantics` (multiplier and limit included) for every encoding.

    Args:
        semantics: which activation.
        dtype: float16 or bfloat16.
        device: where torch evaluates it, and where the table lies.

    Returns:
        (65536,) in `dtype`, by the encoding as an unsigned integer; not to be written to.

    Raises:
        ConfigError: the activation is known for another dtype only, or not at all.
    """
    with torch.inference_mode(False), torch.no_grad():
        codes = torch.arange(_ENCODINGS, dtype=torch.int32, device=device).to(torch.int16)
        return gate_side(semantics, codes.view(dtype))


def gate_side(semantics: ActivationSemantics, gate: torch.Tensor) -> torch.Tensor:
    """The gate's side of a contiguous tensor, computed and not looked up, in its dtype.

    Torch gives some activations other bytes where a tensor is no whole number of vectors:
    `activate` is the definition.
    """
    return _act(semantics.activation, _gate(semantics, gate))


def times_up(
    semantics: ActivationSemantics, side: torch.Tensor, up: torch.Tensor | None
) -> torch.Tensor:
    """What `semantics` makes of the gate's side and, if gated, of `up`; all of one dtype."""
    if not semantics.gated:
        return side
    assert up is not None
    if semantics.limit is not None:
        up = up.clamp(-semantics.limit, semantics.limit)
    if semantics.up_offset is not None:
        offset = torch.tensor(semantics.up_offset, dtype=torch.float32, device=up.device)
        up = (up.float() + offset).to(up.dtype)
    return (side.float() * up.float()).to(side.dtype)


def _act(name: str, x: torch.Tensor) -> torch.Tensor:
    """The activation of a contiguous tensor, rounded to its dtype."""
    if name in ACTIVATIONS:
        return ACTIVATIONS[name].function(x.float()).to(x.dtype)
    table = _custom.get(name)
    if table is None or table.dtype != x.dtype:
        known = "no dtype in this process" if table is None else str(table.dtype)
        raise ConfigError(
            f"activation {name!r} on {x.dtype}",
            f"is defined for {known}",
            f"use one of {', '.join(ACTIVATIONS)}",
        )
    return _look_up(table.to(x.device), x)


def _look_up(table: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return table[x.contiguous().view(torch.int16).to(torch.int32) & 0xFFFF]


def _gate(semantics: ActivationSemantics, gate: torch.Tensor) -> torch.Tensor:
    if semantics.custom:
        return gate
    if semantics.multiplier is not None:
        factor = torch.tensor(semantics.multiplier, dtype=torch.float32, device=gate.device)
        gate = (gate.float() * factor).to(gate.dtype)
    if semantics.limit is not None:
        gate = gate.clamp(max=semantics.limit)
    return gate


def activate(
    semantics: ActivationSemantics, gate: torch.Tensor, up: torch.Tensor | None = None
) -> torch.Tensor:
    """The raw activation at its rounding boundary.

    Args:
        semantics: which activation.
        gate: (..., K), float16, bfloat16 or float32.
        up: (..., K), same dtype, for a gated activation; else None.

    Returns:
        (..., K) in the dtype of `gate`.
    """
    if semantics.tabled and gate.dtype.itemsize == 2:
        side = _look_up(unary_table(semantics, gate.dtype, gate.device), gate)
    else:
        side = gate_side(semantics, gate)
    return times_up(semantics, side, up)
