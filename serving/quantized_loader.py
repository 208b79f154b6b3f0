"""How transformers' own loader fills a model with the codes and scales of a checkpoint.

transformers reads the shards, renames, ties and casts; only the quantised linears are ours.  Before
the weights are read, each is replaced by a module that has the checkpoint's tensors for parameters;
afterwards, one by one, by a `QuantizedLinear`.  Codes of experts, which transformers would stack,
are read by us.  Nothing is ever dequantised.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from ..linear.checkpoint import KV_CACHE_SCALES, CheckpointQuant, ResolvedQuant, TensorHeader
from ..linear.quantized_linear import QuantizedLinear
from ..linear.weights import replace_module
from .pending_experts import ExpertsReader, PendingExperts
from .shards import read_headers
from .stored_model import StoredModel, with_notes

_METHOD = "branchline"


class LoaderConfig(QuantizationConfigMixin):
    """Carries the checkpoint's metadata to `QuantizedLoader` through `from_pretrained`.

    Args:
        metadata: of the checkpoint.
    """

    def __init__(self, metadata: CheckpointQuant | None = None) -> None:
        # Any: the annotation is an enum of the methods that transformers brings.
        self.quant_method: Any = _METHOD
        self.metadata = metadata


class QuantizedLoader(HfQuantizer):
    """Puts modules with the checkpoint's tensors in place of the quantised linears."""

    quantization_config: LoaderConfig

    def __init__(self, quantization_config: LoaderConfig, **_: Any) -> None:
        # The weights are quantised, though the config that transformers sees no longer says so.
        super().__init__(quantization_config, pre_quantized=True)
        self._found: StoredModel | None = None
        self._files: tuple[Path, ...] = ()
        self._passed_over: set[str] = set()
        self._kept: frozenset[str] = frozenset()

    @property
    def is_trainable(self) -> Any:
        return False

    def is_serializable(self) -> Any:
        return False

    def get_new_dtype(self, converter: Any, param: Any, dtype: Any) -> Any:
        # A model may ask for float32 by a pattern that matches a quantised linear's name.
        if converter.target_patterns[0] in self._kept:
            return None
        return super().get_new_dtype(converter, param, dtype)

    def _process_model_before_weight_loading(
        self, model: PreTrainedModel, *, checkpoint_files: Sequence[str], **_: Any
    ) -> None:
        metadata = self.quantization_config.metadata
        assert metadata is not None
        self._files = tuple(map(Path, checkpoint_files))
        found = StoredModel.read(model, metadata, read_headers(self._files))
        kept = set()
        for name, stored in found.linears.items():
            tensors = _by_last_part(stored, found.resolved, found.headers)
            _replace(model, name, PendingLinear(model.get_submodule(name), tensors))
            kept |= {f"{name}.{part}" for part in tensors}
        for name, experts in found.experts.items():
            _replace(model, name, PendingExperts(model.get_submodule(name), experts))
        self._found, self._kept = found, frozenset(kept)
        self._pass_over_experts(model, found)

    def _pass_over_experts(self, model: PreTrainedModel, found: StoredModel) -> None:
        """`install` reads them: transformers would report thousands of tensors without a place."""
        prefix = re.escape(f"{model.base_model_prefix}.")
        for name, stored in found.experts.items():
            experts = re.sub(f"^{prefix}", "", re.escape(name))
            weights = "|".join(stored.projections)
            self._passed_over.add(rf"^({prefix})?{experts}\.(\d+\.|{weights})")
        before = model._keys_to_ignore_on_load_unexpected or ()
        model._keys_to_ignore_on_load_unexpected = {*before, *self._passed_over}

    def unused(self, unexpected: Sequence[str]) -> list[str]:
        """Those of the unexpected tensors that no loader could do without: not the KV cache's."""
        return [name for name in unexpected if name.rpartition(".")[2] not in KV_CACHE_SCALES]

    def ignored(self, unexpected: Sequence[str]) -> list[str]:
        """Those of the unexpected tensors that nobody reads: the KV cache's."""
        return [name for name in unexpected if name.rpartition(".")[2] in KV_CACHE_SCALES]

    def install(self, model: PreTrainedModel) -> ResolvedQuant:
        """Turn what was loaded into `QuantizedLinear`s and `QuantizedExperts`, one at a time.

        Raises:
            CheckpointError: codes of another shape than the model's, or experts that no one
                scheme holds.
            ScaleError: a scale that cannot be used.
        """
        assert self._found is not None
        found, resolved = self._found, self._found.resolved
        for name, stored in found.linears.items():
            pending = model.get_submodule(name)
            assert isinstance(pending, PendingLinear)
            tensors = {f"{stored}.{part}": tensor for part, tensor in pending.named_buffers()}
            weight, contract = resolved.assemble(stored, tensors, pending.shape)
            scheme = resolved.schemes[stored]
            made = QuantizedLinear(name, weight, pending.bias, scheme, contract, model.dtype)
            _replace(model, name, made.train(pending.training))
        notes = self._install_experts(model, found)
        _forget(model)
        kept = set(model._keys_to_ignore_on_load_unexpected or ()) - self._passed_over
        model._keys_to_ignore_on_load_unexpected = kept
        return with_notes(resolved, notes)

    def _install_experts(self, model: PreTrainedModel, found: StoredModel) -> list[str]:
        if not found.experts:
            return []
        dtype = model.dtype
        reader = ExpertsReader(self._files, found.resolved, found.in_files)
        for name, stored in found.experts.items():
            pending = model.get_submodule(name)
            assert isinstance(pending, PendingExperts)
            device = _device_beside(model, name)
            _replace(model, name, reader.read(stored, pending, dtype, device))
        return [f"{text} (experts of {count} modules)" for text, count in reader.notes.items()]


# Not as decorators: their annotations would forget the classes.
register_quantization_config(_METHOD)(LoaderConfig)
register_quantizer(_METHOD)(QuantizedLoader)


class PendingLinear(nn.Module):
    """A quantised linear while transformers loads: its buffers are the checkpoint's tensors.

    Args:
        linear: the model's own, on the meta device.
        tensors: the checkpoint's, by the last part of their names.
    """

    bias: nn.Parameter | None

    def __init__(self, linear: nn.Module, tensors: Mapping[str, TensorHeader]) -> None:
        super().__init__()
        assert isinstance(linear, nn.Linear)
        self.shape = (linear.out_features, linear.in_features)
        self.register_parameter("bias", linear.bias)
        for part, (dtype, shape) in tensors.items():
            self.register_buffer(part, torch.empty(shape, dtype=dtype, device="meta"))


def _by_last_part(
    stored: str, resolved: ResolvedQuant, headers: Mapping[str, TensorHeader]
) -> dict[str, TensorHeader]:
    return {full.rpartition(".")[2]: headers[full] for full in resolved.tensor_names(stored)}


def _replace(model: nn.Module, name: str, module: nn.Module) -> None:
    before = model.get_submodule(name)
    for path, found in list(model.named_modules(remove_duplicate=False)):
        if found is before:
            replace_module(model, path, module)


def _device_beside(model: nn.Module, name: str) -> torch.device:
    """Where the router of these experts was put, or else the model."""
    parent = model.get_submodule(name.rpartition(".")[0])
    return next(parent.parameters(), next(model.parameters())).device


def _forget(model: PreTrainedModel) -> None:
    """Take back what transformers notes on a model of one of its quantisers."""
    for name in ("hf_quantizer", "is_quantized", "quantization_method"):
        delattr(model, name)
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            for field in ("_is_quantized", "quantization_config"):
                vars(module.config).pop(field, None)
