"""One request inside of the engine: what it has of the cache, and how far it is."""

from __future__ import annotations

import random

import numpy as np

from ...adapters.lease import Lease
from .requests import GenerationRequest, Token


class Sequence:
    """A request that waits or runs.  Changed in the engine's thread only.

    The names of some attributes are those that transformers' paged cache asks for.

    Attributes:
        request: what was asked for.
        request_id: of it.
        lease: of its adapter; None for the base.
        root: what the hashes of its blocks begin with: its adapter's content.
        tokens: prompt and answer so far.
        prompt_tokens: how many of them are the prompt.
        position: how many of them lie in the cache.
        hashes: of its complete blocks, in order, each over all before it.
        cached_tokens: of the prompt, that were taken from the prefix cache.
        index: int64 (max_model_len,): where its tokens lie in the cache, up to `position`.
        index_at: its address.
        made: how many tokens the answer has.
        arrived: number in the order of arrival.
        started_at: see `Update.started_at`; None before.
        random: its own random numbers.
    """

    def __init__(
        self, request: GenerationRequest, root: int, arrived: int, seed: int, capacity: int
    ) -> None:
        self.request = request
        self.request_id = request.request_id
        self.lease: Lease | None = request.lease
        self.root = root
        self.tokens: list[int] = list(request.prompt)
        self.prompt_tokens = len(request.prompt)
        self.position = 0
        self.hashes: list[int] = []
        self.cached_tokens = 0
        self.index = np.zeros(capacity, dtype=np.int64)
        self.index_at: int = self.index.ctypes.data
        self.made = 0
        self.arrived = arrived
        self.started_at: float | None = None
        own = request.sampling.seed
        self.random = random.Random(seed if own is None else own)
        self.counts: dict[int, int] = {}

    def current_len(self) -> int:
        """Tokens in the cache."""
        return self.position

    @property
    def pending(self) -> int:
        """Tokens that were not fed to the model yet; 1 while it decodes."""
        return len(self.tokens) - self.position

    @property
    def limit(self) -> int:
        """Most tokens of the answer."""
        return self.request.sampling.max_tokens

    @property
    def adapter(self) -> str | None:
        """Digest of its adapter."""
        return None if self.lease is None else self.lease.digest

    def append(self, token: Token) -> None:
        """The answer has one more token."""
        self.tokens.append(token.id)
        self.counts[token.id] = self.counts.get(token.id, 0) + 1
        self.made += 1

    def restart(self) -> None:
        """Its blocks were given back: everything is to be fed anew."""
        if not self.made:
            self.cached_tokens = 0
        self.position = 0
        self.hashes = []
