"""How large a batch is, roughly: what plans may differ by beyond its adapters."""

from __future__ import annotations

from dataclasses import dataclass

_PARTS = 8


@dataclass(frozen=True)
class BatchClass:
    """Batches that are planned alike.

    Attributes:
        tokens: at most so many, a power of two; more than half of it.
        eighths: so many eighths of the tokens, rounded up, have an adapter: 0 to 8.
        known: the tokens were counted.  Otherwise only rows were named, and each counts as one
            token: rows that are not packed have any length.
    """

    tokens: int = 1
    eighths: int = 0
    known: bool = False

    @classmethod
    def of(cls, tokens: int, with_adapter: int, *, known: bool = True) -> BatchClass:
        """The class of a batch.

        Args:
            tokens: of all rows.
            with_adapter: of those rows that have an adapter.
            known: see above.
        """
        power = 1 << max(tokens - 1, 0).bit_length()
        return cls(power, -(-_PARTS * with_adapter // max(tokens, 1)), known)

    @property
    def adapter_tokens(self) -> int:
        """How many of `tokens` have an adapter, rounded up."""
        return -(-self.tokens * self.eighths // _PARTS)

    def __str__(self) -> str:
        counted = "" if self.known else ", counting one a row"
        share = f", {self.eighths}/{_PARTS} of them with adapters" if self.eighths else ""
        return f"{self.tokens} token{'s' if self.tokens > 1 else ''}{share}{counted}"
