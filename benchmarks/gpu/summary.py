"""One summary of the parts that run.sh ran: ``python -m benchmarks.gpu.summary FOLDER``."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from benchmarks.harness import say
from benchmarks.results import Frozen

#: What `timeout` answers for a part that it ended; 128 + SIGTERM is our own answer to its signal.
_TIMED_OUT = (124, 137, 143)


class Part(Frozen):
    """One process.

    Attributes:
        name: of the part.
        state: "ok", "timed out" or "failed".
        exit_code: of the process.
        seconds: that it took, of the `budget` that it had.
        budget: seconds.
        lines: results in its file; of a part that timed out, those that it came to.
        figures: what they say, in words, by what was measured.
    """

    name: str
    state: str
    exit_code: int
    seconds: int
    budget: int
    lines: int
    figures: dict[str, str]


class Summary(Frozen):
    """All parts, and the device that they ran on."""

    device: str
    parts: tuple[Part, ...]

    @property
    def ok(self) -> bool:
        """Whether every part ended well."""
        return all(part.state == "ok" for part in self.parts)


def summarise(folder: Path) -> Summary:
    """Of parts.tsv and the parts' files in `folder`."""
    parts, devices = [], []
    for line in (folder / "parts.tsv").read_text(encoding="utf-8").splitlines():
        name, code, seconds, budget = line.split("\t")
        found = _results(folder / f"{name}.json")
        # A report of `verify` calls a device by its kind, and says its name beside.
        device = found.get("device_name", found.get("device"))
        devices += [device] if device else []
        lines = found.get("lines" if name in ("verify", "producers") else name, [])
        parts.append(
            Part(
                name=name,
                state="ok" if code == "0" else _state(int(code)),
                exit_code=int(code),
                seconds=int(seconds),
                budget=int(budget),
                lines=len(lines),
                figures=_FIGURES[name](lines) if lines else {},
            )
        )
    return Summary(device=devices[0] if devices else "unknown", parts=tuple(parts))


def _results(file: Path) -> dict[str, Any]:
    # A part that failed early left nothing, or an empty file.
    text = file.read_text(encoding="utf-8") if file.exists() else ""
    return json.loads(text) if text.strip() else {}


def _state(code: int) -> str:
    return "timed out" if code in _TIMED_OUT else "failed"


def _verify(lines: list[dict[str, Any]]) -> dict[str, str]:
    states = [line["verdict"] for line in lines]
    return {state: str(states.count(state)) for state in sorted(set(states))}


def _producers(lines: list[dict[str, Any]]) -> dict[str, str]:
    figures = {}
    for rows in sorted({line["rows"] for line in lines}):
        for route in sorted({line["route"] for line in lines}):
            some = [x for x in lines if x["rows"] == rows and x["route"] == route]
            if some:
                said = f"{_range(_ratios(some, 'eager_microseconds'))} times eager, "
                compiled = [x for x in some if x["compiled_microseconds"]]
                if compiled:
                    ratios = _ratios(compiled, "compiled_microseconds")
                    said += f"{_range(ratios)} times torch.compile, "
                shares = [x["share_of_bandwidth"] for x in some]
                figures[f"{rows} rows, {route}"] = f"{said}{_range(shares)} of bandwidth"
    return figures


def _matmul(lines: list[dict[str, Any]]) -> dict[str, str]:
    figures = {}
    for scheme, kernel in sorted({(x["scheme"], x["kernel"]) for x in lines}):
        some = [x for x in lines if (x["scheme"], x["kernel"]) == (scheme, kernel)]
        ratios = _range(_ratios(some, "bfloat16_microseconds"))
        figures[f"{scheme} by {kernel}"] = f"{ratios} times bfloat16"
    return figures


def _routes(lines: list[dict[str, Any]]) -> dict[str, str]:
    figures = {}
    for policy in sorted({x["policy"] for x in lines} - {"static"}):
        for tokens in sorted({x["tokens_per_row"] for x in lines}):
            some = {
                x["adapters"]: x["static_milliseconds"] / x["milliseconds"]
                for x in lines
                if x["policy"] == policy and x["tokens_per_row"] == tokens
            }
            said = ", ".join(f"{ratio:.2f} with {count}" for count, ratio in some.items())
            figures[f"{policy}, {tokens} tokens a row"] = f"times static: {said} adapters"
    return figures


def _graphs(lines: list[dict[str, Any]]) -> dict[str, str]:
    return {
        x["policy"]: f"{x['swaps']} swaps, {x['graphs']} captures, "
        f"{x['replays_equal_to_forwards']} replays equal, captured: {x['captured']}, "
        f"{x['forward_microseconds'] / x['replay_microseconds']:.1f} times the eager forward"
        for x in lines
    }


def _ratios(lines: Iterable[dict[str, Any]], against: str) -> list[float]:
    return [line[against] / line["microseconds"] for line in lines]


def _range(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


_FIGURES: dict[str, Callable[[list[dict[str, Any]]], dict[str, str]]] = {
    "verify": _verify,
    "producers": _producers,
    "matmul": _matmul,
    "experts": _matmul,
    "routes": _routes,
    "graphs": _graphs,
}


def main(folder: Path) -> int:
    """Write summary.json, print it, and answer 1 where a part did not end well."""
    found = summarise(folder)
    (folder / "summary.json").write_text(found.model_dump_json(indent=1) + "\n", encoding="utf-8")
    say(f"\n{found.device}")
    for part in found.parts:
        say(f"{part.name:<10} {part.state}, {part.lines} lines, {part.seconds} s of {part.budget}")
        for what, figure in part.figures.items():
            say(f"  {what}: {figure}")
    return 0 if found.ok else 1


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1])))
