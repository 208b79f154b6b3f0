"""What a linear tells its producer: the key it consumes and its static scale."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from ..core.oracle import check_static_scale
from ..core.quant_key import QuantKey

#: Shapes of activations that a contract keeps what follows from them.
_REMEMBERED = 256


@dataclass(frozen=True, eq=False)
class InputScale:
    """A calibrated per-tensor input scale; read-only.

    Attributes:
        value: float32, shape (1,), on the consumer's device: a copy, not to be written to.
        source: where it comes from: "calibration", "checkpoint", or nothing that is known.
    """

    value: torch.Tensor
    source: str = ""

    def __post_init__(self) -> None:
        # Codes are made with `reciprocal` and read with `value`: they may not drift apart when
        # whoever gave the tensor changes it.
        object.__setattr__(self, "value", self.value.detach().clone())

    @classmethod
    def checked(
        cls, scale: torch.Tensor | float | None, subject: str, source: str = ""
    ) -> InputScale:
        """Validate a scale for the layer `subject`.

        Raises:
            ScaleError: absent, non-positive, not finite or of more than one element.
        """
        return cls(check_static_scale(scale, subject), source)

    @cached_property
    def reciprocal(self) -> float:
        """``1 / scale``, rounded once to float32: what activations are multiplied with."""
        return self.value.reciprocal().item()

    @cached_property
    def number(self) -> float:
        """The scale as a Python float, for comparison and display."""
        return self.value.item()


@dataclass(frozen=True, eq=False)
class InputContract:
    """What a linear consumes.

    Attributes:
        key: the quantised input it takes, or None for one that takes only raw activations.
        scale: its static scale; None for a dynamic key or no key.
        global_scale: the per-tensor scale above the block scales, for a key that has one.
    """

    key: QuantKey | None
    scale: InputScale | None = None
    global_scale: InputScale | None = None

    def static_scale(self, subject: str) -> InputScale:
        """The scale, for a static key of the layer or kernel `subject`.

        Raises:
            ScaleError: there is none.
        """
        return self.scale if self.scale is not None else InputScale.checked(None, subject)

    def required_global_scale(self, subject: str) -> InputScale:
        """The global scale, for a key of the layer or kernel `subject` that has one.

        Raises:
            ScaleError: there is none.
        """
        if self.global_scale is not None:
            return self.global_scale
        return InputScale.checked(None, subject)

    def same_input(self, other: InputContract) -> bool:
        """Whether codes made for one are, to the bit, codes for the other."""
        return (self.key, *self._numbers()) == (other.key, *other._numbers())

    @cached_property
    def shapes(self) -> dict[torch.Size, tuple[tuple[int, ...], tuple[int, ...]]]:
        """Shapes of codes and scales by that of the activation, as far as they were worked out."""
        return {}

    def code_and_scale_shape(self, shape: torch.Size) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Of an activation of `shape` (..., K), for a contract with a key."""
        found = self.shapes.get(shape)
        if found is None:
            assert self.key is not None
            if len(self.shapes) >= _REMEMBERED:
                self.shapes.clear()
            found = self.key.code_shape(shape), self.key.scale_shape(shape)
            self.shapes[shape] = found
        return found

    def _numbers(self) -> tuple[float | None, ...]:
        return tuple(s and s.number for s in (self.scale, self.global_scale))
