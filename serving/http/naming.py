"""Models by the names that requests call them."""

from __future__ import annotations

from ...core.errors import AdapterNotFoundError
from .errors import model_not_found
from .state import ServerState


def known_names(state: ServerState) -> list[str]:
    """The base model's names, and those of adapters."""
    return [*state.base_names, *(info.name for info in state.served.adapters.list())]


def adapter_of(state: ServerState, model: str | None) -> str | None:
    """The adapter that a request names as its model; None for the base model.

    Raises:
        ApiError: 404, there is no such model.
    """
    if model is None or model in state.base_names:
        return None
    adapters = state.served.adapters
    if adapters.resolver is None:
        try:
            adapters.info(model)
        except AdapterNotFoundError as error:
            raise model_not_found(model, known_names(state)) from error
    # Where there is a resolver, taking a lease asks it.
    return model
