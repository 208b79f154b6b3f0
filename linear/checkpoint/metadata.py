"""Where a checkpoint's metadata lies, and what to make of several documents."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

from ...core.errors import CheckpointError
from . import compressed_tensors, fp8, matching, modelopt, quark
from .document import Document, read_json, short
from .policy import Group, Policy, Rule, Unserved
from .resolve import ResolvedQuant, TensorHeader, resolve

_CONFIG = "config.json"
_NESTED = "text_config"
_KEYS = ("quantization_config", "compression_config")
_MODELOPT = "hf_quant_config.json"
# Files of older tools, and the method of a file that does not name one.
_OLDER = {"quantize_config.json": "gptq", "quant_config.json": "awq"}
_RECIPE = "recipe.yaml"
_NO_MODULES: Mapping[str, Sequence[str]] = MappingProxyType({})

_PARSERS: Mapping[str, Callable[[Document], Policy]] = {
    "compressed-tensors": compressed_tensors.parse,
    "fp8": fp8.parse,
    "mxfp8": fp8.parse,
    "fbgemm_fp8": fp8.parse_fbgemm,
    "quark": quark.parse,
    "modelopt": modelopt.parse,
}


@dataclass(frozen=True)
class CheckpointQuant:
    """What a checkpoint's metadata says of its quantisation.

    Attributes:
        method: the family of formats: "compressed-tensors", "modelopt", "fp8", "fbgemm_fp8" or
            "quark"; of a format that is not served, its own name.
        source: file and place it was read from ("config.json: quantization_config").
        policy: what it says.
    """

    method: str
    source: str
    policy: Policy

    def resolve(
        self,
        linears: Sequence[str],
        headers: Mapping[str, TensorHeader] | None,
        modules: Mapping[str, Sequence[str]] = _NO_MODULES,
    ) -> ResolvedQuant:
        """What each linear is, by metadata and tensors.

        Args:
            linears: the full names of the model's linears, as the checkpoint names them.
            headers: dtype and shape of every tensor of the checkpoint by full name; None to
                answer from the metadata alone.
            modules: other modules that the ignore list may name, each with the linears that its
                format takes it for: a router has none, experts have all of theirs.

        Raises:
            CheckpointError: a format that is not served; a list that leaves nothing quantised, or
                holds no pattern; tensors that are missing or contradict the metadata.
        """
        return resolve(self.policy, linears, headers, modules)


def read_metadata(folder: Path) -> CheckpointQuant | None:
    """What the metadata files of a checkpoint say; None for an unquantised one.

    A format that is not served is refused by `CheckpointQuant.resolve`: weights that are float in
    spite of it can be served.

    Raises:
        CheckpointError: a file that is damaged, a field that is unknown or of the wrong type, or
            two documents that contradict each other.
    """
    policies = [parse_document(document) for document in find_documents(folder)]
    if not policies:
        return None
    policy = policies[0]
    for other in policies[1:]:
        policy = _merged(policy, other)
    if (folder / _RECIPE).exists():
        note = f"{_RECIPE} tells how the checkpoint was made; it is not read"
        policy = replace(policy, notes=(*policy.notes, note))
    return CheckpointQuant(policy.method, policy.source, policy)


def find_documents(folder: Path) -> list[Document]:
    """The documents of a checkpoint that speak of its quantisation, the main one first.

    Raises:
        CheckpointError: a file that is damaged, or a place that holds no object.
    """
    found: list[Document] = []
    config = read_json(folder / _CONFIG)
    if config is not None:
        for place in (config, config.table(_NESTED)):
            tables = [] if place is None else [place.table(key) for key in _KEYS]
            found += [_unwrapped(table) for table in tables if table is not None]
    own = read_json(folder / _MODELOPT)
    if own is not None:
        found.append(Document(own.source, {"quant_method": "modelopt", **own.fields}))
    for name, method in _OLDER.items():
        older = read_json(folder / name)
        if older is not None:
            found.append(Document(name, {"quant_method": method, **older.fields}))
    return found


def parse_document(document: Document) -> Policy:
    """The policy of one document, by its `quant_method`.

    Raises:
        CheckpointError: no method can be told, or its fields are wrong.
    """
    method = _method(document)
    parser = _PARSERS.get(method)
    if parser is not None:
        return parser(document)
    group = Group("quant_method", Unserved(f"quant_method {method!r}"))
    return Policy(
        method, document.source, (Rule(None, group),), None, "ignore", matching.transformers
    )


def _unwrapped(document: Document) -> Document:
    # An older layout, which transformers still reads; what lies beside it still counts.
    inner = document.table("quantization_config")
    if inner is None:
        return document
    outer = {key: value for key, value in document.fields.items() if key != "quantization_config"}
    return Document(inner.source, {**outer, **inner.fields})


def _method(document: Document) -> str:
    named = document.text("quant_method")
    if named:
        method = named.lower().replace("compressed_tensors", "compressed-tensors")
        # "modelopt_fp4" and the like: the algorithm stands in another field.
        return "modelopt" if method.startswith("modelopt") else method
    fields = document.fields
    if fields.get("load_in_4bit") or fields.get("load_in_8bit"):
        return "bitsandbytes"
    if "quant_algo" in fields:
        return "modelopt"
    if "config_groups" in fields:
        return "compressed-tensors"
    raise document.error("quant_method", "is absent")


def _merged(first: Policy, second: Policy) -> Policy:
    """One policy of two that agree; the lists of one that has none come from the other.

    Raises:
        CheckpointError: they contradict each other.
    """
    difference = _difference(first, second)
    if difference is not None:
        raise CheckpointError(
            f"{first.source} and {second.source}",
            f"contradict each other: {difference}",
            "remove the one that is not of these weights",
        )
    speaks = second if first.ignore is None else first
    return replace(
        speaks,
        source=f"{first.source}; {second.source}",
        notes=tuple(dict.fromkeys((*first.notes, *second.notes))),
    )


def _difference(first: Policy, second: Policy) -> str | None:
    if first.method != second.method:
        return f"{_saying(first)}, {_saying(second)}"
    if _meaning(first) != _meaning(second):
        same = first.schemes() == second.schemes()
        what = "the targets of their groups differ" if same else None
        return what or f"{_saying(first)}, {_saying(second)}"
    if first.ignore is None or second.ignore is None:
        return None
    only = sorted(set(first.ignore) ^ set(second.ignore))
    if not only:
        return None
    owner = first if only[0] in first.ignore else second
    return f"only {owner.ignore_field} of {owner.source} holds {short(only[0])}"


def _saying(policy: Policy) -> str:
    return f"{policy.source} says {policy.method}, {' and '.join(policy.schemes())}"


def _meaning(policy: Policy) -> dict[str | None, object]:
    return {rule.target: (rule.group.scheme, rule.group.stored) for rule in policy.rules}
