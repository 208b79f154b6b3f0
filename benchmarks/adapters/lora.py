"""LoRA adapters in one batch, against our own base forward and against PEFT, in one run.

``python -m benchmarks.adapters.lora [--short]``: a random Llama in float32, unquantised, so that
both sides do the same arithmetic; what is compared is the cost of the adapters alone.  `loading`
compares how adapters come and go.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

import branchline
from benchmarks.harness import say, timed
from benchmarks.results import Result

LORAS, RANK, ROWS, PROMPT = 16, 16, 16, 128
#: A batch of adapters takes at most 1.5 times the base's time; no batch is slower than PEFT's.
BASE_AIM, PEFT_AIM = 1 / 1.5, 1.0
NAMES = [f"adapter{index}" for index in range(LORAS)]


def model() -> LlamaForCausalLM:
    """The base, always the same."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=8,
        vocab_size=1024,
    )
    return LlamaForCausalLM(config).eval()


def save_adapters(folder: Path, names: Sequence[str]) -> None:
    """Save random adapters under these names, as PEFT does.

    Args:
        folder: to hold a folder for each.
        names: of the adapters.
    """
    peft_model = get_peft_model(
        model(),
        LoraConfig(r=RANK, lora_alpha=RANK, target_modules="all-linear", init_lora_weights=False),
    )
    for index, name in enumerate(names):
        torch.manual_seed(index)
        for key, parameter in peft_model.named_parameters():
            if "lora_" in key:
                torch.nn.init.normal_(parameter, std=0.02)
        peft_model.save_pretrained(folder / name)


class Contest:
    """One model served by us and by PEFT, both with the same adapters.

    Args:
        folder: where the adapters are.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ours = branchline.wrap(
            model(),
            quant="none",
            lora_dtype="float32",
            max_loras=LORAS,
            max_lora_rank=RANK,
        )
        self.theirs = PeftModel.from_pretrained(model(), folder / NAMES[0], NAMES[0])
        for name in NAMES[1:]:
            self.theirs.load_adapter(folder / name, name)
        self.theirs.eval()
        for name in NAMES:
            self.ours.adapters.load(name, folder / name)

    def run_ours(self, ids: torch.Tensor, names: Sequence[str | None]) -> Callable[[], object]:
        """Forwards of one batch, as generation calls them."""

        def run() -> object:
            with self.ours.adapters.rows(names), torch.no_grad():
                return self.ours(input_ids=ids).logits

        return run

    def run_base(self, ids: torch.Tensor) -> Callable[[], object]:
        """The served model without any batch."""

        def run() -> object:
            with torch.no_grad():
                return self.ours(input_ids=ids).logits

        return run

    def run_theirs(self, ids: torch.Tensor, names: Sequence[str | None]) -> Callable[[], object]:
        """PEFT's mixed batch."""
        chosen = [name or "__base__" for name in names]

        def run() -> object:
            with torch.no_grad():
                return self.theirs(input_ids=ids, adapter_names=chosen).logits

        return run


def measure(
    functions: Sequence[Callable[[], object]],
    rounds: int,
    clock: Callable[[], float] = time.process_time,
) -> list[list[float]]:
    """Seconds of each, in turn; of CPU time where a busy machine only delays a process."""
    found: list[list[float]] = [[] for _ in functions]
    for measured in range(-2, rounds):
        for function, record in zip(functions, found, strict=True):
            start = clock()
            function()
            if measured >= 0:
                record.append(clock() - start)
    return found


def _rows_of(distinct: int) -> list[str | None]:
    return [NAMES[row % distinct] if distinct else None for row in range(ROWS)]


CASES: dict[str, tuple[list[str | None], int]] = {
    "decode, 16 distinct adapters": (_rows_of(16), 1),
    "decode, 2 distinct adapters": (_rows_of(2), 1),
    "decode, no adapter": (_rows_of(0), 1),
    "decode, one row of 16": ([NAMES[0], *[None] * (ROWS - 1)], 1),
    "prefill of 128, 16 distinct": (_rows_of(16), PROMPT),
    "prefill of 128, 2 distinct": (_rows_of(2), PROMPT),
    "prefill of 128, one row of 16": ([NAMES[0], *[None] * (ROWS - 1)], PROMPT),
}


def _compare(contest: Contest, rounds: int, threads: int) -> list[Result]:
    results: list[Result] = []
    torch.set_num_threads(threads)
    clock, what = (
        (time.process_time, "CPU time") if threads == 1 else (time.perf_counter, "elapsed time")
    )
    say(f"\n{threads} threads, {what}, medians, alternating")
    generator = torch.Generator().manual_seed(1)
    for title, (names, tokens) in CASES.items():
        ids = torch.randint(0, 1024, (ROWS, tokens), generator=generator)
        ours, theirs = contest.run_ours(ids, names), contest.run_theirs(ids, names)
        torch.testing.assert_close(ours(), theirs(), rtol=1e-4, atol=1e-4)
        count = rounds if tokens == 1 else max(3, rounds // 8)
        spent = measure((ours, contest.run_base(ids), theirs), count, clock)
        mine, base, peft = map(statistics.median, spent)
        least = min(spent[0]) / min(spent[1])
        say(
            f"{title:<30} ours {mine * 1e3:8.2f} ms = {mine / base:5.2f} of our base forward "
            f"(best runs {least:4.2f}); PEFT {peft * 1e3:8.2f} ms, {peft / mine:5.2f} times ours"
        )
        case = f"{title}, {threads} thread{'s' if threads > 1 else ''}"
        results.append(timed("lora", case, mine, ("our base", base), BASE_AIM))
        results.append(timed("lora", case, mine, ("PEFT", peft), PEFT_AIM))
    return results


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without warnings."""
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _entry(contest: Contest, rounds: int) -> None:
    names = _rows_of(16)
    adapters, found = contest.ours.adapters, []
    for _ in range(rounds * 10):
        start = time.perf_counter()
        with adapters.rows(names):
            entered = time.perf_counter()
        found.append((entered - start, time.perf_counter() - entered))
    entry, leaving = (statistics.median(times) * 1e6 for times in zip(*found, strict=True))
    say(f"{'rows() of a known batch':<30} {entry:8.1f} us to enter, {leaving:.1f} us to leave")


def run(short: bool) -> list[Result]:
    """Measure everything."""
    say("\nLoRA in a batch of 16")
    results: list[Result] = []
    rounds = 3 if short else 40
    with tempfile.TemporaryDirectory() as folder, quiet():
        save_adapters(Path(folder), NAMES)
        contest = Contest(Path(folder))
        for threads in (1,) if short else (1, 2):
            results += _compare(contest, rounds, threads)
        _entry(contest, rounds)
    return results


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.adapters.lora")
    parser.add_argument("--short", action="store_true", help="few repetitions")
    run(parser.parse_args().short)
