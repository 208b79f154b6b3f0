"""What a folder or a source is: a quantised model, or an adapter and its cost; no weights of a
model are loaded.
"""

from __future__ import annotations

import os
from pathlib import Path

from ..adapters.describe import describe_adapter
from ..adapters.sources import AdapterSource, LocalSource, fetch
from ..core.errors import ConfigError, WrapError
from .config import WrapConfig
from .inspect_adapter import try_on
from .inspect_model import inspect_model
from .inspect_report import AdapterFileReport, ModelReport

_MODEL, _ADAPTER = "config.json", "adapter_config.json"
_REMEDY = (
    "pass the folder of a model or of an adapter, or another source of an adapter (an archive, "
    "hf://owner/name, a URL)"
)


def inspect_source(
    source: str | os.PathLike[str] | AdapterSource,
    *,
    on: str | Path | None = None,
    **settings: object,
) -> ModelReport | AdapterFileReport:
    """Tell what lies in the folder of a model, or in any source of an adapter.

    Args:
        source: the folder of a model, or whatever `adapters.load` takes.
        on: for an adapter, the folder of the model to try it on.
        **settings: for an adapter, fields of `WrapConfig` as the model would be wrapped with:
            `allowed_roots` and `max_adapter_bytes`, and with `on` also `max_lora_rank`,
            `lora_slots`, `lora_dtype` and `allow_base_mismatch`.

    Raises:
        WrapError: nothing is there, or a folder of neither a model nor an adapter, or of both, or
            a model that transformers cannot read.
        ConfigError: `on` or a setting for a model, or a setting that cannot work.
        CheckpointError: files of weights that are missing or damaged.
        AdapterError: a source that is not allowed or cannot be read, and files of the adapter that
            are missing or damaged.
    """
    config = WrapConfig.checked(**settings)
    found = AdapterSource.parse(source)
    if isinstance(found, LocalSource) and _is_model(Path(found.path)):
        given = ["on"] if on is not None else list(settings)
        if given:
            flag = f"--{given[0].replace('_', '-')}"
            reason = f"is for an adapter, {found.label!r} is a model"
            raise ConfigError(f"{given[0]}= (command line: {flag})", reason, "drop it")
        return inspect_model(Path(found.path))
    config.source_limits.check_allowed(found)
    with fetch(found, config.source_limits) as folder:
        summary = describe_adapter(folder, label=found.label)
        fit = None if on is None else try_on(folder, found.label, Path(on), config)
    return AdapterFileReport(source=found.label, adapter=summary, on=fit)


def _is_model(path: Path) -> bool:
    """Whether a path is a model's folder; else it is an adapter's folder, or an archive.

    Raises:
        WrapError: nothing is there, or a folder of neither or of both.
    """
    subject = f"folder {os.fspath(path)!r}"
    if not path.is_dir():
        if path.exists():
            return False
        raise WrapError(subject, "does not exist", _REMEDY)
    found = [name for name in (_MODEL, _ADAPTER) if (path / name).is_file()]
    if not found:
        reason = f"holds neither {_MODEL} nor {_ADAPTER}, so it is no model and no adapter"
        raise WrapError(subject, reason, _REMEDY)
    if len(found) > 1:
        reason = f"holds both {_MODEL} and {_ADAPTER}: a model and an adapter"
        raise WrapError(subject, reason, "give each a folder of its own")
    return found == [_MODEL]
