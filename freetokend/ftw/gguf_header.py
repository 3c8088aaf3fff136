"""The header of a GGUF file: metadata and tensors, read within bounds and checked.

As with safetensors, the data is not touched and nothing is mapped into memory. Arrays in the
metadata (vocabularies, mostly) are stepped over.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final, NoReturn

import xxhash

from freetokend.core.errors import ModelDataError, Reason
from freetokend.ftw.safetensors import TENSOR_NAME, SourceFile, SourceTensor, read_exactly
from freetokend.ftw.strict_json import io_error

_MAGIC: Final = b"GGUF"
_VERSIONS: Final = (2, 3)
_DEFAULT_ALIGNMENT: Final = 32
_MAX_ENTRIES_COUNT: Final = 1_000_000
_MAX_TEXT_BYTES: Final = 1 << 24
_MAX_NAME_BYTES: Final = 512
_MAX_ELEMENTS_COUNT: Final = 1 << 48
_READ_BYTES: Final = 1 << 20
_STRING: Final = 8
_ARRAY: Final = 9
_SCALARS: Final[Mapping[int, str]] = MappingProxyType(
    {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class GgmlType:
    """A type of tensor: its ggml name, elements per block, bytes per block."""

    name: str
    block_elements: int
    block_bytes: int


GGML_TYPES: Final[Mapping[int, GgmlType]] = MappingProxyType(
    {
        number: GgmlType(name=name, block_elements=elements, block_bytes=length)
        for number, name, elements, length in (
            (0, "F32", 1, 4),
            (1, "F16", 1, 2),
            (2, "Q4_0", 32, 18),
            (8, "Q8_0", 32, 34),
            (12, "Q4_K", 256, 144),
            (14, "Q6_K", 256, 210),
            (30, "BF16", 1, 2),
            (39, "MXFP4", 32, 17),
        )
    }
)
# Names of all types by number, "-" where there is none, to refuse the others by name.
_TYPE_NAMES: Final = (
    "F32 F16 Q4_0 Q4_1 Q4_2 Q4_3 Q5_0 Q5_1 Q8_0 Q8_1 Q2_K Q3_K Q4_K Q5_K Q6_K Q8_K IQ2_XXS IQ2_XS "
    "IQ3_XXS IQ1_S IQ4_NL IQ3_S IQ2_S IQ4_XS I8 I16 I32 I64 F64 IQ1_M BF16 - - - TQ1_0 TQ2_0 - - - "
    "MXFP4 NVFP4"
)

Value = int | float | bool | str


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufHeader:
    """values: the metadata without its arrays; tensors: shapes in C order, [rows, columns]."""

    file: SourceFile
    values: Mapping[str, Value]
    tensors: tuple[SourceTensor, ...]


def read_gguf_header(descriptor: int, path: Path) -> GgufHeader:
    """The header of an open GGUF file.

    ModelDataError says what is damaged, or (MODEL_UNSUPPORTED) which tensor has which type that is
    not implemented.
    """
    try:
        status = os.fstat(descriptor)
    except OSError as error:
        raise io_error(f"cannot examine {path}", error) from error
    reader = _Reader(descriptor, path, status.st_size)
    if reader.take(4) != _MAGIC:
        raise ModelDataError(f"{path} is not a GGUF file.")
    version = reader.scalar("I")
    if version not in _VERSIONS:
        raise ModelDataError(
            f"{path} is GGUF version {version} (or of a big-endian machine); versions 2 and 3 are "
            f"read.",
            reason=Reason.MODEL_UNSUPPORTED,
        )
    tensors_count = reader.count("tensors", _MAX_ENTRIES_COUNT)
    values_count = reader.count("values", _MAX_ENTRIES_COUNT)
    values: dict[str, Value] = {}
    for _ in range(values_count):
        name = reader.text(_MAX_NAME_BYTES)
        value = reader.value(reader.scalar("I"))
        if value is not None:
            values[name] = value
    entries = [reader.tensor() for _ in range(tensors_count)]
    alignment = values.get("general.alignment", _DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        reader.fail(f"general.alignment is {alignment!r:.40}, not a power of two")
    start_bytes = -(-reader.offset_bytes // alignment) * alignment
    tensors = tuple(_placed(entry, start_bytes, path) for entry in entries)
    _check_extents(tensors, status.st_size, path)
    file = SourceFile(
        file=path.name,
        length_bytes=status.st_size,
        modified_ns=status.st_mtime_ns,
        header_checksum=reader.checksum(),
    )
    return GgufHeader(file=file, values=values, tensors=tensors)


class _Reader:
    """The header from front to back."""

    def __init__(self, descriptor: int, path: Path, file_bytes: int) -> None:
        self._descriptor = descriptor
        self._path = path
        self._file_bytes = file_bytes
        self._buffer = b""
        self._place = 0
        self._digest = xxhash.xxh3_128()
        self.offset_bytes = 0

    def fail(self, why: str) -> NoReturn:
        raise ModelDataError(
            f"{self._path}: {why}, at byte {self.offset_bytes} of the header. It is damaged; "
            f"download it again."
        )

    def checksum(self) -> str:
        return self._digest.hexdigest()

    def take(self, length_bytes: int) -> bytes:
        if self._place + length_bytes > len(self._buffer):
            rest = self._buffer[self._place :]
            start = self.offset_bytes + len(rest)
            wanted = max(length_bytes - len(rest), min(_READ_BYTES, self._file_bytes - start))
            if start + wanted > self._file_bytes:
                self.fail("the file ends within its header")
            more = read_exactly(self._descriptor, wanted, start, self._path)
            self._buffer, self._place = rest + more.tobytes(), 0
        data = self._buffer[self._place : self._place + length_bytes]
        self._place += length_bytes
        self.offset_bytes += length_bytes
        self._digest.update(data)
        return data

    def scalar(self, code: str) -> int:
        (value,) = struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))
        return int(value)

    def count(self, what: str, limit: int) -> int:
        value = self.scalar("Q")
        if value > limit:
            self.fail(f"{value} {what} are more than {limit}")
        return value

    def text(self, limit_bytes: int) -> str:
        length_bytes = self.count("bytes of text", limit_bytes)
        try:
            return self.take(length_bytes).decode("utf-8")
        except UnicodeDecodeError:
            self.fail("a text is not UTF-8")

    def value(self, kind: int) -> Value | None:
        """A value of metadata; None for an array, which is stepped over."""
        if kind in _SCALARS:
            code = "<" + _SCALARS[kind]
            (value,) = struct.unpack(code, self.take(struct.calcsize(code)))
            return value  # type: ignore[no-any-return]
        if kind == _STRING:
            return self.text(_MAX_TEXT_BYTES)
        if kind != _ARRAY:
            self.fail(f"{kind} is no type of a value")
        inner = self.scalar("I")
        length = self.count("elements of an array", self._file_bytes)
        if inner in _SCALARS:
            left = length * struct.calcsize("<" + _SCALARS[inner])
            while left:
                left -= len(self.take(min(left, _READ_BYTES)))
        elif inner == _STRING:
            for _ in range(length):
                self.take(self.count("bytes of text", _MAX_TEXT_BYTES))
        else:
            self.fail(f"an array has elements of type {inner}")
        return None

    def tensor(self) -> SourceTensor:
        """An entry of the table of tensors; its offset counts from the start of the data."""
        name = self.text(_MAX_NAME_BYTES)
        axes = self.scalar("I")
        if not 1 <= axes <= 4:
            self.fail(f"tensor {name!r:.100} has {axes} axes")
        sizes = [self.count("elements", _MAX_ELEMENTS_COUNT) for _ in range(axes)]
        number = self.scalar("I")
        offset_bytes = self.count("bytes before a tensor", self._file_bytes)
        ggml = GGML_TYPES.get(number)
        if ggml is None:
            names = _TYPE_NAMES.split()
            shown = names[number] if number < len(names) else "-"
            shown = f"number {number}" if shown == "-" else shown
            raise ModelDataError(
                f"{self._path}: tensor {name} is of type {shown}, which is not implemented; "
                f"implemented are {', '.join(known.name for known in GGML_TYPES.values())}.",
                reason=Reason.MODEL_UNSUPPORTED,
            )
        if sizes[0] % ggml.block_elements:
            raise ModelDataError(
                f"{self._path}: tensor {name} is {sizes[0]} wide; {ggml.name} comes in blocks of "
                f"{ggml.block_elements}."
            )
        elements = 1
        for size in sizes:
            elements *= size
        return SourceTensor(
            name=name,
            file=self._path.name,
            dtype=ggml.name,
            shape=tuple(reversed(sizes)),
            offset_bytes=offset_bytes,
            length_bytes=elements // ggml.block_elements * ggml.block_bytes,
        )


def _placed(tensor: SourceTensor, start_bytes: int, path: Path) -> SourceTensor:
    if TENSOR_NAME.fullmatch(tensor.name) is None:
        raise ModelDataError(f"{path}: {tensor.name!r:.100} is no name of a tensor.")
    return SourceTensor(
        name=tensor.name,
        file=tensor.file,
        dtype=tensor.dtype,
        shape=tensor.shape,
        offset_bytes=start_bytes + tensor.offset_bytes,
        length_bytes=tensor.length_bytes,
    )


def _check_extents(tensors: tuple[SourceTensor, ...], file_bytes: int, path: Path) -> None:
    end_bytes, previous = 0, "the header"
    for tensor in sorted(tensors, key=lambda item: (item.offset_bytes, item.length_bytes)):
        if tensor.offset_bytes < end_bytes:
            raise ModelDataError(f"{path}: tensor {tensor.name} overlaps {previous}.")
        end_bytes, previous = tensor.offset_bytes + tensor.length_bytes, tensor.name
    if end_bytes > file_bytes:
        raise ModelDataError(
            f"{path} has {file_bytes} of {end_bytes} bytes; tensor {previous} is incomplete. "
            f"Download the file again."
        )
