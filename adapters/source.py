"""The values that reading produces and needs: facts about the base model, weights of one adapter.

Nothing here touches a file or a module. A layer's `a` and `b` keep the dtype and the layout of the
file; whoever copies them into slots converts them there.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True, eq=False)
class LoraWeights:
    """What one LoRA adapter adds to one linear: `scaling * (x @ a.T) @ b.T`.

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


@dataclass(frozen=True)
class TargetLayer:
    """A linear of the base model that may take a branch.

    Args:
        name: full name in the model ("model.layers.0.self_attn.q_proj").
        in_features: K, the size of the input.
        out_features: N, the size of the output.
        refusal: why it cannot take a branch; None says it can.
    """

    name: str
    in_features: int
    out_features: int
    refusal: str | None = None


@dataclass(frozen=True)
class BaseFacts:
    """What reading an adapter needs to know of the base model; no tensors.

    Args:
        layers: every linear (`nn.Linear` or transformers' `Conv1D`) by its full name.
        modules: the names of all modules, linears included; tells "no linear" from "unknown".
        task: the PEFT task type the model's class stands for (CAUSAL_LM, SEQ_CLS, ...;
            FEATURE_EXTRACTION for a bare encoder or decoder).
        output_embedding: the name of the head that `get_output_embeddings` returns, if any.
        model_type: `config.model_type`, for PEFT's default targets.
    """

    layers: Mapping[str, TargetLayer]
    modules: tuple[str, ...]
    task: str
    output_embedding: str | None
    model_type: str

    def with_refusals(self, refusals: Mapping[str, str]) -> BaseFacts:
        """These facts, with the reasons why some linears cannot take a branch."""
        layers = {
            name: replace(layer, refusal=refusals.get(name, layer.refusal))
            for name, layer in self.layers.items()
        }
        return replace(self, layers=layers)


@dataclass(frozen=True, eq=False)
class AdapterWeights:
    """One adapter, checked against one base model.

    Args:
        source: the path, or "PeftModel adapter 'x'".
        digest: `content_digest` of the layers.
        layers: weights by the layer's full name in the base model.
        notes: what a listing should say ("no effect: every lora_B is zero").
    """

    source: str
    digest: str
    layers: Mapping[str, LoraWeights]
    notes: tuple[str, ...] = ()

    @property
    def rank(self) -> int:
        """The highest rank of any layer."""
        return max(weights.rank for weights in self.layers.values())

    @property
    def parameters(self) -> int:
        """How many numbers the adapter holds."""
        return sum(tensor.numel() for tensor in self._tensors())

    @property
    def nbytes(self) -> int:
        """The size of all tensors as stored."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self._tensors())

    def _tensors(self) -> Iterator[torch.Tensor]:
        for weights in self.layers.values():
            yield weights.a
            yield weights.b


def effect_note(layers: Mapping[str, LoraWeights]) -> str | None:
    """Say why the adapter changes nothing, or None if it does change something."""
    if all(not torch.count_nonzero(weights.b) for weights in layers.values()):
        return "no effect: every lora_B is zero"
    if all(
        weights.scaling == 0
        or not torch.count_nonzero(weights.a)
        or not torch.count_nonzero(weights.b)
        for weights in layers.values()
    ):
        return "no effect: in every layer lora_A, lora_B or the scaling is zero"
    return None


def content_digest(layers: Mapping[str, LoraWeights]) -> str:
    """Identify an adapter by what it computes (I9): 64 hex digits of SHA-256.

    Covered are, layer by layer in the order of their names in the base model: the name, the
    scaling, and of lora_A and lora_B dtype, shape and bytes. The config enters in this resolved
    form: rank, alpha, rsLoRA and the patterns as each layer's scaling and shapes, the target
    settings as the set of layers. Two spellings of the same adapter, another path, another order
    of tensors in the file, or a dropout that only training saw do not change it.
    """
    digest = hashlib.sha256(b"branchline adapter 1: LORA\n")
    for name in sorted(layers):
        weights = layers[name]
        # repr keeps apart names that contain a separator; hex keeps every bit of the scaling.
        digest.update(f"{name!r} {float(weights.scaling).hex()}\n".encode())
        for tensor in (weights.a, weights.b):
            digest.update(f"{tensor.dtype} {tuple(tensor.shape)}\n".encode())
            digest.update(tensor_bytes(tensor))
    return digest.hexdigest()


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """The bytes of a CPU tensor in row-major order; a view wherever it is contiguous."""
    return tensor.detach().contiguous().view(torch.uint8).numpy().reshape(-1).data


def lora_scaling(alpha: float, rank: int, use_rslora: bool) -> float:
    """PEFT's scaling, in PEFT's own order of operations, so that it agrees to the last bit."""
    return alpha / math.sqrt(rank) if use_rslora else alpha / rank
