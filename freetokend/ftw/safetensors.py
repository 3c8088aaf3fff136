"""The header of a safetensors file, read within bounds and checked.

The data behind the header is never touched here. Reads are plain `pread`s: a mapping would die by
SIGBUS when somebody truncates the file.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import xxhash
from numpy.typing import NDArray

from freetokend.core.errors import ModelDataError
from freetokend.ftw.strict_json import JsonObject, io_error, parse_json

MAX_HEADER_BYTES: Final = 100_000_000  # the format's own limit
_MAX_SIZE: Final = 1 << 48
TENSOR_NAME: Final = re.compile(r"[ -~]{1,512}")
_DTYPE: Final = re.compile(r"[A-Z0-9_]{1,16}")
# Bits per element of every type the format knows; only some can be converted.
DTYPE_BITS: Final = {
    "BOOL": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "C64": 64,
    "F64": 64,
    "I64": 64,
    "U64": 64,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceTensor:
    """A tensor of a checkpoint; `offset_bytes` counts from the start of its file."""

    name: str
    file: str
    dtype: str
    shape: tuple[int, ...]
    offset_bytes: int
    length_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFile:
    """A file of a checkpoint as it was when it was opened; header: xxh3_128 in hex."""

    file: str
    length_bytes: int
    modified_ns: int
    header_checksum: str


def read_exactly(
    descriptor: int, length_bytes: int, offset_bytes: int, path: Path
) -> NDArray[np.uint8]:
    """`length_bytes` from `offset_bytes`; ModelDataError when the file ends before."""
    out = np.empty(length_bytes, dtype=np.uint8)
    view = out.data
    done = 0
    while done < length_bytes:
        try:
            count = os.preadv(descriptor, [view[done:]], offset_bytes + done)
        except OSError as error:
            raise io_error(f"cannot read {path}", error) from error
        if count == 0:
            raise ModelDataError(
                f"{path} ends at {offset_bytes + done} bytes, where {length_bytes - done} more "
                f"were expected. It was cut short; download it again."
            )
        done += count
    return out


def read_header(descriptor: int, path: Path) -> tuple[SourceFile, list[SourceTensor]]:
    """The tensors of an open safetensors file; ModelDataError says what is wrong with it."""
    try:
        status = os.fstat(descriptor)
    except OSError as error:
        raise io_error(f"cannot examine {path}", error) from error
    if status.st_size < 8:
        raise ModelDataError(f"{path} has {status.st_size} bytes: not a safetensors file.")
    header_bytes = int.from_bytes(read_exactly(descriptor, 8, 0, path).tobytes(), "little")
    if header_bytes > min(MAX_HEADER_BYTES, status.st_size - 8):
        raise ModelDataError(
            f"{path} claims a header of {header_bytes} bytes in a file of {status.st_size} (at "
            f"most {MAX_HEADER_BYTES}): it is cut short or not a safetensors file."
        )
    header = read_exactly(descriptor, header_bytes, 8, path).tobytes()
    start_bytes = 8 + header_bytes
    table = JsonObject(parse_json(header, f"{path}: the header"), str(path))
    tensors = [
        _tensor(table, name, value, path.name, start_bytes)
        for name, value in table.members().items()
        if name != "__metadata__"
    ]
    _check_extents(tensors, start_bytes, status.st_size, path)
    file = SourceFile(
        file=path.name,
        length_bytes=status.st_size,
        modified_ns=status.st_mtime_ns,
        header_checksum=xxhash.xxh3_128_hexdigest(header),
    )
    return file, tensors


def _tensor(
    table: JsonObject, name: str, value: object, file: str, start_bytes: int
) -> SourceTensor:
    table.as_text("the name of a tensor", name, TENSOR_NAME)
    entry = JsonObject(value, f"{table.where}: {name}")
    dtype = entry.text("dtype", _DTYPE)
    if dtype not in DTYPE_BITS:
        entry.fail("dtype", f"is {dtype}, which the safetensors format does not know")
    shape = tuple(entry.as_integer("shape", size, 0, _MAX_SIZE) for size in entry.items("shape", 8))
    offsets = entry.items("data_offsets", 2)
    if len(offsets) != 2:
        entry.fail("data_offsets", f"has {len(offsets)} of 2 values")
    begin = entry.as_integer("data_offsets", offsets[0], 0, 1 << 62)
    end = entry.as_integer("data_offsets", offsets[1], begin, 1 << 62)
    entry.finish()
    bits = DTYPE_BITS[dtype]
    for size in shape:
        bits *= size
    if bits != (end - begin) * 8:
        entry.fail("data_offsets", f"span {end - begin} bytes; {dtype} {list(shape)} differs")
    return SourceTensor(
        name=name,
        file=file,
        dtype=dtype,
        shape=shape,
        offset_bytes=start_bytes + begin,
        length_bytes=end - begin,
    )


def _check_extents(
    tensors: list[SourceTensor], start_bytes: int, file_bytes: int, path: Path
) -> None:
    """The format wants the data to be covered by tensors, without holes and overlaps."""
    end_bytes, previous = start_bytes, "the header"
    for tensor in sorted(tensors, key=lambda item: (item.offset_bytes, item.length_bytes)):
        if tensor.offset_bytes != end_bytes:
            word = "overlaps" if tensor.offset_bytes < end_bytes else "leaves a hole behind"
            raise ModelDataError(f"{path}: tensor {tensor.name} {word} {previous}.")
        end_bytes, previous = tensor.offset_bytes + tensor.length_bytes, tensor.name
    if end_bytes > file_bytes:
        raise ModelDataError(
            f"{path} has {file_bytes} of {end_bytes} bytes; tensor {previous} is incomplete. "
            f"Download the file again."
        )
    if end_bytes < file_bytes:
        raise ModelDataError(
            f"{path} has {file_bytes - end_bytes} bytes behind its last tensor. Download it again."
        )
