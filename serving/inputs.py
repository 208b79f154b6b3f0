"""What a model is run on while it is wrapped: example inputs and calibration prompts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from ..core.errors import CalibrationError, WrapError

_EXAMPLE_ROWS, _EXAMPLE_TOKENS = 2, 5
_CALIBRATION_TOKENS = 1024

Prompts = Iterable[str | torch.Tensor | Mapping[str, torch.Tensor]]


def example_inputs(model: nn.Module) -> dict[str, torch.Tensor]:
    """Token ids (2, 5) that are no padding: enough to see who reads what.

    Raises:
        WrapError: the model has no vocabulary to take them from.
    """
    embedding = _input_embedding(model)
    size = getattr(embedding, "num_embeddings", None)
    if size is None or size < 2:
        raise WrapError(
            f"model {type(model).__qualname__}",
            "takes no token ids that could be made up for the recorded forward",
            "pass example={name: tensor of two rows} to branchline.wrap (from Python only)",
        )
    count = _EXAMPLE_ROWS * _EXAMPLE_TOKENS
    ids = (torch.arange(count) * 7 + 3) % size
    device = next(model.parameters()).device
    return {"input_ids": ids.view(_EXAMPLE_ROWS, _EXAMPLE_TOKENS).to(device)}


def _input_embedding(model: nn.Module) -> nn.Module | None:
    getter = getattr(model, "get_input_embeddings", None)
    try:
        return getter() if getter else None
    except NotImplementedError:
        return None


def calibration_batches(
    model: nn.Module, prompts: Prompts, tokenizer: Any
) -> Iterator[dict[str, torch.Tensor]]:
    """Keyword arguments of one forward for each prompt.

    Args:
        model: what will be run.
        prompts: texts, token ids (tokens,) or (rows, tokens), or keyword arguments.
        tokenizer: for texts; looked up by the model's name where None.

    Raises:
        CalibrationError: texts without a tokenizer, or a prompt of another kind.
    """
    device = next(model.parameters()).device
    for prompt in prompts:
        if isinstance(prompt, str):
            tokenizer = tokenizer or load_tokenizer(model)
            encoded = tokenizer(
                prompt, return_tensors="pt", truncation=True, max_length=_CALIBRATION_TOKENS
            )
            batch = {key: encoded[key] for key in ("input_ids", "attention_mask") if key in encoded}
        elif isinstance(prompt, torch.Tensor) and prompt.dim() in (1, 2):
            batch = {"input_ids": prompt.reshape(-1, prompt.shape[-1])}
        elif isinstance(prompt, Mapping) and all(
            isinstance(value, torch.Tensor) for value in prompt.values()
        ):
            batch = dict(prompt)
        else:
            raise CalibrationError(
                f"calibration prompt of type {type(prompt).__qualname__}",
                "is neither text, token ids (1-D or 2-D) nor tensors by keyword",
                "pass strings, tensors or dicts",
            )
        if all(value.numel() for value in batch.values()):
            yield {key: value.to(device) for key, value in batch.items()}


def load_tokenizer(model: nn.Module) -> Any:
    """The tokenizer that lies beside the model's weights.

    Raises:
        CalibrationError: there is none.
    """
    from transformers import AutoTokenizer

    name = getattr(getattr(model, "config", None), "_name_or_path", "")
    remedy = "pass tokenizer=..., or token ids instead of texts"
    if not name:
        raise CalibrationError("calibration texts", "the model was built without a folder", remedy)
    try:
        return AutoTokenizer.from_pretrained(name, local_files_only=True)
    except (OSError, ValueError) as error:
        reason = f"no tokenizer lies at {name!r} ({error})"
        raise CalibrationError("calibration texts", reason, remedy) from error
