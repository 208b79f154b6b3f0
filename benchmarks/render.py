"""Results as a document: ``python -m benchmarks.render RUN.json... [--folder docs]``.

Writes benchmarks.md and one plot a benchmark, images/bench-NAME.svg.  The same runs give the same
bytes.  Of several runs the later ones replace benchmarks of the earlier ones; every section names
the run that it is from.
"""

from __future__ import annotations

import argparse
import io
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import matplotlib

from benchmarks.results import Result, Run

matplotlib.use("svg")

from matplotlib import pyplot as plt
from matplotlib.axes import Axes

#: Title, and what the figures are of.
SECTIONS: dict[str, tuple[str, str]] = {
    "activation": (
        "Activations",
        "An activation and its FP8 codes in one C kernel, against torch's activation and the "
        "eager quantiser, whose bytes must be the same; and against a plain copy of the input.",
    ),
    "norm": (
        "Norms",
        "A norm and its static FP8 codes in one C kernel, against the eager pair, whose bytes "
        "must be the same; and against a plain copy of the input.",
    ),
    "routes": (
        "Routes",
        "What live adapters cost at a site: `dual` against `fused`, `absorbed` against the "
        "unfused kernels and against eager torch.",
    ),
    "matmul": (
        "FP8 matmul",
        "Weights of one byte against the faster of `F.linear` in float32 and bfloat16; for one "
        "row also against a plain read of as many bytes.",
    ),
    "head": ("Output head", "Unquantised bfloat16 weights in the C matmul."),
    "experts": (
        "Experts",
        "Eight experts, two a token, FP8 in blocks, against the fastest of transformers' own; "
        "with adapters, against our own base; and what lies between the two matmuls.",
    ),
    "auto": (
        "Policy auto",
        "How much longer each policy's choices take than the best route of the same batch, at "
        "sizes that no calibration measures.",
    ),
    "decode": (
        "A model end to end",
        "SmolLM2-135M in FP8 against transformers, in float32 or bfloat16, whichever is faster.",
    ),
    "lora": (
        "LoRA in a batch",
        "A batch of 16 rows in float32, against the same batch without adapters, and against "
        "PEFT's mixed batch, whose logits must agree.",
    ),
    "loading": (
        "Loading and swapping",
        "Against PEFT, with other adapters there already; in one thread.",
    ),
    "throughput": (
        "Engine",
        "16 requests of 64 tokens at once: our base against transformers' continuous batching; "
        "all else against our base.",
    ),
    "side-by-side": (
        "Beside other engines",
        "`python -m benchmarks.side_by_side ENGINE --out build/side-by-side.json` installs another "
        "engine into an environment of its own and runs both on one "
        "model in bfloat16, one after the other: servers over HTTP, libraries by `generate`.",
    ),
}
_BAR, _MISSED, _INK = "#2f6f8f", "#c4552d", "#333333"
_STYLE = {
    "svg.hashsalt": "branchline",
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 9,
    "text.color": _INK,
    "axes.labelcolor": _INK,
    "xtick.color": _INK,
    "ytick.color": _INK,
}


class Measured(NamedTuple):
    """One benchmark's results, and the run that they are from."""

    run: Run
    results: list[Result]


def collect(runs: Sequence[Run]) -> dict[str, Measured]:
    """By benchmark, in the order of `SECTIONS`; of the last run that has it."""
    found: dict[str, Measured] = {}
    for run in runs:
        by_name: dict[str, list[Result]] = {}
        for result in run.results:
            by_name.setdefault(result.benchmark, []).append(result)
        found |= {name: Measured(run, results) for name, results in by_name.items()}
    return {name: found[name] for name in SECTIONS if name in found}


def render(runs: Sequence[Run], folder: Path) -> None:
    """Write the document and its plots.

    Args:
        runs: the latest last.
        folder: where benchmarks.md lies; plots go into its images/.
    """
    found = collect(runs)
    images = folder / "images"
    images.mkdir(parents=True, exist_ok=True)
    parts = [_head(found)]
    for name, measured in found.items():
        (images / f"bench-{name}.svg").write_text(plot(measured.results), encoding="utf-8")
        parts.append(_section(name, measured))
    absent = [title for name, (title, _) in SECTIONS.items() if name not in found]
    if absent:
        parts.append(f"## Not measured\n\nIn none of these runs: {', '.join(absent)}.\n")
    (folder / "benchmarks.md").write_text("\n".join(parts), encoding="utf-8")


def _head(found: dict[str, Measured]) -> str:
    runs = list(dict.fromkeys(_machine(measured.run) for measured in found.values()))
    results = [result for measured in found.values() for result in measured.results]
    aimed = [result for result in results if result.aim is not None]
    met = sum(map(_is_met, aimed))
    lines = [
        "# Benchmarks",
        "",
        "`make bench` measures all of this again and writes this page; what stands beside other "
        "engines comes from build/side-by-side.json, if it is there. A ratio says how many times "
        "as fast ours is as what stands beside it: below 1 it is slower. Both sides run in turn, "
        "in one process unless a section says otherwise; figures are medians. An aim is what a "
        "ratio should be at least.",
        "",
        *_aims(met, len(aimed)),
        *(f"- {run}" for run in runs),
        "",
    ]
    return "\n".join(lines)


def _aims(met: int, count: int) -> list[str]:
    if not count:
        return []
    return [f"Of {count} aims {met} were met in these runs; the tables name the others.", ""]


def _machine(run: Run) -> str:
    machine = run.machine
    versions = ", ".join(f"{name} {version}" for name, version in machine.versions.items())
    short = " Few repetitions (`--short`): figures are rough." if run.short else ""
    return (
        f"{run.date}: {machine.cpu}, {machine.cores} cores, kernels for {machine.isa}, "
        f"{machine.memory / 2**30:.0f} GiB; {run.threads} threads; load {run.load_before:.1f} "
        f"before and {run.load_after:.1f} after; Python {machine.python}, {versions}.{short}"
    )


def _section(name: str, measured: Measured) -> str:
    title, about = SECTIONS[name]
    rows = [
        f"| {r.case} | {_value(r)} | {r.ratio:.2f} | {r.against} | {_aim(r)} |"
        for r in measured.results
    ]
    text = [
        f"## {title}",
        "",
        f"{about} Measured {measured.run.date[:10]}.",
        "",
        f"![{_described(title, measured.results)}](images/bench-{name}.svg)",
        "",
        "| case | ours | ratio | against | aim |",
        "|---|---:|---:|---|---|",
        *rows,
        "",
    ]
    return "\n".join(text)


def _value(result: Result) -> str:
    if result.unit == "us" and result.value >= 1000:
        return f"{result.value / 1000:.2f} ms"
    return f"{result.value:.1f} {result.unit}"


def _aim(result: Result) -> str:
    if result.aim is None:
        return ""
    return f"{result.aim:.2f}" if _is_met(result) else f"{result.aim:.2f}, **missed**"


def _is_met(result: Result) -> bool:
    return result.aim is None or result.ratio >= result.aim


def _described(title: str, results: Sequence[Result]) -> str:
    shown = _shown(results)
    least, most = (pick(shown, key=lambda r: r.ratio) for pick in (min, max))
    return (
        f"{title}: {len(shown)} ratios to {shown[0].against}"
        f"{' and others' if len({r.against for r in shown}) > 1 else ''}, from {least.ratio:.2f} "
        f"({least.case}) to {most.ratio:.2f} ({most.case})"
    )


def _shown(results: Sequence[Result]) -> list[Result]:
    """What is drawn: not how far from a copy a kernel is, which no case is to beat."""
    return [r for r in results if r.against != "clone()"] or list(results)


def plot(results: Sequence[Result]) -> str:
    """Bars of ratios on a logarithmic axis, the aims as marks; an SVG document."""
    shown = _shown(results)
    several = len({r.against for r in shown}) > 1
    labels = [f"{r.case}, to {r.against}" if several else r.case for r in shown]
    with plt.rc_context(_STYLE):
        figure, axes = plt.subplots(figsize=(9, 0.8 + 0.24 * len(shown)), layout="constrained")
        _draw(axes, shown, labels)
        title = "" if several else f" to {shown[0].against}"
        axes.set_xlabel(f"times as fast{title} (line: as fast; mark: aim)")
        out = io.StringIO()
        # Neither a date nor the version of the library: the same figures, the same bytes.
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
        plt.close(figure)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def _draw(axes: Axes, shown: Sequence[Result], labels: Sequence[str]) -> None:
    places = range(len(shown))
    colours = [_BAR if _is_met(r) else _MISSED for r in shown]
    # A bar begins at 1, where both are as fast.
    axes.barh(places, [r.ratio - 1 for r in shown], left=1, color=colours, height=0.7)
    axes.set_xscale("log")
    axes.axvline(1, color=_INK, linewidth=0.8)
    for place, result in zip(places, shown, strict=True):
        side = "left" if result.ratio >= 1 else "right"
        axes.annotate(
            f"{result.ratio:.2f}",
            (result.ratio, place),
            xytext=(3 if side == "left" else -3, 0),
            textcoords="offset points",
            va="center",
            ha=side,
            fontsize=7.5,
        )
        if result.aim is not None:
            axes.plot([result.aim] * 2, [place - 0.42, place + 0.42], color=_INK, linewidth=1.6)
    ratios = [r.ratio for r in shown] + [r.aim for r in shown if r.aim is not None]
    axes.set_xlim(min(0.8, *ratios) / 1.25, max(1.25, *ratios) * 1.25)
    axes.set_yticks(places, labels)
    axes.set_ylim(len(shown) - 0.4, -0.6)
    axes.xaxis.set_major_locator(matplotlib.ticker.LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(matplotlib.ticker.StrMethodFormatter("{x:g}"))
    axes.xaxis.set_minor_locator(matplotlib.ticker.NullLocator())
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(left=False)


def main() -> None:
    """Read the runs, write the document."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.render", description=__doc__)
    parser.add_argument("runs", type=Path, nargs="+", help="files of python -m benchmarks --out")
    parser.add_argument("--folder", type=Path, default=Path("docs"))
    given = parser.parse_args()
    runs = [Run.model_validate_json(file.read_text(encoding="utf-8")) for file in given.runs]
    render(runs, given.folder)


if __name__ == "__main__":
    main()
