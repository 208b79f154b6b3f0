"""The engine: one thread that feeds the model, request by request, step by step.

Blocks, windows and shared prefixes are transformers' paged cache.  The loop is our own, for it is
where adapters live: every token of a step carries its row's slot, requests choose tokens by
settings of their own, and what fails is one request, not the loop.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from typing import Any, TypeVar

import torch

from ...core.errors import (
    AdapterCapacityError,
    BatchError,
    BranchlineError,
    ConfigError,
    EngineStoppedError,
    RequestFailedError,
)
from ...core.team import let_workers_go
from ..model import ServedModel
from ..serve_config import EngineConfig
from .attention import IMPLEMENTATION
from .cache import AdapterCache, blocks_for, refuse_unpaged
from .checks import check_request, non_finite, seeds_from, stop_tokens_of
from .memory import free_bytes
from .requests import EngineStats, FinishReason, GenerationRequest, Token, Update
from .sampling import choose, finite_rows, is_stop
from .scheduler import Scheduler, Share
from .sequence import Sequence
from .step import Step, StepRunner

_T = TypeVar("_T")
_logger = logging.getLogger("branchline.engine")


class Engine:
    """Answers requests of any adapters, in batches that change from step to step.

    Args:
        served: a wrapped model that continues prompts.
        config: how requests are batched.

    Attributes:
        served: the model.
        max_model_len: most tokens of a prompt and its answer.
        stop_tokens: the model's own.

    Raises:
        WrapError: the model continues no prompts, or keeps more than keys and values.
        ConfigError: the cache would not hold one sequence.
    """

    def __init__(self, served: ServedModel, config: EngineConfig, *, seed: int = 0) -> None:
        self.served = served
        model: Any = served.model
        text_config = model.config.get_text_config()
        refuse_unpaged(text_config, type(model).__name__)
        dtype, device = model.dtype, torch.device(model.device)
        blocks = blocks_for(text_config, config, dtype, free_bytes(device))
        self._cache = AdapterCache(text_config, blocks, config, dtype, device)
        positions = getattr(text_config, "max_position_embeddings", None)
        longest = [blocks * config.block_size, positions, config.max_model_len]
        self.max_model_len: int = min(n for n in longest if n is not None)
        self.stop_tokens = stop_tokens_of(model)
        self._vocabulary: int = text_config.vocab_size
        self._seeds = seeds_from(seed)
        self._scheduler = Scheduler(self._cache, config)
        self._runner = StepRunner(served, self._cache)
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="branchline-engine", daemon=True)
        self._lock = threading.Lock()
        self._known: set[str] = set()
        self._stopping = False
        self._ended = False
        self._error: BaseException | None = None
        self._arrivals = 0
        self._counts: Counter[str] = Counter()
        self._attention_before = model.config._attn_implementation
        model.set_attn_implementation(IMPLEMENTATION)

    # --- from any thread ------------------------------------------------------------------------

    @property
    def alive(self) -> bool:
        """Whether its thread runs."""
        return self._thread.is_alive()

    @property
    def error(self) -> BaseException | None:
        """What its thread died of; None where it did not."""
        return self._error

    def start(self) -> None:
        """Begin to answer.

        Raises:
            EngineStoppedError: it was stopped.
        """
        with self._lock:
            if self._stopping:
                raise self._stopped("engine.start()")
            # The caller wrapped the model: what it computed with would slow down every step.
            let_workers_go()
            self._thread.start()

    def submit(self, request: GenerationRequest) -> None:
        """Answer a request; its sink is told.

        Raises:
            EngineStoppedError: it takes no more, or has died.
            RequestTooLongError: prompt and answer do not fit.
            BatchError: an empty prompt, tokens that the model has not, or an id that is in use.
        """
        check_request(request, self._vocabulary, self.max_model_len)
        with self._lock:
            if self._stopping or self._error is not None or self._ended:
                raise self._stopped(request.request_id)
            if request.request_id in self._known:
                raise BatchError(
                    f"request {request.request_id!r}", "runs already", "give each an id of its own"
                )
            self._known.add(request.request_id)
            self._inbox.put(lambda: self._admit(request))

    def cancel(self, request_id: str) -> None:
        """End a request; its sink is told. One that is not known is ignored."""
        self._inbox.put(lambda: self._cancel(request_id))

    def between_steps(self, call: Callable[[], _T]) -> Future[_T]:
        """Run something in the engine's thread while no forward runs.

        Raises:
            EngineStoppedError: its thread has ended.
        """
        future: Future[_T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(call())
            except BaseException as error:
                future.set_exception(error)

        with self._lock:
            if self._ended or self._error is not None:
                raise self._stopped("a call between steps")
            self._inbox.put(run)
        return future

    def stats(self) -> EngineStats:
        """A moment of it; waits for nothing."""
        scheduler, counts = self._scheduler, self._counts
        running, waiting = tuple(scheduler.running.values()), tuple(scheduler.waiting())
        return EngineStats(
            running=len(running),
            waiting=len(waiting),
            running_by_adapter=_by_adapter(running),
            waiting_by_adapter=_by_adapter(waiting),
            blocks=self._cache.num_blocks,
            used_blocks=self._cache.used_blocks,
            steps=counts["steps"],
            prompt_tokens=counts["prompt_tokens"],
            cached_tokens=counts["cached_tokens"],
            generated_tokens=counts["generated_tokens"],
            failed_requests=counts["failed_requests"],
            preemptions=scheduler.preemptions,
            slot_hits=counts["slot_hits"],
            slot_misses=counts["slot_misses"],
        )

    def stop(self, timeout: float) -> bool:
        """Take no more requests, let those that run end, then end.

        Args:
            timeout: seconds that they have; the rest fails then.

        Returns:
            whether all ended by themselves.

        Raises:
            ConfigError: a sink, or a call between steps, called it.
        """
        if threading.current_thread() is self._thread:
            raise ConfigError("engine.stop()", "was called in its own thread", "call it elsewhere")
        with self._lock:
            self._stopping = True
            never_ran = self._thread.ident is None
        if never_ran:
            self._fail_rest()
        if not self._thread.is_alive():
            self._close()
            return self._error is None and not never_ran
        deadline = time.monotonic() + timeout
        self._inbox.put(lambda: None)
        while self._known and self._thread.is_alive() and time.monotonic() < deadline:
            time.sleep(0.01)
        finished = not self._known
        self._inbox.put(self._end)
        self._thread.join()
        self._close()
        return finished

    # --- in its thread --------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._ended:
                self._take_in()
                shares = self._scheduler.next()
                if shares:
                    self._step(shares)
        except BaseException as error:
            _logger.critical("the engine's thread died", exc_info=True)
            with self._lock:
                self._error = error
        self._fail_rest()

    def _take_in(self) -> None:
        """Do what others asked for; wait for that where there is nothing else to do."""
        if not self._scheduler.has_work:
            if self._inbox.empty():
                let_workers_go()
            self._inbox.get()()
        while not self._ended:
            try:
                asked = self._inbox.get_nowait()
            except queue.Empty:
                return
            asked()

    def _admit(self, request: GenerationRequest) -> None:
        digest = None if request.lease is None else request.lease.digest
        self._arrivals += 1
        capacity = len(request.prompt) + request.sampling.max_tokens
        sequence = Sequence(
            request, self._cache.root(digest), self._arrivals, next(self._seeds), capacity
        )
        self._scheduler.add(sequence)

    def _cancel(self, request_id: str) -> None:
        sequence = self._scheduler.find(request_id)
        if sequence is not None:
            self._finish(sequence, Update(finish=FinishReason.CANCELLED))

    def _step(self, shares: list[Share]) -> None:
        now = time.perf_counter()
        for share in shares:
            if share.sequence.started_at is None:
                share.sequence.started_at = now
                self._count_slot(share.sequence)
        try:
            step = self._runner.prepare(shares)
            logits = self._runner.run(step)
            finite = finite_rows(logits)
        except AdapterCapacityError as error:
            self._put_off(shares, error)
            return
        except Exception as error:
            _logger.exception("a forward of %d requests failed", len(shares))
            self._fail([share.sequence for share in shares], error, "its forward")
            return
        self._counts["steps"] += 1
        self._runner.advance(step)
        fed = sum(share.tokens for share in shares)
        self._counts["prompt_tokens"] += fed - sum(share.decodes for share in shares)
        self._choose(step, logits, finite)

    def _count_slot(self, sequence: Sequence) -> None:
        if sequence.lease is not None:
            in_slot = sequence.lease.version.slot is not None
            self._counts["slot_hits" if in_slot else "slot_misses"] += 1

    def _choose(self, step: Step, logits: torch.Tensor, finite: list[bool]) -> None:
        sequences = step.chosen
        bad = [s for s, is_finite in zip(sequences, finite, strict=True) if not is_finite]
        for sequence in bad:
            self._fail_one(sequence, non_finite(sequence))
        if bad:
            rows = [row for row, is_finite in enumerate(finite) if is_finite]
            logits, sequences = logits[rows], tuple(sequences[row] for row in rows)
        if not sequences:
            return
        try:
            tokens = choose(logits, sequences, self.stop_tokens)
        except Exception as error:
            _logger.exception("the choice of %d tokens failed", len(sequences))
            self._fail(sequences, error, "the choice of its next token")
            return
        for sequence, token in zip(sequences, tokens, strict=True):
            self._take_token(sequence, token)

    def _take_token(self, sequence: Sequence, token: Token) -> None:
        first = not sequence.made
        sequence.append(token)
        self._counts["generated_tokens"] += 1
        finish = None
        if is_stop(sequence, token.id, self.stop_tokens):
            finish = FinishReason.STOP
        elif sequence.made >= sequence.limit:
            finish = FinishReason.LENGTH
        if first:
            self._counts["cached_tokens"] += sequence.cached_tokens
            once = (sequence.cached_tokens, sequence.started_at)
            update = Update((token,), finish, None, *once)
        else:
            update = Update((token,), finish)
        if finish is None:
            self._tell(sequence, update)
        else:
            self._finish(sequence, update)

    def _finish(self, sequence: Sequence, update: Update, *, scrub: bool = False) -> None:
        try:
            self._scheduler.remove(sequence, scrub=scrub)
        finally:
            # Whatever becomes of its blocks, whoever waits for it is told.
            self._forget(sequence, update)

    def _forget(self, sequence: Sequence, update: Update) -> None:
        with self._lock:
            self._known.discard(sequence.request_id)
        self._tell(sequence, update)

    def _tell(self, sequence: Sequence, update: Update) -> None:
        try:
            sequence.request.sink(update)
        except Exception:
            # Whoever listens there has a fault of its own, which must not end the others' answers.
            _logger.exception("the sink of request %r raised", sequence.request_id)
            if update.finish is None:
                self.cancel(sequence.request_id)

    def _fail_one(self, sequence: Sequence, error: BranchlineError) -> None:
        self._counts["failed_requests"] += 1
        # What it left in the cache may be as bad as what it answered.
        self._finish(sequence, Update(finish=FinishReason.ERROR, error=error), scrub=True)

    def _fail(self, sequences: Iterable[Sequence], cause: Exception, what: str) -> None:
        reason = f"{what} failed ({type(cause).__name__}: {cause})"
        for sequence in sequences:
            error = RequestFailedError(
                f"request {sequence.request_id!r}", reason, "try again; see the server's log"
            )
            error.__cause__ = cause
            self._fail_one(sequence, error)

    def _put_off(self, shares: list[Share], error: AdapterCapacityError) -> None:
        """Slots are taken by others (pinned adapters, batches of the library): fewer at once."""
        adapters = list(dict.fromkeys(s.sequence.adapter for s in shares if s.sequence.adapter))
        if len(adapters) <= 1:
            for share in shares:
                if share.sequence.adapter is not None:
                    self._fail_one(share.sequence, error)
            return
        kept = {None, *adapters[: len(adapters) // 2]}
        self._step([share for share in shares if share.sequence.adapter in kept])

    def _fail_rest(self) -> None:
        """Whoever is left is told why the engine ends."""
        with self._lock:
            self._ended = True
        while True:
            try:
                self._inbox.get_nowait()()
            except queue.Empty:
                break
        for sequence in (*self._scheduler.running.values(), *self._scheduler.waiting()):
            self._counts["failed_requests"] += 1
            error = self._stopped(f"request {sequence.request_id!r}")
            try:
                # Their blocks are left as they are: the device may be what failed.
                self._forget(sequence, Update(finish=FinishReason.ERROR, error=error))
            except BaseException:
                # Nothing may keep the others from being told.
                _logger.exception("request %r could not be told", sequence.request_id)
        self._scheduler.clear()

    def _end(self) -> None:
        self._ended = True

    def _close(self) -> None:
        if self._attention_before is not None:
            model: Any = self.served.model
            model.set_attn_implementation(self._attention_before)
            self._attention_before = None

    def _stopped(self, subject: str) -> EngineStoppedError:
        if self._error is not None:
            reason = f"the engine died ({type(self._error).__name__}: {self._error})"
            return EngineStoppedError(subject, reason, "restart the server")
        return EngineStoppedError(subject, "the engine is stopping", "ask another server")


def _by_adapter(sequences: tuple[Sequence, ...]) -> Mapping[str, int]:
    return Counter(s.lease.name for s in sequences if s.lease is not None)
