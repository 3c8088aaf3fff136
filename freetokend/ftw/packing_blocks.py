"""From a `QuantMatrix` to its rows16 blocks and back, for every format; see docs/ftw.md.

Whole arrays are moved with views, transposes and reshapes only: a block differs from the matrix in
the order of its bytes, so packing costs a few copies of the data.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from freetokend.ftw.formats import (
    FP8_BLOCK_COLUMNS,
    GROUPS_PER_HEADER,
    K_BLOCK_COLUMNS,
    LINE_BYTES,
    ROWS_PER_BLOCK,
    Kind,
    WeightFormat,
    block_bytes,
    group_bytes,
    header_bytes,
    matrix_bytes,
    round_up,
)
from freetokend.ftw.matrix import QuantMatrix
from freetokend.ftw.packing import pack_rows16, unpack_rows16

U8 = NDArray[np.uint8]
Array = NDArray[Any]

# Scale of rows and groups that only pad: 2^0, since code 0 and not the scale makes them zero.
_E8M0_ONE: Final = 127


def pack_blocks(matrix: QuantMatrix, columns: int | None = None) -> U8:
    """u8 [ceil(n/16), block bytes]. Rows that fill the last block decode to zero.

    `columns` is the packed width if it is more than that of the matrix: bf16 and fp8_block only.
    """
    width = matrix.columns_count if columns is None else columns
    kind = matrix.format.kind
    blocks = -(-matrix.rows_count // ROWS_PER_BLOCK)
    if kind is Kind.BF16:
        packed = pack_rows16(matrix.codes.astype(np.uint16, copy=False), round_up(width, 2))
        return packed.reshape(blocks, -1).view(np.uint8)
    if kind is Kind.FP8_BLOCK:
        return _pack_fp8(matrix, blocks, width)
    if width != matrix.columns_count:
        raise ValueError(f"{matrix.format} matrices cannot be padded to {width} columns")
    groups, out = _super_groups(matrix.format, blocks, width)
    split = header_bytes(matrix.format)
    _fill_header(matrix, out[:, :, :split], groups)
    codes = _padded(matrix.codes, blocks * ROWS_PER_BLOCK, groups * matrix.format.group_columns)
    out[:, :, split:] = _pack_codes(kind, _steps(codes)).reshape(blocks, out.shape[1], -1)
    return np.ascontiguousarray(out.reshape(blocks, -1)[:, : block_bytes(matrix.format, width)])


def unpack_blocks(
    packed: U8,
    weight_format: WeightFormat,
    rows: int,
    columns: int,
    *,
    packed_columns: int | None = None,
    global_scale: float = 1.0,
) -> QuantMatrix:
    """The inverse of `pack_blocks`; `packed` is u8 of any shape of the right size.

    ValueError when the size is another.
    """
    width = columns if packed_columns is None else packed_columns
    blocks = -(-rows // ROWS_PER_BLOCK)
    flat = np.ascontiguousarray(packed).reshape(blocks, block_bytes(weight_format, width))
    kind = weight_format.kind
    parts: dict[str, Array] = {}
    if kind is Kind.BF16:
        codes: Array = unpack_rows16(flat.view(np.uint16), rows, columns)
    elif kind is Kind.FP8_BLOCK:
        codes, parts["scales"] = _unpack_fp8(flat, rows, columns, width)
    else:
        _, out = _super_groups(weight_format, blocks, width)
        out.reshape(blocks, -1)[:, : flat.shape[1]] = flat
        split = header_bytes(weight_format)
        codes = _unpack_codes(kind, np.ascontiguousarray(out[:, :, split:]), blocks)
        codes = codes[:rows, :columns]
        header = np.ascontiguousarray(out[:, :, :split])
        parts = {
            name: np.ascontiguousarray(part[:rows, : -(-columns // per_part)])
            for name, per_part, part in _read_header(weight_format, header)
        }
    return QuantMatrix(
        format=weight_format,
        rows_count=rows,
        columns_count=columns,
        codes=np.ascontiguousarray(codes),
        scales=parts.get("scales"),
        zeros=parts.get("zeros"),
        mins=parts.get("mins"),
        d=parts.get("d"),
        dmin=parts.get("dmin"),
        global_scale=global_scale,
    )


def pack_factor(global_scale: float) -> U8:
    """The line behind the blocks of a matrix whose format has a factor over all, u8 [64]."""
    line = np.zeros(LINE_BYTES, np.uint8)
    line[:4] = np.array([global_scale], np.float32).view(np.uint8)
    return line


def pack_matrix(matrix: QuantMatrix) -> U8:
    """A matrix that stands alone, u8 [bytes]: its blocks, and its factor where the format has
    one."""
    blocks = pack_blocks(matrix).reshape(-1).view(np.uint8)
    if not matrix.format.has_global:
        return blocks
    return np.concatenate([blocks, pack_factor(matrix.global_scale)])


def unpack_matrix(packed: U8, weight_format: WeightFormat, rows: int, columns: int) -> QuantMatrix:
    """The inverse of `pack_matrix`. ValueError when the size is another."""
    if not weight_format.has_global:
        return unpack_blocks(packed, weight_format, rows, columns)
    split = matrix_bytes(weight_format, rows, columns)
    (factor,) = packed[split : split + 4].copy().view(np.float32)
    return unpack_blocks(packed[:split], weight_format, rows, columns, global_scale=float(factor))


def groups_per_header(weight_format: WeightFormat) -> int:
    """Groups of columns whose scales stand together."""
    if weight_format.kind in (Kind.Q4_K, Kind.Q6_K):
        return K_BLOCK_COLUMNS // weight_format.group_columns
    return GROUPS_PER_HEADER


def _super_groups(weight_format: WeightFormat, blocks: int, columns: int) -> tuple[int, U8]:
    """Groups in whole super-groups, and zeros [blocks, super-groups, bytes] for them."""
    per_header = groups_per_header(weight_format)
    supers = -(-columns // (per_header * weight_format.group_columns))
    length = header_bytes(weight_format) + per_header * group_bytes(weight_format)
    return supers * per_header, np.zeros((blocks, supers, length), np.uint8)


def _fill_header(matrix: QuantMatrix, header: U8, groups: int) -> None:
    """Put the scales of `matrix` into `header` [blocks, super-groups, bytes]."""
    blocks, supers, _ = header.shape
    rows = blocks * ROWS_PER_BLOCK
    kind = matrix.format.kind
    parts: list[tuple[Array | None, int, int]] = [(matrix.scales, groups, 0)]
    if kind in (Kind.INT4, Kind.INT8):
        parts.append((matrix.zeros, groups, 0))
    elif kind is Kind.MXFP4:
        parts = [(matrix.scales, groups, _E8M0_ONE)]
    elif kind is Kind.Q4_K:
        parts = [(matrix.d, supers, 0), (matrix.dmin, supers, 0), *parts, (matrix.mins, groups, 0)]
    elif kind is Kind.Q6_K:
        # Half of the first line stays empty.
        parts = [(matrix.d, supers, 0), (np.zeros_like(matrix.d), supers, 0), *parts]
    start = 0
    for part, count, filler in parts:
        if part is None:
            continue
        whole = _padded(part, rows, count, filler)
        grid = whole.reshape(blocks, ROWS_PER_BLOCK, supers, count // supers).transpose(0, 2, 3, 1)
        data = np.ascontiguousarray(grid).reshape(blocks, supers, -1).view(np.uint8)
        header[:, :, start : start + data.shape[2]] = data
        start += data.shape[2]


def _read_header(weight_format: WeightFormat, header: U8) -> list[tuple[str, int, Array]]:
    """Name, columns per number and numbers [rows, ..] of what `header` holds, padding and all."""
    group, per_header = weight_format.group_columns, groups_per_header(weight_format)
    u8, u16 = np.dtype(np.uint8), np.dtype(np.uint16)
    fields: list[tuple[str, int, np.dtype[Any]]]
    match weight_format.kind:
        case Kind.INT4 | Kind.INT8:
            fields = [("scales", group, u16)]
            if weight_format.zero_points:
                fields.append(("zeros", group, u8))
        case Kind.Q4_K:
            fields = [("d", K_BLOCK_COLUMNS, u16), ("dmin", K_BLOCK_COLUMNS, u16)]
            fields += [("scales", group, u8), ("mins", group, u8)]
        case Kind.Q6_K:
            fields = [("d", K_BLOCK_COLUMNS, u16), ("", K_BLOCK_COLUMNS, u16)]
            fields.append(("scales", group, u8))
        case _:
            fields = [("scales", group, u8)]
    blocks, supers, _ = header.shape
    result = []
    start = 0
    for name, per_number, dtype in fields:
        count = per_header * group // per_number
        length = count * ROWS_PER_BLOCK * dtype.itemsize
        numbers = np.ascontiguousarray(header[:, :, start : start + length]).view(dtype)
        grid = numbers.reshape(blocks, supers, count, ROWS_PER_BLOCK).transpose(0, 3, 1, 2)
        if name:
            rows = grid.reshape(blocks * ROWS_PER_BLOCK, supers * count)
            result.append((name, per_number, rows))
        start += length
    return result


def _steps(codes: Array) -> Array:
    """u8 [rows, K] -> [blocks, 16, K/8, 2 j, 2 h, 2 p]: column 4j + 2h + p of each 8 columns."""
    return codes.reshape(codes.shape[0] // ROWS_PER_BLOCK, ROWS_PER_BLOCK, -1, 2, 2, 2)


def _nibbles(steps: Array) -> Array:
    """[blocks, 16, S, 2, 2, 2] of 4-bit codes -> bytes [blocks, S, 16 rows, 2 p, 2 j].

    The even columns of a step stand in its first two bytes, the odd ones in the last two, so that
    a kernel gets both with one mask or shift.
    """
    joined = steps[..., 0, :] | (steps[..., 1, :] << 4)
    return np.ascontiguousarray(joined.transpose(0, 2, 1, 4, 3))


def _from_nibbles(data: Array) -> Array:
    """The inverse of `_nibbles`: [blocks, S, 16, 4] -> [blocks, 16, S, 2, 2, 2]."""
    blocks, steps, rows, _ = data.shape
    joined = data.reshape(blocks, steps, rows, 2, 2).transpose(0, 2, 1, 4, 3)
    return np.stack((joined & 15, joined >> 4), axis=-2)


def _pack_codes(kind: Kind, steps: Array) -> Array:
    """Codes as `_steps` gives them -> the data of the groups, in order."""
    blocks, rows, count = steps.shape[:3]
    if kind is Kind.INT8:
        words = steps.reshape(blocks, rows, 2 * count, 4).view(np.uint32)
        return np.ascontiguousarray(words.transpose(0, 2, 1, 3)).view(np.uint8)
    if kind is not Kind.Q6_K:
        return _nibbles(steps)
    low = _nibbles(steps & 15).reshape(blocks, count // 2, 2, rows, 4)
    # Two bits of every code, in the order of the nibbles they belong to: 4 codes, 2 steps a byte.
    bits = _nibbles(steps >> 4).reshape(blocks, count // 2, 2, rows, 4)
    bits = (bits & 3) | (bits >> 2)
    high = bits[:, :, :1] | (bits[:, :, 1:] << 4)
    return np.concatenate((high, low), axis=2)


def _unpack_codes(kind: Kind, data: Array, blocks: int) -> Array:
    """The inverse of `_pack_codes`: data of whole super-groups -> codes [rows, K]."""
    if kind is Kind.INT8:
        words = data.view(np.uint32).reshape(blocks, -1, ROWS_PER_BLOCK).transpose(0, 2, 1)
        codes: Array = np.ascontiguousarray(words).view(np.uint8)
    elif kind is not Kind.Q6_K:
        codes = _from_nibbles(data.reshape(blocks, -1, ROWS_PER_BLOCK, 4))
    else:
        grid = data.reshape(blocks, -1, 3, ROWS_PER_BLOCK, 4)
        low = _from_nibbles(grid[:, :, 1:].reshape(blocks, -1, ROWS_PER_BLOCK, 4))
        plane = grid[:, :, 0]
        bits = np.stack((plane & 15, plane >> 4), axis=2)
        bits = (bits & 3) | ((bits & 12) << 2)
        codes = low | (_from_nibbles(bits.reshape(blocks, -1, ROWS_PER_BLOCK, 4)) << 4)
    return codes.reshape(blocks * ROWS_PER_BLOCK, -1)


def _pack_fp8(matrix: QuantMatrix, blocks: int, width: int) -> U8:
    out = np.zeros((blocks, block_bytes(matrix.format, width)), np.uint8)
    scales = np.ascontiguousarray(matrix.scales).view(np.uint8)
    out[:, : scales.shape[1]] = scales
    codes = _padded(matrix.codes, blocks * ROWS_PER_BLOCK, round_up(width, 4))
    pairs = codes.view(np.uint16).reshape(blocks, ROWS_PER_BLOCK, -1).transpose(0, 2, 1)
    start = _fp8_start(width)
    out[:, start:] = np.ascontiguousarray(pairs).reshape(blocks, -1).view(np.uint8)
    return out


def _unpack_fp8(flat: U8, rows: int, columns: int, width: int) -> tuple[U8, Array]:
    start = _fp8_start(width)
    scales = np.ascontiguousarray(flat[:, :start]).view(np.float32)
    pairs = np.ascontiguousarray(flat[:, start:]).view(np.uint16)
    grid = pairs.reshape(flat.shape[0], -1, ROWS_PER_BLOCK).transpose(0, 2, 1)
    codes = np.ascontiguousarray(grid).view(np.uint8).reshape(flat.shape[0] * ROWS_PER_BLOCK, -1)
    kept = np.ascontiguousarray(scales[:, : -(-columns // FP8_BLOCK_COLUMNS)])
    return codes[:rows, :columns], kept


def _fp8_start(width: int) -> int:
    """Where the codes of a fp8_block block begin, behind its scales."""
    return round_up(-(-width // FP8_BLOCK_COLUMNS) * 4, LINE_BYTES)


def _padded(part: Array, rows: int, columns: int, filler: int = 0) -> Array:
    """`part` as a contiguous array [rows, columns], filled up with `filler`."""
    if part.shape == (rows, columns):
        return np.ascontiguousarray(part)
    whole = np.full((rows, columns), filler, part.dtype)
    whole[: part.shape[0], : part.shape[1]] = part
    return whole
