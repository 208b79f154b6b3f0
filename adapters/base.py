"""What reading an adapter needs to know of the base model; no tensors, no modules."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace


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
