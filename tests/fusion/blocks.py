"""A module to write forwards for, and forwards that several tests trace."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from transformers.activations import ACT2FN

K = 16
DTYPE = torch.bfloat16


class Clipped(nn.Module):
    top = None

    def __init__(self) -> None:
        super().__init__()
        self.top = 1.5

    def forward(self, x):
        return F.silu(x.clamp(max=self.top))


class Scaling(nn.Module):
    """An activation with a buffer, which may change after a proof."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, x):
        return F.silu(x) * self.scale


class Block(nn.Module):
    """Something to write forwards for."""

    def __init__(self) -> None:
        super().__init__()
        self.offset = nn.Parameter(torch.zeros(1))
        self.gate = nn.Linear(K, 2 * K)
        self.up = nn.Linear(K, 2 * K)
        self.gate_up = nn.Linear(K, 4 * K)
        self.down = nn.Linear(2 * K, K)
        self.other = nn.Linear(2 * K, K)
        self.act = nn.SiLU()
        self.drop = nn.Dropout(0.1)
        self.new_gelu = ACT2FN["gelu_new"]
        self.gelu = nn.GELU()
        self.clipped = Clipped()
        self.scaling = Scaling()
        self.limit, self.factor = 2.0, 0.3
        self.relu_in_place = nn.ReLU(inplace=True)
        self.inner = nn.Sequential(nn.Linear(K, 2 * K), nn.SiLU())


def block(forward) -> nn.Module:
    torch.manual_seed(0)
    return type("Written", (Block,), {"forward": forward})().to(DTYPE).eval()


def limited(self, x):
    gate, up = self.gate(x).clamp(max=self.limit), self.up(x).clamp(-self.limit, self.limit)
    return self.down(self.act(gate) * up)


def limited_after(self, x):
    gate = self.act(self.gate(x)).clamp(max=self.limit)
    return self.down(gate * self.up(x).clamp(min=-self.limit, max=self.limit))


def shifted(self, x):
    up = self.up(x).clamp(-self.limit, self.limit)
    return self.down((up + 0.5) * self.act(self.gate(x)))


def multiplied(self, x):
    return self.down(self.up(x) * self.act(self.gate(x) * self.factor)) * 0.7


def clipped(self, x):
    return self.down(self.clipped(self.up(x)))


def by_hand(self, x):
    up = self.up(x)
    return self.down(up * torch.sigmoid(1.702 * up))
