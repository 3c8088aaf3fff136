"""A rival in a process of its own: it loads weights, and works in bursts when asked.

Requests and replies are lines of JSON over pipes; an idle rival waits in a read and takes no cpu
time. Times are taken in the rival's process. The process is limited to the cpus of the case; its
memory comes in huge pages where glibc can ask for them, as ours does.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Final, Protocol, Self

from benchmarks.peers.cache import PeerUnavailableError
from benchmarks.rounds import Burst

# glibc then asks for huge pages wherever it maps memory for large allocations. numpy's own threads
# would run on any cpu.
_ENVIRONMENT: Final = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1", "OPENBLAS_NUM_THREADS": "1"}
LAST_LINES: Final = 3


class Child:
    """The parent's end. `name` is what the rows call it. Close it, or use it as a context."""

    def __init__(
        self,
        name: str,
        module: str,
        cpus: Sequence[int],
        *,
        environment: Mapping[str, str] | None = None,
        python: Path | None = None,
    ) -> None:
        """python: of an environment of the rival's own."""
        self._name = name
        # no context: the file lives as long as the child, which writes its complaints there
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(
            [str(python or sys.executable), "-m", module, ",".join(map(str, cpus))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            cwd=Path(__file__).parents[2],
            env={**os.environ, **_ENVIRONMENT, **(environment or {})},
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def name(self) -> str:
        return self._name

    def rename(self, name: str) -> None:
        """For rivals that tell only later what exactly they are."""
        self._name = name

    @property
    def ended(self) -> bool:
        """Whether its process is gone: no request can be answered any more."""
        return self._process.poll() is not None

    def ask(self, op: str, **arguments: object) -> dict[str, Any]:
        """One request. Raises PeerUnavailableError with what the child said, or how it ended."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            print(json.dumps({"op": op, **arguments}), file=self._process.stdin, flush=True)
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            self._process.wait(timeout=30)
            raise PeerUnavailableError(
                f"{self._name} {ending(self._process.returncode)}; its last lines: "
                f"{self._last_errors()}"
            )
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            raise PeerUnavailableError(f"{self._name}: {reply['error']}")
        return reply

    def _last_errors(self) -> str:
        self._errors.seek(0)
        text = self._errors.read().decode(errors="replace")
        return " / ".join(text.splitlines()[-LAST_LINES:])

    def burst(self, seconds: float) -> Burst:
        """Work for that long."""
        reply = self.ask("burst", seconds=seconds)
        return Burst(rate=reply["rate"], cpu_share=reply["cpu_share"])

    def close(self) -> None:
        """End the child; it may be in the middle of anything, or have ended by itself."""
        if self._process.stdin is not None:
            # a request that it no longer took is still in the buffer, and closing writes it
            with suppress(BrokenPipeError):
                self._process.stdin.close()
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._errors.close()


def ending(status: int) -> str:
    """How a process ended, from subprocess's return code, in words."""
    if status >= 0:
        return f"ended with status {status}"
    try:
        return f"was ended by {signal.Signals(-status).name}"
    except ValueError:
        return f"was ended by signal {-status}"


class Program(Protocol):
    """What a rival's process does with requests other than bursts: a name per operation."""

    def burst(self, seconds: float) -> Burst: ...


def serve(program: Program, operations: Mapping[str, Callable[..., dict[str, object]]]) -> None:
    """The child's loop, on the cpus of the first argument: until the parent closes the pipe."""
    os.sched_setaffinity(0, [int(cpu) for cpu in sys.argv[1].split(",")])
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # libraries print to stdout; that must not get between the replies
    for line in sys.stdin:
        request = json.loads(line)
        op = request.pop("op")
        reply: dict[str, object]
        try:
            if op == "burst":
                burst = program.burst(**request)
                reply = {"rate": burst.rate, "cpu_share": burst.cpu_share}
            else:
                reply = operations[op](**request)
        except Exception as error:
            reply = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(reply), file=replies, flush=True)
