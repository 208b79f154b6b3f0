"""A model that runs without its weights: large ones are views of a few random numbers.

What the audit finds out by running a model (who reads what, which rows stay apart, what an
activation computes) does not hang on its weights, as long as they are no constants.  Small ones,
those of norms above all, are initialised as the class does it; linears do not multiply at all
(`kernels.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import nn
from transformers import PreTrainedModel

from ...core.errors import WrapError
from ..folder import model_class
from ..skeleton import Skeleton

#: Elements from which on a parameter is a view.
LARGE = 1 << 16
_SPREAD = 0.02
_APART = 0.2


def hollow_model(skeleton: Skeleton) -> PreTrainedModel:
    """The model of a checkpoint, in eval mode on the CPU, with made-up weights.

    Args:
        skeleton: the checkpoint.

    Returns:
        the model; its parameters have the shapes and dtypes that loading would give them, and those
        of `LARGE` elements or more take no memory of their own.

    Raises:
        WrapError: a module whose buffers its class does not initialise.
    """
    dtype = skeleton.dtype or torch.float32
    model = _unfilled(skeleton, dtype)
    numbers = _Numbers()
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for name, module in model.named_modules():
            _fill(name, module, numbers, model._init_weights)
        model.tie_weights()
    return model.eval()


def _unfilled(skeleton: Skeleton, dtype: torch.dtype) -> PreTrainedModel:
    """Of the checkpoint's dtype, on the meta device."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"):
            model = model_class(skeleton.config, skeleton.folder)(skeleton.config)
    finally:
        torch.set_default_dtype(default)
    kept = tuple(_kept_in_float32(model, dtype))
    for name, parameter in model.named_parameters():
        if any(part in name for part in kept):
            parameter.data = parameter.data.float()
    return model


def _kept_in_float32(model: PreTrainedModel, dtype: torch.dtype) -> Iterator[str]:
    """Parts of names of parameters that loading leaves in float32."""
    if dtype in (torch.float16, torch.bfloat16):
        yield from model._keep_in_fp32_modules_strict or ()
    if dtype == torch.float16:
        yield from model._keep_in_fp32_modules or ()


class _Numbers:
    """Views of random numbers: no two rows of one are the same."""

    def __init__(self) -> None:
        self._kept: dict[torch.dtype, torch.Tensor] = {}

    def view(self, like: torch.Tensor) -> torch.Tensor:
        """Of the shape and dtype of `like`: each row begins one number after the one before."""
        count = sum(size - 1 for size in like.shape) + 1
        kept = self._kept.get(like.dtype)
        if kept is None or kept.numel() < count:
            kept = torch.randn(2 * count).mul_(_SPREAD).to(like.dtype)
            self._kept[like.dtype] = kept
        return kept.as_strided(like.shape, (1,) * like.dim())


def _fill(
    name: str, module: nn.Module, numbers: _Numbers, initialise: Callable[[nn.Module], None]
) -> None:
    large = False
    for key, parameter in module._parameters.items():
        if parameter is None:
            continue
        large = large or parameter.numel() >= LARGE
        if parameter.numel() >= LARGE:
            made = numbers.view(parameter)
        else:
            made = torch.randn(parameter.shape).mul_(_SPREAD).to(parameter.dtype)
        module._parameters[key] = nn.Parameter(made, requires_grad=False)
    for key, buffer in module._buffers.items():
        if buffer is not None:
            floating = buffer.is_floating_point()
            value = float("nan") if floating else 0
            module._buffers[key] = torch.full(buffer.shape, value, dtype=buffer.dtype)
    # Views cannot be written to, and are filled already.
    if large:
        return
    initialise(module)
    for parameter in module._parameters.values():
        # Ones and zeros would hide where a norm rounds, and whether it adds one to its weight.
        if parameter is not None and parameter.dim() == 1:
            parameter.add_(torch.randn(parameter.shape).mul_(_APART).to(parameter.dtype))
    for key, buffer in module._buffers.items():
        if buffer is not None and buffer.is_floating_point() and bool(buffer.isnan().any()):
            raise WrapError(
                f"module '{name}' ({type(module).__qualname__})",
                f"does not initialise its buffer {key} without weights",
                "audit the loaded model instead: branchline.wrap(...).audit()",
            )
