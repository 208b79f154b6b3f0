"""CUDA graphs of a served forward, replayed while adapters are swapped.

A swap moves a name between slots whose addresses stay.  A batch's slots are what a graph has
captured, so there is one graph for each slot that the name has been in: after the first two swaps
nothing is captured any more, whatever content comes.  Every replay is compared, byte for byte, with
an eager forward of the same moment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

import branchline
from benchmarks.gpu import world
from benchmarks.gpu.timing import wall
from benchmarks.harness import ResultsDifferError, say

POLICIES = ("dynamic", "dual", "absorbed")
ROWS, CONTENTS, SWAPS = 16, 3, 9
_NAME = "swapped"


class Recording:
    """One forward of one batch: a CUDA graph on a GPU, the same call again elsewhere.

    Args:
        served: the model.
        ids: token ids, whose tensor every replay reads.
        rows: names of the rows.
        device: where.
    """

    def __init__(self, served: Any, ids: torch.Tensor, rows: list[str | None], device: str) -> None:
        self._forward = lambda: _forward(served, ids, rows)
        self.captured = device.startswith("cuda")
        if not self.captured:
            return
        with served.adapters.rows(rows) as batch, torch.inference_mode():
            # What the batch holds is read by replays.
            self._batch = batch
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(3):
                    _logits(served, ids)
            torch.cuda.current_stream().wait_stream(side)
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                self._out = _logits(served, ids)

    def replay(self) -> torch.Tensor:
        """Logits of the last token, (rows, vocabulary)."""
        if not self.captured:
            return self._forward()
        self._graph.replay()
        return self._out


def run(device: str, hidden: int, layers: int, rounds: int) -> Iterator[dict[str, Any]]:
    """Capture, swap, replay and compare under every policy; prints and yields one line each.

    Raises:
        ResultsDifferError: a replay gives other bytes than the eager forward, or contents that are
            swapped make no difference.
    """
    contents = [f"content{number}" for number in range(CONTENTS)]
    shape = world.config(hidden, layers)
    with TemporaryDirectory() as folder:
        world.save_adapters(shape, Path(folder), contents, device)
        for policy in POLICIES:
            served = branchline.wrap(
                world.model(shape, device), quant="fp8-dynamic", policy=policy, max_loras=1,
                max_lora_rank=world.RANK,
            )  # fmt: skip
            folders = [Path(folder) / content for content in contents]
            line = {"policy": policy, **_swap(served, folders, device, rounds)}
            say(_row(line))
            yield line


def _swap(served: Any, folders: list[Path], device: str, rounds: int) -> dict[str, Any]:
    ids = world.tokens(ROWS, 1, device)
    # Every other row is the base's, in a graph as anywhere.
    rows: list[str | None] = [_NAME if row % 2 else None for row in range(ROWS)]
    served.adapters.load(_NAME, folders[0])
    graphs: dict[tuple[int, ...], Recording] = {}
    seen: list[torch.Tensor] = []
    for turn in range(SWAPS + 1):
        if turn:
            served.adapters.swap(_NAME, folders[turn % CONTENTS])
        with served.adapters.rows(rows) as batch:
            slots = batch.row_slots
        if slots not in graphs:
            graphs[slots] = Recording(served, ids, rows, device)
        replayed = graphs[slots].replay().clone()
        if not torch.equal(replayed, _forward(served, ids, rows)):
            raise ResultsDifferError(f"after swap {turn} a replay has other bytes than the forward")
        seen.append(replayed)
    _refuse_same(seen)
    graph = graphs[slots]
    eager: Callable[[], object] = lambda: _forward(served, ids, rows)  # noqa: E731
    times = wall((graph.replay, eager), device, rounds)
    return {
        "captured": graph.captured,
        "graphs": len(graphs),
        "swaps": SWAPS,
        "replays_equal_to_forwards": len(seen),
        "replay_microseconds": times[0] * 1e6,
        "forward_microseconds": times[1] * 1e6,
    }


def _refuse_same(seen: list[torch.Tensor]) -> None:
    for before, after in pairwise(seen):
        if torch.equal(before[1::2], after[1::2]):
            raise ResultsDifferError("a swap changes no row that has the adapter")
        if not torch.equal(before[::2], after[::2]):
            raise ResultsDifferError("a swap changes rows without the adapter")


def _forward(served: Any, ids: torch.Tensor, rows: list[str | None]) -> torch.Tensor:
    with served.adapters.rows(rows), torch.inference_mode():
        return _logits(served, ids)


def _logits(served: Any, ids: torch.Tensor) -> torch.Tensor:
    return served(input_ids=ids, use_cache=False).logits[:, -1]


def _row(line: dict[str, Any]) -> str:
    what = "a replay" if line["captured"] else "no graph on a CPU: the call again"
    return (
        f"{line['policy']:<10}{line['swaps']} swaps, {line['graphs']} captures, "
        f"{line['replays_equal_to_forwards']} replays equal; {what} takes "
        f"{line['replay_microseconds']:.1f} us, a forward {line['forward_microseconds']:.1f} us"
    )
