"""A checkpoint without its values: its config, its module tree and the headers of its tensors."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from ..adapters.base import BaseFacts
from ..core.errors import BranchlineError
from ..linear.checkpoint import TensorHeader
from .base_facts import base_facts
from .folder import (
    UNREADABLE,
    check_folder,
    model_class,
    read_config,
    unreadable,
    without_quantization,
)
from .shards import has_shards, read_headers, shard_files

_FLOATS = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True)
class Skeleton:
    """A checkpoint without its values.

    Attributes:
        folder: of the checkpoint.
        config: what it says of the model.
        model: of that config, on the meta device.
    """

    folder: Path
    config: PreTrainedConfig
    model: PreTrainedModel

    @classmethod
    def of(cls, folder: Path) -> Skeleton:
        """Read a checkpoint's folder.

        Raises:
            WrapError: no folder of a model, or one that transformers cannot read.
        """
        check_folder(folder)
        try:
            config = without_quantization(read_config(folder))
            with torch.device("meta"):
                return cls(folder, config, model_class(config, folder)(config))
        except BranchlineError:
            raise
        except UNREADABLE as error:
            raise unreadable(folder, error) from error

    @cached_property
    def headers(self) -> dict[str, TensorHeader]:
        """Of all tensors; empty where the weights are no safetensors files."""
        return read_headers(self.files) if has_shards(self.folder) else {}

    @cached_property
    def headers_alone(self) -> dict[str, TensorHeader]:
        """As `headers`, of files that may end where their tensors would begin."""
        return read_headers(self.files, whole=False) if has_shards(self.folder) else {}

    @cached_property
    def files(self) -> list[Path]:
        """That hold the weights."""
        if has_shards(self.folder):
            return shard_files(self.folder)
        return sorted(self.folder.glob("pytorch_model*.bin"))

    @cached_property
    def facts(self) -> BaseFacts:
        """For adapters."""
        return base_facts(self.model)

    @property
    def dtype(self) -> torch.dtype | None:
        """Of what is not quantised, as loading chooses it."""
        if self.config.dtype in _FLOATS:
            return self.config.dtype
        floats = {
            header.dtype
            for name, header in self.headers_alone.items()
            if name.endswith(".weight") and header.dtype in _FLOATS
        }
        return floats.pop() if len(floats) == 1 else None
