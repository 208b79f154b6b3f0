"""What one adapter does to a model, whatever PEFT type it was: parts that linears can be served by.

Every type is lowered to a few parts.  A linear with an adapter computes, for a row x of its input,

    x' = rotate(x * in_scale)
    y  = rotate_output(gain * (x' @ weight.T if there is a weight, else base(x')))
         + scaling * (x @ a.T) @ b.T + x @ delta.T + shift

with each part that is absent left out.  What a branch reads of the raw activation, and with it
whether the site before it can stay fused, follows from the parts alone.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property, lru_cache
from types import MappingProxyType
from typing import Any

import torch
from blake3 import blake3

from ..linear.parts import CHANGES_INPUT, READS_RAW, Part


class _Flat:
    """A value of this module, whose parts are listed once."""

    @cached_property
    def flat(self) -> tuple[tuple[str, torch.Tensor | float], ...]:
        """Tensors and numbers below it, by their path in it ("low_rank.a")."""
        found: list[tuple[str, torch.Tensor | float]] = []
        for name in _field_names(type(self)):
            value = getattr(self, name)
            if value is None:
                continue
            if isinstance(value, tuple):
                below = [(f"{name}.{index}", factor) for index, factor in enumerate(value)]
            elif isinstance(value, torch.Tensor | float | int):
                found.append((name, value))
                continue
            else:
                below = [(name, value)]
            for path, part in below:
                found += [(f"{path}.{end}", own) for end, own in part.flat]
        return tuple(found)


@lru_cache(maxsize=16)
def _field_names(kind: Any) -> tuple[str, ...]:
    return tuple(item.name for item in fields(kind))


@dataclass(frozen=True, eq=False)
class LowRank(_Flat):
    """`scaling * (x @ a.T) @ b.T`.

    Args:
        a: `(r, K)` as stored, float32, float16 or bfloat16, on the CPU.
        b: `(N, r)` as stored, same choice of dtypes, on the CPU.
        scaling: alpha / r, or alpha / sqrt(r) with rsLoRA, after this layer's patterns.
    """

    a: torch.Tensor
    b: torch.Tensor
    scaling: float

    @property
    def rank(self) -> int:
        """The inner size of the product."""
        return self.a.shape[0]


@dataclass(frozen=True, eq=False)
class RotationFactor(_Flat):
    """`x[..., order]` (as it is, where None), cut into blocks of b, each times its own matrix.

    Args:
        blocks: `(K / b, b, b)` float32: block i of x becomes `x_i @ blocks[i]`.
        order: int64 `(K,)`: the columns of x in the order in which they are cut; None for as is.
    """

    blocks: torch.Tensor
    order: torch.Tensor | None = None


@dataclass(frozen=True, eq=False)
class LayerWeights(_Flat):
    """The parts of one adapter on one linear of K inputs and N outputs; see the module.

    Args:
        low_rank: a product of two thin matrices.
        gain: float32 `(N,)`, that the base's output (its bias included) is multiplied with.
        shift: float32 `(N,)`, added at the end.
        in_scale: float32 `(K,)`, that the input is multiplied with.
        rotation: applied to the input one after the other, after `in_scale`.
        delta: `(N, K)`, a dense change of the weight.
        weight: `(N, K)`, a weight in the base's place (a bias of the base is then not added either:
            what there is of one lies in `shift`).
        output_rotation: applied to the base's output one after the other, after `gain`; blocks of
            `N / b`.
    """

    low_rank: LowRank | None = None
    gain: torch.Tensor | None = None
    shift: torch.Tensor | None = None
    in_scale: torch.Tensor | None = None
    rotation: tuple[RotationFactor, ...] = ()
    delta: torch.Tensor | None = None
    weight: torch.Tensor | None = None
    output_rotation: tuple[RotationFactor, ...] = ()

    @property
    def parts(self) -> int:
        """The sum of its `Part`s."""
        found = sum(part for part, name in _LAYER_PARTS if getattr(self, name) is not None)
        found += Part.ROTATION if self.rotation else 0
        found += Part.OUTPUT_ROTATION if self.output_rotation else 0
        return Part.PLAIN if found == Part.LOW_RANK else found

    @property
    def changes_input(self) -> bool:
        """Whether the base is fed something else than the site's output."""
        return bool(self.parts & CHANGES_INPUT)

    @property
    def reads_raw(self) -> bool:
        """Whether the raw activation is needed; false for what acts on the output alone."""
        return bool(self.parts & READS_RAW)

    @property
    def shrink_rank(self) -> int | None:
        """The rank, where all that is done with the raw activation is a LoRA shrink; else None."""
        reads = self.parts & READS_RAW
        shrinks = self.low_rank is not None and reads in (Part.PLAIN, Part.LOW_RANK)
        return self.rank if shrinks else None

    @property
    def rank(self) -> int:
        """Of the low-rank part; 0 without one."""
        return 0 if self.low_rank is None else self.low_rank.rank


_LAYER_PARTS = (
    (Part.LOW_RANK, "low_rank"),
    (Part.GAIN, "gain"),
    (Part.SHIFT, "shift"),
    (Part.IN_SCALE, "in_scale"),
    (Part.DELTA, "delta"),
    (Part.WEIGHT, "weight"),
)


@dataclass(frozen=True, eq=False)
class EmbeddingWeights(_Flat):
    """The parts of one adapter on one embedding of V tokens and D columns.

    For a token t: `row(t) + scaling * (a[:, t] @ b.T)`, with `row(t)` from `tokens` where t is one
    of `token_ids`, else from `weight` where there is one, else the base's.

    Args:
        low_rank: `a (r, V)`, `b (D, r)`.
        token_ids: int64 `(T,)`, ascending.
        tokens: `(T, D)`, rows in the place of those of `token_ids`.
        weight: `(V, D)`, in the base's place.
    """

    low_rank: LowRank | None = None
    token_ids: torch.Tensor | None = None
    tokens: torch.Tensor | None = None
    weight: torch.Tensor | None = None


@dataclass(frozen=True, eq=False)
class NormWeights(_Flat):
    """One adapter's own weights of one norm of K columns.

    Args:
        weight: `(K,)`, in the place of the norm's.
        bias: `(K,)`, in the place of the norm's; None where it has none.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None = None


@dataclass(frozen=True, eq=False)
class ExpertsWeights(_Flat):
    """One adapter's low-rank products on one projection of E experts, K inputs and N outputs each.

    For a row x that expert e computes: `scaling * (x @ a[e].T) @ b[e].T` is added.

    Args:
        a: `(E, r, K)`, or `(1, r, K)` where all experts share it; float32, float16 or bfloat16, on
            the CPU.
        b: `(E, N, r)`, or `(1, N, r)`; all gates before all ups, however the base stores them.
        scaling: as in `LowRank`.
    """

    a: torch.Tensor
    b: torch.Tensor
    scaling: float

    @property
    def rank(self) -> int:
        """The inner size of each expert's product."""
        return self.a.shape[1]

    @property
    def parts(self) -> int:
        """Of each pair of a token and an expert: a product, and nothing else."""
        return Part.PLAIN

    @property
    def reads_raw(self) -> bool:
        """Whether the raw activation is needed."""
        return True

    @property
    def shrink_rank(self) -> int:
        """The rank: all that is done with the raw activation is a LoRA shrink."""
        return self.rank


AnyWeights = LayerWeights | EmbeddingWeights | NormWeights | ExpertsWeights

_NOTHING: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, eq=False)
class AdapterWeights:
    """One adapter, checked against one base model.

    Args:
        source: the path, or "PeftModel adapter 'x'".
        digest: `content_digest` of all its parts.
        layers: parts by the linear's full name in the base model.
        notes: what a listing should say ("no effect: every lora_B is zero").
        embeddings: parts by the embedding's full name.
        norms: parts by the norm's full name.
        peft_type: as its config names it.
        config: its adapter_config.json, decoded; names and settings of training included.
        invocation: token ids, from whose last occurrence on it acts; empty: on every token.
        uses_base: it was computed with the base's weights, and is another where those change.
        chat_template: that its folder brings; no part of what it computes.
        experts: parts by the full name of the projection ("model.layers.0.mlp.experts.down_proj").
    """

    source: str
    digest: str
    layers: Mapping[str, LayerWeights]
    notes: tuple[str, ...] = ()
    embeddings: Mapping[str, EmbeddingWeights] = field(default_factory=lambda: _NOTHING)
    norms: Mapping[str, NormWeights] = field(default_factory=lambda: _NOTHING)
    peft_type: str = "LORA"
    config: Mapping[str, Any] = field(default_factory=lambda: _NOTHING)
    invocation: tuple[int, ...] = ()
    uses_base: bool = False
    chat_template: str | None = None
    experts: Mapping[str, ExpertsWeights] = field(default_factory=lambda: _NOTHING)

    @property
    def modules(self) -> Mapping[str, AnyWeights]:
        """The parts of linears, embeddings, norms and projections of experts, by full names."""
        return {**self.layers, **self.embeddings, **self.norms, **self.experts}

    @property
    def rank(self) -> int:
        """The highest rank of any layer, or of any expert; 0 where no part has one."""
        both = (*self.layers.values(), *self.experts.values())
        return max((weights.rank for weights in both), default=0)

    @property
    def parameters(self) -> int:
        """How many numbers its parts hold."""
        return sum(tensor.numel() for tensor in self.tensors)

    @property
    def nbytes(self) -> int:
        """The size of all its tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)

    @cached_property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Every tensor of every part."""
        groups = (self.layers, self.embeddings, self.norms, self.experts)
        each = (weights for group in groups for weights in group.values())
        return tuple(tensor for weights in each for _, tensor in part_tensors(weights))


def effect_note(
    layers: Mapping[str, LayerWeights], experts: Mapping[str, ExpertsWeights] = _NOTHING
) -> str | None:
    """Say why an adapter of these layers changes nothing; None if it does, or may.

    Args:
        layers: of it.
        experts: of it; it holds nothing else: no embedding, no norm.
    """
    on_linears = [weights.low_rank for weights in layers.values() if weights.low_rank is not None]
    products = [*on_linears, *experts.values()]
    if not products or any(weights.parts != Part.PLAIN for weights in layers.values()):
        return None
    if all(not torch.count_nonzero(part.b) for part in products):
        return "no effect: every lora_B is zero"
    if all(
        part.scaling == 0 or not torch.count_nonzero(part.a) or not torch.count_nonzero(part.b)
        for part in products
    ):
        return "no effect: in every layer lora_A, lora_B or the scaling is zero"
    return None


def content_digest(*groups: Mapping[str, AnyWeights], invocation: tuple[int, ...] = ()) -> str:
    """Identify an adapter by what it computes (I9): 64 hex digits of BLAKE3.

    Covered are, module by module in the order of their names in the base model: the name, and of
    each part its name, its scaling, or dtype, shape and bytes.  The config enters in this resolved
    form: rank, alpha, rsLoRA and the patterns as each layer's scaling and shapes, the target
    settings as the set of layers.  Two spellings of the same adapter, another path, another order
    of tensors in the file, or a dropout that only training saw do not change it.

    Args:
        *groups: parts by the names of their modules.
        invocation: see `AdapterWeights`.
    """
    digest = blake3(b"branchline adapter 3\n")
    modules = {name: weights for group in groups for name, weights in group.items()}
    for name in sorted(modules):
        # repr keeps apart names that contain a separator; hex keeps every bit of a number.
        text = f"{name!r} {type(modules[name]).__name__}\n"
        for part, value in modules[name].flat:
            if isinstance(value, torch.Tensor):
                digest.update(f"{text}{part} {value.dtype} {tuple(value.shape)}\n".encode())
                digest.update(tensor_bytes(value))
                text = ""
            else:
                text += f"{part} {float(value).hex()}\n"
        digest.update(text.encode())
    if invocation:
        digest.update(f"invocation {invocation}\n".encode())
    return digest.hexdigest()


def part_tensors(weights: AnyWeights) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of one module's parts, by their path in it ("low_rank.a")."""
    for part, value in weights.flat:
        if isinstance(value, torch.Tensor):
            yield part, value


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """The bytes of a CPU tensor in row-major order; a view wherever it is contiguous."""
    dense = tensor.detach().contiguous()
    # Several times quicker than by way of numpy, and that counts for many small tensors.
    array = _array_of(dense.nbytes).from_address(dense.data_ptr())
    array.tensor = dense
    return memoryview(array).cast("B")


@lru_cache(maxsize=256)
def _array_of(size: int) -> Any:
    # A class of its own, so that an array can keep alive what it shows.
    return type("_Bytes", (ctypes.c_char * size,), {})


def lora_scaling(alpha: float, rank: int, use_rslora: bool) -> float:
    """PEFT's scaling, in PEFT's own order of operations, so that it agrees to the last bit."""
    return alpha / math.sqrt(rank) if use_rslora else alpha / rank
