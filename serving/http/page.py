"""The page at `/`: what a server does now, for a person, with or without scripts.

The whole page is open; where keys are configured it holds nothing but a field for one, and what it
shows comes from `/audit/page`, which the keys guard like the audit.  Names of adapters are hostile:
the templates escape everything, and the policy that goes with the page lets no other script run.
"""

from __future__ import annotations

import secrets
import threading
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from starlette.responses import HTMLResponse, Response

from .page_view import MOST_LISTED, PageSource
from .state import ServerState, state_of

router = APIRouter()

_FOLDER = Path(__file__).with_name("page_files")
_templates = Environment(
    loader=FileSystemLoader(_FOLDER),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_making = threading.Lock()

_NO_UPDATES = (
    "Adapters are not changed at run time here. Start the server with "
    "--allow-runtime-lora-updating and --allowed-roots."
)
_HEADERS = {
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}

Search = Annotated[str, Query(alias="q", max_length=256)]


def _source(request: Request) -> PageSource:
    """The one of this application: it remembers audits and rates."""
    state = request.app.state
    with _making:
        found = getattr(state, "branchline_page", None)
        if found is None:
            found = state.branchline_page = PageSource(state_of(request))
        return found


Server = Annotated[ServerState, Depends(state_of)]
Source = Annotated[PageSource, Depends(_source)]


# No coroutines: an audit takes a while, and locks.


@router.get("/", include_in_schema=False)
def page(state: Server, source: Source, q: Search = "") -> Response:
    """The whole page; with what it shows, where no key is needed for that."""
    locked = bool(state.config.api_key or state.config.admin_key)
    nonce = secrets.token_urlsafe(16)
    body = _templates.get_template("page.html").render(
        nonce=nonce,
        model=state.base_name,
        locked=locked,
        admin=bool(state.config.admin_key),
        live=None if locked else _live(state, source, q),
        updates=state.config.allow_runtime_lora_updating,
        search=q,
    )
    policy = (
        f"default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; "
        "connect-src 'self'; img-src data:; form-action 'self'; base-uri 'none'; "
        "frame-ancestors 'none'"
    )
    return HTMLResponse(body, headers={**_HEADERS, "Content-Security-Policy": policy})


@router.get("/audit/page", include_in_schema=False)
def live_part(state: Server, source: Source, q: Search = "") -> Response:
    """What the page shows, to be put into it."""
    policy = "default-src 'none'; frame-ancestors 'none'; sandbox"
    headers = {**_HEADERS, "Content-Security-Policy": policy}
    return HTMLResponse(_live(state, source, q), headers=headers)


def _live(state: ServerState, source: PageSource, search: str) -> Any:
    return _templates.get_template("live.html").render(
        view=source.view(search),
        names=state.base_names,
        updates=state.config.allow_runtime_lora_updating,
        no_updates=_NO_UPDATES,
        most=MOST_LISTED,
        search=search,
    )
