"""Whether an adapter was trained on the model it is loaded on, as far as names and configs tell.

Names and shapes of tensors prove nothing: models of one architecture share them all, and an adapter
on the wrong one loads and answers badly.  So the base that an adapter names is compared with the
one that is served.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from types import MappingProxyType
from typing import Any, NamedTuple

from ..core.errors import CheckpointError
from ..linear.checkpoint.document import read_json
from .findings import Finding, mismatch

_REMEDY = "wrap with allow_base_mismatch=True (command line: --allow-base-mismatch)"

# What the end of a name says of how weights are stored, and not of which weights they are.
_FORMS = (
    *("dynamic", "block", "kv", "fp8", "mxfp8", "nvfp4", "mxfp4", "fp4", "int8", "int4", "8bit"),
    *("4bit", "bnb", "unsloth", "w8a8", "w8a16", "w4a16", "w4a8", "awq", "gptq", "gguf"),
    *("quantized", "bf16", "fp16", "fp32", "hf"),
)
# Vendors that some copies of a model carry in its name.
_VENDORS = ("meta-",)

# First parts of relative paths that are hardly owners of a hub.
_FOLDERS = frozenset(
    {"model", "models", "checkpoint", "checkpoints", "ckpt", "output", "outputs", "data", "tmp"}
)
_HUB_ID = re.compile(r"[A-Za-z0-9_][\w.-]*/[A-Za-z0-9_][\w.-]*", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{7,40}")

# By config key: what it is.  Models name sizes differently; one is compared where both name it.
_SIZES: Mapping[str, str] = MappingProxyType(
    {
        "model_type": "model type",
        **dict.fromkeys(("hidden_size", "n_embd", "d_model"), "hidden size"),
        **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers"), "number of layers"),
        **dict.fromkeys(("num_attention_heads", "n_head", "num_heads"), "number of heads"),
        "vocab_size": "size of the vocabulary",
    }
)


@dataclass(frozen=True)
class BaseIdentity:
    """Which model is served, as far as it is known.

    Args:
        name_or_path: `config._name_or_path`: a hub id or a path; empty where unknown.
        revision: the commit of the hub that it was loaded from; empty where unknown.
        sizes: from `identifying_sizes` of its config.
        allow_mismatch: adapters of another base are loaded, with a note.
        reads_folders: the base that an adapter names may be looked at where it is a local folder;
            not where roots restrict what a source may make this machine read.
    """

    name_or_path: str = ""
    revision: str = ""
    sizes: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    allow_mismatch: bool = False
    reads_folders: bool = True


class NamedBase(NamedTuple):
    """What an adapter's config says of the model it was trained on.

    Args:
        name_or_path: `base_model_name_or_path`; empty where it says nothing.
        revision: of that model; empty where it says nothing.
    """

    name_or_path: str = ""
    revision: str = ""


@dataclass(frozen=True)
class _Named:
    """What a name or path of a base model says.

    Args:
        last: its last part, without what is only a form of storage.
        is_hub_id: whether it is a name of the hub; else it may be anything.
        revision: the commit; empty where it names none.
    """

    last: str
    is_hub_id: bool
    revision: str


def compare_bases(trained: NamedBase, served: BaseIdentity) -> tuple[list[Finding], list[str]]:
    """Compare the base model that an adapter names with the one that is served.

    Two hub ids that differ by more than a form of storage are a finding, and so is a local folder
    whose config says other sizes.  Any other difference of names is a note: copies and folders are
    called as somebody liked.

    Args:
        trained: what the adapter's config says.
        served: the model.

    Returns:
        Findings and notes; no findings where `served.allow_mismatch`.
    """
    if not trained.name_or_path:
        return [], []
    texts, notes = _compare_sizes(trained.name_or_path, served)
    named = _named(trained.name_or_path, trained.revision)
    known = _named(served.name_or_path, served.revision)
    notes += _revision_notes(named, known)
    if known.last and named.last != known.last:
        said = f"was trained on {trained.name_or_path!r}, the model is {served.name_or_path!r}"
        if named.is_hub_id and known.is_hub_id:
            texts.append(f"it {said}")
        else:
            notes.append(said)
    if served.allow_mismatch:
        return [], [*(f"{text} (allowed by allow_base_mismatch)" for text in texts), *notes]
    return [mismatch(text, f"load it on its own base model, or {_REMEDY}") for text in texts], notes


def identifying_sizes(config: Mapping[str, Any]) -> dict[str, Any]:
    """Of a decoded config.json, what two copies of one model agree in.

    Args:
        config: of a model; of one of several modalities its `text_config` counts.
    """
    text = config.get("text_config")
    own = text if isinstance(text, Mapping) else config
    return {key: own[key] for key in _SIZES if isinstance(own.get(key), int | str)}


def _named(name: str, revision: str) -> _Named:
    path = PurePath(name)
    for part, after, commit in zip(path.parts, path.parts[1:], path.parts[2:], strict=False):
        if part.startswith("models--") and after == "snapshots":
            hub_id = part.removeprefix("models--").replace("--", "/")
            return _Named(_plain(PurePath(hub_id).name), "/" in hub_id, commit)
    is_hub_id = _HUB_ID.fullmatch(name) is not None and not os.path.isdir(name)
    is_hub_id &= path.parts[:1] == () or path.parts[0].lower() not in _FOLDERS
    return _Named(_plain(path.name), is_hub_id, revision)


def _plain(name: str) -> str:
    """A model's name in small letters, without what only says how its weights are stored."""
    name = name.lower()
    for vendor in _VENDORS:
        name = name.removeprefix(vendor)
    while True:
        forms = (form for form in _FORMS if re.search(f".[-_.]{form}$", name))
        longest = max(forms, key=len, default=None)
        if longest is None:
            return name
        name = name[: -len(longest) - 1]


def _revision_notes(trained: _Named, served: _Named) -> list[str]:
    both = (trained.revision, served.revision)
    # A branch or a tag may be any commit.
    if trained.last != served.last or not all(_COMMIT.fullmatch(r) for r in both):
        return []
    shorter, longer = sorted(both, key=len)
    if longer.startswith(shorter):
        return []
    return [f"was trained on revision {both[0]} of its base, the model is revision {both[1]}"]


def _compare_sizes(base_model: str, served: BaseIdentity) -> tuple[list[str], list[str]]:
    """What differs, and notes, where the adapter names a model's folder of this machine."""
    file = os.path.join(base_model, "config.json")
    if not (served.reads_folders and served.sizes and os.path.isfile(file)):
        return [], []
    try:
        found = read_json(Path(file))
    except CheckpointError as error:
        # It is not loaded, so what is wrong with it says nothing against the adapter.
        note = f"its base model {base_model!r} is not compared: config.json {error.reason}"
        return [], [note]
    sizes = {} if found is None else identifying_sizes(found.fields)
    differing = [
        f"its base model, {base_model!r}, has {_SIZES[key]} {sizes[key]!r} ({key}), the model "
        f"that is served {served.sizes[key]!r}"
        for key in _SIZES
        if key in sizes and key in served.sizes and sizes[key] != served.sizes[key]
    ]
    return differing, []
