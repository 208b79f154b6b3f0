"""The rows of a batch from `--prompt`, and their tokens."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..core.errors import BatchError

#: What `@base` asks: the model itself.
BASE = "base"
SYNTAX = (
    '"TEXT" asks the base model and every adapter, one row each; "@NAME TEXT" asks that adapter '
    'only, "@base TEXT" the base model only. A text that begins with @ is written with @@.'
)

_ADDRESSED = re.compile(r"@(\S*)\s*(.*)", re.DOTALL)


@dataclass(frozen=True)
class Row:
    """One row of the batch.

    Attributes:
        adapter: its name; None for the base model.
        prompt: what it is asked.
    """

    adapter: str | None
    prompt: str


def parse_rows(prompts: Sequence[str], adapters: Sequence[str]) -> list[Row]:
    """The rows that `prompts` ask for, in their order.

    Args:
        prompts: see `SYNTAX`.
        adapters: names of the adapters, in the order of their rows.

    Raises:
        ValueError: an unknown adapter, or nothing to ask.
    """
    return [row for prompt in prompts for row in _rows_of(prompt, adapters)]


def _rows_of(prompt: str, adapters: Sequence[str]) -> list[Row]:
    asked: list[str | None] = [None, *adapters]
    addressed = _ADDRESSED.fullmatch(prompt)
    if prompt.startswith("@@"):
        text = prompt[1:]
    elif addressed:
        name, text = addressed.groups()
        if name != BASE and name not in adapters:
            known = ", ".join(f"@{known}" for known in (BASE, *adapters))
            raise ValueError(
                f"prompt {prompt!r} asks adapter {name!r}, but there is only {known}; "
                "begin a text that starts with @ with @@"
            )
        asked = [None if name == BASE else name]
    else:
        text = prompt
    if not text.strip():
        raise ValueError(f"prompt {prompt!r} holds no text")
    return [Row(adapter, text) for adapter in asked]


def encode(tokenizer: Any, texts: Sequence[str], *, raw: bool) -> dict[str, Any]:
    """Token ids and attention mask, (rows, tokens) each, padded on the left.

    Args:
        tokenizer: of the model.
        texts: one a row.
        raw: never use the tokenizer's chat template.

    Raises:
        BatchError: the chat template refuses a single user turn.
    """
    chat = bool(tokenizer.chat_template) and not raw
    if chat:
        turns = [[{"role": "user", "content": text}] for text in texts]
        try:
            texts = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
        except (
            Exception
        ) as error:  # a template is a program of the checkpoint's: it raises anything
            raise BatchError(
                "the chat template", f"refuses a single user turn ({error})", "use --raw"
            ) from error
    # The template has written the special tokens already.
    encoded = tokenizer(
        list(texts),
        add_special_tokens=not chat,
        padding=True,
        padding_side="left",
        return_tensors="pt",
    )
    return {name: encoded[name] for name in ("input_ids", "attention_mask")}
