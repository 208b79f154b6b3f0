"""Routes of operation: adapters that come and go, the audit, health and readiness.

The bodies, and what they are answered, are vLLM's; `/adapters` has SageMaker's form of the same.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Depends, Query, Request
from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response

from ...adapters.file_names import CONFIG_NAME
from ...adapters.sources import AdapterSource, LocalSource
from ...adapters.version import AdapterInfo
from ...core.errors import (
    AdapterError,
    AdapterExistsError,
    AdapterFormatError,
    AdapterNotFoundError,
    AdapterSourceError,
    ConfigError,
)
from ...policies.audit.page import page
from .errors import ApiError
from .gate import not_ready, version_facts
from .logs import log_facts
from .protocol import LONGEST_NAME
from .state import ServerState, state_of

router = APIRouter()
logger = logging.getLogger("branchline.admin")

_T = TypeVar("_T")

_MOST_POLICIES = 8
_MOST_TOKENS = 1 << 20


# --- what is asked -------------------------------------------------------------------------------


def _encodable(text: str) -> str:
    # JSON may escape halves of characters, which no file name and no answer can hold.
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError("holds half of a character (a lone surrogate)") from error
    return text


Text = Annotated[str, AfterValidator(_encodable)]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class LoadBody(_Body):
    """What `/v1/load_lora_adapter` is sent.

    Attributes:
        lora_name: requests name it as their model.
        lora_path: a source.
        load_inplace: a name that is loaded already gets the content of this source.
    """

    lora_name: Annotated[Text, Field(max_length=LONGEST_NAME)]
    lora_path: Text
    load_inplace: bool = False


class UnloadBody(_Body):
    """What `/v1/unload_lora_adapter` is sent.

    Attributes:
        lora_name: to unload.
        lora_int_id: vLLM's number of an adapter, which has no meaning beside its name.
    """

    lora_name: Text
    lora_int_id: int | None = None


class AddBody(_Body):
    """What `POST /adapters` is sent: SageMaker's words for a name and its source."""

    name: Annotated[Text, Field(max_length=LONGEST_NAME)]
    src: Text


class AuditFormat(StrEnum):
    """How the audit is told."""

    JSON = "json"
    TEXT = "text"
    HTML = "html"


def _updatable(request: Request) -> ServerState:
    state = state_of(request)
    if not state.config.allow_runtime_lora_updating:
        message = (
            "adapters are not loaded or unloaded at run time here; start the server with "
            "--allow-runtime-lora-updating and --allowed-roots"
        )
        raise ApiError(404, message, code="updates_disabled")
    return state


Updatable = Annotated[ServerState, Depends(_updatable)]
State = Annotated[ServerState, Depends(state_of)]


# --- adapters ------------------------------------------------------------------------------------


@router.post("/v1/load_lora_adapter")
async def load_lora_adapter(body: LoadBody, state: Updatable, request: Request) -> Response:
    """Load an adapter, or give a loaded name another content."""
    names = ("lora_name", "lora_path")
    return await _load(request, state, body.lora_name, body.lora_path, body.load_inplace, names)


@router.post("/v1/unload_lora_adapter")
async def unload_lora_adapter(body: UnloadBody, state: Updatable, request: Request) -> Response:
    """Forget an adapter; requests that run on it end on it."""
    return await _unload(request, state, body.lora_name)


@router.post("/adapters")
async def add_adapter(body: AddBody, state: Updatable, request: Request) -> Response:
    """Load an adapter."""
    return await _load(request, state, body.name, body.src, False, ("name", "src"))


@router.delete("/adapters/{name:path}")
async def remove_adapter(name: str, state: Updatable, request: Request) -> Response:
    """Forget an adapter; requests that run on it end on it."""
    return await _unload(request, state, name)


@router.get("/v1/adapters")
async def list_adapters(state: State) -> dict[str, Any]:
    """Every adapter: where it lies, what it costs, what it is used for."""

    def listing() -> dict[str, Any]:
        infos = state.served.adapters.list()
        report = state.audits.of(())
        unfused = {adapter.name: adapter.sites_unfused for adapter in report.adapters}
        return {
            "object": "list",
            "data": [_line(info, unfused.get(info.name)) for info in infos],
            "draining": [_line(info, None) for info in state.served.adapters.draining()],
            "policy": report.policy,
            "sites": len(report.sites),
            "max_loras": state.config.tier_limits.count,
        }

    return await _in_thread(state.look_threads, listing)


async def _load(
    request: Request, state: ServerState, name: str, path: str, inplace: bool, fields: Any
) -> Response:
    log_facts(request)["adapter"] = name
    for value, field in zip((name, path), fields, strict=True):
        if not value.strip():
            raise ApiError(400, f"{field} is empty", type="InvalidUserInput", param=field)
    if name in state.base_names:
        message = f"'{name}' is the base model's name; choose another one"
        raise ApiError(400, message, type="InvalidUserInput", param=fields[0])
    try:
        source = AdapterSource.parse(path)
        await _in_thread(state.load_threads, lambda: _check_allowed(state, source, fields[1]))
        info = await _in_thread(state.load_threads, lambda: _load_now(state, name, source, inplace))
    except (AdapterError, ConfigError) as error:
        raise _told(error, path, fields) from error
    logger.info("adapter loaded", extra={"facts": {"adapter": name, "digest": info.digest}})
    return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")


def _load_now(state: ServerState, name: str, source: AdapterSource, inplace: bool) -> AdapterInfo:
    adapters = state.served.adapters
    known = inplace and any(info.name == name for info in adapters.list())
    try:
        info = adapters.swap(name, source) if known else adapters.load(name, source)
    except AdapterFormatError as error:
        if _is_no_adapter(source):
            raise AdapterNotFoundError(error.subject, error.reason, error.remedy) from error
        raise
    state.checks.loaded(name)
    return info


def _check_allowed(state: ServerState, source: AdapterSource, field: str) -> None:
    try:
        state.config.source_limits.check_allowed(source)
    except AdapterSourceError as error:
        raise ApiError(403, str(error), param=field, code="source_not_allowed") from error


def _is_no_adapter(source: AdapterSource) -> bool:
    """Whether it is a folder of this machine without an adapter's config."""
    if not isinstance(source, LocalSource):
        return False
    folder = Path(source.path)
    return folder.is_dir() and not (folder / CONFIG_NAME).exists()


async def _unload(request: Request, state: ServerState, name: str) -> Response:
    log_facts(request)["adapter"] = name
    try:
        await _in_thread(state.load_threads, lambda: state.served.adapters.unload(name))
    except AdapterNotFoundError as error:
        message = f"there is no adapter '{name}'"
        raise ApiError(404, message, param="lora_name") from error
    logger.info("adapter unloaded", extra={"facts": {"adapter": name}})
    return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.")


def _told(error: AdapterError | ConfigError, path: str, fields: tuple[str, str]) -> ApiError:
    name_field, path_field = fields
    if isinstance(error, AdapterExistsError):
        message = f"{error.subject}: {error.reason}; pass load_inplace=true, or unload it first"
        return ApiError(400, message, type="InvalidUserInput", param=name_field)
    if isinstance(error, ConfigError):
        return ApiError(400, str(error), type="InvalidUserInput", param=name_field)
    # Of what was copied from its root to be read, the library names the copy.
    message = f"adapter {path!r}: {error.reason}; {error.remedy}"
    if isinstance(error, AdapterNotFoundError):
        return ApiError(404, message, param=path_field)
    return ApiError(400, message, type="InvalidUserInput", param=path_field)


def _line(info: AdapterInfo, sites_unfused: int | None) -> dict[str, Any]:
    return {
        "name": info.name,
        "state": info.state,
        "tier": info.tier,
        "slot": info.slot,
        "digest": info.digest,
        "source": info.source,
        "peft_type": info.peft_type,
        "rank": info.rank,
        "modules": info.modules,
        "parameters": info.parameters,
        "bytes": info.nbytes,
        "batches": info.batches,
        "hits": info.hits,
        "last_use": info.last_use,
        "pinned": info.pinned,
        "priority": info.priority,
        "aliases": info.aliases,
        "sites_unfused": sites_unfused,
        "notes": info.notes,
        "reason": info.reason,
    }


# --- what is told --------------------------------------------------------------------------------


@router.get("/audit")
async def audit(
    state: State,
    form: Annotated[AuditFormat, Query(alias="format")] = AuditFormat.JSON,
    policy: Annotated[list[str] | None, Query(max_length=_MOST_POLICIES)] = None,
    tokens: Annotated[int, Query(ge=1, le=_MOST_TOKENS)] = 64,
) -> Response:
    """Every site, who reads it, its route for each set of adapters, why, its cost, what ran."""

    def made() -> Response:
        try:
            report = state.served.audit(policy=policy, tokens=tokens)
        except ConfigError as error:
            raise ApiError(400, str(error), type="InvalidUserInput", param="policy") from error
        if form is AuditFormat.HTML:
            return HTMLResponse(page(report))
        if form is AuditFormat.TEXT:
            return PlainTextResponse(str(report))
        return Response(report.model_dump_json(), media_type="application/json")

    return await _in_thread(state.look_threads, made)


@router.get("/health")
async def health(state: State) -> Response:
    """Whether the process can still answer: if not, it has to be restarted."""
    engine = state.engine
    if engine is not None and not engine.alive and not state.stopping:
        died = "the engine is not running" if engine.error is None else _cause(engine.error)
        raise ApiError(503, died, code="engine_dead")
    return JSONResponse({"status": "stopping" if state.stopping else "ok"})


@router.get("/ready")
async def ready(state: State) -> Response:
    """Whether requests should be sent here now."""
    if state.stopping:
        raise not_ready("the server is stopping")
    engine = state.engine
    if engine is not None and not engine.alive:
        raise not_ready("the engine is not running")
    report = state.readiness
    check = None
    if report is not None:
        check = {
            "ok": report.ok,
            "routes": report.routes,
            "out_of_service": [fault.model_dump() for fault in report.out_of_service],
        }
    return JSONResponse({"status": "ready", "models": list(state.base_names), "self_check": check})


@router.get("/version")
async def version() -> dict[str, str]:
    """Versions of this server and of what it computes with."""
    return version_facts()


def _cause(error: BaseException) -> str:
    return f"the engine died: {type(error).__name__}: {error}"


# --- threads -------------------------------------------------------------------------------------


async def _in_thread(threads: ThreadPoolExecutor, call: Callable[[], _T]) -> _T:
    """Run what waits for disks and locks beside the event loop."""
    return await asyncio.get_running_loop().run_in_executor(threads, call)
