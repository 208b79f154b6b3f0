"""What reading an adapter needs to know of the model, gathered before anything is replaced."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType

from peft import PeftModel
from torch import nn
from transformers import PreTrainedConfig
from transformers.models.auto import modeling_auto
from transformers.pytorch_utils import Conv1D

from ..adapters.base import BaseFacts, TargetEmbedding, TargetLayer, TargetNorm
from ..adapters.from_peft import plain_modules
from ..adapters.identity import BaseIdentity, identifying_sizes
from ..linear.weights import AnyLinear, linear_shape
from .expert_facts import expert_targets

# PEFT's task types by the registry in which transformers lists the model's class.
_TASKS = (
    ("SEQ_CLS", "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES"),
    ("TOKEN_CLS", "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES"),
    ("QUESTION_ANS", "MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES"),
    ("SEQ_2_SEQ_LM", "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES"),
    ("CAUSAL_LM", "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"),
)


def base_facts(model: nn.Module) -> BaseFacts:
    """Names, shapes and task of a transformers model or of the one inside a `PeftModel`."""
    plain = model.get_base_model() if isinstance(model, PeftModel) else model
    modules = dict(_modules(model))
    config = getattr(plain, "config", None)
    head, table = _output_embedding(plain), _named(plain, "get_input_embeddings")
    return BaseFacts(
        layers=_layers(modules),
        modules=tuple(modules),
        task=_task(plain),
        output_embedding=head,
        model_type=getattr(config, "model_type", ""),
        embeddings={
            name: TargetEmbedding(name, module.num_embeddings, module.embedding_dim)
            for name, module in modules.items()
            if isinstance(module, nn.Embedding)
        },
        norms=_norms(modules),
        input_embedding=table,
        tied_head=_is_tied(modules.get(head or ""), modules.get(table or "")),
        identity=_identity(config),
        experts=expert_targets(modules, getattr(config, "model_type", "")),
    )


def _identity(config: object) -> BaseIdentity:
    if not isinstance(config, PreTrainedConfig):
        return BaseIdentity()
    return BaseIdentity(
        name_or_path=config._name_or_path or "",
        revision=getattr(config, "_commit_hash", None) or "",
        sizes=MappingProxyType(identifying_sizes(config.to_dict())),
    )


def _layers(modules: Mapping[str, nn.Module]) -> dict[str, TargetLayer]:
    layers = {}
    for name, module in modules.items():
        if isinstance(module, AnyLinear):
            outputs, inputs = linear_shape(module)
            has_bias = getattr(module, "bias", None) is not None
            transposed = isinstance(module, Conv1D)
            layers[name] = TargetLayer(
                name, inputs, outputs, has_bias=has_bias, transposed=transposed
            )
    return layers


def _norms(modules: Mapping[str, nn.Module]) -> dict[str, TargetNorm]:
    """Modules of one vector, with or without another for a bias, and nothing else."""
    norms = {}
    for name, module in modules.items():
        own = dict(module.named_parameters())
        weight, bias = own.get("weight"), own.get("bias")
        only_these = own.keys() <= {"weight", "bias"} and not dict(module.named_buffers())
        if weight is None or weight.dim() != 1 or not only_these:
            continue
        if bias is None or bias.shape == weight.shape:
            norms[name] = TargetNorm(name, weight.shape[0], bias is not None)
    return norms


def _is_tied(head: nn.Module | None, table: nn.Module | None) -> bool:
    weight = getattr(head, "weight", None)
    return weight is not None and weight is getattr(table, "weight", None)


def _named(plain: nn.Module, getter: str) -> str | None:
    """The name of the module that one of transformers' getters returns."""
    found = getattr(plain, getter, None)
    module = found() if found else None
    # PEFT may have wrapped the module itself; its name is the same either way.
    return next((name for name, item in plain.named_modules() if item is module), None)


def _modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    return plain_modules(model) if isinstance(model, PeftModel) else model.named_modules()


def _task(model: nn.Module) -> str:
    name = type(model).__name__
    for task, registry in _TASKS:
        if name in getattr(modeling_auto, registry).values():
            return task
    return "FEATURE_EXTRACTION" if _output_embedding(model) is None else "CAUSAL_LM"


def _output_embedding(model: nn.Module) -> str | None:
    return _named(model, "get_output_embeddings")
