"""Whether an adapter was trained on the model it is loaded on, as far as names tell."""

from __future__ import annotations

from pathlib import PurePath

from .base import BaseFacts


def identity_notes(base_model: str | None, base: BaseFacts) -> list[str]:
    """A note where the names of the two base models differ; never more.

    A name is no proof either way: copies, quantised forms and local folders have their own.  What
    does not fit shows in names, shapes and task, which are errors.

    Args:
        base_model: `base_model_name_or_path` of the adapter.
        base: the model.
    """
    trained, served = _last(base_model), _last(base.name_or_path)
    if trained and served and trained != served:
        return [f"was trained on {base_model!r}, the model is {base.name_or_path!r}"]
    return []


def _last(name: str | None) -> str:
    return PurePath(name or "").name.lower()
