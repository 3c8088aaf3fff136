"""`freetokenctl trace record`: the running model's choice of experts, written to a file."""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from freetokend.api.control.v1 import control_pb2 as pb
from freetokend.core.errors import FreetokenError, InvalidInputError, Reason, reaction
from freetokend.core.units import format_bytes, format_seconds
from freetokend.ctl.connection import admin_stub, connected, find_socket
from freetokend.ctl.plain import Plain, print_json
from freetokend.traces.trace import Phase, TraceShape
from freetokend.traces.trace_file import TraceWriter

if TYPE_CHECKING:
    import grpc

_BY_CALLER = "it was ended here"


def record(arguments: argparse.Namespace) -> int:
    """Record until a limit, Ctrl-C, or the service ends it; the file is whole in every case."""
    path = Path(arguments.out)
    if path.exists() and not arguments.force:
        raise InvalidInputError(
            f"{path} is there already. Give another name, or --force to replace it.", param="out"
        )
    recorder = _Recorder(path)
    with recorder:
        try:
            with connected(find_socket(arguments.socket, admin=True)) as channel:
                call = admin_stub(channel).RecordTrace(
                    pb.RecordTraceRequest(
                        duration_s=arguments.duration_s, steps_count=arguments.steps_count
                    )
                )
                with _ended_by_signals(call) as asked:
                    recorder.take_all(call, asked)
        except FreetokenError as error:
            if not recorder.is_writing or error.reason is Reason.IO_FAILED:
                raise
            # The service went away: what it told before is worth keeping.
            recorder.end = _End(cause=error.message, reason=error.reason)
    recorder.print_summary(arguments.output)
    if recorder.end.reason is None:
        return 0
    print(
        f"freetokenctl: the recording ended early: {recorder.end.cause.rstrip('.')}. {path} has "
        "the steps before that.",
        file=sys.stderr,
    )
    return reaction(recorder.end.reason).exit_code


@dataclass(frozen=True, slots=True, kw_only=True)
class _End:
    """Why the recording ended; reason None: as asked."""

    cause: str
    reason: Reason | None = None


class _Recorder:
    """Owner of the file and of what is counted. The file is completed when the block is left
    without an exception."""

    def __init__(self, path: Path) -> None:
        self.end = _End(cause=_BY_CALLER)
        self._path = path
        self._writer: TraceWriter | None = None
        self._shape = TraceShape(layers_count=1, experts_per_layer=1, experts_per_token=1)
        self._source = ""
        self._steps_count = 0
        self._parts = {Phase.PREFILL: 0, Phase.DECODE: 0}
        self._tokens = {Phase.PREFILL: 0, Phase.DECODE: 0}
        self._started_s = 0.0
        self._record_s = 0.0

    @property
    def is_writing(self) -> bool:
        return self._writer is not None

    def __enter__(self) -> _Recorder:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._writer is None:
            return
        self._record_s = time.monotonic() - self._started_s
        if kind is None:
            self._writer.close()
        else:
            self._writer.discard()

    def take_all(self, call: Iterator[pb.RecordTraceResponse], asked: threading.Event) -> None:
        """Everything until the end, or until `asked`, which cancels the call."""
        import grpc  # noqa: PLC0415 - `connected` has imported it

        try:
            for response in call:
                match response.WhichOneof("body"):
                    case "started":
                        self._start(response.started)
                    case "step":
                        self._add(response.step)
                    case "ended":
                        self._ended(response.ended)
        except grpc.RpcError:
            if not asked.is_set():
                raise
        if asked.is_set() and self._writer is None:
            raise KeyboardInterrupt

    def _start(self, shape: pb.TraceShape) -> None:
        try:
            self._shape = TraceShape(
                layers_count=shape.layers_count,
                experts_per_layer=shape.experts_per_layer_count,
                experts_per_token=shape.experts_per_token_count,
            )
        except ValueError as error:
            raise _unusable(error) from error
        self._source = shape.source
        self._writer = TraceWriter(self._path, self._shape, source=shape.source)
        self._started_s = time.monotonic()
        print(
            f"recording to {self._path}: {self._shape.layers_count} layers of "
            f"{self._shape.experts_per_layer} experts, {self._shape.experts_per_token} per token; "
            "Ctrl-C ends it",
            file=sys.stderr,
            flush=True,
        )

    def _add(self, step: pb.TracedStep) -> None:
        shape = self._shape
        for part in step.parts:
            phase = Phase.PREFILL if part.is_prefill else Phase.DECODE
            try:
                ids = np.frombuffer(part.expert_ids, dtype="<u2").reshape(
                    shape.layers_count, part.rows_count, shape.experts_per_token
                )
                if self._writer is None:
                    raise ValueError("a step came before the sizes")
                self._writer.add(phase, ids)
            except ValueError as error:
                raise _unusable(error) from error
            self._parts[phase] += 1
            self._tokens[phase] += part.rows_count
        self._steps_count += 1

    def _ended(self, ended: pb.TraceEnd) -> None:
        reason = None
        if ended.error_reason:
            try:
                reason = Reason(ended.error_reason)
            except ValueError:  # of a newer daemon
                reason = Reason.INTERNAL
        self.end = _End(cause=ended.cause, reason=reason)

    def print_summary(self, output: str) -> None:
        """What the file holds."""
        size_bytes = self._path.stat().st_size
        if output == "json":
            print_json(self._document(size_bytes))
            return
        tokens = sum(self._tokens.values())
        print(
            f"{self._path}: {self._steps_count} steps in {format_seconds(self._record_s)}, "
            f"{tokens} tokens ({self._tokens[Phase.PREFILL]} read, "
            f"{self._tokens[Phase.DECODE]} written), {self._shape.layers_count} layers, "
            f"{format_bytes(size_bytes)}"
        )
        if not self._steps_count:
            print("No step was computed meanwhile: record while requests run.")
        elif self._parts[Phase.DECODE]:
            print(f"See `freetokenctl trace replay {self._path}`.")

    def _document(self, size_bytes: int) -> dict[str, Plain]:
        shape = self._shape
        return {
            "file": str(self._path),
            "file_bytes": size_bytes,
            "source": self._source,
            "layers_count": shape.layers_count,
            "experts_per_layer": shape.experts_per_layer,
            "experts_per_token": shape.experts_per_token,
            "steps_count": self._steps_count,
            "prefill_steps_count": self._parts[Phase.PREFILL],
            "decode_steps_count": self._parts[Phase.DECODE],
            "prefill_tokens": self._tokens[Phase.PREFILL],
            "decode_tokens": self._tokens[Phase.DECODE],
            "record_s": round(self._record_s, 6),
            "ended": self.end.cause,
            "ended_early": self.end.reason is not None,
        }


@contextlib.contextmanager
def _ended_by_signals(call: grpc.Call) -> Iterator[threading.Event]:
    """Ctrl-C and SIGTERM end the call instead of interrupting a write; the event says so."""
    asked = threading.Event()
    done = threading.Event()

    def cancel() -> None:
        asked.wait()
        if not done.is_set():
            call.cancel()  # type: ignore[no-untyped-call]

    # Not in the handler itself: it may have interrupted a holder of the call's lock.
    threading.Thread(target=cancel, name="cancel", daemon=True).start()
    numbers = (signal.SIGINT, signal.SIGTERM)
    former = [signal.signal(number, lambda _number, _frame: asked.set()) for number in numbers]
    try:
        yield asked
    finally:
        done.set()
        for number, handler in zip(numbers, former, strict=True):
            signal.signal(number, handler)


def _unusable(error: ValueError) -> FreetokenError:
    return FreetokenError(
        f"the service told a step that cannot be: {error}. Its version may be another one; see "
        "`freetokenctl version`."
    )
