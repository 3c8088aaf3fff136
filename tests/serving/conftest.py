"""A real HTTP server over a scripted engine; clients are the official one and bare sockets."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openai
import uvicorn

from freetokend.link.messages import EngineState
from freetokend.serving.app import Readiness, create_app
from freetokend.serving.model_text import ModelText, load_model_text
from tests.support.scripted import EngineHarness, scripted_engine
from tests.support.tiny_tokenizer import write_tiny_text


@dataclass
class Ended:
    """What the observer was told, one entry per request."""

    calls: list[dict[str, Any]] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def request_ended(self, **call: Any) -> None:
        self.calls.append(call)
        self.changed.set()

    async def wait_count(self, count: int) -> None:
        async with asyncio.timeout(20):
            while len(self.calls) < count:
                self.changed.clear()
                await self.changed.wait()


@dataclass
class Served:
    """One running server."""

    port: int
    engine: EngineHarness
    text: ModelText
    ended: Ended

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def client(self) -> openai.AsyncOpenAI:
        """The official client; the server closes its connections when the test ends."""
        return openai.AsyncOpenAI(base_url=f"{self.base_url}/v1", api_key="unused", max_retries=0)

    def ids(self, text: str) -> list[int]:
        return list(self.text.tokenizer.encode(text, add_special_tokens=False).ids)


@asynccontextmanager
async def serve(
    directory: Path,
    script: dict[str, Any],
    *,
    wait_ready: bool = True,
    keep_alive_s: float = 10.0,
    max_body_bytes: int = 1 << 20,
) -> AsyncIterator[Served]:
    """Serve `script`'s engine over HTTP on a free loopback port."""
    text = load_model_text(write_tiny_text(directory))
    ended = Ended()
    async with scripted_engine(script) as engine:
        gateway = engine.supervisor

        def readiness() -> Readiness:
            state = gateway.snapshot().state
            return Readiness(ready=state is EngineState.READY, reason=state.value)

        app = create_app(
            gateway,
            text,
            observer=ended,
            readiness=readiness,
            render_metrics=lambda: (b"# none\n", "text/plain; version=0.0.4"),
            model_created_s=1_700_000_000,
            max_body_bytes=max_body_bytes,
            keep_alive_s=keep_alive_s,
        )
        listener = socket.create_server(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(app, log_config=None, lifespan="off"))
        serving = asyncio.create_task(server.serve([listener]))
        try:
            if wait_ready:
                await engine.wait_state(EngineState.READY)
            yield Served(listener.getsockname()[1], engine, text, ended)
        finally:
            server.should_exit = True
            await serving
            listener.close()
