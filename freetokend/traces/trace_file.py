"""The file form of a routing trace, version 2.

One line of JSON (`{"format": "freetokend-routing-trace", "version": 2, "layers_count": ...,
"experts_per_layer": ..., "experts_per_token": ..., "source": "..."}`), then per step, little
endian: u8 phase (1 prefill, 2 decode), u32 tokens, ids [layers][tokens][k] as u8 (u16 with more
than 255 experts per layer), u32 CRC-32 of what precedes in the step. The highest number of the type
stands for the experts of a token that the layer skipped. After the last step: u8 0, u32 steps, u32
CRC-32. A recording that was cut off lacks that end and is refused.

Version 1, which is read too, has no skipped tokens, and u8 also with 256 experts per layer.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Final, Self

import numpy as np
from numpy.typing import NDArray

from freetokend.core.errors import FreetokenError, InvalidInputError, ModelDataError, Reason
from freetokend.traces.trace import (
    SKIPPED,
    Phase,
    RoutingTrace,
    TraceShape,
    TraceStep,
    check_ids,
)

FORMAT_NAME: Final = "freetokend-routing-trace"
FORMAT_VERSION: Final = 2
_READ_VERSIONS: Final = (1, FORMAT_VERSION)
MAX_HEADER_BYTES: Final = 4096
_SIZES: Final = ("layers_count", "experts_per_layer", "experts_per_token")
_STEP: Final = struct.Struct("<BI")
_CRC: Final = struct.Struct("<I")
_END: Final = 0
_PHASE_CODES: Final = ((Phase.PREFILL, 1), (Phase.DECODE, 2))


class TraceWriter:
    """Writes steps as they come; the file appears under its name when it is complete.

    As a context manager: completed at the end, removed after an exception.
    """

    def __init__(self, path: Path, shape: TraceShape, *, source: str = "") -> None:
        """Raises FreetokenError (io_failed) when the file cannot be written."""
        self._path = path
        self._partial = path.with_name(f"{path.name}.partial")
        self._shape = shape
        self._id_type = _id_type(shape, FORMAT_VERSION)
        self._steps_count = 0
        header = {"format": FORMAT_NAME, "version": FORMAT_VERSION}
        header |= {name: getattr(shape, name) for name in _SIZES}
        line = json.dumps(header | {"source": source}).encode("ascii") + b"\n"
        if len(line) > MAX_HEADER_BYTES:
            raise InvalidInputError(f"the source of a trace is too long: {len(source)} characters.")
        try:
            self._stream = self._partial.open("wb")
            self._stream.write(line)
        except OSError as error:
            raise _io_failed(path, "written", error) from error

    def add(self, phase: Phase, ids: NDArray[np.integer]) -> None:
        """Append a step. ids: [layers, tokens, k], as of `TraceStep`.

        Raises ValueError for ids of another shape or range, FreetokenError when the disk is full.
        """
        check_ids(self._shape, ids)
        # Where the type is u8, the cast makes its highest number of SKIPPED.
        self._record(dict(_PHASE_CODES)[phase], ids.shape[1], ids.astype(self._id_type).tobytes())
        self._steps_count += 1

    def _record(self, code: int, count: int, body: bytes) -> None:
        record = _STEP.pack(code, count) + body
        try:
            self._stream.write(record + _CRC.pack(zlib.crc32(record)))
        except OSError as error:
            raise _io_failed(self._path, "written", error) from error

    def close(self) -> None:
        """Complete the file and give it its name."""
        self._record(_END, self._steps_count, b"")
        try:
            self._stream.close()
            os.replace(self._partial, self._path)
        except OSError as error:
            raise _io_failed(self._path, "written", error) from error

    def discard(self) -> None:
        """Leave no file behind."""
        self._stream.close()
        self._partial.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.discard()


def write_trace(path: Path, trace: RoutingTrace) -> None:
    """Write a whole trace."""
    with TraceWriter(path, trace.shape, source=trace.source) as writer:
        for step in trace.steps:
            writer.add(step.phase, step.ids)


def read_trace(path: Path) -> RoutingTrace:
    """Read a whole trace into memory: two bytes per id.

    Raises ModelDataError, with the path and the step, for a file that is no trace, of another
    version, damaged or cut off; FreetokenError (io_failed) when it cannot be read.
    """
    try:
        with path.open("rb") as stream:
            return _Reader(path, stream).read()
    except OSError as error:
        raise _io_failed(path, "read", error) from error


class _Reader:
    def __init__(self, path: Path, stream: BinaryIO) -> None:
        self._path = path
        self._stream = stream
        self._left_bytes = os.fstat(stream.fileno()).st_size

    def read(self) -> RoutingTrace:
        shape, source, version = self._header()
        id_type = _id_type(shape, version)
        phases = {code: phase for phase, code in _PHASE_CODES}
        steps: list[TraceStep] = []
        while True:
            code, count, body = self._record(shape, id_type, len(steps))
            if code == _END:
                break
            if code not in phases:
                raise self._bad(f"step {len(steps)} is of the unknown kind {code}")
            sizes = (shape.layers_count, count, shape.experts_per_token)
            raw = np.frombuffer(body, dtype=id_type).reshape(sizes)
            ids = raw.astype(np.uint16)
            if version > 1:
                ids[raw == np.iinfo(id_type).max] = SKIPPED
            try:
                check_ids(shape, ids)
            except ValueError as error:
                raise self._bad(f"step {len(steps)} cannot be true: {error}") from error
            steps.append(TraceStep(phase=phases[code], ids=ids))
        if count != len(steps):
            raise self._bad(f"it holds {len(steps)} steps and its end says {count}")
        if self._left_bytes:
            raise self._bad(f"{self._left_bytes} bytes follow its end")
        return RoutingTrace(shape=shape, steps=tuple(steps), source=source)

    def _header(self) -> tuple[TraceShape, str, int]:
        line = self._stream.readline(MAX_HEADER_BYTES)
        self._left_bytes -= len(line)
        try:
            header = json.loads(line)
        except (ValueError, RecursionError):
            header = None
        if not isinstance(header, dict) or header.get("format") != FORMAT_NAME:
            raise self._bad("it is not a routing trace", "Give a file that `trace record` wrote.")
        version = header.get("version")
        if type(version) is not int or version not in _READ_VERSIONS:
            raise self._bad(
                f"it has format version {version!r:.40} and this program reads 1 to "
                f"{FORMAT_VERSION}"
            )
        sizes = {name: header.get(name) for name in _SIZES}
        source = header.get("source", "")
        if not all(type(value) is int for value in sizes.values()) or not isinstance(source, str):
            raise self._bad(f"its header must have the whole numbers {', '.join(_SIZES)}")
        try:
            shape = TraceShape(**{name: int(str(value)) for name, value in sizes.items()})
        except ValueError as error:
            raise self._bad(f"its header cannot be true: {error}") from error
        return shape, source, version

    def _record(
        self, shape: TraceShape, id_type: np.dtype[np.unsignedinteger], index: int
    ) -> tuple[int, int, bytes]:
        head = self._take(_STEP.size, index)
        code, count = _STEP.unpack(head)
        body = b""
        if code != _END:
            if count == 0:
                raise self._bad(f"step {index} has no tokens")
            per_token = shape.layers_count * shape.experts_per_token * id_type.itemsize
            body = self._take(count * per_token, index)
        (crc,) = _CRC.unpack(self._take(_CRC.size, index))
        if crc != zlib.crc32(body, zlib.crc32(head)):
            raise self._bad(f"step {index} is damaged (its checksum differs)")
        return code, count, body

    def _take(self, size_bytes: int, index: int) -> bytes:
        """The next bytes; looks at the file's size first, so that no header makes it allocate."""
        if size_bytes > self._left_bytes:
            raise self._bad(f"it ends within step {index}: the recording was cut off")
        self._left_bytes -= size_bytes
        taken = self._stream.read(size_bytes)
        if len(taken) != size_bytes:
            raise self._bad(f"it became shorter while step {index} was read")
        return taken

    def _bad(self, why: str, what_to_do: str = "Record the trace again.") -> ModelDataError:
        return ModelDataError(f"{self._path} cannot be used: {why}. {what_to_do}")


def _id_type(shape: TraceShape, version: int) -> np.dtype[np.unsignedinteger]:
    most = 256 if version == 1 else 255
    return np.dtype("u1" if shape.experts_per_layer <= most else "<u2")


def _io_failed(path: Path, verb: str, error: OSError) -> FreetokenError:
    return FreetokenError(
        f"{path} cannot be {verb}: {error.strerror}. Check the path and the free space.",
        reason=Reason.IO_FAILED,
    )
