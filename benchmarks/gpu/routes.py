"""A served model under every policy, with no adapter, one, and many in its batch.

What is timed is a whole forward, launches included.  Rows without adapters must have the base's
bytes under every policy, and rows with adapters the same logits up to rounding.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

import branchline
from benchmarks.gpu import world
from benchmarks.gpu.timing import wall
from benchmarks.harness import ResultsDifferError, say

POLICIES = ("static", "dynamic", "dual", "absorbed")
COUNTS = (0, 1, 8, 64)
ROWS = 64
PROMPTS = (1, 128)
#: What float32 sums in another order may make of a row's logits, as a part of its length.
_ROUNDING = 2e-2


@dataclass(frozen=True)
class Sizes:
    """What is served.

    Attributes:
        hidden: columns of the model's residual.
        layers: of the model.
        counts: numbers of different adapters among `ROWS` rows; row 0 never has one.
        prompts: tokens of each row.
    """

    hidden: int
    layers: int
    counts: tuple[int, ...]
    prompts: tuple[int, ...]


def run(device: str, sizes: Sizes, rounds: int) -> Iterator[dict[str, Any]]:
    """Every policy with every number of adapters; prints and yields one line each.

    Raises:
        ResultsDifferError: a policy changes the base's bytes or what an adapter adds.
    """
    names = [f"adapter{number}" for number in range(max(sizes.counts))]
    shape = world.config(sizes.hidden, sizes.layers)
    with TemporaryDirectory() as folder:
        world.save_adapters(shape, Path(folder), names, device)
        served = {}
        for policy in POLICIES:
            one = branchline.wrap(
                world.model(shape, device), quant="fp8-dynamic", policy=policy,
                max_loras=max(1, len(names)), max_lora_rank=world.RANK,
            )  # fmt: skip
            for name in names:
                one.adapters.load(name, Path(folder) / name)
            served[policy] = one
    for columns in sizes.prompts:
        ids = world.tokens(ROWS, columns, device)
        for count in sizes.counts:
            lines = _measure(served, ids, names[:count], device, rounds)
            for line in lines:
                say(_row(line))
            yield from lines


def _measure(
    served: dict[str, Any], ids: torch.Tensor, names: list[str], device: str, rounds: int
) -> list[dict[str, Any]]:
    rows = [names[row % len(names)] if names and row else None for row in range(ROWS)]

    def forward(policy: str) -> torch.Tensor:
        one = served[policy]
        with one.adapters.rows(rows), torch.inference_mode():
            return one(input_ids=ids, use_cache=False, logits_to_keep=1).logits[:, -1]

    wanted = forward(POLICIES[0]).float()
    for policy in POLICIES[1:]:
        _check(policy, forward(policy).float(), wanted)
    spent = wall([lambda p=policy: forward(p) for policy in POLICIES], device, rounds)
    return [
        {
            "policy": policy,
            "adapters": len(names),
            "rows": ROWS,
            "tokens_per_row": ids.shape[1],
            "milliseconds": seconds * 1e3,
            "static_milliseconds": spent[0] * 1e3,
        }
        for policy, seconds in zip(POLICIES, spent, strict=True)
    ]


def _check(policy: str, found: torch.Tensor, wanted: torch.Tensor) -> None:
    if not torch.equal(found[0], wanted[0]):
        raise ResultsDifferError(f"policy {policy}: a row without an adapter has other bytes")
    error = (found - wanted).norm(dim=-1) / wanted.norm(dim=-1)
    # Written so that a NaN is refused as well.
    if not bool((error < _ROUNDING).all()):
        raise ResultsDifferError(f"policy {policy}: logits are off by {error.max():.4f}")


def _row(line: dict[str, Any]) -> str:
    label = f"{line['rows']} rows of {line['tokens_per_row']}, {line['adapters']} adapters"
    ratio = line["static_milliseconds"] / line["milliseconds"]
    return (
        f"{label:<34}{line['policy']:<10}{line['milliseconds']:9.3f} ms  "
        f"{ratio:5.2f} times as fast as policy static"
    )
