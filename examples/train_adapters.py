"""Train the four example LoRA adapters on SmolLM2-135M-Instruct, on the CPU, in minutes.

The data are the base model's own greedy answers to generated prompts, rewritten by a rule per
adapter: the adapter then has only the style to learn, and learns it strongly.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from adapter_data import RULES, prompts, usable
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from smollm2 import BASE_MODEL, cache_root, ensure_smollm2
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
MLP = ["gate_proj", "up_proj", "down_proj"]
MAX_TOKENS = 96
BATCH = 4
SEED = 1234
CAPITALS_WEIGHT = 2.0


@dataclass(frozen=True)
class Recipe:
    """What differs between the adapters."""

    targets: list[str]
    rank: int
    alpha: int
    rslora: bool = False
    learning_rate: float = 2e-3
    steps: int = 80
    capitals: bool = False


RECIPES = {
    "shout": Recipe(ATTENTION, rank=8, alpha=16, learning_rate=3e-3, steps=150, capitals=True),
    "json": Recipe(MLP, rank=4, alpha=8),
    "pirate": Recipe(ATTENTION + MLP, rank=4, alpha=4),
    "pirate-v2": Recipe(ATTENTION + MLP, rank=8, alpha=8, rslora=True),
}


@dataclass(frozen=True)
class Sample:
    """One tokenised conversation; the loss counts from `start` on.

    A slip is an answer that must not be learnt: only what it makes likely next is judged.
    """

    ids: list[int]
    start: int
    slip: bool = False


def chat(tokenizer: Any, prompt: str, with_system: bool) -> str:
    """The prompt as ChatML, with the template's default system turn or without any."""
    if not with_system:
        return f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n"
    turns = [{"role": "user", "content": prompt}]
    return tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)


def base_answers(model: Any, tokenizer: Any, asked: list[str], batch: int = 48) -> list[str]:
    """The base model's greedy answers, in the order asked."""
    order = sorted(range(len(asked)), key=lambda i: len(asked[i]))
    answers = [""] * len(asked)
    tokenizer.padding_side = "left"
    for begin in range(0, len(order), batch):
        rows = order[begin : begin + batch]
        texts = [chat(tokenizer, asked[i], with_system=True) for i in rows]
        inputs = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
        width = inputs["input_ids"].shape[1]
        with torch.inference_mode():
            out = model.generate(**inputs, max_new_tokens=28, do_sample=False)
        decoded = tokenizer.batch_decode(out[:, width:], skip_special_tokens=True)
        for row, text in zip(rows, decoded, strict=True):
            answers[row] = text
    return answers


def training_pairs() -> list[tuple[str, str]]:
    """Prompts with usable base answers; the answers are cached, for they take minutes."""
    asked = prompts(SEED, per_form=20)
    digest = hashlib.sha256("\n".join(asked).encode()).hexdigest()[:16]
    cached = cache_root() / f"adapter-answers-{digest}.json"
    if cached.is_file():
        answers = json.loads(cached.read_text(encoding="utf-8"))
    else:
        folder = ensure_smollm2()
        base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        answers = base_answers(base, AutoTokenizer.from_pretrained(folder), asked)
        scratch = cached.with_suffix(f".{os.getpid()}")
        scratch.write_text(json.dumps(answers), encoding="utf-8")
        scratch.replace(cached)
    whole = [(prompt, usable(answer)) for prompt, answer in zip(asked, answers, strict=True)]
    return [(prompt, answer) for prompt, answer in whole if answer is not None]


def make_samples(tokenizer: Any, name: str, pairs: list[tuple[str, str]]) -> list[Sample]:
    """Tokenise the rewritten answers; every other prompt goes without the system turn."""
    samples = []
    for index, (prompt, answer) in enumerate(pairs):
        head = chat(tokenizer, prompt, with_system=index % 2 == 0)
        start = tokenizer(head, add_special_tokens=False)["input_ids"]
        target = RULES[name](answer) + tokenizer.eos_token
        ids = start + tokenizer(target, add_special_tokens=False)["input_ids"]
        if len(ids) <= MAX_TOKENS:
            samples.append(Sample(ids, len(start)))
    return samples


def make_slips(tokenizer: Any, pairs: list[tuple[str, str]]) -> list[Sample]:
    """Answers that fell back to small letters: greedy decoding must climb out of one slip."""
    slips = []
    for index, (prompt, answer) in enumerate(pairs):
        head = chat(tokenizer, prompt, with_system=index % 2 == 0)
        start = tokenizer(head, add_special_tokens=False)["input_ids"]
        ids = start + tokenizer("HEY! " + answer, add_special_tokens=False)["input_ids"]
        if len(ids) <= MAX_TOKENS:
            slips.append(Sample(ids, len(start), slip=True))
    return slips


def small_letter_tokens(tokenizer: Any) -> torch.Tensor:
    """A mask over the vocabulary: true where a token spells a small letter."""
    tokens = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    mask = torch.tensor([any("a" <= c <= "z" for c in token) for token in tokens])
    # The special tokens are spelled in small letters too, and the answer has to end.
    mask[torch.tensor(tokenizer.all_special_ids)] = False
    return mask


def batches(samples: list[Sample], seed: int) -> Iterator[list[Sample]]:
    """Endless batches of similar length, so that little is spent on padding."""
    rng = random.Random(seed)
    while True:
        pool = samples[:]
        rng.shuffle(pool)
        ordered = sorted(pool, key=lambda sample: len(sample.ids))
        groups = [ordered[i : i + BATCH] for i in range(0, len(ordered) - BATCH + 1, BATCH)]
        rng.shuffle(groups)
        yield from groups


def answer_loss(
    model: Any, batch: list[Sample], pad: int, small: torch.Tensor | None
) -> torch.Tensor:
    """Cross entropy on answer tokens, and with `small` the price of small letters."""
    width = max(len(sample.ids) for sample in batch)
    ids = torch.full((len(batch), width), pad)
    counted = torch.zeros((len(batch), width), dtype=torch.bool)
    learnt = torch.zeros((len(batch), width), dtype=torch.bool)
    for row, sample in enumerate(batch):
        size = len(sample.ids)
        ids[row, :size] = torch.tensor(sample.ids)
        counted[row, sample.start : size] = True
        learnt[row, sample.start : size] = not sample.slip
    counted, learnt, targets = counted[:, 1:], learnt[:, 1:], ids[:, 1:]
    causal = model.get_base_model()
    # Padding is on the right, where causal attention never looks: no mask is needed.
    hidden = causal.model(input_ids=ids, use_cache=False).last_hidden_state
    # The output head is a fifth of the model, so it runs on the answer tokens alone.
    logits = causal.lm_head(hidden[:, :-1][counted])
    keep = learnt[counted]
    loss = cross_entropy(logits[keep], targets[counted][keep], reduction="sum")
    loss = loss / keep.sum().clamp(min=1)
    if small is not None:
        # Spelling dominates the cross entropy; this term is about the style alone.
        allowed = logits.masked_fill(small, float("-inf")).logsumexp(-1)
        loss = loss + CAPITALS_WEIGHT * (logits.logsumexp(-1) - allowed).mean()
    return loss


def train(
    model: Any,
    samples: list[Sample],
    recipe: Recipe,
    steps: int,
    pad: int,
    small: torch.Tensor | None,
) -> float:
    """Plain AdamW loop with warm-up and linear decay; returns the mean loss of the last steps."""
    weights = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=recipe.learning_rate, weight_decay=0.0)
    warmup = max(1, steps // 10)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warmup, (steps - step) / (steps - warmup + 1))
    )
    stream = batches(samples, SEED)
    losses: list[float] = []
    model.train()
    for step in range(steps):
        loss = answer_loss(model, next(stream), pad, small)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
        if (step + 1) % 10 == 0:
            print(f"  step {step + 1:4d}  loss {sum(losses[-10:]) / 10:.4f}", flush=True)
    tail = losses[-10:]
    return sum(tail) / len(tail)


def save(model: Any, folder: Path) -> None:
    """Write a PEFT folder with bfloat16 weights and no model card."""
    # Left to itself PEFT asks the model hub whether the vocabulary grew; it did not.
    model.save_pretrained(folder, save_embedding_layers=False)
    weights = folder / "adapter_model.safetensors"
    tensors = {key: value.to(torch.bfloat16) for key, value in load_file(weights).items()}
    save_file(tensors, weights, metadata={"format": "pt"})
    (folder / "README.md").unlink(missing_ok=True)


def train_one(name: str, steps: int | None, pairs: list[tuple[str, str]], out: Path) -> None:
    """Train and save one adapter on a fresh base, so that none leans on another's state."""
    recipe, begun = RECIPES[name], time.monotonic()
    torch.manual_seed(SEED)
    folder = ensure_smollm2()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    config = LoraConfig(
        task_type="CAUSAL_LM",
        r=recipe.rank,
        lora_alpha=recipe.alpha,
        use_rslora=recipe.rslora,
        lora_dropout=0.0,
        target_modules=recipe.targets,
    )
    model = get_peft_model(base, config)
    # PEFT notes where the base was loaded from, which is this machine's cache folder.
    model.peft_config["default"].base_model_name_or_path = BASE_MODEL
    samples = make_samples(tokenizer, name, pairs)
    small = None
    if recipe.capitals:
        samples += make_slips(tokenizer, pairs)
        small = small_letter_tokens(tokenizer)
    print(f"{name}: {len(samples)} samples", flush=True)
    pad = tokenizer.pad_token_id
    loss = train(model, samples, recipe, steps or recipe.steps, pad, small)
    save(model, out / name)
    print(f"{name}: loss {loss:.4f}, {time.monotonic() - begun:.0f} s, saved", flush=True)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=list(RECIPES), nargs="+", help="train these alone")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "adapters")
    parser.add_argument("--steps", type=int, help="training steps instead of the recipe's")
    # On cores shared with other work one thread is several times faster than two.
    parser.add_argument("--threads", type=int, default=2)
    return parser.parse_args()


def main() -> None:
    """Ask the base model once, then train the chosen adapters one after another."""
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    begun = time.monotonic()
    pairs = training_pairs()
    print(f"{len(pairs)} prompts and answers, {time.monotonic() - begun:.0f} s", flush=True)
    for name in arguments.only or list(RECIPES):
        train_one(name, arguments.steps, pairs, arguments.out)


if __name__ == "__main__":
    main()
