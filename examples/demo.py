"""One FP8 base model, three adapters, one batch: what branchline does, shown on a CPU.

Run by `make demo`; takes a minute or two, more on a busy machine.  The model is converted once and
kept in the cache.
"""

from __future__ import annotations

import io
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text
from smollm2 import (
    BASE_MODEL,
    FOLDER,
    ModelPackageError,
    cache_root,
    ensure_smollm2,
    is_complete,
)
from transformers import AutoModelForCausalLM, AutoTokenizer, StoppingCriteria
from transformers.utils import logging

from branchline import BranchlineError, ServedModel, wrap

ADAPTERS = Path(__file__).parent / "adapters"
PROMPT = "What is the capital of France?"
# Of the mixed batch: who is asked what; None is the base model itself.
ROWS = (
    (None, PROMPT),
    ("shout", "Hello, how are you?"),
    ("json", PROMPT),
    ("pirate", PROMPT),
)
NAMES = tuple(name for name, _ in ROWS)
MAX_NEW_TOKENS = 24
# Tokens that the old version has written when the swap begins, and when it must have happened.
SWAP_BEGINS, SWAP_ENDS = 2, 6
PATIENCE = 120.0
CALIBRATION = (
    "What is the capital of Spain?",
    "Tell me about the moon.",
    "Write a short sentence about a castle.",
    "How do planes fly?",
    "What is 12 plus 30?",
    "Hello! My name is Clara.",
    "Give me some advice for a long journey, please.",
    "Translate 'the house by the river' into French.",
)

console = Console(width=None if sys.stdout.isatty() else 120)


def heading(text: str) -> None:
    console.print()
    console.rule(Text(text, style="bold"), align="left")


def say(text: str) -> None:
    # Text, because rich reads square brackets in a string as markup.
    console.print(Text(text))


def quiet() -> None:
    """Nobody who runs a demo can act on what libraries log."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    warnings.simplefilter("ignore")


def encode(tokenizer: Any, prompts: list[str]) -> dict[str, torch.Tensor]:
    """Token ids and mask of chat prompts, padded on the left."""
    turns = [[{"role": "user", "content": prompt}] for prompt in prompts]
    texts = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
    encoded = tokenizer(
        texts, add_special_tokens=False, padding=True, padding_side="left", return_tensors="pt"
    )
    return dict(encoded)


def ask(
    served: ServedModel, tokenizer: Any, rows: Sequence[tuple[str | None, str]], **settings: Any
) -> list[str]:
    """One greedy generate call; every row is asked its own prompt and takes its own adapter."""
    inputs = encode(tokenizer, [prompt for _, prompt in rows])
    with torch.inference_mode():
        out = served.generate(
            **inputs,
            adapter_names=[name for name, _ in rows],
            max_new_tokens=MAX_NEW_TOKENS,
            do_sample=False,
            **settings,
        )
    new = out[:, inputs["input_ids"].shape[1] :]
    return tokenizer.batch_decode(new, skip_special_tokens=True)


def base_row_logits(served: ServedModel, tokenizer: Any, names: Sequence[str | None]) -> bytes:
    """The bytes of the first row's logits, in a batch whose rows take the adapters `names`."""
    with torch.inference_mode():
        logits = served(**encode(tokenizer, [PROMPT] * len(names)), adapter_names=names).logits
    return logits[0].contiguous().view(torch.uint8).numpy().tobytes()


# --- the steps ----------------------------------------------------------------------------------


def model_folder() -> Path:
    if not is_complete(cache_root() / FOLDER):
        say("Converting the model; this happens once and takes about a minute.")
    # The converter draws its progress bar whatever the log level is.
    with redirect_stderr(io.StringIO()):
        return ensure_smollm2()


def load() -> tuple[ServedModel, Any]:
    heading("1. One base model, in FP8")
    folder = model_folder()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    served = wrap(
        model,
        quant="fp8-static",
        policy="absorbed",
        calibration=[encode(tokenizer, list(CALIBRATION))],
    )
    sites = len(served.audit().sites)
    say(
        f"{BASE_MODEL} with FP8 weights, and input scales calibrated on {len(CALIBRATION)} "
        f"prompts. At {sites} places (sites) a norm or an activation feeds FP8 linears. Such a "
        "site can round its output to FP8 on the spot (fused), but then what an adapter would "
        "have to read, the unrounded output, never exists."
    )
    return served, tokenizer


def load_adapters(served: ServedModel) -> None:
    heading("2. Three PEFT adapters on it")
    table = Table("adapter", "rank", "linears it changes", "bytes")
    for name in NAMES:
        if name is not None:
            info = served.adapters.load(name, ADAPTERS / name)
            table.add_row(name, str(info.rank), str(info.modules), f"{info.nbytes:,}")
    console.print(table)


def mixed_batch(served: ServedModel, tokenizer: Any) -> None:
    heading("3. One generate call answers for all of them")
    table = Table("row", "adapter", "asked", "answer", show_lines=True)
    answers = ask(served, tokenizer, ROWS)
    for i, ((name, prompt), answer) in enumerate(zip(ROWS, answers, strict=True)):
        table.add_row(str(i), name or "(base model)", prompt, Text(answer))
    console.print(table)


def fused_where_possible(
    served: ServedModel, tokenizer: Any, before: bytes, first: Counter[str]
) -> None:
    heading("4. Every batch stays fused")
    batches: tuple[tuple[str | None, ...], ...] = (
        (None, "shout", "shout", "shout"),
        (None, "json", "json", "json"),
        NAMES,
    )
    routes = ("fused", "absorbed", "unfused")
    table = Table("other rows of the batch", *(f"sites {r}" for r in routes), "base row's logits")
    table.add_row("base model", *(str(first[route]) for route in routes), "(before)")
    for names in batches:
        earlier = calls(served)
        check(base_row_logits(served, tokenizer, names) == before, "the base row has changed")
        ran = calls(served) - earlier
        others = ", ".join(dict.fromkeys(name or "base model" for name in names[1:]))
        table.add_row(others, *(str(ran[route]) for route in routes), "the same bytes")
    console.print(table)
    say(
        f"Row 0 asks the base model each time. All {len(before):,} bytes of its logits are what "
        "they were before any adapter was loaded, whatever its neighbours are and however the "
        "sites ran."
    )
    say(
        "A site that is absorbed rounds to FP8 on the spot too, and multiplies what the adapters "
        "would have to read with their first matrix in the same kernel. What other policies would "
        "make of the last batch:"
    )
    console.print(policies(served))


def policies(served: ServedModel) -> Table:
    """Planned routes of the mixed batch, by policy."""
    routes = ("fused", "absorbed", "dual", "unfused")
    table = Table("policy", *(f"sites {route}" for route in routes))
    names = [name for name in NAMES if name is not None]
    for policy in ("static", "dynamic", "dual", "absorbed"):
        report = served.audit(adapter_sets=[names], policy=policy)
        planned = Counter(site.routes[0].route for site in report.sites)
        table.add_row(policy, *(str(planned[route]) for route in routes))
    return table


def calls(served: ServedModel) -> Counter[str]:
    """How often sites ran fused and unfused so far."""
    ran: Counter[str] = Counter()
    for site in served.audit(adapter_sets=[()]).sites:
        ran.update(site.ran)
    return ran


class Pace(StoppingCriteria):
    """Tells when a generate call has begun to write, and keeps it from ending too early."""

    def __init__(self) -> None:
        self.tokens = 0
        self.begun = threading.Event()
        self.swapped = threading.Event()

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        self.tokens += 1
        if self.tokens == SWAP_BEGINS:
            self.begun.set()
        if self.tokens == SWAP_ENDS:
            # On a fast machine the answer would otherwise be complete before the swap is.
            self.swapped.wait(PATIENCE)
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


def swap_while_answering(served: ServedModel, tokenizer: Any) -> None:
    heading("5. Swap an adapter while it answers")
    pace, asked = Pace(), [("pirate", PROMPT)]
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(ask, served, tokenizer, asked, stopping_criteria=[pace])
        pace.begun.wait(PATIENCE)
        served.adapters.swap("pirate", ADAPTERS / "pirate-v2")
        at_swap, unfinished = pace.tokens, not running.done()
        pace.swapped.set()
        old = running.result()[0]
    check(unfinished, "the batch ended before the swap")
    new = ask(served, tokenizer, asked)[0]
    check(old.startswith("Arr") and new.startswith("Ahoy"), f"old {old!r}, new {new!r}")
    table = Table("batch", "version of pirate", "answer", show_lines=True)
    table.add_row("running during the swap", "the old one, to its end", Text(old))
    table.add_row("the next one", "the new one", Text(new))
    console.print(table)
    say(
        f"The swap came after token {at_swap} of {pace.tokens}. The running batch was not stopped: "
        "it kept the version that it began with."
    )


def unload(served: ServedModel, tokenizer: Any, before: bytes) -> None:
    heading("6. Unload an adapter")
    served.adapters.unload("json")
    say(f"Loaded now: {', '.join(info.name for info in served.adapters.list())}.")
    try:
        ask(served, tokenizer, [("json", PROMPT)])
    except BranchlineError as error:
        say(f"A row that asks json is refused: {error}.")
    else:
        check(False, "an unloaded adapter answered")
    names = (None, "shout", None, "pirate")
    check(base_row_logits(served, tokenizer, names) == before, "the base row has changed")
    say("The base model's row: still the same bytes as before any adapter was loaded.")


def show_audit(served: ServedModel) -> None:
    heading("7. The audit: what is planned for which adapters, why, and what ran")
    served.audit().render(console)


def check(good: bool, otherwise: str) -> None:
    if not good:
        raise SystemExit(f"The demo failed: {otherwise}.")


def main() -> int:
    quiet()
    began = time.monotonic()
    try:
        served, tokenizer = load()
        before = base_row_logits(served, tokenizer, [None] * len(ROWS))
        first = calls(served)
        load_adapters(served)
        mixed_batch(served, tokenizer)
        fused_where_possible(served, tokenizer, before, first)
        swap_while_answering(served, tokenizer)
        unload(served, tokenizer, before)
        show_audit(served)
    except (BranchlineError, ModelPackageError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    say(f"\nThe demo took {time.monotonic() - began:.0f} s.")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
