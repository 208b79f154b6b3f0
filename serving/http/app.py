"""The application: all routes of a server, over one state."""

from __future__ import annotations

from importlib.metadata import version

from fastapi import FastAPI

from . import admin, chat, completions, embeddings, metrics, models, page
from .errors import install_error_handlers
from .state import ServerState


def create_app(state: ServerState) -> FastAPI:
    """The application of one server.

    Args:
        state: what its routes share; reached as `request.app.state.branchline`.
    """
    app = FastAPI(title="Branchline", version=version("branchline"), redoc_url=None)
    app.state.branchline = state
    for routes in (completions, chat, embeddings, models, admin, metrics, page):
        app.include_router(routes.router)
    install_error_handlers(app)
    return app
