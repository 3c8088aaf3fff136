"""The region as a sequence of pieces, each made from the source on its own.

A piece is a few MiB, so conversion needs memory for a handful of pieces whatever the model, can
make several at once, and can start again anywhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

import numpy as np
from numpy.typing import NDArray

from freetokend.ftw.checkpoint import Checkpoint
from freetokend.ftw.layout import (
    ROWS16,
    ROWS_PER_BLOCK,
    RegionPlan,
    TensorEntry,
    gate_up_bytes,
    rows16_bytes,
)
from freetokend.ftw.model import ModelSource, SourceRows
from freetokend.ftw.packing import U16, as_bf16, as_f32, pack_down, pack_gate_up, pack_rows16

# Large enough for efficient reads, small enough that the arrays of a piece stay near the cache.
_PIECE_BYTES: Final = 4 * 1024 * 1024


class Form(Enum):
    """How the source rows of a piece become bytes."""

    ROWS16 = auto()
    BF16 = auto()
    F32 = auto()
    GATE_UP = auto()
    DOWN = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """[offset, offset + length) of the region, from whole source rows (two parts for GATE_UP)."""

    offset_bytes: int
    length_bytes: int
    form: Form
    parts: tuple[SourceRows, ...]


def region_pieces(source: ModelSource, plan: RegionPlan) -> Iterator[Piece]:
    """All pieces in region order; the gaps between them are zeros."""
    for spec, rows in source.tensors:
        yield from _tensor_pieces(plan.tensors[spec.name], rows)
    bank = plan.bank
    for moe_layer_index in range(bank.moe_layers_count):
        for expert in range(bank.experts_per_layer_count):
            offset_bytes = bank.record_offset_bytes(bank.expert_id(moe_layer_index, expert))
            origin = source.expert(moe_layer_index, expert)
            yield from _cut(offset_bytes, Form.GATE_UP, (origin.gate, origin.up))
            down_bytes = offset_bytes + gate_up_bytes(bank.hidden_size, bank.intermediate_size)
            yield from _cut(down_bytes, Form.DOWN, (origin.down,))


def make_piece(piece: Piece, checkpoint: Checkpoint) -> NDArray[np.uint8]:
    """The bytes of `piece`, read and packed. Safe from several threads at once."""
    match piece.form:
        case Form.F32:
            (rows,) = piece.parts
            packed: NDArray[np.generic] = as_f32(_read(rows, checkpoint), rows.tensor.dtype)
        case Form.BF16:
            packed = _bf16(piece.parts[0], checkpoint)
        case Form.ROWS16:
            packed = pack_rows16(_bf16(piece.parts[0], checkpoint))
        case Form.DOWN:
            packed = pack_down(_bf16(piece.parts[0], checkpoint))
        case Form.GATE_UP:
            gate, up = (_bf16(rows, checkpoint) for rows in piece.parts)
            packed = pack_gate_up(gate, up)
    return np.ascontiguousarray(packed).reshape(-1).view(np.uint8)


def _tensor_pieces(entry: TensorEntry, rows: SourceRows) -> Iterator[Piece]:
    if entry.dtype == "f32":
        return _cut(entry.offset_bytes, Form.F32, (rows,))
    form = Form.ROWS16 if entry.layout == ROWS16 else Form.BF16
    return _cut(entry.offset_bytes, form, (rows,))


def _piece_bytes(form: Form, rows: int, columns: int) -> int:
    match form:
        case Form.F32:
            return rows * columns * 4
        case Form.BF16:
            return rows * columns * 2
        case Form.ROWS16:
            return rows16_bytes(rows, columns)
        case Form.GATE_UP:
            return 2 * rows16_bytes(rows, columns)
        case Form.DOWN:
            return rows16_bytes(rows, -(-columns // ROWS_PER_BLOCK) * ROWS_PER_BLOCK)


def _cut(offset_bytes: int, form: Form, parts: tuple[SourceRows, ...]) -> Iterator[Piece]:
    """Split matrices of equal shape, packed together, into pieces of whole row blocks."""
    rows_count, columns = parts[0].rows_count, parts[0].columns_count
    block_bytes = _piece_bytes(form, ROWS_PER_BLOCK, columns)
    step = max(_PIECE_BYTES // block_bytes, 1) * ROWS_PER_BLOCK
    for first in range(0, rows_count, step):
        count = min(step, rows_count - first)
        length_bytes = _piece_bytes(form, count, columns)
        yield Piece(
            offset_bytes=offset_bytes,
            length_bytes=length_bytes,
            form=form,
            parts=tuple(
                SourceRows(
                    tensor=part.tensor,
                    first_row=part.first_row + first,
                    rows_count=count,
                    columns_count=columns,
                )
                for part in parts
            ),
        )
        offset_bytes += length_bytes


def _read(rows: SourceRows, checkpoint: Checkpoint) -> NDArray[np.uint8]:
    element_bytes = 4 if rows.tensor.dtype == "F32" else 2
    row_bytes = rows.columns_count * element_bytes
    return checkpoint.read(rows.tensor, rows.first_row * row_bytes, rows.rows_count * row_bytes)


def _bf16(rows: SourceRows, checkpoint: Checkpoint) -> U16:
    bits = as_bf16(_read(rows, checkpoint), rows.tensor.dtype)
    return bits.reshape(rows.rows_count, rows.columns_count)


def same_values(left: SourceRows, right: SourceRows, checkpoint: Checkpoint) -> bool:
    """Whether two source matrices of one shape hold the same numbers after rounding to bf16."""
    return all(
        np.array_equal(_bf16(a.parts[0], checkpoint), _bf16(b.parts[0], checkpoint))
        for a, b in zip(_cut(0, Form.BF16, (left,)), _cut(0, Form.BF16, (right,)), strict=True)
    )
