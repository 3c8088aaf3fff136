"""Expert records of every format: gate and up interleaved, down, factors and biases."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from freetokend.ftw.formats import (
    ROWS_PER_BLOCK,
    RecordLayout,
    WeightFormat,
    record_layout,
    round_up,
)
from freetokend.ftw.matrix import QuantMatrix
from freetokend.ftw.packing_blocks import pack_blocks, unpack_blocks

U8 = NDArray[np.uint8]
F32 = NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertMatrices:
    """One expert: gate and up [I, H], down [H, I]; biases fp32 [I], [I], [H], or None."""

    gate: QuantMatrix
    up: QuantMatrix
    down: QuantMatrix
    biases: tuple[F32, F32, F32] | None = None


def pack_gate_up(gate: QuantMatrix, up: QuantMatrix) -> U8:
    """Rows of gate and up, [n, H] each -> their blocks interleaved: gate 0, up 0, gate 1, ..."""
    return np.stack((pack_blocks(gate), pack_blocks(up)), axis=1)


def pack_down(down: QuantMatrix) -> U8:
    """Rows of down, [n, I] -> blocks as wide as I rounded up to 16."""
    return pack_blocks(down, round_up(down.columns_count, ROWS_PER_BLOCK))


def pack_trailer(
    layout: RecordLayout, factors: Sequence[float], biases: Sequence[F32] | None
) -> U8:
    """What follows the matrices, from `layout.trailer_bytes` on; empty when there is nothing.

    factors: the fp32 factors of gate, up and down, stored if the format has them; biases: of gate
    [I], up [I] and down [H], given exactly when the bank has them.
    """
    start = layout.trailer_bytes
    trailer = np.zeros(layout.end_bytes - start, np.uint8)
    if layout.globals_bytes is not None:
        _put(trailer, layout.globals_bytes - start, np.array(factors, np.float32))
    for place, bias in zip(layout.biases_bytes or (), biases or (), strict=True):
        _put(trailer, place - start, bias)
    return trailer


def pack_record(expert: ExpertMatrices) -> U8:
    """The whole record of one expert, padded to a page."""
    hidden, inner = expert.gate.columns_count, expert.gate.rows_count
    layout = record_layout(expert.gate.format, hidden, inner, has_bias=expert.biases is not None)
    record = np.zeros(layout.record_bytes, np.uint8)
    _put(record, 0, pack_gate_up(expert.gate, expert.up))
    _put(record, layout.down_bytes, pack_down(expert.down))
    factors = [part.global_scale for part in (expert.gate, expert.up, expert.down)]
    _put(record, layout.trailer_bytes, pack_trailer(layout, factors, expert.biases))
    return record


def _put(target: U8, start: int, data: NDArray[Any]) -> None:
    raw = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
    target[start : start + raw.size] = raw


def unpack_record(
    record: U8,
    weight_format: WeightFormat,
    hidden_size: int,
    intermediate_size: int,
    *,
    has_bias: bool = False,
) -> ExpertMatrices:
    """The inverse of `pack_record`."""
    layout = record_layout(weight_format, hidden_size, intermediate_size, has_bias=has_bias)
    factors = [1.0, 1.0, 1.0]
    if layout.globals_bytes is not None:
        factors = _floats(record, layout.globals_bytes, 3).tolist()
    blocks = layout.down_columns // ROWS_PER_BLOCK
    gate_up = record[: layout.down_bytes].reshape(blocks, 2, -1)
    gate, up = (
        unpack_blocks(
            gate_up[:, part],
            weight_format,
            intermediate_size,
            hidden_size,
            global_scale=factors[part],
        )
        for part in range(2)
    )
    down = unpack_blocks(
        record[layout.down_bytes : layout.payload_bytes],
        weight_format,
        hidden_size,
        intermediate_size,
        packed_columns=layout.down_columns,
        global_scale=factors[2],
    )
    biases = None
    if layout.biases_bytes is not None:
        gate_at, up_at, down_at = layout.biases_bytes
        biases = (
            _floats(record, gate_at, intermediate_size),
            _floats(record, up_at, intermediate_size),
            _floats(record, down_at, hidden_size),
        )
    return ExpertMatrices(gate=gate, up=up, down=down, biases=biases)


def _floats(record: NDArray[Any], start: int, count: int) -> F32:
    part: F32 = record[start : start + 4 * count].view(np.float32)
    return part
