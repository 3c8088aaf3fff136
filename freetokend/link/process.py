"""One spawned engine process: its lifeline, its stderr, its end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Mapping
from typing import Final

from freetokend.core.errors import ConfigError
from freetokend.link.engine_side import TOKEN_ENVIRONMENT
from freetokend.link.handover import PoolHandover, hand_over, make_lifeline

_LINE_LIMIT_BYTES: Final = 64 << 10
_KEPT_LINES: Final = 20
_LAST_LINES_S: Final = 0.5
_KEPT_LINE_CHARACTERS: Final = 500

# Not for the engine: it must not speak to the service manager, nor adopt its sockets.
_WITHHELD_ENVIRONMENT: Final = (
    "NOTIFY_SOCKET",
    "WATCHDOG_USEC",
    "WATCHDOG_PID",
    "LISTEN_FDS",
    "LISTEN_PID",
    "LISTEN_FDNAMES",
)


def pass_to_stderr(line: str) -> None:
    """The ordinary sink of an engine's log lines: our own stderr, unchanged."""
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


class EngineProcess:
    """A running engine. Owned by the event loop that spawned it."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        lifeline: socket.socket,
        line_sink: Callable[[str], None],
    ) -> None:
        self._process = process
        self._lifeline = lifeline
        self._line_sink = line_sink
        self._last_lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self._exited = asyncio.Event()
        self._pump = asyncio.create_task(self._pump_lines(), name="engine-stderr")
        self._pidfd = os.pidfd_open(process.pid)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._pidfd, self._reap)

    @classmethod
    def spawn(
        cls,
        argv: tuple[str, ...],
        *,
        address: str,
        token: str,
        environment: Mapping[str, str],
        pool: PoolHandover | None,
        line_sink: Callable[[str], None],
    ) -> EngineProcess:
        """Start `argv` with --link and --lifeline-fd added, and hand it the pool.

        The engine leads a session of its own: a Ctrl-C in the terminal reaches control only, which
        then drains. Raises `ConfigError` when the program cannot be started.
        """
        ours, theirs = make_lifeline()
        try:
            # Popen and not the loop's own way: it uses vfork, which runs none of the fork handlers
            # that gRPC's threads would stumble over, and takes no copy of our page tables.
            process = subprocess.Popen(
                (*argv, "--link", address, "--lifeline-fd", str(theirs.fileno())),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=(theirs.fileno(),),
                env=_engine_environment(environment, token),
                start_new_session=True,
            )
        except OSError as error:
            ours.close()
            raise ConfigError(
                f"the engine program {argv[0]} cannot be started: {error.strerror}"
            ) from error
        finally:
            theirs.close()
        with contextlib.suppress(OSError):
            hand_over(ours, pool)  # an engine that is already dead is seen at its exit
        return cls(process, ours, line_sink)

    @property
    def pid(self) -> int:
        """Process id, also that of its session and process group."""
        return self._process.pid

    @property
    def last_lines(self) -> tuple[str, ...]:
        """The newest lines that the engine printed, oldest first."""
        return tuple(self._last_lines)

    def kill(self) -> None:
        """SIGKILL to the engine and whatever it started."""
        if not self._exited.is_set():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    async def wait(self) -> str:
        """Wait for the end, read its last lines; returns how it ended, for people. Repeatable."""
        await self._exited.wait()
        # A grandchild may hold the pipe open: do not wait for it.
        await asyncio.wait({self._pump}, timeout=_LAST_LINES_S)
        self._pump.cancel()
        self._lifeline.close()
        return describe_exit(self._process.wait())

    def _reap(self) -> None:
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._process.wait()
        self._exited.set()

    async def _pump_lines(self) -> None:
        stream = asyncio.StreamReader(limit=_LINE_LIMIT_BYTES)
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(stream), self._process.stdout
        )
        try:
            while raw := await _next_line(stream):
                line = raw.decode("utf-8", errors="replace").rstrip("\n")
                self._last_lines.append(line[:_KEPT_LINE_CHARACTERS])
                self._line_sink(line)
        finally:
            transport.close()


async def _next_line(stream: asyncio.StreamReader) -> bytes:
    """A line, or a piece of one that is too long; empty at the end."""
    try:
        return await stream.readuntil(b"\n")
    except asyncio.IncompleteReadError as error:
        return error.partial
    except asyncio.LimitOverrunError as error:
        return await stream.readexactly(max(error.consumed, 1))


def describe_exit(code: int) -> str:
    """A return code of `subprocess` in words."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {-code} ({signal.Signals(-code).name})"
    except ValueError:
        return f"signal {-code}"


def signal_of(exit_text: str) -> str:
    """The signal's name in a text of `describe_exit`; empty where there is none."""
    before, _, name = exit_text.partition("(")
    return name.rstrip(")") or before if before.startswith("signal") else ""


def _engine_environment(environment: Mapping[str, str], token: str) -> dict[str, str]:
    kept = {key: value for key, value in environment.items() if key not in _WITHHELD_ENVIRONMENT}
    return {**kept, TOKEN_ENVIRONMENT: token}
