"""Errors as OpenAI clients expect them, for every way a request can fail. No stack traces."""

from __future__ import annotations

import math
import traceback
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from freetokend.core import logs
from freetokend.core.errors import FreetokenError, Reason, reaction

_LOGGED_FRAMES = 3  # the innermost: where it broke and who called

_REASON_OF_STATUS = {
    401: Reason.UNAUTHENTICATED,
    403: Reason.PERMISSION_DENIED,
    404: Reason.NOT_FOUND,
    405: Reason.METHOD_NOT_ALLOWED,
    413: Reason.PAYLOAD_TOO_LARGE,
    503: Reason.ENGINE_UNAVAILABLE,
}


def error_body(error: FreetokenError) -> dict[str, Any]:
    """{"error": {message, type, param, code}}; `code` is the stable reason."""
    return {
        "error": {
            "message": error.message,
            "type": reaction(error.reason).openai_type,
            "param": error.param,
            "code": error.reason.value,
        }
    }


def error_response(error: FreetokenError) -> JSONResponse:
    """The response of one error, with Retry-After (whole seconds, at least 1) where it has one."""
    headers = {}
    if error.retry_after_s is not None:
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_s)))
    return JSONResponse(
        error_body(error), status_code=reaction(error.reason).http_status, headers=headers
    )


def as_freetoken_error(error: Exception) -> FreetokenError:
    """Any exception as one of ours; what is not ours is a fault: logged here, told as internal.

    The log says where it happened and not its text, which may hold what a user wrote.
    """
    if isinstance(error, FreetokenError):
        return error
    frames = traceback.extract_tb(error.__traceback__)[-_LOGGED_FRAMES:]
    where = " > ".join(f"{Path(f.filename).name}:{f.lineno} {f.name}" for f in frames)
    logs.logger(__name__).error("request-failed", error=type(error).__name__, where=where)
    return FreetokenError(
        "the server failed while handling this request; the cause is in its log.",
        reason=Reason.INTERNAL,
    )


class _FaultBarrier:
    """ASGI middleware: a fault of ours is one log event and an answer in OpenAI's shape.

    Starlette's own handler for all exceptions answers too, but raises them again, so that the
    HTTP server logs them a second time.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def noting_send(message: Message) -> None:
            nonlocal started
            started = started or message["type"] == "http.response.start"
            await send(message)

        try:
            await self._app(scope, receive, noting_send)
        except Exception as error:
            known = as_freetoken_error(error)
            if not started:  # otherwise the client sees the connection break
                await error_response(known)(scope, receive, send)


def install_error_handlers(app: FastAPI) -> None:
    """Every failure of a route, and every unknown path or method, answers in OpenAI's shape."""

    async def on_error(_request: Request, error: Exception) -> JSONResponse:
        return error_response(as_freetoken_error(error))

    async def on_http_error(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        reason = _REASON_OF_STATUS.get(error.status_code, Reason.INVALID_REQUEST)
        message = f"{request.method} {request.url.path}: {error.detail}."
        response = error_response(FreetokenError(message, reason=reason))
        response.headers.update(error.headers or {})
        return response

    app.add_exception_handler(FreetokenError, on_error)
    app.add_exception_handler(HTTPException, on_http_error)
    app.add_middleware(_FaultBarrier)
