"""Continuous batching: requests of many adapters share every forward."""

import importlib.util

import transformers

from ...core.errors import ConfigError

# Older ones keep their paged cache in another shape; the library itself runs with them.
if not importlib.util.find_spec("transformers.generation.continuous_batching.cache_allocators"):
    raise ConfigError(
        f"transformers {transformers.__version__}",
        "has a paged cache that the engine cannot extend",
        "install transformers 5.24 or newer to serve",
    )
