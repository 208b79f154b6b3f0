"""Reading a PEFT adapter folder: headers first, all checks, and only then the tensors (I8)."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ..core.errors import AdapterFormatError, AdapterNotFoundError
from .assemble import assemble
from .base import BaseFacts, BaseWeights
from .chat_template import read_chat_template
from .check import LoadPlan, plan_load
from .config_file import ParsedConfig, load_config, parse_config
from .file_names import CONFIG_NAME, PICKLE_NAME, TENSORS_NAME
from .findings import Finding, raise_findings
from .identity import NamedBase, compare_bases
from .pickle_file import PickleFile
from .tensor_file import TensorFile, TensorHeader, open_regular, read_exactly
from .weights import AdapterWeights

# Real ones have a few kilobytes; "all-linear" on a large model spells out a few hundred names.
_LONGEST_CONFIG = 16 * 2**20

# Of plans: as many shapes of adapters as one model is likely to see, none of them endless.
_MOST_KEPT = 64
_LONGEST_KEPT = 2**20

_PlanKey = tuple[bytes, bytes]
_Compared = tuple[list[Finding], list[str]]
_Known = tuple[NamedBase, _Compared, LoadPlan]


def read_adapter(
    path: str | Path,
    base: BaseFacts,
    *,
    max_rank: int,
    base_weights: BaseWeights | None = None,
    plans: PlanCache | None = None,
) -> AdapterWeights:
    """Read an adapter that PEFT saved, checked against a base model.

    Nothing is read but `adapter_config.json`, `adapter_model.safetensors` (or, where there is
    none, `adapter_model.bin`) and a chat template in that folder, and no tensor before names,
    shapes, dtypes, ranks, targets and task are checked. What comes back is on the CPU and owns its
    memory.

    Args:
        path: the folder.
        base: facts about the model it is to be loaded on.
        max_rank: the rank the slots were sized for.
        base_weights: the model's weights, for what cannot be lowered without them (DoRA).
        plans: of this base and rank, so that what was checked once is not checked again.

    Raises:
        AdapterNotFoundError: there is no such folder.
        AdapterFormatError: the files are damaged, incomplete, unreadable or of another tool.
        AdapterUnsupportedError: it uses a type, a feature, a dtype or a layer that is not served,
            or needs `base_weights`.
        AdapterMismatchError: it is for another base model or another task.
        AdapterCapacityError: its rank exceeds `max_rank`.
    """
    folder = Path(path)
    subject = f"adapter {os.fspath(path)!r}"
    config = read_config(folder, subject)
    with open_tensors(folder, subject) as file:
        # Decoded for each: nobody shares it, and it is small.
        raw = load_config(config, subject)
        key = config, file.header
        plan = None if plans is None else plans.get(key, base)
        if plan is None:
            parsed = parse_config(raw, subject)
            plan = checked_plan(parsed, file.headers, base, max_rank=max_rank, subject=subject)
            if plans is not None:
                plans.put(key, parsed.base_model, base, plan)
        weights = assemble(
            plan, file.read, source=os.fspath(path), subject=subject, base_weights=base_weights
        )
    template = read_chat_template(folder, subject)
    return replace(weights, config=MappingProxyType(raw), chat_template=template)


def read_plan(path: str | Path, base: BaseFacts, *, max_rank: int) -> LoadPlan:
    """Check an adapter as `read_adapter` does, as far as no tensor has to be read.

    Args:
        path, base, max_rank: as there.

    Raises:
        AdapterError: as there.
    """
    folder, subject = Path(path), f"adapter {os.fspath(path)!r}"
    parsed = parse_config(read_raw_config(folder, subject), subject)
    with open_tensors(folder, subject) as file:
        return checked_plan(parsed, file.headers, base, max_rank=max_rank, subject=subject)


class PlanCache:
    """What the latest config and header bytes came to; a training run changes neither.

    Only what was accepted is kept: whatever is wrong is said with the name of the adapter.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: OrderedDict[_PlanKey, _Known] = OrderedDict()

    def get(self, key: _PlanKey, base: BaseFacts) -> LoadPlan | None:
        """The plan, if these bytes were accepted before and the base model compares as it did.

        That is asked anew: the adapter's base may be a folder, and folders change.
        """
        with self._lock:
            if key not in self._kept:
                return None
            self._kept.move_to_end(key)
            named, compared, plan = self._kept[key]
        return plan if compare_bases(named, base.identity) == compared else None

    def put(self, key: _PlanKey, named: NamedBase, base: BaseFacts, plan: LoadPlan) -> None:
        """Keep an accepted plan; not of pickles, which have no header, nor of endless headers.

        Args:
            key: config and header.
            named: the base model as the config names it.
            base: the model.
            plan: for it.
        """
        config, header = key
        if not header or len(config) + len(header) > _LONGEST_KEPT:
            return
        compared = compare_bases(named, base.identity)
        with self._lock:
            self._kept[key] = named, compared, plan
            while len(self._kept) > _MOST_KEPT:
                self._kept.popitem(last=False)


def read_config(folder: Path, subject: str) -> bytes:
    """The adapter_config.json of a folder.

    Raises:
        AdapterNotFoundError, AdapterFormatError: as in `read_raw_config`.
    """
    if not _is_folder(folder, subject):
        raise AdapterNotFoundError(subject, "there is no such folder", "check the path")
    return _read_config(folder / CONFIG_NAME, subject)


def read_raw_config(folder: Path, subject: str) -> dict[str, Any]:
    """The decoded, unchecked adapter_config.json of a folder.

    Args:
        folder: of the adapter.
        subject: what errors are about.

    Raises:
        AdapterNotFoundError: there is no such folder.
        AdapterFormatError: the file is missing, unreadable, too long or no JSON object.
    """
    return load_config(read_config(folder, subject), subject)


def checked_plan(
    parsed: ParsedConfig,
    headers: list[TensorHeader],
    base: BaseFacts,
    *,
    max_rank: int,
    subject: str,
) -> LoadPlan:
    """Check config and headers; raise one error that lists all findings, or return the plan.

    Raises:
        AdapterFormatError, AdapterUnsupportedError, AdapterMismatchError, AdapterCapacityError:
            as in `read_adapter`.
    """
    plan, findings = plan_load(parsed, headers, base, max_rank=max_rank)
    raise_findings(subject, findings)
    return plan


def _is_folder(folder: Path, subject: str) -> bool:
    try:
        return folder.is_dir()
    except OSError as error:
        reason = f"the folder cannot be read ({error})"
        raise AdapterFormatError(subject, reason, "check the path and its permissions") from error


def _read_config(path: Path, subject: str) -> bytes:
    with open_regular(path, subject) as file:
        size = os.fstat(file.fileno()).st_size
        if size > _LONGEST_CONFIG:
            raise AdapterFormatError(
                subject,
                f"{path.name} has {size} bytes, more than any config",
                f"restore {path.name} as PEFT wrote it",
            )
        data = bytearray(size)
        read_exactly(file, data, path.name, subject)
        return bytes(data)


def open_tensors(folder: Path, subject: str) -> TensorFile | PickleFile:
    """The tensors of an adapter folder, their headers read and checked.

    Args:
        folder: of the adapter.
        subject: what errors are about.

    Raises:
        AdapterFormatError: the file is missing, unreadable, no well-formed safetensors file, or a
            pickle that holds anything but tensors.
    """
    path = folder / TENSORS_NAME
    if not os.path.lexists(path) and os.path.lexists(folder / PICKLE_NAME):
        return PickleFile(folder / PICKLE_NAME, subject)
    return TensorFile(path, subject)
