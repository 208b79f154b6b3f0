"""Request traces: read from a file, or drawn from a popularity."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import BaseModel, Field, ValidationError

from ...core.errors import ConfigError

_FORMS = (
    "name a .jsonl file of requests, or draw one: zipf:1.0,requests=1000,clients=16 or "
    "uniform,requests=1000,rate=20 (further: prompt=, output=, base=, seed=)"
)


#: Of one request; more than any model takes.
_MOST_TOKENS = 10**7
_MOST_REQUESTS = 5 * 10**7
_Tokens = Annotated[int, Field(ge=1, le=_MOST_TOKENS, strict=True)]


class _Line(BaseModel):
    """A line of a trace file."""

    time: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    adapter: str | None = None
    prompt: _Tokens
    output: _Tokens


@dataclass(frozen=True)
class TracedRequest:
    """One request.

    Attributes:
        time: seconds at which it comes; 0 in a trace of clients, who ask again when answered.
        adapter: its name; None for the base.
        prompt: tokens.
        output: tokens.
    """

    time: float
    adapter: str | None
    prompt: int
    output: int


@dataclass(frozen=True, eq=False)
class Trace:
    """Requests in order, as columns: a fleet's are millions.

    Attributes:
        times: float64 (R,), see `TracedRequest`.
        adapters: int64 (R,), indices of `names`; -1 for the base.
        prompts: int64 (R,).
        outputs: int64 (R,).
        names: of the adapters.
        clients: each takes the next request when its last one is answered; None where requests
            come at their times.
    """

    times: np.ndarray
    adapters: np.ndarray
    prompts: np.ndarray
    outputs: np.ndarray
    names: tuple[str, ...]
    clients: int | None = None

    def __len__(self) -> int:
        return len(self.times)

    def __iter__(self) -> Iterator[TracedRequest]:
        columns = (self.times, self.adapters, self.prompts, self.outputs)
        for time, adapter, prompt, output in zip(*(c.tolist() for c in columns), strict=True):
            name = None if adapter < 0 else self.names[adapter]
            yield TracedRequest(time, name, prompt, output)

    def part(self, keep: np.ndarray, clients: int | None) -> Trace:
        """The requests that `keep`, bool (R,), says."""
        return Trace(
            self.times[keep],
            self.adapters[keep],
            self.prompts[keep],
            self.outputs[keep],
            self.names,
            clients,
        )

    @classmethod
    def of(cls, requests: Sequence[TracedRequest], clients: int | None) -> Trace:
        """Of requests one by one."""
        names = tuple(dict.fromkeys(r.adapter for r in requests if r.adapter is not None))
        index = {name: number for number, name in enumerate(names)}
        return cls(
            np.array([r.time for r in requests], float),
            np.array([-1 if r.adapter is None else index[r.adapter] for r in requests], int),
            np.array([r.prompt for r in requests], int),
            np.array([r.output for r in requests], int),
            names,
            clients,
        )


@dataclass(frozen=True)
class _Drawn:
    """The options of a trace that is drawn."""

    requests: int = 1000
    rate: float = 0.0
    clients: int = 16
    prompt: int = 200
    output: int = 100
    base: float = 0.0
    seed: int = 0


def read_trace(text: str, adapters: int) -> Trace:
    """The trace that `text` names.

    Args:
        text: a path, or a popularity and its options: ``zipf:ALPHA,...`` or ``uniform,...``.
            Options: ``requests`` (how many), ``rate`` (a second, arriving at random; without it
            ``clients`` ask one after the other), ``prompt`` and ``output`` (mean tokens),
            ``base`` (share of requests without an adapter), ``seed``.
        adapters: how many adapters a popularity is drawn over.

    Raises:
        ConfigError: no such file, no such popularity, or an option that is unknown or unusable.
    """
    kind, _, rest = text.partition(",")
    name, _, alpha = kind.partition(":")
    if name == "zipf":
        return _draw(text, _weights(text, alpha or "1.0", adapters), rest)
    if name == "uniform" and not alpha:
        return _draw(text, np.full(adapters, 1.0), rest)
    return _read(Path(text))


def _weights(text: str, alpha: str, adapters: int) -> np.ndarray:
    try:
        exponent = float(alpha)
    except ValueError:
        exponent = -1.0
    if not 0 <= exponent < 10:
        raise ConfigError(f"trace {text!r}", f"{alpha!r} is no exponent from 0 to 10", _FORMS)
    return 1.0 / np.arange(1, adapters + 1) ** exponent


def _options(text: str, rest: str) -> _Drawn:
    kinds: dict[str, type] = {field.name: type(field.default) for field in fields(_Drawn)}
    given: dict[str, Any] = {}
    for part in filter(None, rest.split(",")):
        name, equals, value = part.partition("=")
        if name not in kinds or not equals:
            raise ConfigError(f"trace {text!r}", f"{part!r} is no option of a trace", _FORMS)
        try:
            given[name] = kinds[name](value)
        except ValueError as error:
            raise ConfigError(f"trace {text!r}", f"{value!r} is no {name}", _FORMS) from error
    options = _Drawn(**given)
    counts = (options.requests, options.clients, options.prompt, options.output)
    most = (_MOST_REQUESTS, _MOST_REQUESTS, _MOST_TOKENS, _MOST_TOKENS)
    within = all(1 <= count <= limit for count, limit in zip(counts, most, strict=True))
    usable = 0 <= options.rate < math.inf and 0 <= options.base <= 1 and options.seed >= 0
    if not (within and usable):
        raise ConfigError(f"trace {text!r}", "has a number out of range", _FORMS)
    return options


def _draw(text: str, weights: np.ndarray, rest: str) -> Trace:
    options = _options(text, rest)
    random = np.random.default_rng(options.seed)
    count = options.requests
    chosen = np.full(count, -1)
    if len(weights):
        drawn = random.choice(len(weights), count, p=weights / weights.sum())
        chosen = np.where(random.random(count) < options.base, -1, drawn)
    times = np.zeros(count)
    if options.rate:
        times = random.exponential(1 / options.rate, count).cumsum()
    return Trace(
        times,
        chosen,
        1 + random.poisson(options.prompt - 1, count),
        1 + random.poisson(options.output - 1, count),
        tuple(map(adapter_name, range(len(weights)))),
        None if options.rate else options.clients,
    )


def adapter_name(index: int) -> str:
    """What adapters of a drawn trace are called."""
    return f"adapter{index}"


def _read(path: Path) -> Trace:
    subject = f"trace {str(path)!r}"
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise ConfigError(subject, f"cannot be read ({error})", _FORMS) from error
    requests = tuple(_requests(subject, lines))
    if not requests:
        raise ConfigError(subject, "holds no requests", _FORMS)
    if list(requests) != sorted(requests, key=lambda request: request.time):
        raise ConfigError(subject, "its requests are not in order of time", "sort them by time")
    timed = any(request.time for request in requests)
    return Trace.of(requests, None if timed else _Drawn.clients)


def _requests(subject: str, lines: list[str]) -> Iterator[TracedRequest]:
    shape = '{"time": 1.5, "adapter": "sql", "prompt": 200, "output": 64}'
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            read = _Line.model_validate_json(line)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            reason = f"line {number} is no request ({where}: {first['msg']})"
            raise ConfigError(subject, reason, f"write lines such as {shape}") from error
        yield TracedRequest(read.time, read.adapter, read.prompt, read.output)
