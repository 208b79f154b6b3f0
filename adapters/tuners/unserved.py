"""PEFT types that are known and not served: why, and what would have to change."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Unserved:
    """Why a PEFT type is refused.

    Args:
        reason: after "it ...": what the type does that is not served.
        remedy: what to do instead.
    """

    reason: str
    remedy: str


_OTHER = "train a type that is served, such as LORA"


def _bypass(what: str) -> Unserved:
    return Unserved(
        f"multiplies with a changed weight in the base's place ({what}), so no base kernel runs",
        "merge it into the float model before that is quantised, or train LORA",
    )


def _prompt(what: str) -> Unserved:
    return Unserved(
        f"adds {what} to every prompt instead of acting on modules",
        "serving it needs positions and a cache of its own; " + _OTHER,
    )


def _own_formula(what: str, *, weight: bool = False) -> Unserved:
    read = "the raw input and the base's weight" if weight else "the raw input"
    return Unserved(
        f"reads {read} by a formula of its own ({what}), which is not lowered to parts",
        "a function in adapters.lowering would have to be written for it; " + _OTHER,
    )


UNSERVED: Mapping[str, Unserved] = {
    "ADAMSS": _own_formula("products in subspaces that clusters chose"),
    "ADAPTION_PROMPT": _prompt("a learned prompt inside the attention"),
    "CARTRIDGE": _prompt("a learned key-value cache"),
    "CPT": _prompt("a learned context"),
    "DEFT": _own_formula("a projection that takes away as well as adds"),
    "FROD": _bypass("a joint decomposition of all layers' weights"),
    "GLORA": _own_formula("five supports chosen layer by layer", weight=True),
    "GRALORA": _own_formula("a grid of small products"),
    "HRA": _bypass("reflections of it"),
    "LILY": _own_formula("experts shared between layers behind a router"),
    "MULTITASK_PROMPT_TUNING": _prompt("a learned prompt"),
    "OSF": _own_formula("singular vectors in the base's place"),
    "PEANUT": _own_formula("a small network over the weight", weight=True),
    "POLY": Unserved("mixes products by a learned router over tasks", _OTHER),
    "PREFIX_TUNING": _prompt("learned keys and values"),
    "PROMPT_TUNING": _prompt("a learned prompt"),
    "PSOFT": _own_formula("a rotation inside a subspace of the weight"),
    "PVERA": _own_formula("a probabilistic form of VeRA"),
    "P_TUNING": _prompt("a learned prompt"),
    "RANDLORA": _own_formula("sums of products of random matrices"),
    "SHADOW": Unserved("runs a second model beside the base", _OTHER),
    "SHIRA": _bypass("single numbers of it"),
    "SUPERTUNING": _bypass("single numbers of it"),
    "TINYLORA": _own_formula("a projection of a few numbers onto singular vectors"),
    "UNILORA": _own_formula("products projected from one vector"),
    "VBLORA": _own_formula("products out of a bank of vectors"),
    "WAVEFT": _own_formula("a wavelet transform"),
    "XLORA": Unserved("mixes several LoRAs by a learned gate", _OTHER),
}
