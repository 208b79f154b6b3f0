"""Errors as OpenAI's interface writes them: `{"error": {message, type, param, code}}`."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from ...core.errors import (
    AdapterBrokenError,
    AdapterBusyError,
    AdapterError,
    AdapterExistsError,
    AdapterNotFoundError,
    BatchError,
    BranchlineError,
    ConfigError,
    EngineStoppedError,
    NonFiniteError,
    RequestTooLongError,
)

logger = logging.getLogger("branchline.http")

_SHOWN_NAMES = 20
_SHOWN_FINDINGS = 8
_ALTERNATIVES = frozenset({"str", "int", "TextPart", "OtherPart"})
_INTERNAL = "the server failed to answer this request; its log says why"

#: vLLM's and OpenAI's words for a status, where an error brings none of its own.
_TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    408: "TimeoutError",
    409: "ConflictError",
    413: "RequestTooLargeError",
    429: "RateLimitError",
    500: "InternalServerError",
    503: "ServiceUnavailableError",
    504: "TimeoutError",
}


#: Their clients know vLLM's words for a body that is wrong, not OpenAI's.
_VLLM_PATHS = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/adapters")


class ApiError(Exception):
    """What a client is told instead of an answer.

    Args:
        status: of the response.
        message: for a person; nothing of the server's inside.
        type: vLLM's or OpenAI's word for the kind; None for the usual one of the status.
        param: the field that is to blame.
        code: for programs; None for the status.
        headers: of the response.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str | None = None,
        param: str | None = None,
        code: str | int | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = type or _TYPES.get(status, "BadRequestError" if status < 500 else _TYPES[500])
        self.param = param
        self.code = status if code is None else code
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        """The JSON of the response."""
        fields = {"message": self.message, "type": self.type, "param": self.param}
        return {"error": {**fields, "code": self.code}}

    def response(self) -> JSONResponse:
        """The whole response."""
        return JSONResponse(self.body, self.status, headers=self.headers)


def bad_request(message: str, param: str | None = None) -> ApiError:
    """A request that asks for something that cannot be."""
    return ApiError(400, message, param=param)


def model_not_found(model: str, known: Sequence[str]) -> ApiError:
    """A request for a model that is neither the base nor an adapter.

    Args:
        model: as the request names it.
        known: all names that there are.
    """
    shown = ", ".join(f"`{name}`" for name in known[:_SHOWN_NAMES])
    more = len(known) - _SHOWN_NAMES
    shown += f" and {more} more" if more > 0 else ""
    message = f"The model `{model}` does not exist; there are {shown}."
    return ApiError(404, message, type="NotFoundError", param="model")


def api_error_of(error: BranchlineError) -> ApiError:
    """How an error of the library is told to a client.

    What the client can mend is told as it is; what only the server's log should say is not.
    """
    message = str(error)
    if isinstance(error, AdapterNotFoundError):
        return ApiError(404, message, type="NotFoundError", param="model")
    if isinstance(error, AdapterExistsError):
        return ApiError(400, message, type="InvalidUserInput", param="lora_name")
    if isinstance(error, AdapterBusyError):
        return ApiError(409, message)
    if isinstance(error, AdapterBrokenError):
        return ApiError(503, message, param="model", code="adapter_broken")
    if isinstance(error, AdapterError | BatchError | ConfigError | RequestTooLongError):
        return ApiError(400, message)
    if isinstance(error, EngineStoppedError):
        return ApiError(503, message, headers={"Retry-After": "1"})
    if isinstance(error, NonFiniteError):
        return ApiError(500, message, code="non_finite")
    return ApiError(500, _INTERNAL)


def told(error: Exception) -> ApiError:
    """How any exception is told to a client; what is nobody's plan is logged with its trace."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, TimeoutError):
        return ApiError(504, "the request took longer than the server allows (request_timeout)")
    found = api_error_of(error) if isinstance(error, BranchlineError) else ApiError(500, _INTERNAL)
    if found.status >= 500:
        # What was raised on purpose says all in its words.
        planned = isinstance(error, BranchlineError) and error.__cause__ is None
        logger.error("a request failed: %s", error, exc_info=None if planned else error)
    return found


def validation_error(errors: Sequence[Mapping[str, Any]]) -> ApiError:
    """A body that is no JSON, or whose fields are missing, unknown or out of bounds.

    Args:
        errors: pydantic's.
    """
    if any(error["type"] == "json_invalid" for error in errors):
        return bad_request("the body is no JSON", "body")
    unknown = [_field(error) for error in errors if error["type"] == "extra_forbidden"]
    if unknown:
        named = ", ".join(f"`{name}`" for name in unknown[:_SHOWN_NAMES])
        more = len(unknown) - _SHOWN_NAMES
        named += f" and {more} more" if more > 0 else ""
        return bad_request(f"unknown field {named}", unknown[0])
    told = [f"`{_field(error)}`: {error['msg']}" for error in errors[:_SHOWN_FINDINGS]]
    return bad_request("; ".join(dict.fromkeys(told)), _field(errors[0]) if errors else None)


def _field(error: Mapping[str, Any]) -> str:
    place = tuple(error["loc"])
    parts = [str(part) for part in (place[1:] if place[:1] == ("body",) else place)]
    # Names of the alternatives of a union are no part of the body.
    named = [p for p in parts if "[" not in p and "-" not in p and p not in _ALTERNATIVES]
    return ".".join(named) or "body"


def encode_event(body: Mapping[str, Any]) -> bytes:
    """One server-sent event: a part of an answer, or an error in its middle."""
    return b"data: " + json.dumps(body, ensure_ascii=False).encode() + b"\n\n"


def install_error_handlers(app: FastAPI) -> None:
    """Answer every failure of `app` in OpenAI's shape."""

    async def on_api(request: Request, error: Exception) -> Response:
        return told(error).response()

    async def on_invalid(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        request.app.state.branchline.metrics.refused(400)
        kind = request.headers.get("content-type", "")
        if request.method == "POST" and "json" not in kind:
            found = bad_request(
                f"the body is {kind or 'of no type'}; send it with Content-Type: application/json",
                "body",
            )
        else:
            found = validation_error(error.errors())
        if request.url.path in _VLLM_PATHS:
            found.type = "Bad Request"
            found.param = found.param if found.param == "body" else f"body.{found.param}"
        return found.response()

    async def on_http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        found = ApiError(error.status_code, str(error.detail), headers=error.headers)
        return found.response()

    app.add_exception_handler(ApiError, on_api)
    app.add_exception_handler(BranchlineError, on_api)
    app.add_exception_handler(TimeoutError, on_api)
    app.add_exception_handler(RequestValidationError, on_invalid)
    app.add_exception_handler(HTTPException, on_http)
    app.add_exception_handler(Exception, on_api)
