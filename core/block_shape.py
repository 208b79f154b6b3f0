"""The shape of the blocks that share a weight scale, as configurations write it."""

from __future__ import annotations

from dataclasses import dataclass

from .errors import CheckpointError

# Sizes are kept in 32 bits by kernels and headers.
_LARGEST = 2**31 - 1


@dataclass(frozen=True, order=True)
class BlockShape:
    """A block of a weight (N, K).

    Attributes:
        rows: output channels, 1 or more.
        columns: inputs, 1 or more.
    """

    rows: int
    columns: int

    @classmethod
    def parse(cls, value: object, source: str, key: str) -> BlockShape | None:
        """What a configuration says; None where it says null, which means no blocks.

        A list and a tuple are one shape.  A bool is no integer here.

        Args:
            value: of the key.
            source: file and place, for messages.
            key: for messages.

        Raises:
            CheckpointError: anything but null or two positive integers.
        """
        if value is None:
            return None
        if isinstance(value, list | tuple) and len(value) == 2:
            rows, columns = value
            if _is_size(rows) and _is_size(columns):
                return cls(rows, columns)
        text = repr(value)
        raise CheckpointError(
            source,
            f"{key} is {text if len(text) <= 60 else text[:57] + '...'}, expected two positive "
            "integers (rows, columns) or null",
            "restore the file as the checkpoint's producer wrote it",
        )

    def __str__(self) -> str:
        return f"{self.rows}x{self.columns}"


def _is_size(value: object) -> bool:
    # Not isinstance: True would be a block of one row.
    return type(value) is int and 0 < value <= _LARGEST
