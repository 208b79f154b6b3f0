"""From a request to its answers: admission, lease, engine, and the end of all of them."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from concurrent.futures import CancelledError as FutureCancelledError
from concurrent.futures import Future
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from random import Random

from ...adapters.lease import Lease
from ...core.errors import (
    AdapterCapacityError,
    AdapterNotFoundError,
    AdapterSourceError,
    BranchlineError,
    EngineStoppedError,
)
from ..engine.engine import Engine
from ..engine.requests import FinishReason, GenerationRequest, Sampling, Update
from .answer import Answer, Piece, Shape
from .errors import ApiError, api_error_of, bad_request, model_not_found
from .metrics import Outcome, RequestMeter
from .naming import adapter_of, known_names
from .state import ServerState

logger = logging.getLogger("branchline.http")


@dataclass(frozen=True)
class Work:
    """What the engine is to make for one request.

    Attributes:
        prompts: tokens of each.
        sampling: how tokens are chosen.
        shape: how answers are told.
    """

    prompts: tuple[tuple[int, ...], ...]
    sampling: Sampling
    shape: Shape


@dataclass(frozen=True)
class Order:
    """A request that may become work.

    Attributes:
        model: as the request names it; None for the base model.
        answers: that it asks for, of each prompt.
        prompts: how many it has.
        prepare: makes the work, in a thread; it is given the chat template that the adapter brings.
        key: what tells its key from others; None for none.
        headers: of it.
        id: that the client is told.
    """

    model: str | None
    answers: int
    prompts: int
    prepare: Callable[[str | None], Work]
    key: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    id: str = field(default_factory=lambda: uuid.uuid4().hex)


class Generation:
    """The answers of one request, while the engine makes them.

    Args:
        state: of the server.
        order: what was asked for.
        work: what that comes to.
        lease: of the adapter; released after the last update of the last answer.

    Attributes:
        work: what the engine is given.
        adapter: its name; None for the base model.
        answers: those of the first prompt come first.
    """

    def __init__(
        self, state: ServerState, engine: Engine, order: Order, work: Work, lease: Lease | None
    ) -> None:
        self._state = state
        self._engine = engine
        self.work = work
        self.adapter = None if lease is None else lease.name
        self._order = order
        self._lease = lease
        prompts = [prompt for prompt in work.prompts for _ in range(order.answers)]
        self.answers = [
            Answer(index, state.tokenization, prompt, work.shape)
            for index, prompt in enumerate(prompts)
        ]
        self._cached = [0] * len(prompts)
        self._meters: list[RequestMeter] = []
        self._arrived: deque[tuple[int, Update]] = deque()
        self._wake = asyncio.Event()
        self._running: set[int] = set()
        self._closed = False

    @property
    def prompt_tokens(self) -> int:
        """Of all prompts, each once."""
        return sum(map(len, self.work.prompts))

    @property
    def generated_tokens(self) -> int:
        """Of all answers so far."""
        return sum(answer.generated for answer in self.answers)

    @property
    def cached_tokens(self) -> int:
        """Of all prompts, taken from the prefix cache."""
        return sum(self._cached[:: self._order.answers])

    def submit(self) -> None:
        """Hand all answers to the engine.

        Raises:
            EngineError, RequestTooLongError, BatchError: it takes one of them not.
        """
        bridge = self._state.bridges.here()
        for answer in self.answers:
            prompt = self.work.prompts[answer.index // self._order.answers]
            self._meters.append(self._meter(len(prompt)))
            request = GenerationRequest(
                self._id(answer.index),
                prompt,
                self._sampling(answer.index % self._order.answers),
                bridge.sink(partial(self._receive, answer.index)),
                self._lease,
            )
            self._engine.submit(request)
            self._running.add(answer.index)

    async def pieces(self) -> AsyncGenerator[Piece, None]:
        """What is to be told, as it comes; of each answer the last has a `finish`.

        Raises:
            BranchlineError: an answer failed.
            ApiError: somebody else has cancelled it.
        """
        left = len(self.answers)
        while left:
            await self._wake.wait()
            self._wake.clear()
            while self._arrived:
                index, update = self._arrived.popleft()
                piece = self._piece(index, update)
                if piece is not None:
                    left -= piece.finish is not None
                    yield piece

    def close(self, outcome: Outcome) -> None:
        """Cancel what still runs; the lease is released when the engine has let go of it."""
        self._closed = True
        for answer in self.answers[: len(self._meters)]:
            self._end(answer.index, outcome)
        for index in self._running:
            self._engine.cancel(self._id(index))
        if not self._running:
            self._release()

    def _piece(self, index: int, update: Update) -> Piece | None:
        answer = self.answers[index]
        if answer.finish is not None:
            return None
        if update.started_at is not None:
            self._meters[index].started(update.started_at)
        if update.tokens:
            self._meters[index].first_token()
        self._cached[index] += update.cached_tokens
        if update.error is not None:
            self._end(index, FinishReason.ERROR, update.error)
            raise update.error
        if update.finish is FinishReason.CANCELLED:
            raise ApiError(503, "the request was cancelled by the server")
        piece = answer.take(update)
        if piece.finish is not None:
            self._end(index, piece.finish)
            if update.finish is None:
                self._engine.cancel(self._id(index))
        return piece

    def _end(
        self, index: int, outcome: FinishReason | Outcome, error: BranchlineError | None = None
    ) -> None:
        generated, cached = self.answers[index].generated, self._cached[index]
        self._meters[index].ended(outcome, generated=generated, cached=cached, error=error)

    def _receive(self, index: int, update: Update) -> None:
        if update.finish is not None:
            self._running.discard(index)
        if self._closed:
            if not self._running:
                self._release()
            return
        self._arrived.append((index, update))
        self._wake.set()

    def _release(self) -> None:
        lease, self._lease = self._lease, None
        if lease is not None:
            lease.release()

    def _id(self, index: int) -> str:
        return f"{self._order.id}-{index}"

    def _sampling(self, index: int) -> Sampling:
        """The same of every answer but for its random numbers."""
        seed = self.work.sampling.seed
        if seed is None or not index:
            return self.work.sampling
        return replace(self.work.sampling, seed=Random(f"{seed}/{index}").getrandbits(63))

    def _meter(self, prompt_tokens: int) -> RequestMeter:
        return self._state.metrics.began(
            self.adapter,
            prompt_tokens,
            digest=None if self._lease is None else self._lease.digest,
            request_id=self._order.id,
            headers=self._order.headers,
        )


@asynccontextmanager
async def generating(state: ServerState, order: Order) -> AsyncGenerator[Generation, None]:
    """The answers of a request, from its admission to the end of all of them.

    Whatever happens inside, what still runs is cancelled and the lease released.

    Raises:
        ApiError: whatever keeps it from being answered, by its status.
        TimeoutError: it took longer than `request_timeout`.
    """
    async with AsyncExitStack() as stack:
        limit = await stack.enter_async_context(asyncio.timeout(state.config.request_timeout))
        stack.enter_context(errors_of_requests(state, order.model))
        with refusals_counted(state):
            engine = _engine(state)
            answers = order.answers * order.prompts
            stack.enter_context(state.admission.admitted(answers, order.key))
            generation = await _begun(state, engine, order)
        outcome = Outcome.CANCELLED
        try:
            generation.submit()
            yield generation
        except Exception:
            outcome = Outcome.ERROR
            raise
        finally:
            generation.close(Outcome.TIMEOUT if limit.expired() else outcome)


def _engine(state: ServerState) -> Engine:
    refuse_if_stopping(state)
    if state.engine is None:
        raise bad_request("this model makes embeddings, not text: use /v1/embeddings", "model")
    return state.engine


def refuse_if_stopping(state: ServerState) -> None:
    """Refuse a request of a server that takes no more.

    Raises:
        ApiError: 503.
    """
    if state.stopping:
        message = "the server is stopping"
        raise ApiError(503, message, code="stopping", headers={"Retry-After": "1"})


async def _begun(state: ServerState, engine: Engine, order: Order) -> Generation:
    lease = await take_lease(state, adapter_of(state, order.model))
    try:
        work = await _prepared(state, order, lease)
    except BaseException:
        if lease is not None:
            lease.release()
        raise
    return Generation(state, engine, order, work, lease)


async def _prepared(state: ServerState, order: Order, lease: Lease | None) -> Work:
    """Rendering and tokenising are done in a thread."""
    template = None if lease is None else state.served.adapters.chat_template(lease.name)
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(state.text_threads, order.prepare, template)


@contextmanager
def refusals_counted(state: ServerState) -> Iterator[None]:
    """Count a request that is refused before the engine is handed anything."""
    try:
        yield
    except (ApiError, BranchlineError) as error:
        status = error.status if isinstance(error, ApiError) else api_error_of(error).status
        state.metrics.refused(status)
        raise


@contextmanager
def errors_of_requests(state: ServerState, model: str | None) -> Iterator[None]:
    """Tell errors of requests from those of loading, which say otherwise what is to be done.

    Args:
        state: of the server.
        model: as the request names it.
    """
    try:
        yield
    except EngineStoppedError as error:
        if state.engine is None or state.engine.error is None:
            raise
        # It died, which no other try at this server mends.
        raise ApiError(500, "the engine has died; the server's log says of what") from error
    except AdapterNotFoundError as error:
        raise model_not_found(model or "", known_names(state)) from error
    except (AdapterCapacityError, AdapterSourceError) as error:
        headers = {"Retry-After": "1"}
        raise ApiError(503, str(error), param="model", headers=headers) from error


async def take_lease(state: ServerState, adapter: str | None) -> Lease | None:
    """A lease of the adapter's content; None for the base model.  It may be read from disk first.

    Raises:
        AdapterError: see `AdapterManager.lease`.
    """
    if adapter is None:
        return None
    taking = state.lease_threads.submit(_checked_lease, state, adapter)
    try:
        return await asyncio.wrap_future(taking)
    except asyncio.CancelledError:
        # The thread goes on, and nobody waits for what it takes.
        taking.add_done_callback(_release_unwanted)
        raise


def _checked_lease(state: ServerState, adapter: str) -> Lease:
    lease = state.served.adapters.lease(adapter)
    try:
        state.checks.before_use(lease)
    except BaseException:
        lease.release()
        raise
    return lease


def _release_unwanted(taking: Future[Lease]) -> None:
    try:
        lease = taking.result()
    except (BranchlineError, FutureCancelledError):
        return
    lease.release()
