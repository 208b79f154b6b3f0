"""What every module has that holds a checkpoint's codes: nobody moves, casts or saves it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import nn

from ..core.errors import WrapError


class CheckpointModule(nn.Module):
    """Codes of a checkpoint, before kernels take them over.

    Args:
        name: full name in the model.
        dtype: of the activations.
    """

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        super().__init__()
        self.name = name
        self.dtype = dtype

    def _save_to_state_dict(self, *args: Any, **kwargs: Any) -> None:
        raise WrapError(
            self.name,
            "its codes are no parameters, so a state dict or a saved checkpoint would lack them",
            "copy the checkpoint's folder instead",
        )

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        raise WrapError(
            self.name,
            "cannot be moved or cast: its codes, scales and dtype are the checkpoint's",
            "pass dtype= to branchline.load_model, or set dtype in its config.json",
        )
