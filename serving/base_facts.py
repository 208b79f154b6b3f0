"""What reading an adapter needs to know of the model, gathered before anything is replaced."""

from __future__ import annotations

from collections.abc import Iterator

from peft import PeftModel
from torch import nn
from transformers.models.auto import modeling_auto

from ..adapters.base import BaseFacts, TargetLayer
from ..adapters.from_peft import plain_modules
from ..linear.weights import AnyLinear, linear_shape

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
    layers = {
        name: TargetLayer(name, in_features, out_features)
        for name, module in modules.items()
        if isinstance(module, AnyLinear)
        for out_features, in_features in [linear_shape(module)]
    }
    return BaseFacts(
        layers=layers,
        modules=tuple(modules),
        task=_task(plain),
        output_embedding=_output_embedding(plain),
        model_type=getattr(getattr(plain, "config", None), "model_type", ""),
    )


def _modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    return plain_modules(model) if isinstance(model, PeftModel) else model.named_modules()


def _task(model: nn.Module) -> str:
    name = type(model).__name__
    for task, registry in _TASKS:
        if name in getattr(modeling_auto, registry).values():
            return task
    return "FEATURE_EXTRACTION" if _output_embedding(model) is None else "CAUSAL_LM"


def _output_embedding(model: nn.Module) -> str | None:
    getter = getattr(model, "get_output_embeddings", None)
    head = getter() if getter else None
    # PEFT may have wrapped the head itself; its name is the same either way.
    return next((name for name, module in model.named_modules() if module is head), None)
