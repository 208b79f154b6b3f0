"""What the routes of one server share."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from starlette.requests import HTTPConnection

from ...core.team import SideThreads
from ..model import ServedModel
from ..serve_config import ServeConfig
from .admission import Admission
from .audits import KeptAudits
from .bridge import Bridges
from .chat_templates import ChatTemplates
from .encoder import Encoder
from .route_checks import RouteChecks
from .sampling_defaults import model_defaults
from .tokenization import Tokenization

if TYPE_CHECKING:
    from ..engine.engine import Engine
    from ..self_check import Readiness
    from .metrics import Metrics

# Reading an adapter waits for its disk; rendering and tokenising need the interpreter.
_LEASE_THREADS = 4
_TEXT_THREADS = 2
# Loading takes disk, network and one core each; further loads wait for their turn.
_LOAD_THREADS = 4
# A listing does not wait for a load that waits for the network.
_LOOK_THREADS = 2


@dataclass
class ServerState:
    """One server: a model, its engine, and what the routes know of them.

    Attributes:
        config: what it was started with.
        served: the model and its adapters.
        tokenizer: transformers' own of the model.
        engine: makes the answers; None for an encoder, which makes embeddings only.
        folder: of the checkpoint.
        base_names: of the base model; the first is shown.
        metrics: counts the requests.
        created: when the server began, in seconds since 1970.
        started_at: the same by `time.monotonic()`.
        stopping: no new requests are taken.
        checks: self-checks, that of the start included.
        audits: of the model, for listings and the page.
        sampling_defaults: what the model's generation_config.json says of sampling.
        tokenization: texts to tokens and back.
        chat_templates: of the base and of adapters.
        encoder: makes embeddings; None where there is an engine.
        admission: how many requests there are.
        bridges: from the engine's thread to event loops.
        lease_threads: takes leases, which may read from disk.
        text_threads: renders and tokenises.
        load_threads: loads and unloads adapters.
        look_threads: lists adapters, and audits.
        forward_thread: runs an encoder's forwards, one after the other.
    """

    config: ServeConfig
    served: ServedModel
    tokenizer: Any
    engine: Engine | None
    folder: Path
    base_names: tuple[str, ...]
    metrics: Metrics
    created: int = field(default_factory=lambda: int(time.time()))
    started_at: float = field(default_factory=time.monotonic)
    stopping: bool = False
    checks: RouteChecks = field(init=False)
    audits: KeptAudits = field(init=False)
    sampling_defaults: Mapping[str, float] = field(init=False)
    tokenization: Tokenization = field(init=False)
    chat_templates: ChatTemplates = field(init=False)
    encoder: Encoder | None = field(init=False)
    admission: Admission = field(init=False)
    bridges: Bridges = field(init=False)
    lease_threads: ThreadPoolExecutor = field(init=False)
    text_threads: ThreadPoolExecutor = field(init=False)
    load_threads: ThreadPoolExecutor = field(init=False)
    look_threads: ThreadPoolExecutor = field(init=False)
    forward_thread: ThreadPoolExecutor = field(init=False)

    def __post_init__(self) -> None:
        self.checks = RouteChecks(self.served, self._between_forwards)
        self.audits = KeptAudits(self.served)
        self.sampling_defaults = model_defaults(self.served)
        self.tokenization = Tokenization(self.tokenizer)
        self.chat_templates = ChatTemplates(self.tokenizer, self.config.chat_template)
        self.encoder = None
        if self.engine is None:
            padding = self.tokenizer.pad_token_id or 0
            self.encoder = Encoder(self.served, padding, self.folder)
        self.admission = Admission(self.config.max_queue, self.config.max_concurrency_per_key)
        self.bridges = Bridges()
        self.lease_threads = SideThreads(_LEASE_THREADS, "branchline-lease")
        self.text_threads = SideThreads(_TEXT_THREADS, "branchline-text")
        self.load_threads = SideThreads(_LOAD_THREADS, "branchline-load")
        self.look_threads = SideThreads(_LOOK_THREADS, "branchline-look")
        # Computes, and so keeps its workers.
        self.forward_thread = ThreadPoolExecutor(1, "branchline-forward")

    @property
    def readiness(self) -> Readiness | None:
        """What the last self-check found; None before the first."""
        return self.checks.latest

    @property
    def base_name(self) -> str:
        """The name of the base model that is shown."""
        return self.base_names[0]

    @property
    def vocab_size(self) -> int:
        """How many tokens the model has."""
        return self.served.config.get_text_config().vocab_size

    @property
    def max_model_len(self) -> int:
        """Most tokens of a prompt and its answer together."""
        if self.engine is not None:
            return self.engine.max_model_len
        positions = getattr(self.served.config, "max_position_embeddings", None)
        asked = self.config.max_model_len
        known = [limit for limit in (positions, asked) if limit is not None]
        return min(known) if known else 512

    def _between_forwards(self, call: Callable[[], Readiness]) -> Future[Readiness]:
        if self.engine is None:
            return self.forward_thread.submit(call)
        return self.engine.between_steps(call)

    def close(self) -> None:
        """Let the threads go; nothing is served afterwards."""
        for threads in (
            self.lease_threads,
            self.text_threads,
            self.load_threads,
            self.look_threads,
            self.forward_thread,
        ):
            threads.shutdown(wait=False, cancel_futures=True)


def state_of(connection: HTTPConnection) -> ServerState:
    """The server that answers this request."""
    return connection.app.state.branchline
