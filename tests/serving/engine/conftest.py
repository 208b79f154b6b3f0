"""An engine over small models, and a way to ask it."""

from __future__ import annotations

import itertools
import queue
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import pytest
import torch

from branchline.adapters.lease import Lease
from branchline.core.errors import BranchlineError
from branchline.serving import ServedModel
from branchline.serving.engine.engine import Engine
from branchline.serving.engine.requests import (
    FinishReason,
    GenerationRequest,
    Sampling,
    Token,
    Update,
)
from branchline.serving.serve_config import EngineConfig

_ids = itertools.count()
PATIENCE = 60


@dataclass
class Answer:
    """What came of one request, as it comes."""

    request_id: str
    updates: queue.Queue[Update] = field(default_factory=queue.Queue)
    tokens: list[Token] = field(default_factory=list)
    finish: FinishReason | None = None
    error: BranchlineError | None = None
    cached: int = 0

    def take(self) -> Update:
        update = self.updates.get(timeout=PATIENCE)
        assert self.finish is None, "an update after the last one"
        self.tokens += update.tokens
        self.finish, self.error = update.finish, update.error
        self.cached += update.cached_tokens
        return update

    def wait(self) -> Answer:
        while self.finish is None:
            self.take()
        return self

    @property
    def ids(self) -> list[int]:
        return [token.id for token in self.tokens]


@dataclass
class Client:
    """Asks one engine."""

    engine: Engine
    leases: list[Lease] = field(default_factory=list)

    def ask(self, prompt: Sequence[int], adapter: str | None = None, **sampling) -> Answer:
        sampling = {"temperature": 0.0, "ignore_eos": True, "max_tokens": 12, **sampling}
        answer = Answer(f"request-{next(_ids)}")
        lease = None if adapter is None else self.engine.served.adapters.lease(adapter)
        if lease is not None:
            self.leases.append(lease)
        self.engine.submit(
            GenerationRequest(
                answer.request_id, tuple(prompt), Sampling(**sampling), answer.updates.put, lease
            )
        )
        return answer


@pytest.fixture
def serve() -> Iterator[Callable[..., Client]]:
    """Start engines; they are stopped at the end."""
    clients: list[Client] = []

    def start(served: ServedModel, *, run: bool = True, **settings) -> Client:
        client = Client(Engine(served, EngineConfig(**settings)))
        clients.append(client)
        if run:
            client.engine.start()
        return client

    yield start
    for client in clients:
        client.engine.stop(0)
        for lease in client.leases:
            lease.release()


@pytest.fixture
def served(llama) -> ServedModel:
    """A float32 model, whose answers do not depend on who shares the batch."""
    return llama.served(torch.float32, quant="none", max_loras=4)


def prompt(tokens: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 256, (tokens,), generator=generator).tolist()


def alone(
    served: ServedModel, tokens: Sequence[int], adapter: str | None = None, new: int = 12
) -> list[int]:
    """The library's greedy answer to one request."""
    ids = torch.tensor([list(tokens)])
    for _ in range(new):
        # Whole forwards, without any cache.
        best = served(ids, adapter_names=[adapter], use_cache=False).logits[:, -1:].argmax(-1)
        ids = torch.cat([ids, best], -1)
    return ids[0, len(tokens) :].tolist()


def is_answer(
    served: ServedModel, tokens: Sequence[int], ids: Sequence[int], adapter: str | None = None
) -> bool:
    """Whether `ids` are the library's greedy answer to one request, as `alone` makes it.

    Of a causal model one forward over all tokens tells that, without a forward for each.
    """
    given = torch.tensor([[*tokens, *ids]])
    logits = served(given, adapter_names=[adapter], use_cache=False).logits
    return logits[0, len(tokens) - 1 : -1].argmax(-1).tolist() == list(ids)
