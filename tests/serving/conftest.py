"""A real HTTP server over an engine; clients are the official one and bare sockets."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openai
from fastapi import FastAPI

from freetokend.daemon.http import HttpServer
from freetokend.link.messages import EngineGateway, EngineSnapshot, EngineState
from freetokend.policy.health import Health, HealthInputs, HealthState, assess
from freetokend.serving.app import create_app
from freetokend.serving.model_text import ModelText, load_model_text
from tests.support.scripted import DEADLINE_S, EngineHarness, Gate, scripted_engine
from tests.support.tiny_tokenizer import write_tiny_text

HELLO = [{"role": "user", "content": "hello"}]
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


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
class Listening:
    """A server on a free loopback port."""

    port: int
    text: ModelText
    ended: Ended
    clients: list[openai.AsyncOpenAI] = field(default_factory=list)

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def client(self) -> openai.AsyncOpenAI:
        """The official client, closed when the test ends."""
        client = openai.AsyncOpenAI(base_url=f"{self.base_url}/v1", api_key="unused", max_retries=0)
        self.clients.append(client)
        return client

    def ids(self, text: str) -> list[int]:
        return list(self.text.tokenizer.encode(text, add_special_tokens=False).ids)

    async def raw(
        self, body: dict[str, Any], *, path: str = CHAT, left_out_bytes: int = 0
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A bare connection on which `body` was posted, without its last `left_out_bytes`."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        payload = json.dumps(body).encode()
        head = (
            f"POST {path} HTTP/1.1\r\nhost: test\r\ncontent-type: application/json\r\n"
            f"content-length: {len(payload)}\r\n\r\n"
        )
        writer.write(head.encode() + payload[: len(payload) - left_out_bytes])
        await writer.drain()
        return reader, writer


@dataclass
class Served(Listening):
    """A server with an engine process behind it."""

    engine: EngineHarness = field(kw_only=True)

    async def until_idle(self, gate: Gate | None = None) -> EngineSnapshot:
        """Wait until nothing runs or waits; an engine at its gate gets a step at a time."""
        supervisor, generation = self.engine.supervisor, 0
        async with asyncio.timeout(DEADLINE_S):
            while True:
                snapshot = supervisor.snapshot()
                stats = snapshot.stats
                if not (stats.running_count or stats.waiting_count or snapshot.busy):
                    assert supervisor.in_flight_count == 0
                    return snapshot
                if gate is not None:
                    gate.open()
                generation = await supervisor.changed(generation)


def make_app(gateway: EngineGateway, text: ModelText, ended: Ended, **options: Any) -> FastAPI:
    """The application; its health is the real registry's verdict on the gateway's state."""

    def health() -> Health:
        snapshot = gateway.snapshot()
        return assess(HealthInputs(state=HealthState(snapshot.state.value), cause=snapshot.cause))

    defaults: dict[str, Any] = {
        "observer": ended,
        "health": health,
        "render_metrics": lambda: (b"# none\n", "text/plain; version=0.0.4"),
        "model_created_s": 1_700_000_000,
        "max_body_bytes": 1 << 20,
    }
    return create_app(gateway, text, **{**defaults, **options})


@asynccontextmanager
async def listen(
    gateway: EngineGateway, directory: Path, **options: Any
) -> AsyncIterator[Listening]:
    """Serve any gateway over HTTP."""
    text = load_model_text(write_tiny_text(directory))
    ended = Ended()
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    server = HttpServer(make_app(gateway, text, ended, **options), listener)
    server.start()
    listening = Listening(port, text, ended)
    try:
        yield listening
    finally:
        for client in listening.clients:
            await client.close()
        await server.stop()


@asynccontextmanager
async def serve(
    directory: Path, script: dict[str, Any], *, wait_ready: bool = True, **options: Any
) -> AsyncIterator[Served]:
    """Serve `script`'s engine over HTTP."""
    engine_options = {key: options.pop(key) for key in ("settings", "budget") if key in options}
    async with (
        scripted_engine(script, **engine_options) as engine,
        listen(engine.supervisor, directory, **options) as server,
    ):
        if wait_ready:
            await engine.wait_state(EngineState.READY)
        yield Served(server.port, server.text, server.ended, server.clients, engine=engine)
