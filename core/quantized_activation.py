"""`QuantizedActivation`: codes with their scale, which no raw consumer can mistake for a tensor."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import InitVar, dataclass, field
from typing import Any, NoReturn

import torch

from .errors import MalformedActivationError, QuantKeyMismatchError, RawConsumerError
from .quant_key import QuantKey, ScaleLayout


@dataclass(frozen=True, eq=False)
class RawOutput:
    """The raw rows that a producer wrote beside its codes.

    Attributes:
        values: of the activation's shape and dtype, with all other rows unwritten; or, if
            `compact`, (n, K): the written rows alone.
        rows: bool (R,), which of the R requests that the activation's rows belong to in turn have
            theirs written; None for all.
        compact: only written rows lie in `values`, one after the other.
    """

    values: torch.Tensor
    rows: torch.Tensor | None = None
    compact: bool = False


@dataclass(frozen=True, eq=False, repr=False)
class QuantizedActivation:
    """An activation as a producer emits it: codes and scale, and perhaps the raw tensor beside.

    It is no tensor.  Shape, dtype and device of the activation can be read (model code does so to
    build views of a linear's *output*); anything that would read values raises
    `RawConsumerError`, naming the producer and the consumer (I1).

    Attributes:
        codes: what was passed as `data`: `quant_key.code_shape(orig_shape)`, of
            `quant_key.code_dtype`.
        scale: `quant_key.scale_shape(orig_shape)`, `quant_key.scale_dtype`; multiplies the codes.
        orig_dtype: dtype of the activation the codes stand for.
        orig_shape: its shape (..., K).
        quant_key: what the codes were quantised for.
        raw: raw rows, where a raw consumer is live and the producer served both; else None.
        producer: name of what made the codes, for messages.
        global_scale: float32, one element, for keys that have one.
        shrunk: where the producer absorbed LoRA branches, the shrunk rows by the name of the
            linear: float32 (M, width), the M rows of the activation flattened; else None.
        shared_outputs: where several linears read this object, what one kernel computed for the
            others, by kernel; None where nobody may leave anything here.

    Raises:
        MalformedActivationError: a dtype, shape or device that contradicts the key.
    """

    data: InitVar[torch.Tensor]
    scale: torch.Tensor
    orig_dtype: torch.dtype
    orig_shape: torch.Size
    quant_key: QuantKey
    raw: RawOutput | None = None
    producer: str = "an unnamed producer"
    global_scale: torch.Tensor | None = None
    shrunk: Mapping[str, torch.Tensor] | None = None
    shared_outputs: dict[Any, torch.Tensor] | None = None
    codes: torch.Tensor = field(init=False)

    def __post_init__(self, data: torch.Tensor) -> None:
        # `x.data` is how torch code reads a tensor's values: here it must refuse, not hand out
        # codes.  So what is passed as `data` is kept under another name.
        object.__setattr__(self, "codes", data)
        object.__setattr__(self, "orig_shape", torch.Size(self.orig_shape))
        reason = self._fault()
        if reason:
            raise MalformedActivationError(
                f"quantised activation of {self.producer} for key {self.quant_key}",
                reason,
                "make it with branchline.fusion.quantize or a registered producer",
            )

    @classmethod
    def unchecked(cls, **fields: Any) -> QuantizedActivation:
        """For outputs that were allocated by their key, so that no check can fail.

        A site makes one in every forward; the checks take longer than a kernel on one row.

        Args:
            **fields: every attribute by its name.
        """
        made = object.__new__(cls)
        made.__dict__.update(fields)
        return made

    def shared(self) -> QuantizedActivation:
        """This activation, for several linears that read this one object."""
        object.__setattr__(self, "shared_outputs", {})
        return self

    def _fault(self) -> str | None:
        key = self.quant_key
        shape = self.orig_shape
        if self.raw is not None and not isinstance(self.raw, RawOutput):
            return "its raw rows are a bare tensor, no RawOutput"
        if not shape:
            return "an activation has at least one dimension"
        if not self.orig_dtype.is_floating_point or self.orig_dtype.itemsize < 2:
            return f"the original dtype must be float16, bfloat16 or float32, not {self.orig_dtype}"
        for what, tensor, dtype, expected in (
            ("codes", self.codes, key.code_dtype, key.code_shape(shape)),
            ("scale", self.scale, key.scale_dtype, key.scale_shape(shape)),
            ("raw", self.raw and self.raw.values, self.orig_dtype, self._raw_shape()),
            *(
                (
                    f"shrunk rows of {name}",
                    rows,
                    torch.float32,
                    (shape[:-1].numel(), rows.shape[-1]),
                )
                for name, rows in (self.shrunk or {}).items()
            ),
        ):
            if tensor is None:
                continue
            fault = _tensor_fault(what, tensor, dtype, expected, self.codes.device)
            if fault:
                return fault
        if key.global_scale != (self.global_scale is not None):
            return f"the key says global_scale={key.global_scale}"
        return self._global_scale_fault() or self._layout_fault()

    def _raw_shape(self) -> tuple[int, ...]:
        if self.raw is None or not self.raw.compact:
            return tuple(self.orig_shape)
        return (self.raw.values.shape[0], self.orig_shape[-1])

    def _global_scale_fault(self) -> str | None:
        scale = self.global_scale
        if scale is None:
            return None
        if scale.numel() != 1:
            return f"global scale has {scale.numel()} elements, expected 1"
        shape = tuple(scale.shape)
        return _tensor_fault("global scale", scale, torch.float32, shape, self.codes.device)

    def _layout_fault(self) -> str | None:
        if self.quant_key.layout != ScaleLayout.COLUMN_MAJOR:
            return None
        if self.scale.dim() < 2:
            return "a column-major scale needs an activation of two dimensions or more"
        return None if self.scale.mT.is_contiguous() else "the scale is not column-major"

    @property
    def shape(self) -> torch.Size:
        """Shape of the activation the codes stand for."""
        return self.orig_shape

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the activation the codes stand for, not of the codes."""
        return self.orig_dtype

    @property
    def device(self) -> torch.device:
        """Device of the codes."""
        return self.codes.device

    @property
    def ndim(self) -> int:
        """Number of dimensions of the activation."""
        return len(self.orig_shape)

    def dim(self) -> int:
        """Number of dimensions of the activation."""
        return len(self.orig_shape)

    def size(self, dim: int | None = None) -> torch.Size | int:
        """Shape of the activation, or one entry of it."""
        return self.orig_shape if dim is None else self.orig_shape[dim]

    def require_raw(self, consumer: str) -> torch.Tensor:
        """The whole raw activation, for `consumer`.

        Raises:
            RawConsumerError: the producer kept none, or only some of its rows.
        """
        if self.raw is None or self.raw.rows is not None:
            self._refuse(consumer)
        return self.raw.values

    def require_raw_rows(self, consumer: str) -> RawOutput:
        """The raw rows that were asked for, for `consumer`, which reads no others.

        Raises:
            RawConsumerError: the producer kept none.
        """
        if self.raw is None:
            self._refuse(consumer)
        return self.raw

    def shrunk_for(self, consumer: str) -> torch.Tensor | None:
        """The shrunk rows for the linear `consumer`, where the producer absorbed its branches."""
        return None if self.shrunk is None else self.shrunk.get(consumer)

    def _refuse(self, consumer: str) -> NoReturn:
        raise RawConsumerError(
            f"{consumer} reads the raw activation",
            f"{self.producer} emitted {self._emitted()}, since no other raw consumer was live "
            "when this batch was planned",
            "register the consumer before the batch begins, or route the site with policy='static'",
        )

    def _emitted(self) -> str:
        beside = [
            *(["the raw rows of some adapters"] if self.raw is not None else []),
            *(["LoRA products"] if self.shrunk else []),
        ]
        return f"only {' and '.join([f'{self.quant_key} codes', *beside])}"

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> NoReturn:
        name = torch.overrides.resolve_name(func) or str(func)
        _find(cls, (*args, *(kwargs or {}).values()))._refuse(name)

    def __getattr__(self, name: str) -> NoReturn:
        if hasattr(torch.Tensor, name):
            self._refuse(f"torch.Tensor.{name}")
        raise AttributeError(f"QuantizedActivation has no attribute {name!r}")

    # By identity, though `==` is refused: an activation can be a dictionary's key.
    __hash__ = object.__hash__

    def __repr__(self) -> str:
        raw = "with raw" if self.raw is not None else "no raw"
        if self.shrunk:
            raw = f"shrunk for {', '.join(self.shrunk)}"
        return (
            f"QuantizedActivation(shape={tuple(self.orig_shape)}, dtype={self.orig_dtype}, "
            f"key={self.quant_key}, producer={self.producer!r}, {raw})"
        )


def _refusing_operator(name: str) -> Callable[..., NoReturn]:
    def operator(self: QuantizedActivation, *_: object) -> NoReturn:
        self._refuse(f"operator {name}")

    return operator


# Python looks operators up on the type, past __getattr__ and __torch_function__.  For `tensor + q`
# too: torch takes our refusal, a TypeError, for NotImplemented, and Python then asks the reflected
# operator, where == and != would fall back on identity and answer.
_ARITHMETIC = "add sub mul truediv floordiv mod pow matmul and or xor lshift rshift"
for _name in (
    *(f"__{prefix}{name}__" for name in _ARITHMETIC.split() for prefix in ("", "r", "i")),
    *(
        "__divmod__ __rdivmod__ __neg__ __pos__ __invert__ __abs__ __round__ __trunc__ __floor__ "
        "__ceil__ __lt__ __le__ __gt__ __ge__ __eq__ __ne__ __bool__ __float__ __int__ __complex__ "
        "__index__ __len__ __iter__ __reversed__ __contains__ __getitem__ __setitem__ __delitem__ "
        "__array__"
    ).split(),
):
    setattr(QuantizedActivation, _name, _refusing_operator(_name))


def _tensor_fault(
    what: str,
    tensor: torch.Tensor,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    device: torch.device,
) -> str | None:
    if tensor.dtype != dtype:
        return f"{what} are {tensor.dtype}, expected {dtype}"
    if tuple(tensor.shape) != shape:
        return f"{what} have shape {tuple(tensor.shape)}, expected {shape}"
    if tensor.device != device:
        return f"{what} lie on {tensor.device}, the codes on {device}"
    return None


def _find(cls: type[QuantizedActivation], values: Any) -> QuantizedActivation:
    """The first activation among nested arguments; torch hands them over unflattened."""
    stack = [values]
    while stack:
        value = stack.pop()
        if isinstance(value, cls):
            return value
        if isinstance(value, (list, tuple)):
            stack.extend(value)
        elif isinstance(value, dict):
            stack.extend(value.values())
    raise AssertionError("torch dispatched to QuantizedActivation without one among its arguments")


def as_quantized_activation(
    x: torch.Tensor | QuantizedActivation,
    expected_key: QuantKey | None,
    *,
    consumer: str = "linear",
) -> QuantizedActivation | None:
    """The contract's one entry for consumers: codes as they are, None for a plain tensor.

    Args:
        x: what reached the consumer.
        expected_key: the key the consumer declares; None for one that takes only raw tensors.
        consumer: its name, for messages.

    Raises:
        QuantKeyMismatchError: codes for another key.
        RawConsumerError: codes for a consumer that takes none, or a float8 tensor without scale.
    """
    if isinstance(x, QuantizedActivation):
        if expected_key is None:
            x._refuse(consumer)
        if x.quant_key != expected_key:
            raise QuantKeyMismatchError(
                f"{consumer} consumes {expected_key}",
                f"{x.producer} emitted {x.quant_key}",
                "plan the site again: its consumers changed after the plan was made",
            )
        return x
    if x.dtype.itemsize == 1:
        raise RawConsumerError(
            f"{consumer} was handed a bare {x.dtype} tensor",
            "codes never travel without their scale",
            "pass a QuantizedActivation",
        )
    return None
