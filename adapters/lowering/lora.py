"""LoRA with its variants, on linears and embeddings.

    y = base(x) + scaling * (x @ lora_A.T) @ lora_B.T (+ scaling * lora_B.bias)

with `scaling = alpha / r`, or `alpha / sqrt(r)` with rsLoRA (arXiv 2106.09685, 2312.03732).

DoRA (arXiv 2402.09353) rescales each row n of the summed weight to a trained magnitude m:

    g = m / ||W + scaling * B A||   (the norm of each row)
    y = g * (W x + scaling * B A x) + bias

so the base's output, bias included, times g, plus `(1 - g) * bias`, plus the product with its
B rows times g.  Block-diagonal LoRA (PEFT's `use_bdlora`) stores the blocks of A or of B below
one another; they are put in their places here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ...core.errors import AdapterMismatchError, AdapterUnsupportedError
from ..weights import EmbeddingWeights, LayerWeights, LowRank, lora_scaling
from .base import BaseLinear, Shapes, checked


@dataclass(frozen=True)
class LoraSettings:
    """The settings of one module, after all patterns.

    Args:
        rank: r.
        alpha: `lora_alpha`.
        use_rslora: whether the scaling is alpha / sqrt(r).
        use_dora: whether there is a `lora_magnitude_vector`.
        lora_bias: whether lora_B has a bias.
        a_blocks: the blocks of a block-diagonal lora_A; 1 for a plain one.
        b_blocks: the same of lora_B.
    """

    rank: int
    alpha: float
    use_rslora: bool = False
    use_dora: bool = False
    lora_bias: bool = False
    a_blocks: int = 1
    b_blocks: int = 1

    @property
    def scaling(self) -> float:
        """PEFT's, to the last bit."""
        return lora_scaling(self.alpha, self.rank, self.use_rslora)


def shapes(settings: LoraSettings, base: BaseLinear) -> Shapes:
    """lora_A `(r, K)`, lora_B `(N, r)`; with blocks, the inner sizes divided by their number."""
    expected: Shapes = {
        "lora_A": (settings.rank, base.in_features // settings.a_blocks),
        "lora_B": (base.out_features, settings.rank // settings.b_blocks),
    }
    if settings.lora_bias:
        expected["lora_B.bias"] = (base.out_features,)
    if settings.use_dora:
        expected["lora_magnitude_vector"] = (base.out_features,)
    return expected


def lower(
    tensors: Mapping[str, torch.Tensor], settings: LoraSettings, base: BaseLinear
) -> LayerWeights:
    """The parts of LoRA on a linear; A and B stay as stored where nothing is folded into them.

    Args:
        tensors: of `shapes`.
        settings: of this module.
        base: with its weight, for DoRA.

    Raises:
        AdapterFormatError, AdapterMismatchError, AdapterUnsupportedError: see `checked`.
        AdapterMismatchError: blocks that do not divide r, K or N.
        AdapterUnsupportedError: DoRA together with `lora_bias`, DoRA without the base weight, or
            on a weight with a row whose norm is not positive (PEFT would divide by zero).
    """
    if settings.use_dora and settings.lora_bias:
        raise AdapterUnsupportedError(
            f"adapter on {base.name}",
            "has DoRA together with lora_bias, which PEFT does not define",
            "train it with one of the two",
        )
    _check_blocks(settings, base)
    given = checked(tensors, shapes(settings, base), base)
    a = _unblocked(given["lora_A"], settings.a_blocks)
    b = _unblocked(given["lora_B"], settings.b_blocks)
    if settings.use_dora:
        return _dora(a, b, given["lora_magnitude_vector"], settings.scaling, base)
    shift = given["lora_B.bias"].float() * settings.scaling if settings.lora_bias else None
    return LayerWeights(low_rank=LowRank(a, b, settings.scaling), shift=shift)


def embedding_shapes(settings: LoraSettings, num_embeddings: int, embedding_dim: int) -> Shapes:
    """lora_embedding_A `(r, V)` and lora_embedding_B `(D, r)`."""
    return {
        "lora_embedding_A": (settings.rank, num_embeddings),
        "lora_embedding_B": (embedding_dim, settings.rank),
    }


def lower_embedding(
    tensors: Mapping[str, torch.Tensor],
    settings: LoraSettings,
    name: str,
    num_embeddings: int,
    embedding_dim: int,
) -> EmbeddingWeights:
    """The parts of LoRA on an embedding of V tokens and D columns.

    PEFT's forward: `embedding(t) + scaling * lora_embedding_A[:, t] @ lora_embedding_B.T`.

    Raises:
        AdapterFormatError, AdapterMismatchError, AdapterUnsupportedError: see `checked`.
        AdapterUnsupportedError: DoRA, a bias, or blocks.
    """
    variants = {
        "DoRA": settings.use_dora,
        "lora_bias": settings.lora_bias,
        "block-diagonal LoRA": settings.a_blocks > 1 or settings.b_blocks > 1,
    }
    if used := [variant for variant, is_used in variants.items() if is_used]:
        raise AdapterUnsupportedError(
            f"adapter on {name}",
            f"has {' and '.join(used)} on an embedding",
            "train the embedding with plain LoRA or trainable_token_indices",
        )
    expected = embedding_shapes(settings, num_embeddings, embedding_dim)
    given = checked(tensors, expected, BaseLinear(name, num_embeddings, embedding_dim))
    product = LowRank(given["lora_embedding_A"], given["lora_embedding_B"], settings.scaling)
    return EmbeddingWeights(low_rank=product)


def _check_blocks(settings: LoraSettings, base: BaseLinear) -> None:
    for blocks, inner, outer in (
        (settings.a_blocks, base.in_features, settings.rank),
        (settings.b_blocks, settings.rank, base.out_features),
    ):
        if inner % blocks or outer % blocks:
            raise AdapterMismatchError(
                f"adapter on {base.name}",
                f"{blocks} diagonal blocks do not divide {inner} inputs and {outer} outputs",
                "load it on the base model that it was trained on",
            )


def _unblocked(stored: torch.Tensor, blocks: int) -> torch.Tensor:
    return stored if blocks == 1 else torch.block_diag(*stored.chunk(blocks))


def _dora(
    a: torch.Tensor, b: torch.Tensor, magnitude: torch.Tensor, scaling: float, base: BaseLinear
) -> LayerWeights:
    a, b = a.float(), b.float()
    norm = torch.linalg.norm(base.float_weight("DoRA") + scaling * (b @ a), dim=1)
    if not bool((norm > 0).all()):
        row = int((~(norm > 0)).nonzero()[0])
        raise AdapterUnsupportedError(
            f"DoRA on {base.name}",
            f"divides by the norm of row {row} of the adapted weight, {norm[row].item()}",
            "train it without DoRA on this linear",
        )
    gain = magnitude.float() / norm
    bias = base.float_bias("DoRA")
    return LayerWeights(
        low_rank=LowRank(a, gain[:, None] * b, scaling),
        gain=gain,
        shift=None if bias is None else (1 - gain) * bias,
    )
