"""The configuration of a server: how the model is wrapped, batched, reached and guarded."""

from __future__ import annotations

import json
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import Field, SecretStr, ValidationError, field_validator, model_validator

from ..linear.kernels.float_selection import FloatKernel
from .config import WrapConfig
from .settings import Settings


class LogLevel(StrEnum):
    """How much is logged."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class LogFormat(StrEnum):
    """How log lines look."""

    TEXT = "text"
    JSON = "json"


class EngineConfig(WrapConfig):
    """How requests are batched, beside how the model is wrapped."""

    float_kernel: Annotated[
        FloatKernel,
        Field(description=WrapConfig.model_fields["float_kernel"].description),
    ] = FloatKernel.AUTO
    max_model_len: Annotated[
        int | None,
        Field(
            ge=1,
            description="Most tokens of a prompt and its answer together. Unset: the model's "
            "positions, or what the cache holds if that is less.",
        ),
    ] = None
    max_num_seqs: Annotated[
        int, Field(ge=1, description="Most requests that share one forward.")
    ] = 64
    max_num_batched_tokens: Annotated[
        int,
        Field(ge=1, description="Most tokens of one forward; longer prompts take several."),
    ] = 512
    block_size: Annotated[
        int, Field(ge=1, le=1024, description="Tokens of one block of the KV cache.")
    ] = 16
    num_gpu_blocks_override: Annotated[
        int | None,
        Field(
            ge=1,
            description="Blocks of the KV cache. Unset: sized from the model, its memory and "
            "max_num_seqs.",
        ),
    ] = None
    kv_cache_memory_bytes: Annotated[
        int | None,
        Field(ge=1, description="Most bytes of the KV cache. Unset: a share of what is free."),
    ] = None
    enable_prefix_caching: Annotated[
        bool,
        Field(description="Share blocks of equal prompt beginnings, within one adapter content."),
    ] = True
    adapter_turn_steps: Annotated[
        int,
        Field(
            ge=1,
            description="Where more adapters are wanted than there are slots: forwards before "
            "those that wait take the places of those that ran.",
        ),
    ] = 16


class ServeConfig(EngineConfig):
    """What `branchline serve` is started with.  Field descriptions are its help."""

    host: Annotated[str, Field(description="Address to listen on.")] = "127.0.0.1"
    port: Annotated[
        int, Field(ge=0, le=65535, description="Port to listen on; 0 takes a free one.")
    ] = 8000
    served_model_name: Annotated[
        tuple[str, ...],
        Field(description="Names of the base model; the first is shown. Unset: the folder's."),
    ] = ()
    lora_modules: Annotated[
        tuple[str, ...],
        Field(
            description="Adapters to load at start: NAME=SOURCE, or JSON with name, path and "
            "base_model_name. Repeatable; --adapter NAME=SOURCE means the same."
        ),
    ] = ()
    calibration: Annotated[
        Path | None,
        Field(
            description="For quant fp8-static or nvfp4: a .txt of prompts, one a line, or a .json "
            "of saved scales. Unset: a small built-in set of English prompts."
        ),
    ] = None
    api_key: Annotated[
        tuple[SecretStr, ...],
        Field(
            description="Keys that requests must bring (Authorization: Bearer). Unset: none. On "
            "the command line every user of the machine sees them (ps): better in the file or in "
            "BRANCHLINE_API_KEY."
        ),
    ] = ()
    admin_key: Annotated[
        tuple[SecretStr, ...],
        Field(
            description="Keys for loading, swapping, unloading, the list of adapters and the "
            "audit; they are good for requests too. Unset: those of api_key. Better in "
            "BRANCHLINE_ADMIN_KEY, as above."
        ),
    ] = ()
    allow_runtime_lora_updating: Annotated[
        bool,
        Field(
            description="Serve the endpoints that load and unload adapters (also switched on by "
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1); sources must then lie in allowed_roots."
        ),
    ] = False
    chat_template: Annotated[
        str | None,
        Field(description="File of a chat template, or the template. Unset: the tokenizer's."),
    ] = None
    max_logprobs: Annotated[
        int, Field(ge=0, description="Most log-probabilities a request may ask for, a token.")
    ] = 20
    max_n: Annotated[int, Field(ge=1, description="Most answers of one request (n).")] = 16
    max_body_bytes: Annotated[
        int, Field(ge=1, description="Longest request body; longer ones are answered 413.")
    ] = 4 * 1024 * 1024
    max_queue: Annotated[
        int,
        Field(ge=1, description="Most answers that wait or run; further requests get 503."),
    ] = 1024
    max_concurrency_per_key: Annotated[
        int | None,
        Field(ge=1, description="Most requests of one key at a time; further ones get 429."),
    ] = None
    request_timeout: Annotated[
        float, Field(gt=0, description="Seconds after which a request is given up (504).")
    ] = 600.0
    shutdown_timeout: Annotated[
        float,
        Field(ge=0, description="Seconds that running requests may still take after SIGTERM."),
    ] = 30.0
    slow_reader_bytes: Annotated[
        int,
        Field(
            ge=1024,
            description="Bytes kept for a streaming client that does not read; beyond, its request "
            "is cancelled.",
        ),
    ] = 1024 * 1024
    log_level: Annotated[LogLevel, Field(description="What is logged.")] = LogLevel.INFO
    log_format: Annotated[
        LogFormat, Field(description="Log lines for a person (text) or a collector (json).")
    ] = LogFormat.TEXT
    seed: Annotated[
        int, Field(description="Of the random numbers of requests that bring none.")
    ] = 0
    ray: Annotated[
        bool,
        Field(
            description="Serve by replicas of the model on Ray (needs branchline[ray]), behind one "
            "endpoint. On the cluster of RAY_ADDRESS, or one that is started here."
        ),
    ] = False
    ray_replicas: Annotated[
        int, Field(ge=1, description="With ray: how many replicas; the least, if they may be more.")
    ] = 1
    ray_max_replicas: Annotated[
        int | None,
        Field(ge=1, description="With ray: most replicas, as many as requests need. Unset: fixed."),
    ] = None
    ray_cpus: Annotated[
        float, Field(gt=0, description="With ray: processors that each replica is given.")
    ] = 1.0
    ray_gpus: Annotated[
        float, Field(ge=0, description="With ray: GPUs that each replica is given.")
    ] = 0.0

    @field_validator("api_key", "admin_key", "served_model_name", "lora_modules", mode="before")
    @classmethod
    def _one_alone(cls, value: object) -> object:
        return (value,) if isinstance(value, str | SecretStr) else value

    @field_validator("lora_modules", mode="before")
    @classmethod
    def _modules_as_text(cls, value: Any) -> Any:
        # In a file they are mappings.
        if isinstance(value, Mapping):
            return tuple(f"{name}={source}" for name, source in value.items())
        if isinstance(value, list | tuple):
            return tuple(json.dumps(m) if isinstance(m, Mapping) else m for m in value)
        return value

    @field_validator("lora_modules")
    @classmethod
    def _sound_modules(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        names = [LoraModule.parse(text).name for text in value]
        twice = {name for name in names if names.count(name) > 1}
        if twice:
            raise ValueError(f"names {', '.join(sorted(twice))} twice")
        return value

    @field_validator("api_key", "admin_key")
    @classmethod
    def _no_empty_key(cls, value: tuple[SecretStr, ...]) -> tuple[SecretStr, ...]:
        if any(not key.get_secret_value().strip() for key in value):
            raise ValueError("a key is empty")
        return value

    @model_validator(mode="after")
    def _roots_for_updates(self) -> Self:
        if self.allow_runtime_lora_updating and self.allowed_roots is None:
            raise ValueError(
                "allow_runtime_lora_updating lets clients name files to read: say from where by "
                "allowed_roots"
            )
        return self

    @model_validator(mode="after")
    def _keys_for_their_limit(self) -> Self:
        if self.max_concurrency_per_key is not None and not self.api_key:
            raise ValueError("max_concurrency_per_key counts by key, and there is no api_key")
        return self

    @model_validator(mode="after")
    def _room_for_replicas(self) -> Self:
        if self.ray_max_replicas is not None and self.ray_max_replicas < self.ray_replicas:
            raise ValueError(
                f"ray_max_replicas={self.ray_max_replicas} is less than "
                f"ray_replicas={self.ray_replicas}"
            )
        return self

    @property
    def modules(self) -> tuple[LoraModule, ...]:
        """The adapters to load at start."""
        return tuple(LoraModule.parse(text) for text in self.lora_modules)


class LoraModule(Settings):
    """One adapter to load at start.

    Attributes:
        name: requests name it as their model.
        path: a source.
        base_model_name: of the base model it is for, if it says so.
    """

    name: str
    path: str
    base_model_name: str | None = None

    @classmethod
    def parse(cls, text: str) -> LoraModule:
        """Read ``NAME=SOURCE`` or JSON.

        Raises:
            ValueError: it is neither.
        """
        if text.lstrip().startswith("{"):
            try:
                return cls.model_validate_json(text)
            except ValidationError as error:
                first = error.errors()[0]
                field = ".".join(str(part) for part in first["loc"])
                raise ValueError(f"{text!r}: {field} {first['msg']}") from error
        name, equals, path = text.partition("=")
        if not (equals and name.strip() and path.strip()):
            raise ValueError(f"{text!r} is not NAME=SOURCE, such as sql=adapters/sql")
        return cls(name=name.strip(), path=path.strip())
