"""`GET /v1/models`: the base model, and every adapter, as models."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from ...adapters.version import AdapterInfo
from ...core.errors import AdapterNotFoundError
from .errors import model_not_found
from .naming import known_names
from .state import ServerState, state_of

router = APIRouter()


# No coroutines: what is read takes locks that loading may hold for a moment.
@router.get("/v1/models")
def models(request: Request) -> dict[str, Any]:
    """All models that requests may name."""
    state = state_of(request)
    cards = [_base_card(state, name) for name in state.base_names]
    cards += [_adapter_card(state, info) for info in state.served.adapters.list()]
    return {"object": "list", "data": cards}


@router.get("/v1/models/{name:path}")
def model(request: Request, name: str) -> dict[str, Any]:
    """One model."""
    state = state_of(request)
    if name in state.base_names:
        return _base_card(state, name)
    try:
        return _adapter_card(state, state.served.adapters.info(name))
    except AdapterNotFoundError as error:
        raise model_not_found(name, known_names(state)) from error


def _base_card(state: ServerState, name: str) -> dict[str, Any]:
    return _card(state, name, root=str(state.folder), parent=None)


def _adapter_card(state: ServerState, info: AdapterInfo) -> dict[str, Any]:
    return _card(state, info.name, root=info.source, parent=state.base_name)


def _card(state: ServerState, name: str, *, root: str, parent: str | None) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": state.created,
        "owned_by": "branchline",
        "root": root,
        "parent": parent,
        "max_model_len": state.max_model_len,
    }
