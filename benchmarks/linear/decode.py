"""Decoding and prefill of the demo model: FP8 by the C kernels against transformers in floats."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import branchline
from benchmarks.harness import begin, rated, say
from benchmarks.results import Result
from examples.smollm2 import ensure_smollm2

PROMPT = "The history of the harbour began when"
STEPS, PREFILL = 16, 256
BATCHES = (1, 8)
#: Decoding reads half the bytes of bfloat16; long prompts are arithmetic, at which we may lose.
AIMS = {"decode": 1.5, "prefill": 0.8}


def run(short: bool = False) -> list[Result]:
    """Print and return tokens a second of each model, measured in turn."""
    begin("SmolLM2-135M end to end")
    folder = ensure_smollm2()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    models = {
        "float32": _load(folder, torch.float32),
        "bfloat16": _load(folder, torch.bfloat16),
        "fp8": branchline.wrap(_load(folder, torch.bfloat16), quant="fp8-dynamic"),
        "fp8, head too": branchline.wrap(
            _load(folder, torch.bfloat16), quant="fp8-dynamic", quantize_lm_head=True
        ),
    }
    rounds = 1 if short else 7
    results: list[Result] = []
    for batch in BATCHES:
        inputs = tokenizer([PROMPT] * batch, return_tensors="pt")
        times = _alternate({n: _decoder(m, inputs) for n, m in models.items()}, rounds)
        speeds = {n: batch * STEPS / t for n, t in times.items()}
        results += _report(f"decode, batch {batch}", speeds)
    ids = torch.randint(100, 40000, (1, PREFILL), generator=torch.Generator().manual_seed(0))
    times = _alternate({n: _prefill(m, ids) for n, m in models.items()}, rounds)
    results += _report(f"prefill, {PREFILL} tokens", {n: PREFILL / t for n, t in times.items()})
    return results


def _load(folder: Any, dtype: torch.dtype) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


def _decoder(model: Any, inputs: Any) -> Callable[[], float]:
    """Seconds of STEPS steps after the first token."""
    settings = {"do_sample": False, "pad_token_id": 0}

    def seconds(tokens: int) -> float:
        start = time.perf_counter()
        model.generate(**inputs, max_new_tokens=tokens, min_new_tokens=tokens, **settings)
        return time.perf_counter() - start

    return lambda: seconds(STEPS + 1) - seconds(1)


def _prefill(model: Any, ids: torch.Tensor) -> Callable[[], float]:
    def seconds() -> float:
        start = time.perf_counter()
        model(input_ids=ids, use_cache=True, logits_to_keep=1)
        return time.perf_counter() - start

    return seconds


def _alternate(timed: dict[str, Callable[[], float]], rounds: int) -> dict[str, float]:
    found: dict[str, list[float]] = {name: [] for name in timed}
    with torch.inference_mode():
        for measured in range(-1, rounds):
            for name, seconds in timed.items():
                elapsed = seconds()
                if measured >= 0:
                    found[name].append(elapsed)
    return {name: statistics.median(times) for name, times in found.items()}


def _report(what: str, speeds: dict[str, float]) -> list[Result]:
    floats = max(speeds["float32"], speeds["bfloat16"])
    for name, speed in speeds.items():
        say(f"{what}: {name:<14}{speed:8.1f} tok/s  {speed / floats:.2f} of the better float")
    aim = AIMS[what.partition(",")[0]]
    return [
        rated("decode", f"{what}, {name}", speed, ("transformers in the better float", floats), aim)
        for name, speed in speeds.items()
        if name.startswith("fp8")
    ]


if __name__ == "__main__":
    run()
