"""How transformers' own loader fills a model with the codes and scales of a checkpoint.

transformers reads the shards, renames, ties and casts; only the quantised linears are ours.  Before
the weights are read, each is replaced by a module that has the checkpoint's tensors for parameters;
afterwards, one by one, by a `QuantizedLinear`.  Nothing is ever dequantised.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from ..core.errors import CheckpointError
from ..linear.checkpoint import KV_CACHE_SCALES, CheckpointQuant, ResolvedQuant, TensorHeader
from ..linear.quantized_linear import QuantizedLinear
from ..linear.weights import kind_refusal, replace_module
from .checkpoint_names import CheckpointNames, checkpoint_names, tied_weight
from .folder import some
from .shards import read_headers

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


@dataclass(frozen=True)
class _Found:
    """What the metadata and the headers say of the model."""

    names: CheckpointNames
    resolved: ResolvedQuant


class QuantizedLoader(HfQuantizer):
    """Puts modules with the checkpoint's tensors in place of the quantised linears."""

    quantization_config: LoaderConfig

    def __init__(self, quantization_config: LoaderConfig, **_: Any) -> None:
        # The weights are quantised, though the config that transformers sees no longer says so.
        super().__init__(quantization_config, pre_quantized=True)
        self._found: _Found | None = None
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
        headers = read_headers(map(Path, checkpoint_files))
        names = checkpoint_names(model, headers)
        resolved = metadata.resolve(stored_linears(model, names), headers)
        in_model = names.in_model()
        kept = set()
        for stored in resolved.schemes:
            name = in_model[stored]
            tensors = _by_last_part(stored, resolved, headers)
            refuse_tied(model, name)
            _replace(model, name, PendingLinear(model.get_submodule(name), tensors))
            kept |= {f"{name}.{part}" for part in tensors}
        refuse_leftovers(headers, resolved)
        self._found, self._kept = _Found(names, resolved), frozenset(kept)

    def unused(self, unexpected: Sequence[str]) -> list[str]:
        """Those of the unexpected tensors that no loader could do without: not the KV cache's."""
        return [name for name in unexpected if name.rpartition(".")[2] not in KV_CACHE_SCALES]

    def install(self, model: PreTrainedModel) -> ResolvedQuant:
        """Turn what was loaded into `QuantizedLinear`s, one at a time.

        Raises:
            CheckpointError: codes of another shape than the model's.
            ScaleError: a scale that cannot be used.
        """
        assert self._found is not None
        names, resolved = self._found.names, self._found.resolved
        in_model = names.in_model()
        for stored, scheme in resolved.schemes.items():
            name = in_model[stored]
            pending = model.get_submodule(name)
            assert isinstance(pending, PendingLinear)
            tensors = {f"{stored}.{part}": tensor for part, tensor in pending.named_buffers()}
            weight, contract = resolved.assemble(stored, tensors, pending.shape)
            made = QuantizedLinear(name, weight, pending.bias, scheme, contract, model.dtype)
            _replace(model, name, made.train(pending.training))
        _forget(model)
        return resolved


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


def stored_linears(model: PreTrainedModel, names: CheckpointNames) -> list[str]:
    """The model's linears as the checkpoint names them; those that it has not, by their own names.

    Linears whose weights transformers merges or splits have no name in the checkpoint.
    """
    return [
        names.stored.get(name, name)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and kind_refusal(module) is None
        and name not in names.converted
    ]


def _by_last_part(
    stored: str, resolved: ResolvedQuant, headers: Mapping[str, TensorHeader]
) -> dict[str, TensorHeader]:
    return {full.rpartition(".")[2]: headers[full] for full in resolved.tensor_names(stored)}


def refuse_tied(model: PreTrainedModel, name: str) -> None:
    """Refuse a quantised linear of the model that shares its weight.

    Raises:
        CheckpointError: the config ties it.
    """
    other = tied_weight(model, name)
    if other is not None:
        raise CheckpointError(
            name,
            f"is quantised, but the config ties its weight to {other}",
            "set tie_word_embeddings to false if the checkpoint has both",
        )


def refuse_leftovers(headers: Mapping[str, TensorHeader], resolved: ResolvedQuant) -> None:
    """Refuse codes that no linear takes: transformers would cast them to the model's dtype.

    Raises:
        CheckpointError: there are such tensors.
    """
    used = {full for stored in resolved.schemes for full in resolved.tensor_names(stored)}
    left = [n for n, header in headers.items() if is_codes(n, header) and n not in used]
    if left:
        raise CheckpointError(
            some(left),
            "holds codes, but belongs to no linear of the model that is read as quantised",
            "pass a checkpoint whose linears alone are quantised, one by one",
        )


def is_codes(name: str, header: TensorHeader) -> bool:
    """Whether a tensor holds, or must be taken to hold, quantised values."""
    if header.dtype.is_floating_point:
        return header.dtype.itemsize < 2
    return header.dtype in (torch.int8, torch.uint8) and name.endswith(".weight")


def _replace(model: nn.Module, name: str, module: nn.Module) -> None:
    before = model.get_submodule(name)
    for path, found in list(model.named_modules(remove_duplicate=False)):
        if found is before:
            replace_module(model, path, module)


def _forget(model: PreTrainedModel) -> None:
    """Take back what transformers notes on a model of one of its quantisers."""
    for name in ("hf_quantizer", "is_quantized", "quantization_method"):
        delattr(model, name)
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            for field in ("_is_quantized", "quantization_config"):
                vars(module.config).pop(field, None)


def with_decisions(resolved: ResolvedQuant, ignored: Sequence[str]) -> ResolvedQuant:
    """`resolved`, that also says which tensors of the checkpoint were not loaded."""
    if not ignored:
        return resolved
    note = f"of the KV cache and not used: {some(ignored)}"
    return replace(resolved, decisions=(*resolved.decisions, note))
