"""Texts to tokens and back, in any thread."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

_TOKENS_KEPT = 65_536


class Tokenization:
    """A tokenizer of transformers', used without its mutable state.

    Args:
        tokenizer: of the model.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._lock = threading.Lock()
        # Calling the tokenizer itself sets truncation and padding of the one object that other
        # threads are decoding with.
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        if self._backend is not None:
            self._backend.no_truncation()
            self._backend.no_padding()
        self._byte_level, self._byte_fallback = _decoders(self._backend)
        self._special = frozenset(tokenizer.all_special_ids)
        self.text_of = lru_cache(_TOKENS_KEPT)(self._text_of)
        self.bytes_of = lru_cache(_TOKENS_KEPT)(self._bytes_of)
        self.name_of = lru_cache(_TOKENS_KEPT)(self._name_of)

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """The tokens of `text`.

        Args:
            text: any.
            add_special_tokens: put those around it that the model was trained with.
        """
        if self._backend is not None:
            return self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        with self._lock:
            return self.tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"]

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool) -> str:
        """The text of `tokens`, not cleaned up: what is added later only adds to it."""
        if self._backend is not None:
            return self._backend.decode(list(tokens), skip_special_tokens=skip_special_tokens)
        with self._lock:
            return self.tokenizer.decode(
                list(tokens),
                skip_special_tokens=skip_special_tokens,
                clean_up_tokenization_spaces=False,
            )

    def _text_of(self, token: int) -> str:
        """One token as text; what is no whole character becomes U+FFFD."""
        return self.decode([token], skip_special_tokens=False)

    def _bytes_of(self, token: int) -> bytes:
        """The bytes that one token stands for, which may be a part of a character."""
        piece = self.tokenizer.convert_ids_to_tokens(token)
        if piece is None or token in self._special:
            return self.text_of(token).encode()
        if self._byte_level:
            table = _byte_of_character()
            if all(character in table for character in piece):
                return bytes(table[character] for character in piece)
        if self._byte_fallback and len(piece) == 6 and piece.startswith("<0x"):
            return bytes([int(piece[3:5], 16)])
        return self.text_of(token).encode()

    def _name_of(self, token: int) -> str:
        """One token as log-probabilities name it: its text, or, of a part of a character, bytes.

        No two parts of characters have one name; the form is OpenAI's (`bytes:\\xe2\\x82`).
        """
        raw = self.bytes_of(token)
        try:
            raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
        return self.text_of(token)


def _decoders(backend: Any) -> tuple[bool, bool]:
    """Whether tokens are spelt in characters that stand for bytes, or fall back to bytes."""
    if backend is None:
        return False, False
    decoder = json.loads(backend.to_str()).get("decoder") or {}
    kinds = {decoder.get("type")} | {part.get("type") for part in decoder.get("decoders", ())}
    return "ByteLevel" in kinds, "ByteFallback" in kinds


@lru_cache(1)
def _byte_of_character() -> dict[str, int]:
    """Byte-level BPE's printable stand-ins.

    Source: Radford et al., "Language models are unsupervised multitask learners", 2019 (GPT-2):
    printable Latin-1 stands for itself, the other bytes for the characters from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in set(printable))
    return table | {chr(0x100 + index): byte for index, byte in enumerate(others)}
