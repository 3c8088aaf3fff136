"""The HTTP application: generation, models, health, metrics. A composition without logic."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from fastapi import FastAPI
from fastapi.responses import JSONResponse, Response

from freetokend import __version__
from freetokend.core.errors import UnavailableError
from freetokend.link.messages import EngineGateway
from freetokend.policy.health import Health
from freetokend.serving.admission import check_model, known_description
from freetokend.serving.generate_routes import GenerationRoutes, HttpObserver
from freetokend.serving.http_errors import install_error_handlers
from freetokend.serving.model_text import ModelText

_RETRY_S = 2


def create_app(
    gateway: EngineGateway,
    text: ModelText,
    *,
    observer: HttpObserver,
    health: Callable[[], Health],
    render_metrics: Callable[[], tuple[bytes, str]],
    model_created_s: int,
    max_body_bytes: int,
    keep_alive_s: float = 10.0,
) -> FastAPI:
    """Build the application.

    `health` is asked by /livez and /readyz, `render_metrics` gives body and content type of
    /metrics, `model_created_s` is the Unix time that /v1/models reports, `keep_alive_s` the longest
    silence of a stream.
    """
    app = FastAPI(title="freetokend", version=__version__, docs_url=None, redoc_url=None)
    install_error_handlers(app)
    routes = GenerationRoutes(
        gateway, text, observer, max_body_bytes=max_body_bytes, keep_alive_s=keep_alive_s
    )
    app.include_router(routes.router())

    def model_entry() -> dict[str, object]:
        description = known_description(gateway.snapshot())
        if description is None:
            raise UnavailableError(
                f"no model is being served now: {health().ready_reason}.", retry_after_s=_RETRY_S
            )
        return {
            "id": description.model,
            "object": "model",
            "created": model_created_s,
            "owned_by": "freetokend",
            # what a request can really have, not the checkpoint's maximum; both common names
            "context_length": description.servable_context_tokens,
            "max_model_len": description.servable_context_tokens,
        }

    @app.get("/v1/models")
    async def models() -> JSONResponse:
        return JSONResponse({"object": "list", "data": [model_entry()]})

    @app.get("/v1/models/{model_id:path}")
    async def model(model_id: str) -> JSONResponse:
        entry = model_entry()
        check_model(model_id, str(entry["id"]))
        return JSONResponse(entry)

    @app.get("/livez")
    async def livez() -> JSONResponse:
        now = health()
        return _health_response("alive", now.alive, now.ready_reason)

    @app.get("/readyz")
    async def readyz() -> JSONResponse:
        now = health()
        return _health_response("ready", now.ready, now.ready_reason)

    @app.get("/metrics")
    async def metrics() -> Response:
        body, content_type = render_metrics()
        return Response(body, headers={"Content-Type": content_type})

    return app


def _health_response(name: str, holds: bool, reason: str) -> JSONResponse:
    if holds:
        return JSONResponse({"status": name})
    return JSONResponse(
        {"status": f"not {name}", "reason": reason},
        status_code=503,
        headers={"Retry-After": str(_RETRY_S)},
    )


def model_created_s(directory: Path) -> int:
    """Unix time at which the FTW directory's index was written."""
    return int((directory / "freetoken_weight.json").stat().st_mtime)
