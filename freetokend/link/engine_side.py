"""The engine's end of the link: threads around one synchronous gRPC stream. Imports no torch."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Iterator
from typing import Final

import grpc

from freetokend import __version__
from freetokend.api.link.v1 import link_pb2 as pb
from freetokend.api.link.v1 import link_pb2_grpc as pb_grpc
from freetokend.core.cache_stats import CacheCounters
from freetokend.core.errors import AccessError, ConfigError, FreetokenError, UnavailableError
from freetokend.link.codec import (
    decode_control_message,
    encode_engine_message,
)
from freetokend.link.messages import (
    LINK_VERSION,
    ControlMessage,
    Disconnected,
    EngineMessage,
    EngineSettings,
    EngineStats,
    Heartbeat,
    Hello,
    StepReport,
)
from freetokend.link.options import CHANNEL_OPTIONS
from freetokend.link.outbox import Outbox
from freetokend.link.protocol_errors import LinkProtocolError

TOKEN_ENVIRONMENT: Final = "FREETOKEND_LINK_TOKEN"


def take_link_token() -> str:
    """The secret of this spawn, removed from the environment so that no child inherits it.

    Raises `ConfigError` when it is not there: the program was started by hand.
    """
    token = os.environ.pop(TOKEN_ENVIRONMENT, "")
    if not token:
        raise ConfigError(
            f"{TOKEN_ENVIRONMENT} is not set: this program is started by freetokend, not by hand"
        )
    return token


class EngineLinkClient:
    """One engine's connection to control. `connect` once, then `inbox`, `send`, `progress`.

    Owns three threads (reader, writer of gRPC, heartbeat); all end with the stream. `send` and
    `progress` may be called from any thread and never block on control.
    """

    def __init__(
        self,
        address: str,
        *,
        token: str,
        kind: str,
        heartbeat_s: float = 1.0,
        stats: Callable[[], EngineStats] | None = None,
        cache: Callable[[], CacheCounters | None] = lambda: None,
        link_version: int = LINK_VERSION,
    ) -> None:
        """`address` is "unix:PATH". `stats`, if given, is asked at every heartbeat; otherwise the
        last `StepReport`'s are repeated. `cache` is asked at every heartbeat, in its thread."""
        self.inbox: queue.SimpleQueue[ControlMessage | Disconnected] = queue.SimpleQueue()
        self._address = address
        self._hello = Hello(
            token=token,
            link_version=link_version,
            pid=os.getpid(),
            kind=kind,
            version=__version__,
        )
        self._heartbeat_s = heartbeat_s
        self._stats_source = stats
        self._cache_source = cache
        self._last_stats = EngineStats()
        self._progress_lock = threading.Lock()
        self._progress_count = 0
        self._watched: Callable[[], int] = lambda: 0
        self._busy = False
        self._outbox = Outbox()
        self._closing = threading.Event()
        self._stream_ended = threading.Event()
        self._channel: grpc.Channel | None = None
        self._call: grpc.Call | None = None

    def connect(self, timeout_s: float = 30.0) -> EngineSettings:
        """Say Hello, wait for Welcome, start the threads.

        Raises `AccessError` (token), `ConfigError` (other build), `UnavailableError` (nobody
        listens or no answer within `timeout_s`).
        """
        self._channel = grpc.insecure_channel(self._address, options=list(CHANNEL_OPTIONS))
        self._outbox.put(self._hello)
        welcome: queue.SimpleQueue[EngineSettings | FreetokenError] = queue.SimpleQueue()
        stub = pb_grpc.EngineLinkStub(self._channel)  # type: ignore[no-untyped-call]
        call = stub.Attach(self._requests(), wait_for_ready=False)
        self._call = call
        threading.Thread(
            target=self._read, args=(call, welcome), name="link-reader", daemon=True
        ).start()
        try:
            answer = welcome.get(timeout=timeout_s)
        except queue.Empty:
            answer = UnavailableError(
                f"the control process did not answer on {self._address} within {timeout_s:g} s"
            )
        if isinstance(answer, FreetokenError):
            self.close(flush_s=0.0)
            raise answer
        threading.Thread(target=self._beat, name="link-heartbeat", daemon=True).start()
        return answer

    def send(self, message: EngineMessage) -> None:
        """Queue a message for control; returns at once. Reports merge while control is slow."""
        if isinstance(message, StepReport):
            self._last_stats = message.stats
        self._outbox.put(message)

    def traced_bytes(self) -> int:
        """How many bytes of recorded steps control has not taken yet."""
        return self._outbox.traced_bytes()

    def progress(self, count: int = 1) -> None:
        """Note that work advanced: a chunk, a layer sweep, a loaded block."""
        with self._progress_lock:
            self._progress_count += count

    def watch(self, count: Callable[[], int]) -> None:
        """Add to the progress what `count` says at each heartbeat, in the heartbeat's thread: work
        that is one long call advances too. It must never fall."""
        self._watched = count

    def set_busy(self, busy: bool) -> None:
        """Whether the engine has work: only then does a resting progress count mean stuck."""
        self._busy = busy

    def close(self, flush_s: float = 2.0) -> None:
        """Send what waits (at most `flush_s`), then end the stream. Idempotent."""
        self._closing.set()
        self._outbox.close()
        if self._call is not None:
            # The server ends the stream when it has read our half-close.
            if not self._stream_ended.wait(flush_s):
                self._call.cancel()  # type: ignore[no-untyped-call]
            self._call = None
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def _requests(self) -> Iterator[pb.EngineMessage]:
        while (message := self._outbox.take()) is not None:
            yield encode_engine_message(message)

    def _read(
        self,
        call: Iterator[pb.ControlMessage],
        welcome: queue.SimpleQueue[EngineSettings | FreetokenError],
    ) -> None:
        cause = "control ended the stream"
        try:
            first = decode_control_message(next(call))
            if not isinstance(first, EngineSettings):
                raise LinkProtocolError(f"control began with {type(first).__name__}")
            welcome.put(first)
            for raw in call:
                self.inbox.put(decode_control_message(raw))
        except StopIteration:
            welcome.put(UnavailableError("the control process ended the stream before Welcome"))
        except grpc.RpcError as error:
            refusal = _refusal(error)
            cause = refusal.message
            welcome.put(refusal)
        except FreetokenError as error:
            cause = error.message
            welcome.put(error)
        finally:
            self._stream_ended.set()
            self._outbox.close()
            self.inbox.put(Disconnected(cause=cause))

    def _beat(self) -> None:
        while not self._closing.wait(self._heartbeat_s) and not self._stream_ended.is_set():
            stats = self._last_stats if self._stats_source is None else self._stats_source()
            self._outbox.put(
                Heartbeat(
                    progress_count=self._progress_count + self._watched(),
                    busy=self._busy,
                    stats=stats,
                    cache=self._cache_source(),
                )
            )


def _refusal(error: grpc.RpcError) -> FreetokenError:
    """The end of the call as one of our errors."""
    if not isinstance(error, grpc.Call):
        return LinkProtocolError(f"the link failed: {error}")
    details = error.details() or "no details"
    match error.code():
        case grpc.StatusCode.UNAUTHENTICATED | grpc.StatusCode.PERMISSION_DENIED:
            return AccessError(f"control refused this engine: {details}")
        case grpc.StatusCode.FAILED_PRECONDITION:
            return ConfigError(f"control refused this engine: {details}")
        case code:
            return UnavailableError(f"the link to control is down ({code.name}): {details}")
