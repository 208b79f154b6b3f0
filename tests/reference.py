"""PEFT on a fake-quantised base: the independent answer that served models are compared with."""

from __future__ import annotations

import copy
from pathlib import Path

import torch
from peft import PeftModel
from torch import nn
from transformers.pytorch_utils import Conv1D

from branchline import ServedModel

FP8_MAX = 448.0


def _grid(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    # The reciprocal, as everywhere in the field: a quotient rounds some codes the other way.
    codes = (x.float() * (1.0 / scale)).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    return codes.float() * scale


class FakeQuantLinear(nn.Linear):
    """An `nn.Linear` (so that PEFT wraps it) whose weight and input lie on the FP8 grid."""

    @classmethod
    def of(cls, module: nn.Module, input_scale: float | None) -> FakeQuantLinear:
        weight = module.weight.detach()
        weight = (weight.t() if isinstance(module, Conv1D) else weight).float()
        made = cls(weight.shape[1], weight.shape[0], bias=module.bias is not None)
        amax = weight.abs().amax(1, keepdim=True).clamp(min=2.0**-40)
        made.weight.data = _grid(weight, amax / FP8_MAX)
        if module.bias is not None:
            made.bias.data = module.bias.detach().float()
        made.input_scale = None if input_scale is None else torch.tensor(input_scale)
        return made

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = self.input_scale
        if scale is None:
            scale = x.float().abs().amax(-1, keepdim=True).clamp(min=2.0**-40) / FP8_MAX
        out = torch.nn.functional.linear(_grid(x, scale), self.weight, self.bias)
        return out.to(x.dtype)


def fake_quantized(model: nn.Module, served: ServedModel) -> nn.Module:
    """A copy of the plain `model` that computes what `served` should, without any of our code.

    The static scales are the only thing taken from `served`: they are its calibration's result.
    """
    model = copy.deepcopy(model)
    head = model.get_output_embeddings()
    for name, module in list(model.named_modules()):
        if not isinstance(module, nn.Linear | Conv1D) or module is head:
            continue
        scale = None
        if served.calibration is not None:
            scale = served.calibration.input_amax[name] / FP8_MAX
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, FakeQuantLinear.of(module, scale))
    return model


def with_adapters(model: nn.Module, folders: dict[str, Path]) -> PeftModel:
    """`model` under PEFT, every folder loaded by its name."""
    names = iter(folders.items())
    first, folder = next(names)
    peft_model = PeftModel.from_pretrained(model, folder, adapter_name=first)
    for name, folder in names:
        peft_model.load_adapter(folder, adapter_name=name)
    return peft_model.eval()
