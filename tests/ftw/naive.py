"""Slow, obvious readings of the formats, to hold the real ones against."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def read_checkpoint(directory: Path) -> dict[str, Floats]:
    """Every tensor of a checkpoint as exact float64 values."""
    return {
        name: values for path in directory.glob("*.safetensors") for name, values in _file(path)
    }


def _file(path: Path) -> list[tuple[str, Floats]]:
    data = path.read_bytes()
    (header_bytes,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + header_bytes])
    header.pop("__metadata__", None)
    result = []
    for name, entry in header.items():
        begin, end = (8 + header_bytes + offset for offset in entry["data_offsets"])
        raw = data[begin:end]
        if entry["dtype"] == "BF16":
            halves = np.frombuffer(raw, np.uint16)
            values = np.frombuffer(b"".join(b"\0\0" + half.tobytes() for half in halves), "<f4")
        else:
            values = np.frombuffer(raw, {"F16": "<f2", "F32": "<f4"}[entry["dtype"]])
        result.append((name, values.astype(np.float64).reshape(entry["shape"])))
    return result


def nearest_bf16(value: float) -> float:
    """The finite `value` rounded to 8 significant bits, ties to even, as bf16 does it."""
    if value == 0.0:
        return value
    mantissa, exponent = np.frexp(value)
    # Below the smallest normal number the steps stop shrinking.
    scale = 2.0 ** (max(int(exponent), -125) - 8)
    rounded = float(np.round(value / scale)) * scale  # numpy rounds halves to even
    limit = 2.0**128 - 2.0**120
    return rounded if abs(rounded) <= limit else float(np.copysign(np.inf, mantissa))


def rounded(values: Floats) -> Floats:
    """`nearest_bf16` of every element."""
    flat = [nearest_bf16(float(value)) for value in values.reshape(-1)]
    return np.array(flat, np.float64).reshape(values.shape)


def bf16_at(region: bytes, element: int) -> float:
    """The bf16 number that is element `element` of `region`."""
    pair = region[2 * element : 2 * element + 2]
    return float(struct.unpack("<f", b"\0\0" + pair)[0])


def rows16_element(columns: int, row: int, column: int) -> int:
    """Where [row, column] of a matrix `columns` wide (padded) is in the rows16 layout."""
    pairs = (columns + 1) // 2
    return ((row // 16 * pairs + column // 2) * 16 + row % 16) * 2 + column % 2


def unpack_rows16(region: bytes, rows: int, columns: int, width: int | None = None) -> Floats:
    """A rows16 matrix, element by element; `width` is the padded width if it is not `columns`."""
    width = columns if width is None else width
    return np.array(
        [
            [bf16_at(region, rows16_element(width, row, column)) for column in range(columns)]
            for row in range(rows)
        ]
    )


def unpack_expert(record: bytes, hidden: int, inner: int) -> tuple[Floats, Floats, Floats]:
    """gate, up [inner, hidden] and down [hidden, inner] of a bf16 expert record."""
    block_bytes = 16 * (hidden + hidden % 2) * 2
    gate = np.empty((inner, hidden))
    up = np.empty((inner, hidden))
    for row in range(inner):
        for column in range(hidden):
            element = rows16_element(hidden, row % 16, column)
            start = row // 16 * 2 * block_bytes
            gate[row, column] = bf16_at(record[start:], element)
            up[row, column] = bf16_at(record[start + block_bytes :], element)
    padded = (inner + 15) // 16 * 16
    down_start = padded // 16 * 2 * block_bytes
    return gate, up, unpack_rows16(record[down_start:], hidden, inner, padded)
