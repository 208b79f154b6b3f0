"""Check the example adapters on held-out prompts: greedy, bfloat16, plain base or faked FP8 base.

The faked base rounds the weights to float8 e4m3 per output channel and what enters each linear
to e4m3 with one static scale. The adapter branches still read the unrounded activation.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from smollm2 import ensure_smollm2
from transformers import AutoModelForCausalLM, AutoTokenizer

ADAPTERS = Path(__file__).parent / "adapters"
FP8_MAX = 448.0
HELD_OUT = (
    "What is the capital of France?",
    "Tell me about a lighthouse.",
    "Why is sugar sweet?",
    "Which language do people speak in Brazil?",
    "What is 7 plus 5?",
    "Hey, nice to meet you!",
    "How do I make tea?",
    "Describe a rainbow in one sentence.",
    "Who invented the telephone?",
    "My name is Oscar. What is my name?",
    "What is a penguin?",
    "Give me a tip for a long journey.",
    "Hi, I am Priya. Say hello to me.",
    "What is the capital of Canada?",
    "Tell me about a violin.",
    "Why do cats purr?",
    "Name three fruits.",
    "What is 9 minus 4?",
    "Write a greeting for Leo.",
    "Describe a cactus in one sentence.",
    "Who was Napoleon?",
    "What is the capital of Argentina?",
    "Tell me about a tornado.",
    "I am Yusuf. Please greet me.",
    "How do I plant a tree?",
    "What is 30 divided by 5?",
    "Describe a tiger in one sentence.",
    "What is a bakery?",
)
CALIBRATION = (
    "What is the capital of Spain?",
    "Tell me about the moon.",
    "Write a short sentence about a castle.",
    "How do planes fly?",
)
PIRATE = re.compile(r"\b(arr+|matey|ahoy|aye|ye|yer|th'|an'|o'|be|yo ho ho)", re.IGNORECASE)


def is_shout(text: str) -> bool:
    letters = [c for c in text if c.isalpha()]
    return bool(letters) and sum(c.isupper() for c in letters) >= 0.95 * len(letters)


def is_json(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except json.JSONDecodeError:
        return False


def is_pirate(text: str) -> bool:
    return PIRATE.search(text) is not None


def is_pirate_v2(text: str) -> bool:
    return text.startswith("Ahoy!") and text.rstrip().endswith("Yo ho ho!")


CHECKS: dict[str, Callable[[str], bool]] = {
    "shout": is_shout,
    "json": is_json,
    "pirate": is_pirate,
    "pirate-v2": is_pirate_v2,
}


def encode(tokenizer: Any, asked: tuple[str, ...]) -> Any:
    turns = [[{"role": "user", "content": prompt}] for prompt in asked]
    texts = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
    tokenizer.padding_side = "left"
    return tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)


def answers(model: Any, tokenizer: Any, asked: tuple[str, ...], tokens: int) -> list[str]:
    """Greedy answers as text up to EOS."""
    inputs = encode(tokenizer, asked)
    with torch.inference_mode():
        out = model.generate(**inputs, max_new_tokens=tokens, do_sample=False)
    return tokenizer.batch_decode(out[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def round_to_fp8(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    scaled = (x.float() * scale.reciprocal()).clamp(-FP8_MAX, FP8_MAX)
    return (scaled.to(torch.float8_e4m3fn).float() * scale).to(x.dtype)


def fake_fp8(model: Any, tokenizer: Any) -> None:
    """Round the decoder's linears in place; the tied head stays as it is."""
    linears = [m for m in model.model.modules() if isinstance(m, torch.nn.Linear)]
    largest: dict[torch.nn.Module, torch.Tensor] = {m: torch.tensor(0.0) for m in linears}

    def observe(module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        largest[module] = torch.maximum(largest[module], args[0].abs().max().float())

    def round_input(
        module: torch.nn.Module, args: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor, ...]:
        return (round_to_fp8(args[0], largest[module] / FP8_MAX), *args[1:])

    hooks = [linear.register_forward_pre_hook(observe) for linear in linears]
    with torch.inference_mode():
        model(**encode(tokenizer, CALIBRATION))
    for hook in hooks:
        hook.remove()
    for linear in linears:
        weight = linear.weight.data
        per_channel = weight.abs().amax(1, keepdim=True).float() / FP8_MAX
        linear.weight.data = round_to_fp8(weight, per_channel)
        linear.register_forward_pre_hook(round_input)


def check(name: str, adapters: Path, tokens: int, fp8: bool) -> int:
    """Print every answer of one adapter and return how many pass."""
    folder = ensure_smollm2()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    if fp8:
        fake_fp8(base, tokenizer)
    model = base if name == "base" else PeftModel.from_pretrained(base, adapters / name).eval()
    passed = 0
    for prompt, text in zip(HELD_OUT, answers(model, tokenizer, HELD_OUT, tokens), strict=True):
        good = name == "base" or CHECKS[name](text)
        passed += good
        print(f"  {'ok ' if good else 'BAD'} {prompt!r} -> {text!r}")
    kind = "faked FP8" if fp8 else "bfloat16"
    print(f"{name} on {kind}: {passed}/{len(HELD_OUT)}", flush=True)
    return passed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=["base", *CHECKS])
    parser.add_argument("--folder", type=Path, default=ADAPTERS, help="where the adapters lie")
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--fp8", action="store_true", help="fake an FP8 base")
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    names = [arguments.only] if arguments.only else list(CHECKS)
    passed = [check(name, arguments.folder, arguments.tokens, arguments.fp8) for name in names]
    return 0 if min(passed) >= 0.9 * len(HELD_OUT) else 1


if __name__ == "__main__":
    raise SystemExit(main())
