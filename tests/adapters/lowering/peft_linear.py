"""One small layer with an adapter that PEFT made, and the tensors that PEFT would save for it."""

from __future__ import annotations

import warnings

import peft
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from branchline.adapters.lowering.base import BaseLinear
from branchline.adapters.weights import LayerWeights
from tests.parts_reference import apply_parts

NAME = "net.proj"


class Net(nn.Module):
    """A model of one layer."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.net = nn.ModuleDict({"proj": layer})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net["proj"](x)


def linear(inputs: int, outputs: int, bias: bool = True, seed: int = 0) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(inputs, outputs, bias=bias)


def conv1d(inputs: int, outputs: int, seed: int = 0) -> Conv1D:
    torch.manual_seed(seed)
    layer = Conv1D(outputs, inputs)
    nn.init.normal_(layer.weight, std=0.3)
    nn.init.normal_(layer.bias)
    return layer


class Adapted:
    """A layer, PEFT's model around it, and what lowering is given.

    Args:
        config: of the adapter; its target is "proj" where it has none.
        layer: the base.
        spread: of the random numbers that are added to what PEFT initialised.
    """

    def __init__(self, config: peft.PeftConfig, layer: nn.Module, spread: float = 0.3) -> None:
        if config.target_modules is None:
            config.target_modules = ["proj"]
        self.layer = layer
        is_conv1d = isinstance(layer, Conv1D)
        self.weight = (layer.weight.T if is_conv1d else layer.weight).detach().clone()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.model = peft.get_peft_model(Net(layer), config).eval()
        self.config = self.model.peft_config["default"]
        torch.manual_seed(1)
        for name, parameter in self.model.named_parameters():
            # AdaLoRA's rank number is no weight, and is not saved.
            if ".default" in name and "ranknum" not in name:
                parameter.data += spread * torch.randn_like(parameter)

    def saved(self) -> dict[str, torch.Tensor]:
        """All that PEFT would write, with the names as written."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return peft.get_peft_model_state_dict(self.model)

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """Those of the layer, by the name within it, a final "weight" left out."""
        prefix = f"base_model.model.{NAME}."
        return {
            name.removeprefix(prefix).removesuffix(".weight"): tensor.clone()
            for name, tensor in self.saved().items()
            if name.startswith(prefix)
        }

    def base(self, **changes) -> BaseLinear:
        outputs, inputs = self.weight.shape
        values = {"weight": lambda: self.weight, "bias": self.layer.bias}
        return BaseLinear(NAME, inputs, outputs, **(values | changes))

    def inputs(self) -> torch.Tensor:
        """`(3, 4, K)`, one of whose rows is zero."""
        torch.manual_seed(2)
        x = torch.randn(3, 4, self.weight.shape[1])
        x[1, 2] = 0
        return x

    def expect(self, parts: LayerWeights) -> None:
        """The parts give PEFT's output, which is not the base's."""
        x = self.inputs()
        with torch.no_grad():
            expected = self.model(x)
            with self.model.disable_adapter():
                plain = self.model(x)
            actual = apply_parts(x, self.layer_alone, parts)
        assert (expected - plain).abs().max() > 1e-3
        size = expected.abs().max().clamp(min=1)
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5 * float(size))

    def layer_alone(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight, self.layer.bias)
