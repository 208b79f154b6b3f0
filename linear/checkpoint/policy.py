"""What a checkpoint's metadata says, whatever format it says it in."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from ...core.scheme import LinearScheme
from .matching import Dialect

#: What the metadata left open, so that the tensors decide.
Open = Literal["blocks", "inputs", "scale format"]


@dataclass(frozen=True)
class StoredNames:
    """Under which names a format stores the tensors of a linear, behind its own name and a dot.

    Every role has the names of the format and of its variants, the usual one first.

    Attributes:
        codes: the codes.
        scale: the scales of the codes; multiply them.
        global_scale: the per-tensor scale above the block scales.
        input_scale: the per-tensor scale of the input, or the one above its block scales.
        divisor: global scales are stored as what values are divided by, not multiplied with.
    """

    codes: tuple[str, ...] = ("weight",)
    scale: tuple[str, ...] = ("weight_scale",)
    global_scale: tuple[str, ...] = ()
    input_scale: tuple[str, ...] = ("input_scale",)
    divisor: bool = False


@dataclass(frozen=True)
class Unserved:
    """A format that was recognised and is not served.

    Attributes:
        what: the format, by name.
        remedy: what to do about it.
    """

    what: str
    remedy: str = "serve a checkpoint in FP8, MXFP8 or NVFP4"


@dataclass(frozen=True)
class Group:
    """What the metadata says of some linears.

    Attributes:
        where: the field that says it.
        scheme: their quantisation; None where it leaves them alone.
        stored: the names of their tensors.
        open: what `scheme` holds by default only.
    """

    where: str
    scheme: LinearScheme | Unserved | None
    stored: StoredNames = StoredNames()
    open: frozenset[Open] = frozenset()


@dataclass(frozen=True)
class Rule:
    """One target of a group; None stands for every linear."""

    target: str | None
    group: Group


@dataclass(frozen=True)
class Policy:
    """One document's answer.

    Attributes:
        method: the family of formats.
        source: file and place.
        rules: the first one that matches a linear counts.
        ignore: what stays unquantised; None where the document has no such list.
        ignore_field: the list's key.
        dialect: of the entries in `ignore` and of targets.
        silent_ignore: without a list, the tensors say what stays; if unknown, the head does.
        covers_below: an entry that names a module is about the linears below it.
        notes: what was read and decided here.
    """

    method: str
    source: str
    rules: tuple[Rule, ...]
    ignore: tuple[str, ...] | None
    ignore_field: str
    dialect: Dialect
    silent_ignore: bool = False
    covers_below: bool = False
    notes: tuple[str, ...] = ()

    def schemes(self) -> tuple[str, ...]:
        """The schemes of its groups, for messages."""
        return listed(_says(rule.group.scheme) for rule in self.rules) or ("nothing quantised",)


def _says(scheme: LinearScheme | Unserved | None) -> str:
    if isinstance(scheme, Unserved):
        return scheme.what
    return "unquantised" if scheme is None else str(scheme)


def listed(texts: Iterable[str]) -> tuple[str, ...]:
    """The texts, each once, in order."""
    return tuple(dict.fromkeys(texts))
