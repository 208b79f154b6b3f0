"""What a model says of how its tokens are chosen."""

from __future__ import annotations

from typing import Any

# What a generation_config.json sets for requests that do not, as in vLLM.
_FROM_MODEL = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def model_defaults(served: Any) -> dict[str, float]:
    """What the model's generation_config.json says of sampling."""
    found = getattr(served.model, "generation_config", None)
    said = {} if found is None else found.to_diff_dict()
    return {name: said[name] for name in _FROM_MODEL if said.get(name) is not None}
