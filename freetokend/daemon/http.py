"""The HTTP listener: a socket bound early, and uvicorn inside our own loop."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import uvicorn

from freetokend.core.errors import ConfigError, Reason, UnavailableError

_BACKLOG: Final = 1024
_KEEP_ALIVE_S: Final = 30
# After the engine has ended every stream: what a client gets to read its last bytes.
_FLUSH_S: Final = 2.0


def bind_http(host: str, port: int, *, listening: bool = True) -> socket.socket:
    """Listen on `host`:`port`, or only bind. Raises `ConfigError` that names the address and the
    way out."""
    try:
        return _bound(host, port, listening)
    except (OSError, OverflowError) as error:
        number = error.errno if isinstance(error, OSError) else None
        match number:
            case errno.EADDRINUSE:
                why = (
                    "another program listens there; choose another port with [http] port or --port"
                )
            case errno.EACCES:
                why = (
                    f"uid {os.geteuid()} may not use ports below 1024; choose a higher [http] port"
                )
            case _:
                why = f"{error}; see [http] host and port"
        raise ConfigError(f"cannot listen on {host} port {port}: {why}", param="http") from error


def _bound(host: str, port: int, listening: bool) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    opened = socket.socket(family, socket.SOCK_STREAM)
    try:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            opened.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        opened.bind((host, port))
        if listening:
            opened.listen(_BACKLOG)
    except BaseException:
        opened.close()
        raise
    return opened


def listen(host: str, port: int, *, listening: bool = True) -> socket.socket:
    """As `bind_http`, but what may pass by itself is `UnavailableError`: a port that another
    program still holds, an address that the network has not brought up yet."""
    try:
        return bind_http(host, port, listening=listening)
    except ConfigError as error:
        cause = error.__cause__
        if isinstance(cause, OSError) and cause.errno in (errno.EADDRINUSE, errno.EADDRNOTAVAIL):
            raise UnavailableError(error.message, reason=Reason.ADDRESS_IN_USE) from cause
        raise


def check_http(host: str, port: int) -> None:
    """Raises as `listen`, but accepts a port in use: the service itself may be running. Nobody
    can connect meanwhile, and a daemon that starts at the same time is not in the way."""
    try:
        listen(host, port, listening=False).close()
    except UnavailableError as error:
        cause = error.__cause__
        if not isinstance(cause, OSError) or cause.errno != errno.EADDRINUSE:
            raise


def http_address(listener: socket.socket) -> str:
    """The URL of a listening socket."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: signals belong to the daemon."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class HttpServer:
    """Serves one ASGI application on one listening socket, which it closes in the end."""

    def __init__(self, app: Any, listener: socket.socket) -> None:
        self._listener = listener
        config = uvicorn.Config(
            app,
            loop="none",
            http="httptools",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=int(_FLUSH_S),
        )
        self._server = _Server(config)
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to serve; returns at once."""
        self._task = asyncio.create_task(self._server.serve([self._listener]), name="http")

    async def failed(self) -> None:
        """Wait until the server ends, which it does not do by itself; raises what ended it."""
        if self._task is not None:
            await asyncio.shield(self._task)

    async def stop(self) -> None:
        """Stop accepting, give running responses a moment, close. Idempotent."""
        if self._task is not None:
            self._server.should_exit = True
            await asyncio.wait({self._task}, timeout=_FLUSH_S + 1.0)
            self._server.force_exit = True
            self._task.cancel()
            await asyncio.wait({self._task})
            self._task = None
        self._listener.close()
