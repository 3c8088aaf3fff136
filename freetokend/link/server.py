"""Control's end of the link: a gRPC server on a private Unix socket that engines attach to."""

from __future__ import annotations

import asyncio
import hmac
import logging
import os
import secrets
import stat
from collections import deque
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Final, Protocol

import grpc

from freetokend.api.link.v1 import link_pb2 as pb
from freetokend.api.link.v1 import link_pb2_grpc as pb_grpc
from freetokend.core.errors import ConfigError
from freetokend.link.codec import (
    decode_engine_message,
    encode_control_message,
)
from freetokend.link.messages import (
    LINK_VERSION,
    ControlMessage,
    EngineMessage,
    EngineSettings,
    GenerateRequest,
    Hello,
)
from freetokend.link.options import CHANNEL_OPTIONS
from freetokend.link.protocol_errors import LinkProtocolError

_HELLO_TIMEOUT_S: Final = 10.0
_MAX_SOCKET_PATH_BYTES: Final = 107  # sun_path of Linux, without the final zero

_log = logging.getLogger(__name__)

_Context = grpc.aio.ServicerContext[pb.EngineMessage, pb.ControlMessage]


class LinkListener(Protocol):
    """Who hears one attached engine; called in the event loop, must not block."""

    def attached(self, hello: Hello) -> None:
        """The engine has said Hello with the right token and version."""
        ...

    def received(self, message: EngineMessage) -> None:
        """A message after Hello."""
        ...

    def refused(self, text: str) -> None:
        """The engine of this spawn was turned away for good: another build's link version."""
        ...

    def detached(self, cause: str) -> None:
        """The stream has ended; nothing more will come."""
        ...


class Attachment:
    """A place for one spawned engine: its secret, its settings, and its outgoing messages.

    Owned by the event loop. The queue is bounded by the supervisor's admission: each request adds
    one Submit and at most one Cancel.
    """

    def __init__(self, settings: EngineSettings, listener: LinkListener) -> None:
        self.token: Final = secrets.token_urlsafe(32)
        self.settings: Final = settings
        self.listener: Final = listener
        self.attached = False
        self._outgoing: deque[ControlMessage] = deque()
        self._wake = asyncio.Event()
        self._closed = False

    def send(self, message: ControlMessage) -> None:
        """Queue a message; returns at once."""
        self._outgoing.append(message)
        self._wake.set()

    def withdraw(self, request_id: str) -> bool:
        """Take back a request that has not left yet; False when it has."""
        for message in self._outgoing:
            if isinstance(message, GenerateRequest) and message.request_id == request_id:
                self._outgoing.remove(message)
                return True
        return False

    def close(self) -> None:
        """End the stream after what is queued."""
        self._closed = True
        self._wake.set()

    async def next_outgoing(self) -> ControlMessage | None:
        """The next message for the engine; None once closed and empty."""
        while not self._outgoing:
            if self._closed:
                return None
            self._wake.clear()
            await self._wake.wait()
        return self._outgoing.popleft()


class LinkServer(pb_grpc.EngineLinkServicer):
    """Serves `link.v1.EngineLink` in a 0700 directory; each `expect`ed token admits one engine."""

    def __init__(self, directory: Path, *, link_version: int = LINK_VERSION) -> None:
        self._directory = directory
        self._link_version = link_version
        self._path = directory / f"link-{os.getpid()}.sock"
        self._server: grpc.aio.Server | None = None
        self._expected: dict[str, Attachment] = {}

    @property
    def address(self) -> str:
        """What the engine gets as --link."""
        return f"unix:{self._path}"

    def prepare(self) -> None:
        """The part of `start` that can show the place to be unusable; listens to nothing."""
        prepare_private_directory(self._directory)
        if len(os.fsencode(self._path)) > _MAX_SOCKET_PATH_BYTES:
            raise ConfigError(
                f"the socket path {self._path} is longer than the {_MAX_SOCKET_PATH_BYTES} bytes "
                "a Unix socket allows: choose a shorter [service] runtime_dir"
            )

    async def start(self) -> None:
        """Make the directory private, listen. Raises `ConfigError` when the place is unusable."""
        self.prepare()
        _remove_dead_sockets(self._directory)
        server = grpc.aio.server(options=list(CHANNEL_OPTIONS))
        pb_grpc.add_EngineLinkServicer_to_server(self, server)  # type: ignore[no-untyped-call]
        try:
            server.add_insecure_port(self.address)
            await server.start()
        except RuntimeError as error:
            raise ConfigError(
                f"cannot listen on {self._path}: {error}; see [service] runtime_dir"
            ) from error
        self._server = server

    async def stop(self) -> None:
        """End every stream and remove the socket."""
        if self._server is not None:
            await self._server.stop(grace=None)
            self._server = None
        self._path.unlink(missing_ok=True)

    def expect(self, settings: EngineSettings, listener: LinkListener) -> Attachment:
        """Admit one engine that will present the returned attachment's token."""
        attachment = Attachment(settings, listener)
        self._expected[attachment.token] = attachment
        return attachment

    def revoke(self, attachment: Attachment) -> None:
        """The spawn is over: its token admits nobody, its stream ends."""
        self._expected.pop(attachment.token, None)
        attachment.close()

    async def Attach(  # noqa: N802  the name is the proto's
        self, request_iterator: AsyncIterator[pb.EngineMessage], context: _Context
    ) -> None:
        """The stream of one engine, from Hello to its end."""
        attachment = await self._admit(request_iterator, context)
        listener = attachment.listener
        cause = "the engine ended the stream"
        try:
            await context.write(encode_control_message(attachment.settings))
            reader = asyncio.create_task(_read(request_iterator, listener.received))
            writer = asyncio.create_task(_write(context, attachment))
            try:
                await asyncio.wait({reader, writer}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                reader.cancel()
                writer.cancel()
                results = await asyncio.gather(reader, writer, return_exceptions=True)
            for result in results:
                if isinstance(result, LinkProtocolError):
                    cause = result.message
                elif isinstance(result, Exception):
                    cause = f"the stream broke: {result or type(result).__name__}"
        finally:
            self._expected.pop(attachment.token, None)
            listener.detached(cause)

    async def _admit(
        self, requests: AsyncIterator[pb.EngineMessage], context: _Context
    ) -> Attachment:
        """Read Hello and find its spawn; aborts the call, telling why, when it has none."""
        try:
            async with asyncio.timeout(_HELLO_TIMEOUT_S):
                hello = decode_engine_message(await anext(requests))
        except (TimeoutError, StopAsyncIteration, LinkProtocolError):
            hello = None
        if not isinstance(hello, Hello):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the first message must be Hello")
        attachment = self._find(hello.token)
        if attachment is None:
            _log.warning("link-token-refused", extra={"engine_pid": hello.pid})
            await context.abort(
                grpc.StatusCode.UNAUTHENTICATED,
                "the token is not that of an engine this process started",
            )
        if hello.link_version != self._link_version:
            text = (
                f"the engine speaks link version {hello.link_version} (freetokend "
                f"{hello.version}) but the control process version {self._link_version}: "
                "both must come from one installation; reinstall freetokend"
            )
            attachment.listener.refused(text)
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, text)
        if attachment.attached:
            await context.abort(
                grpc.StatusCode.ALREADY_EXISTS, "an engine with this token is already attached"
            )
        attachment.attached = True
        attachment.listener.attached(hello)
        return attachment

    def _find(self, token: str) -> Attachment | None:
        found = None
        for known, attachment in self._expected.items():
            if hmac.compare_digest(known.encode(), token.encode()):
                found = attachment
        return found


async def _read(
    requests: AsyncIterator[pb.EngineMessage], received: Callable[[EngineMessage], None]
) -> None:
    async for raw in requests:
        received(decode_engine_message(raw))


async def _write(context: _Context, attachment: Attachment) -> None:
    while (message := await attachment.next_outgoing()) is not None:
        await context.write(encode_control_message(message))


def _remove_dead_sockets(directory: Path) -> None:
    """Sockets of control processes that were killed; the live ones belong to somebody else."""
    for path in directory.glob("link-*.sock"):
        pid = path.stem.removeprefix("link-")
        if pid == str(os.getpid()) or not Path("/proc", pid).exists():
            path.unlink(missing_ok=True)


def prepare_private_directory(directory: Path) -> None:
    """Make `directory` (mode 0700, ours). Raises `ConfigError` naming what is in the way."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = os.lstat(directory)
        if not stat.S_ISDIR(status.st_mode):
            raise ConfigError(f"{directory} is not a directory; see [service] runtime_dir")
        if status.st_uid != os.geteuid():
            raise ConfigError(
                f"{directory} belongs to uid {status.st_uid}, not to uid {os.geteuid()} that runs "
                "freetokend: remove it or choose another [service] runtime_dir"
            )
        os.chmod(directory, 0o700)
    except OSError as error:
        raise ConfigError(
            f"cannot use {directory} for private sockets: {error.strerror} "
            f"(uid {os.geteuid()}); see [service] runtime_dir"
        ) from error
