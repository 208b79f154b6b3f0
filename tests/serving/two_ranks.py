"""Two processes that are the ranks of one replica, and what they are told to do.

Both run the same calls at the same time.  Each has at most one served model.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.distributed.configuration_utils import DistributedConfig

import branchline
from branchline.core.errors import BranchlineError
from branchline.serving.parallel import LockstepAdapters
from tests.parts import ADAPTERS

RANKS = 2
# A rank that waits for the other for ever fails by this.
_COLLECTIVE = timedelta(seconds=60)
_REPLY = 240.0


class TwoRanks:
    """The processes; `run` gives what each of them returned."""

    def __init__(self, folder: Path) -> None:
        context = mp.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes = []
        # Where the processes find this module.
        sys.path.insert(0, str(Path(__file__).parents[2]))
        try:
            for rank in range(RANKS):
                here, there = context.Pipe()
                process = context.Process(
                    target=_work, args=(rank, str(folder / "store"), there), daemon=True
                )
                process.start()
                there.close()
                self._pipes.append(here)
                self._processes.append(process)
        finally:
            del sys.path[0]

    def run(self, call: Callable[..., Any], *args: Any) -> tuple[Any, ...]:
        """`call(rank, *args)` on all ranks at once; errors of branchline are returned."""
        for pipe in self._pipes:
            pipe.send((call, args))
        replies = []
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(_REPLY):
                raise TimeoutError(f"rank {rank} does not answer {call.__name__}{args}")
            replies.append(pipe.recv())
        for rank, (failed, reply) in enumerate(replies):
            if failed:
                raise AssertionError(f"rank {rank}:\n{reply}")
        return tuple(reply for _, reply in replies)

    def close(self) -> None:
        """End both processes."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(10)
            if process.is_alive():
                process.kill()


def _work(rank: int, store: str, pipe: Connection) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(RANKS), "LOCAL_RANK": str(rank)}
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS, timeout=_COLLECTIVE
    )
    while True:
        try:
            call, args = pipe.recv()
        except (EOFError, ConnectionResetError):
            break
        try:
            reply = False, call(rank, *args)
        except BranchlineError as error:
            reply = False, error
        except BaseException:
            reply = True, traceback.format_exc()
        pipe.send(reply)
    dist.destroy_process_group()


# --- what ranks do --------------------------------------------------------------------------------

_served: dict[str, Any] = {}


@dataclass(frozen=True)
class Setup:
    """A model from its folder, wrapped."""

    folder: Path
    dtype: torch.dtype = torch.float32
    plan: dict[str, str] | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    adapters: dict[str, Path] = field(default_factory=dict)
    expert_parallel: bool = False


def plain_model(setup: Setup, ranks: int = 1) -> Any:
    """The model, split over `ranks`."""
    split = {}
    if ranks > 1:
        experts = {"ep_size": ranks} if setup.expert_parallel else {}
        config = DistributedConfig(tp_size=ranks, tp_plan=setup.plan, **experts)
        split = {"distributed_config": config}
    return AutoModelForCausalLM.from_pretrained(setup.folder, dtype=setup.dtype, **split).eval()


def wrapped(setup: Setup, ranks: int = 1) -> branchline.ServedModel:
    """The model, wrapped, with its adapters."""
    served = branchline.wrap(plain_model(setup, ranks), **setup.settings)
    for name, folder in setup.adapters.items():
        served.adapters.load(name, folder)
    return served


def serve(rank: int, setup: Setup) -> None:
    """Serve a model from now on."""
    _served.clear()
    _served["model"] = wrapped(setup, RANKS)


def own_logits(rank: int, setup: Setup, ids: torch.Tensor) -> torch.Tensor:
    """Of the model as transformers has split it."""
    with torch.no_grad():
        return plain_model(setup, RANKS)(ids).logits


def logits(rank: int, ids: torch.Tensor, names: Sequence[str | None] | None) -> torch.Tensor:
    """Of the served model."""
    return logits_of(_served["model"], ids, names)


def logits_of(
    served: branchline.ServedModel, ids: torch.Tensor, names: Sequence[str | None] | None
) -> torch.Tensor:
    """The logits of rows with adapters."""
    return served(ids, adapter_names=names).logits


def compiled_logits(rank: int, ids: torch.Tensor, names: Sequence[str | None]) -> torch.Tensor:
    """Of the layers of the served model, compiled each by itself."""
    served = _served["model"]
    for layer in served.model.model.layers:
        layer.compile(backend="eager")
    with served.adapters.rows(names):
        return served(ids).logits


def headless_logits(rank: int, ids: torch.Tensor, name: str) -> torch.Tensor:
    """Of packed rows none of whose tokens the head is fed."""
    served = _served["model"]
    with served.adapters.rows([name], tokens=[len(ids)], logits=[]):
        return served(ids[None], logits_to_keep=torch.tensor([], dtype=torch.int64)).logits


def packed_logits(
    rank: int, ids: Sequence[torch.Tensor], names: Sequence[str | None]
) -> torch.Tensor:
    """Of sequences that lie one after the other."""
    return packed_logits_of(_served["model"], ids, names)


def packed_logits_of(
    served: branchline.ServedModel, ids: Sequence[torch.Tensor], names: Sequence[str | None]
) -> torch.Tensor:
    """Of sequences that lie one after the other, each with its own attention."""
    lengths = [len(row) for row in ids]
    owner = torch.repeat_interleave(torch.arange(len(ids)), torch.tensor(lengths))
    position = torch.cat([torch.arange(length) for length in lengths])
    seen = (owner[:, None] == owner[None]) & (position[:, None] >= position[None])
    with served.adapters.rows(names, tokens=lengths):
        return served(
            torch.cat(list(ids))[None],
            attention_mask=seen[None, None],
            position_ids=position[None],
        ).logits


def generated(rank: int, ids: torch.Tensor, names: Sequence[str | None]) -> torch.Tensor:
    """Greedy answers."""
    return _served["model"].generate(
        ids, adapter_names=names, max_new_tokens=6, do_sample=False, pad_token_id=0
    )


def change(rank: int, kind: str, name: str, *sources: Path) -> str:
    """Load, swap or unload on both ranks; `sources` are those of rank 0 and 1, or of both."""
    served = _served["model"]
    adapters = LockstepAdapters(served.adapters, served.ranks)
    info = getattr(adapters, kind)(name, *sources[rank : rank + 1] or sources)
    return "" if info is None else info.digest


def listed(rank: int) -> dict[str, tuple[str, int]]:
    """Digest and bytes of each adapter."""
    return {info.name: (info.digest, info.nbytes) for info in _served["model"].adapters.list()}


def routes(rank: int) -> tuple[str, ...]:
    """What the sites do for all adapters."""
    model = _served["model"]
    names = [info.name for info in model.adapters.list()]
    return tuple(site.routes[0].route for site in model.audit([names]).sites)


def unwrapped_logits(rank: int, ids: torch.Tensor) -> torch.Tensor:
    """Of the model that is given back."""
    with torch.no_grad():
        return _served.pop("model").unwrap()(ids).logits


def install(rank: int, name: str) -> None:
    """Serve one of the adapters of every part."""
    _served["model"].adapters.install(name, ADAPTERS[name])


def calibrated(setup: Setup, prompts: torch.Tensor | None) -> Setup:
    """With prompts to calibrate from, if any."""
    given = {} if prompts is None else {"calibration": [prompts]}
    return replace(setup, settings={**setup.settings, **given})


class Halves(nn.Module):
    """A linear as two of half its inputs, whose outputs are summed, or of half its outputs."""

    def __init__(self, linear: nn.Linear, by_rows: bool) -> None:
        super().__init__()
        self.by_rows = by_rows
        self.parts = nn.ModuleList()
        for weight in linear.weight.detach().chunk(RANKS, 1 if by_rows else 0):
            part = nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=weight.dtype)
            part.weight = nn.Parameter(weight.clone())
            self.parts.append(part)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.by_rows:
            return torch.cat([part(x) for part in self.parts], -1)
        first, second = (
            part(own) for part, own in zip(self.parts, x.chunk(RANKS, -1), strict=True)
        )
        return first + second


def halved_logits(setup: Setup, ids: torch.Tensor) -> torch.Tensor:
    """Of one process that computes what the ranks do: each half of a linear is one of its own."""
    model = plain_model(setup)
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and name != "lm_head":
            halves = Halves(module, name.endswith(("o_proj", "down_proj")))
            model.set_submodule(name, halves)
    settings = dict(setup.settings)
    if settings.pop("quantize_lm_head", False):
        # No longer what `get_output_embeddings` knows as the head.
        model.set_submodule("lm_head", Halves(model.lm_head, False))
    return branchline.wrap(model, **settings)(ids).logits


# --- experts --------------------------------------------------------------------------------------


def shapes_of_experts(rank: int) -> dict[str, tuple[int, ...]]:
    """(E, N, K) of each projection of experts on this rank."""
    layers = _served["model"].registry.layers
    return {
        name: tuple(layer.kernel.dequantized().shape)
        for name, layer in layers.items()
        if ".experts." in name
    }


def through_experts(
    rank: int, x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """What the first layer's experts make of tokens (T, H)."""
    return through_experts_of(_served["model"], x, index, weights)


def through_experts_of(
    served: branchline.ServedModel, x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """What the first layer's experts make of tokens (T, H)."""
    with torch.no_grad():
        return served.model.model.layers[0].mlp.experts(x, index, weights)


def wrap_with_lying_config(rank: int, setup: Setup) -> None:
    """A model whose config says that its experts are split over other ranks."""
    model = plain_model(setup, RANKS)
    model.config.distributed_config.ep_size = 2 * RANKS
    branchline.wrap(model, **setup.settings)
