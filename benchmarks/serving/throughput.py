"""The engine against transformers' own continuous batching, with and without adapters.

``python -m benchmarks.serving.throughput [--short]``: random Llamas, 16 requests of 64 tokens at
once, greedy.  transformers' manager runs the same model without adapters, its cache sized alike.
What adapters cost is measured in the same run, in turn with the base.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import ContinuousBatchingConfig, GenerationConfig, LlamaConfig, LlamaForCausalLM

import branchline
from benchmarks.harness import ResultsDifferError, begin, rated, say
from benchmarks.results import Result
from branchline.core.team import let_workers_go
from branchline.serving import ServedModel
from branchline.serving.engine.engine import Engine
from branchline.serving.engine.requests import GenerationRequest, Sampling, Update
from branchline.serving.serve_config import EngineConfig

REQUESTS, TOKENS, PROMPT, RANK, ADAPTERS = 16, 64, 32, 16, 4
VOCABULARY = 32_000
#: Of four engines in one process none may take what is free; twice what 16 requests need.
CACHE = 256 * 2**20


@dataclass(frozen=True)
class Shape:
    """One random Llama."""

    hidden: int
    intermediate: int
    layers: int
    heads: int

    def build(self, dtype: torch.dtype) -> LlamaForCausalLM:
        """Always the same one."""
        torch.manual_seed(0)
        config = LlamaConfig(
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.heads,
            vocab_size=VOCABULARY,
        )
        return LlamaForCausalLM(config).to(dtype).eval()


SHAPES = {
    "hidden 256, 4 layers": Shape(256, 688, 4, 4),
    "hidden 768, 6 layers": Shape(768, 2048, 6, 12),
}
#: No slower than transformers without adapters; what adapters may cost of our own base.
AIMS = {
    "base": 1.0,
    "one adapter of rank 16": 0.7,
    "four adapters of rank 16": 0.7,
    "four, slots of rank 64": 0.7,
    "bfloat16 base": 1.0,
    "bfloat16, four adapters": 0.7,
    "FP8 base": 1.0,
    "FP8, four adapters": 0.7,
}
PROMPTS = [
    torch.randint(3, VOCABULARY, (PROMPT,), generator=torch.Generator().manual_seed(seed)).tolist()
    for seed in range(REQUESTS)
]


def save_adapters(shape: Shape, folder: Path, ranks: Sequence[int]) -> list[Path]:
    """Random adapters for every linear, one for each rank."""
    folders = []
    for index, rank in enumerate(ranks):
        config = LoraConfig(
            r=rank, lora_alpha=rank, target_modules="all-linear", init_lora_weights=False
        )
        base = shape.build(torch.float32)
        # After the base, which seeds too: adapters of one content would share one slot.
        torch.manual_seed(index + 1)
        adapted = get_peft_model(base, config)
        adapted.save_pretrained(folder / f"adapter{index}")
        folders.append(folder / f"adapter{index}")
    return folders


class Ours:
    """One engine, and rounds of requests for it."""

    def __init__(self, served: ServedModel, **settings: object) -> None:
        self.served = served
        config = EngineConfig.checked(
            enable_prefix_caching=False, kv_cache_memory_bytes=CACHE, **settings
        )
        self.engine = Engine(served, config)
        self.engine.start()
        self._rounds = 0

    def run(self, names: Sequence[str | None]) -> list[list[int]]:
        """The answers to all requests at once."""
        self._rounds += 1
        answers: list[list[int]] = [[] for _ in PROMPTS]
        left = threading.Semaphore(0)

        def sink_of(row: int):
            def sink(update: Update) -> None:
                answers[row].extend(token.id for token in update.tokens)
                if update.finish is not None:
                    left.release()

            return sink

        leases = [None if n is None else self.served.adapters.lease(n) for n in names]
        sampling = Sampling(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)
        for row, (prompt, lease) in enumerate(zip(PROMPTS, leases, strict=True)):
            self.engine.submit(
                GenerationRequest(
                    f"{self._rounds}-{row}", tuple(prompt), sampling, sink_of(row), lease
                )
            )
        for _ in PROMPTS:
            left.acquire()
        for lease in leases:
            if lease is not None:
                lease.release()
        return answers

    def stop(self) -> None:
        self.engine.stop(0)


class Theirs:
    """transformers' manager over the same model."""

    def __init__(self, model: LlamaForCausalLM) -> None:
        self._model = model
        self._generation = GenerationConfig(
            max_new_tokens=TOKENS, do_sample=False, eos_token_id=-1, pad_token_id=0
        )
        # As many blocks as the requests take; its defaults are many times slower.
        self._batching = ContinuousBatchingConfig(
            page_size=32, num_blocks=64, max_batch_tokens=REQUESTS * PROMPT
        )

    def run(self) -> list[list[int]]:
        """The answers to all requests at once."""
        found = self._model.generate_batch(
            inputs=PROMPTS,
            generation_config=self._generation,
            continuous_batching_config=self._batching,
        )
        return [output.generated_tokens for output in found.values()]


def check(ours: list[list[int]], theirs: list[list[int]]) -> None:
    """Refuse to compare different answers.

    Raises:
        ResultsDifferError: more than a few tokens differ; float32 sums of another order may.
    """
    same = sum(a == b for a, b in zip(ours, theirs, strict=True))
    if same < REQUESTS * 3 // 4:
        raise ResultsDifferError(f"only {same} of {REQUESTS} answers are the same")


def seconds(call) -> float:
    """How long a call takes."""
    # What this thread computed with before would slow down both engines' threads.
    let_workers_go()
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


def measure(label: str, shape: Shape, rounds: int) -> list[Result]:
    """Compare on one shape."""
    theirs = Theirs(shape.build(torch.float32))
    with tempfile.TemporaryDirectory() as folder:
        folders = save_adapters(shape, Path(folder), [RANK] * ADAPTERS)
        served = branchline.wrap(shape.build(torch.float32), quant="none", max_loras=ADAPTERS)
        wide = branchline.wrap(
            shape.build(torch.float32), quant="none", max_loras=ADAPTERS, max_lora_rank=64
        )
        halves, quantised = (
            branchline.wrap(
                shape.build(torch.bfloat16), quant=quant, max_loras=ADAPTERS, float_kernel="auto"
            )
            for quant in ("none", "fp8-dynamic")
        )
        engines = []
        for one in (served, wide, halves, quantised):
            for index, source in enumerate(folders):
                one.adapters.load(f"adapter{index}", source)
            engines.append(Ours(one, max_loras=ADAPTERS))
    ours, ours_wide, ours_halves, ours_fp8 = engines
    mixed = [f"adapter{row % ADAPTERS}" for row in range(REQUESTS)]
    base: list[str | None] = [None] * REQUESTS
    alone = ["adapter0"] * REQUESTS
    check(ours.run(base), theirs.run())
    cases = {
        "transformers, base": theirs.run,
        "base": lambda: ours.run(base),
        "one adapter of rank 16": lambda: ours.run(alone),
        "four adapters of rank 16": lambda: ours.run(mixed),
        "four, slots of rank 64": lambda: ours_wide.run(mixed),
        "bfloat16 base": lambda: ours_halves.run(base),
        "bfloat16, four adapters": lambda: ours_halves.run(mixed),
        "FP8 base": lambda: ours_fp8.run(base),
        "FP8, four adapters": lambda: ours_fp8.run(mixed),
    }
    times: dict[str, list[float]] = {name: [] for name in cases}
    for turn in range(rounds + 1):
        for name, call in cases.items():
            elapsed = seconds(call)
            if turn:
                times[name].append(elapsed)
    yardstick = statistics.median(times["base"])
    for name, found in times.items():
        median = statistics.median(found)
        rate = REQUESTS * TOKENS / median
        say(f"{label}: {name:<28}{rate:8.0f} tokens/s   {yardstick / median:5.2f} of our base")
    for engine in engines:
        engine.stop()
    return _results(label, times)


def _results(label: str, times: dict[str, list[float]]) -> list[Result]:
    rates = {name: REQUESTS * TOKENS / statistics.median(found) for name, found in times.items()}
    theirs = ("transformers", rates.pop("transformers, base"))
    base = ("our base", rates["base"])
    results = [rated("throughput", f"{label}: base", rates.pop("base"), theirs, AIMS["base"])]
    return results + [
        rated("throughput", f"{label}: {name}", rate, base, AIMS[name])
        for name, rate in rates.items()
    ]


def run(short: bool) -> list[Result]:
    """Compare on all shapes."""
    begin("engine, 16 requests of 64 tokens at once")
    results: list[Result] = []
    for label, shape in SHAPES.items():
        results += measure(label, shape, 1 if short else 7)
        if short:
            break
    return results


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true", help="one shape, one round")
    run(parser.parse_args().short)
