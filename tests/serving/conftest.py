"""Wrapped small models with three adapters each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import nn

import branchline
from tests.models import TARGETS, build, save_adapter, token_ids


@dataclass
class Family:
    """One model family, and the folders of three adapters for it."""

    name: str
    folders: dict[str, Path]

    def plain(self, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
        """The model as it comes from transformers."""
        return build(self.name, dtype)

    def wrap(self, dtype: torch.dtype = torch.bfloat16, **settings) -> branchline.ServedModel:
        """A freshly wrapped model without adapters."""
        settings.setdefault("quant", "fp8-static")
        if settings["quant"] == "fp8-static":
            settings.setdefault("calibration", [token_ids(4, 12, seed=9)])
        return branchline.wrap(self.plain(dtype), **settings)

    def served(self, dtype: torch.dtype = torch.bfloat16, **settings) -> branchline.ServedModel:
        """The same with all three adapters loaded."""
        model = self.wrap(dtype, **settings)
        for name, folder in self.folders.items():
            model.adapters.load(name, folder)
        return model


@pytest.fixture(scope="session")
def make_family(tmp_path_factory) -> Callable[[str], Family]:
    """Families by name; the folders are written once a session."""
    made: dict[str, Family] = {}

    def make(name: str) -> Family:
        if name not in made:
            root = tmp_path_factory.mktemp(name)
            model = build(name)
            attention, mlp = TARGETS[name]
            made[name] = Family(
                name,
                {
                    "attn": save_adapter(model, root / "attn", attention, rank=8, seed=1),
                    "mlp": save_adapter(model, root / "mlp", mlp, rank=4, seed=2, use_rslora=True),
                    "all": save_adapter(model, root / "all", "all-linear", rank=16, seed=3),
                },
            )
        return made[name]

    return make


@pytest.fixture(params=sorted(TARGETS))
def family(request, make_family) -> Family:
    """Every family in turn."""
    return make_family(request.param)


@pytest.fixture
def llama(make_family) -> Family:
    """The family for tests whose subject is not the architecture."""
    return make_family("llama")
