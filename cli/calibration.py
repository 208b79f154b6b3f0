"""What `--quant fp8-static` is calibrated on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..core.errors import CalibrationError
from ..linear.calibration import Calibration
from .output import note
from .prompts import encode

_BATCH_ROWS = 8

#: Several kinds of text, since an input range must hold for all of them: questions, prose,
#: dialogue, code, numbers, lists and markup.
BUILT_IN = (
    "What is the capital of Spain?",
    "Explain in two sentences why the sky is blue.",
    "Write a short poem about the sea in winter.",
    "Translate into French: 'The library opens at nine in the morning.'",
    "Hello! How are you today?",
    "I feel tired and sad after a long week. What should I do?",
    "What is 17 * 23? Show each step of the calculation.",
    "If a train leaves at 14:35 and travels for 2 h 50 min, when does it arrive?",
    "Write a Python function that returns the n-th Fibonacci number.",
    "What does this do?\n\nfor (int i = 0; i < n; ++i) {\n    sum += a[i] * b[i];\n}",
    "SELECT name, COUNT(*) FROM orders WHERE total > 99.5 GROUP BY name ORDER BY 2 DESC;",
    '{"id": 42, "tags": ["red", "green"], "active": true, "price": 19.99}',
    "Summarize: The committee met on Tuesday to discuss the budget for the coming year. After a "
    "long debate it agreed to repair the bridge, to plant four hundred trees along the river, and "
    "to put off the new sports hall until the money for it has been found.",
    "The old man lit his pipe, looked out at the harbour and began, as he did every evening, to "
    "tell the story of the storm that had once carried his boat to an island without a name.",
    "'Who's there?' she whispered. Nobody answered. 'I know that you can hear me,' she said.",
    "List five vegetables that grow in the shade, one a line.",
    "# Release notes\n\n* faster start\n* **fixed**: a crash on empty input\n\nSee `README.md`.",
    "Photosynthesis converts light energy into chemical energy; chlorophyll absorbs mostly red "
    "and blue light, and the oxygen that plants release comes from the water that they split.",
    "Classify the sentiment of this review: 'The food was cold, the waiter rude, and we waited "
    "over an hour. Never again!'",
    "WARNING: DO NOT OPEN THE DOOR WHILE THE MACHINE IS RUNNING!!!",
    "Dear Ms. Novak, thank you for your letter of 3 March. I am pleased to offer you the post.",
    "Population in millions: Norway 5.5, Kenya 54.0, Japan 125.1, Peru 33.7, Canada 38.9.",
    "Let f(x) = x^2 - 4x + 3. Find all x with f(x) = 0 and sketch the graph between -1 and 5.",
    "Give me a recipe for soup with lentils, carrots and cumin.",
)


def calibration_data(
    file: Path | None, tokenizer: Any, say: Callable[[str], None] = note
) -> Calibration | list[dict[str, Any]]:
    """Saved scales, or the arguments of one forward for each few prompts.

    Args:
        file: a `.json` file of saved scales, or a `.txt` file of prompts, one a line; None for
            the built-in prompts.
        tokenizer: makes the tokenizer, if one is needed.
        say: is told where the built-in prompts are taken.

    Raises:
        CalibrationError: the file cannot be used.
    """
    if file is not None and file.suffix == ".json":
        return Calibration.load(file)
    texts = list(BUILT_IN) if file is None else _prompts(file)
    if file is None:
        say(f"no --calibration given: calibrating on {len(BUILT_IN)} built-in English prompts")
    # Of about one length, so that little of a batch is padding.
    texts.sort(key=len)
    batches = (texts[i : i + _BATCH_ROWS] for i in range(0, len(texts), _BATCH_ROWS))
    return [encode(tokenizer(), batch, raw=False) for batch in batches]


def _prompts(file: Path) -> list[str]:
    subject = f"calibration file {str(file)!r}"
    if file.suffix != ".txt":
        raise CalibrationError(
            subject,
            "is neither .json (saved scales) nor .txt (prompts, one a line)",
            "name it by what it holds",
        )
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise CalibrationError(subject, str(error), "pass a readable UTF-8 file") from error
    texts = [line for line in lines if line.strip()]
    if not texts:
        raise CalibrationError(subject, "holds no prompts", "write a few typical ones, one a line")
    return texts
