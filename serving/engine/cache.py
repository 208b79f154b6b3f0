"""The paged KV cache: transformers' own, whose shared blocks belong to one adapter content."""

from __future__ import annotations

import hashlib
import secrets

import numpy as np
import torch
from transformers import ContinuousBatchingConfig, PreTrainedConfig
from transformers.generation.continuous_batching.cache import PagedAttentionCache
from transformers.generation.continuous_batching.cache_allocators import SLIDING_ATTENTION
from transformers.generation.continuous_batching.distributed import DistributedHelper

from ...core.errors import ConfigError, WrapError
from ..serve_config import EngineConfig
from .sequence import Sequence

# Of the memory that is free, where nobody said how much the cache may take.
_SHARE_OF_FREE = 0.5
# More than this many full-length sequences are not provided for without being asked.
_MOST_BLOCK_BYTES = 8 * 2**30
_HASH_BYTES = 16


class AdapterCache(PagedAttentionCache):
    """Blocks of keys and values, by request; complete ones are shared within one content (I9).

    A block is known by a hash over its tokens and all before them, which begins with the digest
    of the adapter.  Hashes are 128 bits, with a secret of this process, so that nobody can make a
    prompt that takes over another one's blocks.

    Args:
        config: of the model.
        blocks: how many.
        settings: of the engine.
        dtype: of keys and values.
        device: they lie there.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        blocks: int,
        settings: EngineConfig,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        batching = ContinuousBatchingConfig(
            page_size=settings.block_size,
            num_blocks=blocks,
            max_batch_tokens=settings.max_num_batched_tokens,
            max_requests_per_batch=settings.max_num_seqs,
            max_memory_percent=1.0,
            # No block tables: attention takes indices, which serve windows as well.
            max_blocks_per_request=0,
            allow_block_sharing=settings.enable_prefix_caching,
            use_async_batching=False,
            use_cuda_graph=False,
        )
        super().__init__(config, batching, device, DistributedHelper(None, None), dtype, True)
        self._secret = secrets.token_bytes(32)

    def root(self, digest: str | None) -> int:
        """What the hashes of all blocks of one adapter content begin with.

        Args:
            digest: of the adapter; None for the base model.
        """
        return self._hash(b"base" if digest is None else b"adapter " + digest.encode())

    def adopt_prefix(self, sequence: Sequence) -> None:
        """Give a sequence that has no block yet those that hold the beginning of its tokens."""
        if not self.use_prefix_sharing:
            return
        (allocator,) = self.cache_allocators.values()
        size, found = allocator.tokens_per_page, []
        hashes, parent = [], sequence.root
        # At least one token is always fed: its logits are wanted.
        for start in range(0, (len(sequence.tokens) - 1) // size * size, size):
            parent = self._block_hash(parent, sequence.tokens[start : start + size])
            block = allocator.ledger.hash_to_block.get(parent)
            if block is None:
                break
            found.append(block)
            hashes.append(parent)
        if not found:
            return
        length = len(found) * size
        allocator.acquire_prefix_blocks(sequence.request_id, length, found)
        sequence.position, sequence.hashes = length, hashes
        sequence.index[:length] = allocator.get_read_indices(sequence.request_id, length, 0)
        if not sequence.made:
            sequence.cached_tokens = length

    def share_complete(self, sequence: Sequence) -> None:
        """Let others take the blocks that are full now."""
        if not self.use_prefix_sharing:
            return
        (allocator,) = self.cache_allocators.values()
        size = allocator.tokens_per_page
        table, hashes = allocator.block_table[sequence.request_id], sequence.hashes
        while (len(hashes) + 1) * size <= sequence.position:
            at = len(hashes)
            parent = hashes[-1] if hashes else sequence.root
            hashes.append(self._block_hash(parent, sequence.tokens[at * size : (at + 1) * size]))
            # Where an equal block is known already, this one stays the sequence's own.
            allocator.ledger.register_new_hash(table[at], hashes[-1])

    def reserve(self, sequence: Sequence, tokens: int) -> bool:
        """Blocks for the next `tokens` of a sequence; cached ones that nobody uses make room."""
        while not self.can_store_request_tokens(sequence, tokens):  # pyright: ignore[reportArgumentType]
            if not self._evict(self._missing(sequence, tokens)):
                return False
        return True

    def free(self, sequence: Sequence, *, scrub: bool = False) -> None:
        """Take a sequence's blocks.

        Args:
            sequence: which.
            scrub: nobody may find them by their hash any more, and those that no one else holds
                are overwritten with zeros.
        """
        if scrub:
            for allocator in self.cache_allocators.values():
                table = allocator.block_table.get(sequence.request_id, ())
                own = [b for b in table if b not in allocator.ledger.shared_ref_counts]
                if own:
                    allocator._copy_view[torch.tensor(own, device=self.device)] = 0
        self.free_blocks(sequence.request_id, no_cache=scrub)
        sequence.restart()

    @property
    def used_blocks(self) -> int:
        """Blocks that requests hold, as shares of the whole.  Other threads may ask."""
        held = 0
        for allocator in self.cache_allocators.values():
            tables = tuple(allocator.block_table.values())
            held += len({b for table in tables for b in tuple(table)}) * allocator.bytes_per_block
        return -(-held * self.num_blocks // (self.num_sectors * self.bytes_per_sector))

    def _missing(self, sequence: Sequence, tokens: int) -> int:
        (allocator, *_) = self.cache_allocators.values()
        needed = allocator.needs_new_blocks(sequence.request_id, sequence.position, tokens)
        return needed - self.pool.count_free_blocks(allocator.index)

    def _evict(self, blocks: int) -> bool:
        """Forget the blocks that nobody has held for longest; whether there were any."""
        evicted = False
        for allocator in self.cache_allocators.values():
            ledger = allocator.ledger
            oldest = list(ledger.cached_blocks)[: max(1, blocks)]
            for block in oldest:
                del ledger.cached_blocks[block]
                del ledger.hash_to_block[ledger.block_to_hash.pop(block)]
            self.pool.free_blocks(allocator.index, oldest)
            evicted = evicted or bool(oldest)
        self.pool.try_to_free_sectors()
        return evicted

    def _block_hash(self, parent: int, tokens: list[int]) -> int:
        before = parent.to_bytes(_HASH_BYTES, "little")
        return self._hash(before + np.asarray(tokens, dtype=np.int64).tobytes())

    def _hash(self, content: bytes) -> int:
        made = hashlib.blake2b(content, digest_size=_HASH_BYTES, key=self._secret)
        return int.from_bytes(made.digest(), "little")


def blocks_for(
    config: PreTrainedConfig, settings: EngineConfig, dtype: torch.dtype, free_bytes: int
) -> int:
    """How many blocks a cache has.

    Room for `max_num_seqs` sequences of the longest length is more than is ever used: the default
    stops at a share of the memory that is free.

    Args:
        config: of the model.
        settings: of the engine.
        dtype: of keys and values.
        free_bytes: of the device.

    Raises:
        ConfigError: not even one sequence of the wanted length fits.
    """
    if settings.num_gpu_blocks_override is not None:
        return settings.num_gpu_blocks_override
    size = settings.block_size
    block = block_bytes(config, settings, dtype)
    given = settings.kv_cache_memory_bytes
    budget = min(int(free_bytes * _SHARE_OF_FREE), _MOST_BLOCK_BYTES) if given is None else given
    positions = settings.max_model_len or getattr(config, "max_position_embeddings", 4096)
    longest = -(-positions // size)
    blocks = min(budget // block, settings.max_num_seqs * longest)
    if blocks < 1 or (settings.max_model_len is not None and blocks < longest):
        raise ConfigError(
            f"a KV cache of {budget} bytes",
            f"holds {max(blocks, 0) * size} tokens, fewer than one sequence of {positions}",
            "pass a higher --kv-cache-memory-bytes, or a lower --max-model-len",
        )
    return blocks


def block_bytes(config: PreTrainedConfig, settings: EngineConfig, dtype: torch.dtype) -> int:
    """Bytes of the keys and values of one block, of all layers."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return settings.block_size * config.num_hidden_layers * 2 * heads * width * dtype.itemsize


def refuse_unpaged(config: PreTrainedConfig, model: str) -> None:
    """Refuse a model with layers whose state is no list of keys and values.

    Raises:
        WrapError: it has such layers.
    """
    kinds = set(getattr(config, "layer_types", None) or ())
    others = sorted(kinds - {"full_attention", SLIDING_ATTENTION})
    if others:
        raise WrapError(
            f"model {model}",
            f"has layers of kind {', '.join(others)}, which no paged cache holds",
            "serve a model of full or sliding attention; generate() of the library runs this one",
        )
