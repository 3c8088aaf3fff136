"""The region as a sequence of pieces, each made from the source on its own.

A piece is a few MiB, so conversion needs memory for a handful of pieces whatever the model, can
make several at once, and can start again anywhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Final

import numpy as np
from numpy.typing import NDArray

from freetokend.core.errors import InternalError, ModelDataError
from freetokend.ftw.formats import (
    FP8_BLOCK_ROWS,
    ROWS_PER_BLOCK,
    RecordLayout,
    WeightFormat,
    block_bytes,
    matrix_bytes,
    parse_format,
    record_layout,
    round_up,
)
from freetokend.ftw.layout import ROWS16, ExpertBank, RegionPlan, TensorEntry
from freetokend.ftw.matrix import MatrixSource, QuantMatrix, problem_of
from freetokend.ftw.model import ExpertSource, ModelSource
from freetokend.ftw.packing_blocks import pack_blocks, pack_factor
from freetokend.ftw.packing_record import pack_down, pack_gate_up, pack_trailer
from freetokend.ftw.sources import (
    IdTable,
    PlainMatrix,
    QuantisedMatrix,
    SquaredError,
    VectorSource,
    squared_error,
)

# Elements of a piece: large enough for efficient reads, small enough that its arrays stay near the
# cache and the temporaries of quantisation stay few.
_PIECE_COUNT: Final = 2 * 1024 * 1024
_ID_BYTES: Final = 4


class Form(Enum):
    """How the source rows of a piece become bytes."""

    BLOCKS = auto()
    BF16 = auto()
    F32 = auto()
    GATE_UP = auto()
    DOWN = auto()
    TRAILER = auto()
    FACTOR = auto()
    IDS = auto()


# The matrices of an expert, whose errors are told; others are not measured.
_MEASURED: Final[dict[Form, tuple[str, ...]]] = {Form.GATE_UP: ("gate", "up"), Form.DOWN: ("down",)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """[offset, offset + length) of the region.

    From rows [first_row, first_row + rows_count) of each of `parts`: gate and up for GATE_UP, all
    three matrices for TRAILER, the matrix for FACTOR (its fp32 factor over all). moe_layer_index:
    whose expert it is a part of, None for none; measured: the tensor that it is a part of, if what
    its quantisation costs is to be told; biases and record: for TRAILER; ids: for IDS.
    """

    offset_bytes: int
    length_bytes: int
    form: Form
    parts: tuple[MatrixSource, ...]
    first_row: int
    rows_count: int
    moe_layer_index: int | None = None
    measured: str | None = None
    biases: tuple[VectorSource, ...] = ()
    record: RecordLayout | None = None
    ids: IdTable | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MadePiece:
    """The bytes of a piece, and what quantisation cost: sums by "gate", "up", "down" or tensor."""

    data: NDArray[np.uint8]
    errors: tuple[tuple[str, SquaredError], ...] = ()


def region_pieces(source: ModelSource, plan: RegionPlan) -> Iterator[Piece]:
    """All pieces in region order; the gaps between them are zeros."""
    for spec, matrix in source.tensors:
        entry = plan.tensors[spec.name]
        if isinstance(matrix, IdTable):
            yield from _id_pieces(entry, matrix)
            continue
        measured = spec.name if spec.name in source.quantised_dense else None
        for piece in _tensor_pieces(entry, matrix):
            yield replace(piece, measured=measured)
    bank = plan.bank
    for moe_layer_index in range(bank.moe_layers_count):
        for expert in range(bank.experts_per_layer_count):
            offset_bytes = bank.record_offset_bytes(bank.expert_id(moe_layer_index, expert))
            origin = source.expert(moe_layer_index, expert)
            yield from expert_pieces(bank, offset_bytes, moe_layer_index, origin)


def expert_pieces(
    bank: ExpertBank, offset_bytes: int, moe_layer_index: int, origin: ExpertSource
) -> Iterator[Piece]:
    """The pieces of one record, which begins at `offset_bytes` of the region."""
    weight_format = parse_format(bank.format)
    hidden, inner = bank.hidden_size, bank.intermediate_size
    layout = record_layout(weight_format, hidden, inner, has_bias=bank.has_bias)
    gate_up = (origin.gate, origin.up)
    yield from _cut(
        offset_bytes, Form.GATE_UP, gate_up, 2 * block_bytes(weight_format, hidden), moe_layer_index
    )
    yield from _cut(
        offset_bytes + layout.down_bytes,
        Form.DOWN,
        (origin.down,),
        block_bytes(weight_format, layout.down_columns),
        moe_layer_index,
    )
    if layout.end_bytes > layout.trailer_bytes:
        yield Piece(
            offset_bytes=offset_bytes + layout.trailer_bytes,
            length_bytes=layout.end_bytes - layout.trailer_bytes,
            form=Form.TRAILER,
            parts=(*gate_up, origin.down),
            first_row=0,
            rows_count=0,
            moe_layer_index=moe_layer_index,
            biases=origin.biases or (),
            record=layout,
        )


def make_piece(piece: Piece) -> MadePiece:
    """The bytes of `piece`, read and packed. Safe from several threads at once.

    ModelDataError names a source tensor that holds a number which its format cannot.
    """
    if piece.ids is not None:
        return MadePiece(data=_raw(piece.ids.read_ids(piece.first_row, piece.rows_count)))
    if piece.form is Form.F32:
        (part,) = piece.parts
        if not isinstance(part, PlainMatrix):
            raise InternalError(f"tensor {part.name} is wanted in fp32 and is {part.format}")
        return MadePiece(data=_raw(part.read_values(piece.first_row, piece.rows_count)))
    if piece.form is Form.FACTOR:
        return MadePiece(data=pack_factor(_global_scale(piece.parts[0])))
    if piece.form is Form.TRAILER and piece.record is not None:
        factors = [_global_scale(part) for part in piece.parts]
        biases = [bias.read() for bias in piece.biases]
        return MadePiece(data=pack_trailer(piece.record, factors, biases))
    matrices, errors = [], []
    names = _MEASURED.get(piece.form, ()) if piece.measured is None else (piece.measured,)
    for position, part in enumerate(piece.parts):
        if isinstance(part, QuantisedMatrix):
            matrix, values = part.read_both(piece.first_row, piece.rows_count)
            _check(matrix, part)
            if position < len(names):
                errors.append((names[position], squared_error(matrix, values)))
        else:
            matrix = part.read_rows(piece.first_row, piece.rows_count)
            _check(matrix, part)
        matrices.append(matrix)
    return MadePiece(data=_packed(piece.form, matrices), errors=tuple(errors))


def _packed(form: Form, matrices: list[QuantMatrix]) -> NDArray[np.uint8]:
    match form:
        case Form.GATE_UP:
            gate, up = matrices
            return _raw(pack_gate_up(gate, up))
        case Form.DOWN:
            return _raw(pack_down(matrices[0]))
        case Form.BF16:
            return _raw(matrices[0].codes)
        case _:
            return _raw(pack_blocks(matrices[0]))


def _raw(values: NDArray[np.generic]) -> NDArray[np.uint8]:
    return np.ascontiguousarray(values).reshape(-1).view(np.uint8)


def _check(matrix: QuantMatrix, source: MatrixSource) -> None:
    problem = problem_of(matrix)
    if problem is not None:
        raise ModelDataError(
            f"tensor {source.name} {problem} in {matrix.format}; it cannot be computed with. "
            "Check where the checkpoint comes from; where bf16 weights are being quantised, choose "
            "a format whose scale can hold them."
        )


def _global_scale(source: MatrixSource) -> float:
    return source.read_rows(0, min(ROWS_PER_BLOCK, source.rows_count)).global_scale


def _rows16_pieces(entry: TensorEntry, matrix: MatrixSource) -> Iterator[Piece]:
    weight_format, columns = parse_format(entry.dtype), matrix.columns_count
    length_bytes = block_bytes(weight_format, columns)
    yield from _cut(entry.offset_bytes, Form.BLOCKS, (matrix,), length_bytes, None)
    blocks_bytes = matrix_bytes(weight_format, matrix.rows_count, columns)
    if entry.length_bytes > blocks_bytes:
        yield Piece(
            offset_bytes=entry.offset_bytes + blocks_bytes,
            length_bytes=entry.length_bytes - blocks_bytes,
            form=Form.FACTOR,
            parts=(matrix,),
            first_row=0,
            rows_count=0,
        )


def _tensor_pieces(entry: TensorEntry, matrix: MatrixSource) -> Iterator[Piece]:
    columns = matrix.columns_count
    if entry.dtype == "f32":
        return _cut(entry.offset_bytes, Form.F32, (matrix,), columns * 4 * ROWS_PER_BLOCK, None)
    if entry.layout == ROWS16:
        return _rows16_pieces(entry, matrix)
    return _cut(entry.offset_bytes, Form.BF16, (matrix,), columns * 2 * ROWS_PER_BLOCK, None)


def _id_pieces(entry: TensorEntry, table: IdTable) -> Iterator[Piece]:
    rows_count, columns = entry.shape
    step = max(_PIECE_COUNT // columns, 1)
    for first in range(0, rows_count, step):
        count = min(step, rows_count - first)
        yield Piece(
            offset_bytes=entry.offset_bytes + first * columns * _ID_BYTES,
            length_bytes=count * columns * _ID_BYTES,
            form=Form.IDS,
            parts=(),
            first_row=first,
            rows_count=count,
            ids=table,
        )


def _cut(
    offset_bytes: int,
    form: Form,
    parts: tuple[MatrixSource, ...],
    step_bytes: int,
    moe_layer_index: int | None,
) -> Iterator[Piece]:
    """Split matrices of equal shape, packed together, into pieces of whole row blocks.

    step_bytes: what 16 rows of all parts take together.
    """
    rows_count, columns = parts[0].rows_count, parts[0].columns_count
    # A multiple of 128 rows where there are as many, so that no block of fp8 is looked at twice.
    step = max(_PIECE_COUNT // (columns * len(parts)), 1)
    step = round_up(step, ROWS_PER_BLOCK if step < FP8_BLOCK_ROWS else FP8_BLOCK_ROWS)
    for first in range(0, rows_count, step):
        count = min(step, rows_count - first)
        length_bytes = _length(form, parts[0].format, count, columns, step_bytes)
        yield Piece(
            offset_bytes=offset_bytes,
            length_bytes=length_bytes,
            form=form,
            parts=parts,
            first_row=first,
            rows_count=count,
            moe_layer_index=moe_layer_index,
        )
        offset_bytes += length_bytes


def _length(
    form: Form, weight_format: WeightFormat, rows: int, columns: int, step_bytes: int
) -> int:
    if form in (Form.F32, Form.BF16):
        return rows * columns * (4 if form is Form.F32 else 2)
    return round_up(rows, ROWS_PER_BLOCK) // ROWS_PER_BLOCK * step_bytes


def same_values(left: MatrixSource, right: MatrixSource) -> bool:
    """Whether two bf16 matrices of one shape hold the same numbers."""
    step = round_up(max(_PIECE_COUNT // left.columns_count, 1), FP8_BLOCK_ROWS)
    return all(
        np.array_equal(left.read_rows(first, count).codes, right.read_rows(first, count).codes)
        for first in range(0, left.rows_count, step)
        if (count := min(step, left.rows_count - first))
    )
