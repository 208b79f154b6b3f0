"""Float checkpoints wide enough for every scheme, and a run of `quantize_checkpoint` over them."""

from __future__ import annotations

import copy
from pathlib import Path

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from branchline.core.scheme import SCHEMES
from branchline.serving import quantize_checkpoint
from branchline.serving.quantize_report import QuantizationReport
from tests.models import CONFIGS, token_ids

#: Schemes whose inputs have a scale that is stored.
CALIBRATED = tuple(name for name, scheme in SCHEMES.items() if scheme.calibrated)
PROMPTS = [token_ids(4, 12, seed=9)]
#: Blocks have 128 columns.
WIDE = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}


@torch.no_grad()
def build_wide(family: str, **changes) -> nn.Module:
    """A random model of `tests.models.CONFIGS`, made wider."""
    torch.manual_seed(0)
    config = copy.deepcopy(CONFIGS[family])
    for name, value in {**WIDE, **changes}.items():
        if hasattr(config, name):
            setattr(config, name, value)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2 or name.endswith("bias"):
            parameter.normal_(std=0.08)
        else:
            parameter.add_(0.1)
    return model.to(torch.bfloat16).eval()


class WideModels:
    """Float checkpoints by family, each in several files; written when first asked for."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._made: dict[str, tuple[nn.Module, Path]] = {}

    def __call__(self, family: str) -> tuple[nn.Module, Path]:
        """The model, and the folder it lies in."""
        if family not in self._made:
            model, folder = build_wide(family), self._root / family
            model.save_pretrained(folder, max_shard_size="150KB")
            self._made[family] = model, folder
        return self._made[family]


def quantize(source: Path, out: Path, scheme: str, **settings) -> QuantizationReport:
    """`quantize_checkpoint`, with prompts where the scheme needs some."""
    if scheme in CALIBRATED:
        settings.setdefault("calibration", PROMPTS)
    return quantize_checkpoint(source, out, scheme=scheme, **settings)


def linears_of(model: nn.Module) -> dict[str, nn.Linear]:
    """The model's linears by name."""
    return {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear)}


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of a folder."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}
