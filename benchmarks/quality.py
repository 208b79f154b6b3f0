"""What each scheme costs the demo model: perplexity and agreement with float32 on held text.

``python -m benchmarks.quality [--json FILE]``.  The text is prose of this project's documents,
which no model was trained on and no scale was calibrated on.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

import branchline
from benchmarks.harness import say
from branchline.cli.calibration import calibration_data
from branchline.core.scheme import SCHEMES
from examples.smollm2 import ensure_smollm2

TEXT = Path(__file__).parent / "data" / "held_text.txt"
CHUNKS, LENGTH = 4, 513
#: How much perplexity may grow.
LIMITS = {"fp8-static": 1.05, "fp8-dynamic": 1.03, "fp8-block": 1.03, "fp8-block-ue8m0": 1.05}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.quality", description=__doc__)
    parser.add_argument("--json", type=Path, help="write the figures there too")
    out: Path | None = parser.parse_args().json
    figures = measure()
    if out is not None:
        out.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


def measure() -> dict[str, dict[str, float]]:
    """Perplexity, its ratio to float32's and next-token agreement of every scheme; printed too."""
    folder = ensure_smollm2()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(TEXT.read_text(encoding="utf-8"), return_tensors="pt").input_ids[0]
    chunks = ids[: CHUNKS * LENGTH].view(CHUNKS, LENGTH)
    reference = _logits(_load(folder, torch.float32), chunks)
    base = _perplexity(reference, chunks)
    say(f"float32: perplexity {base:.2f} on {CHUNKS * (LENGTH - 1)} tokens")
    figures: dict[str, dict[str, float]] = {}
    for name in ("bfloat16", *SCHEMES):
        logits = _logits(_model(name, folder, tokenizer), chunks)
        perplexity = _perplexity(logits, chunks)
        agreement = (logits.argmax(-1) == reference.argmax(-1)).float().mean().item()
        figures[name] = {
            "perplexity": perplexity,
            "ratio": perplexity / base,
            "agreement": agreement,
        }
        say(f"{name:<18} perplexity {perplexity / base - 1:+.2%}, agreement {agreement:.3f}")
        if perplexity / base > LIMITS.get(name, math.inf):
            raise AssertionError(f"{name}: perplexity grew by more than {LIMITS[name] - 1:.0%}")
    return figures


def _load(folder: Path, dtype: torch.dtype) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


def _model(name: str, folder: Path, tokenizer: Any) -> Any:
    model = _load(folder, torch.bfloat16)
    if name == "bfloat16":
        return model
    settings: dict[str, Any] = {}
    if SCHEMES[name].calibrated:
        settings["calibration"] = calibration_data(None, lambda: tokenizer)
    return branchline.wrap(model, quant=name, max_loras=0, **settings)


def _logits(model: Any, chunks: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return torch.cat([model(input_ids=c[None, :-1]).logits.float() for c in chunks])


def _perplexity(logits: torch.Tensor, chunks: torch.Tensor) -> float:
    return F.cross_entropy(logits.flatten(0, 1), chunks[:, 1:].flatten()).exp().item()


if __name__ == "__main__":
    main()
