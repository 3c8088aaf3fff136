"""Weight formats: their names, what they demand of a matrix, and how many bytes they take.

Pure arithmetic on Python integers. The forms themselves are described in docs/ftw.md.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

ROWS_PER_BLOCK: Final = 16
PAGE_BYTES: Final = 4096
# Every part of a block and of a record's trailer starts at a multiple of a cache line.
LINE_BYTES: Final = 64
# Groups of columns whose scales share one header.
GROUPS_PER_HEADER: Final = 4
FP8_BLOCK_COLUMNS: Final = 128
FP8_BLOCK_ROWS: Final = 128
K_BLOCK_COLUMNS: Final = 256

_F32_BYTES: Final = 4
_INTEGER: Final = re.compile(r"(int4|int8)_g(32|64|128)_(f16|bf16)(_zp)?")
# Names that other programs use for one of ours.
_ALIASES: Final = {"q4_0": "int4_g32_f16", "q8_0": "int8_g32_f16"}


class Kind(StrEnum):
    """How one element is coded."""

    BF16 = "bf16"
    FP8_BLOCK = "fp8_block"
    MXFP4 = "mxfp4"
    NVFP4 = "nvfp4"
    INT4 = "int4"
    INT8 = "int8"
    Q4_K = "q4_K"
    Q6_K = "q6_K"


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFormat:
    """A format. `str()` gives its canonical name, which `parse_format` reads.

    group_columns: columns that share a scale (1 for bf16); scale_dtype: "f16" or "bf16" of the
    integer formats, "f32", "e8m0", "e4m3", "u8" or "i8" where the kind leaves no choice, "" for
    bf16; zero_points: whether an integer format has them.
    """

    kind: Kind
    group_columns: int
    scale_dtype: str
    zero_points: bool = False

    def __str__(self) -> str:
        if self.kind not in (Kind.INT4, Kind.INT8):
            return self.kind.value
        suffix = "_zp" if self.zero_points else ""
        return f"{self.kind.value}_g{self.group_columns}_{self.scale_dtype}{suffix}"

    @property
    def column_multiple(self) -> int:
        """What the width of a matrix must be a multiple of."""
        match self.kind:
            case Kind.BF16 | Kind.FP8_BLOCK:
                return 1
            case Kind.Q4_K | Kind.Q6_K:
                return K_BLOCK_COLUMNS
            case _:
                return self.group_columns

    @property
    def has_global(self) -> bool:
        """Whether a matrix has one fp32 factor over all."""
        return self.kind is Kind.NVFP4


_PLAIN: Final = {
    str(weight_format): weight_format
    for weight_format in (
        WeightFormat(kind=Kind.BF16, group_columns=1, scale_dtype=""),
        WeightFormat(kind=Kind.FP8_BLOCK, group_columns=FP8_BLOCK_COLUMNS, scale_dtype="f32"),
        WeightFormat(kind=Kind.MXFP4, group_columns=32, scale_dtype="e8m0"),
        WeightFormat(kind=Kind.NVFP4, group_columns=16, scale_dtype="e4m3"),
        WeightFormat(kind=Kind.Q4_K, group_columns=32, scale_dtype="u8"),
        WeightFormat(kind=Kind.Q6_K, group_columns=16, scale_dtype="i8"),
    )
}
BF16: Final = _PLAIN["bf16"]
# For help and errors.
FORMAT_NAMES: Final = (
    f"{', '.join(_PLAIN)}, {', '.join(_ALIASES)}, int4_gG_S and int8_gG_S (G: 32, 64 or 128 "
    "columns per scale; S: f16 or bf16; _zp behind it for zero points)"
)


def parse_format(name: str) -> WeightFormat:
    """The format of this name (canonical, or the aliases q4_0 and q8_0); ValueError otherwise."""
    name = _ALIASES.get(name, name)
    plain = _PLAIN.get(name)
    if plain is not None:
        return plain
    match = _INTEGER.fullmatch(name)
    if match is None:
        raise ValueError(f"no weight format is called {name!r}; there are {FORMAT_NAMES}")
    return WeightFormat(
        kind=Kind(match[1]),
        group_columns=int(match[2]),
        scale_dtype=match[3],
        zero_points=match[4] is not None,
    )


def round_up(value: int, step: int) -> int:
    """The smallest multiple of `step` that is not below `value`."""
    return -(-value // step) * step


def header_bytes(weight_format: WeightFormat) -> int:
    """Bytes of the scales in front of each run of groups; 0 for bf16 and fp8_block."""
    match weight_format.kind:
        case Kind.BF16 | Kind.FP8_BLOCK:
            return 0
        case Kind.MXFP4 | Kind.NVFP4:
            return GROUPS_PER_HEADER * ROWS_PER_BLOCK
        case Kind.INT4 | Kind.INT8:
            bytes_per_scale = 3 if weight_format.zero_points else 2
            return GROUPS_PER_HEADER * ROWS_PER_BLOCK * bytes_per_scale
        case Kind.Q4_K | Kind.Q6_K:
            return 2 * LINE_BYTES + 3 * LINE_BYTES


def group_bytes(weight_format: WeightFormat) -> int:
    """Bytes of the codes of 16 rows x one group of columns (one column for bf16 and fp8_block)."""
    match weight_format.kind:
        case Kind.BF16:
            return ROWS_PER_BLOCK * 2
        case Kind.FP8_BLOCK:
            return ROWS_PER_BLOCK
        case Kind.INT8:
            return ROWS_PER_BLOCK * weight_format.group_columns
        case Kind.Q6_K:
            return ROWS_PER_BLOCK * weight_format.group_columns * 3 // 4
        case _:
            return ROWS_PER_BLOCK * weight_format.group_columns // 2


def block_bytes(weight_format: WeightFormat, columns: int) -> int:
    """Bytes of one block of 16 rows. ValueError when the format cannot have this width."""
    if columns % weight_format.column_multiple:
        raise ValueError(
            f"{columns} columns are not a multiple of {weight_format.column_multiple}, which "
            f"{weight_format} needs"
        )
    match weight_format.kind:
        case Kind.BF16:
            return round_up(columns, 2) * group_bytes(weight_format)
        case Kind.FP8_BLOCK:
            scales = -(-columns // FP8_BLOCK_COLUMNS) * _F32_BYTES
            return round_up(scales, LINE_BYTES) + round_up(columns, 4) * group_bytes(weight_format)
        case Kind.Q4_K | Kind.Q6_K:
            headers = columns // K_BLOCK_COLUMNS
        case _:
            headers = -(-columns // (GROUPS_PER_HEADER * weight_format.group_columns))
    groups = columns // weight_format.group_columns
    return headers * header_bytes(weight_format) + groups * group_bytes(weight_format)


def matrix_bytes(weight_format: WeightFormat, rows: int, columns: int) -> int:
    """Bytes of the blocks of a matrix [rows, columns]. ValueError as `block_bytes`."""
    blocks = -(-rows // ROWS_PER_BLOCK)
    return blocks * block_bytes(weight_format, columns)


def rows16_bytes(weight_format: WeightFormat, rows: int, columns: int) -> int:
    """Bytes of a matrix [rows, columns] that stands alone: its blocks, and where the format has an
    fp32 factor over all a line that begins with it. ValueError as `block_bytes`."""
    factor_bytes = LINE_BYTES if weight_format.has_global else 0
    return matrix_bytes(weight_format, rows, columns) + factor_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordLayout:
    """Where the parts of an expert record lie, in bytes from its start.

    Gate and up blocks alternate from 0 on; down, `down_columns` wide, ends at payload_bytes. The
    trailer, from trailer_bytes to end_bytes, may be empty. globals_bytes: place of the fp32
    factors of gate, up and down, None when the format has none; biases_bytes: places of the biases
    of gate, up and down, None when the bank has none; record_bytes: length, padded to a page.
    """

    down_bytes: int
    down_columns: int
    payload_bytes: int
    trailer_bytes: int
    end_bytes: int
    globals_bytes: int | None
    biases_bytes: tuple[int, int, int] | None
    record_bytes: int


def record_layout(
    weight_format: WeightFormat, hidden_size: int, intermediate_size: int, *, has_bias: bool = False
) -> RecordLayout:
    """The layout of an expert record. ValueError when a size is no multiple that the format needs.

    Down is as wide as the activations it meets, which are padded to whole row blocks of gate and
    up.
    """
    inner = round_up(intermediate_size, ROWS_PER_BLOCK)
    block_bytes(weight_format, intermediate_size)  # the true width counts, not the padded one
    down = 2 * matrix_bytes(weight_format, intermediate_size, hidden_size)
    payload = down + matrix_bytes(weight_format, hidden_size, inner)
    end = round_up(payload, LINE_BYTES)
    globals_bytes = None
    if weight_format.has_global:
        globals_bytes = end
        end += LINE_BYTES
    biases = None
    if has_bias:
        inner_bytes = round_up(inner * _F32_BYTES, LINE_BYTES)
        biases = (end, end + inner_bytes, end + 2 * inner_bytes)
        outer = round_up(hidden_size, ROWS_PER_BLOCK)
        end = biases[2] + round_up(outer * _F32_BYTES, LINE_BYTES)
    return RecordLayout(
        down_bytes=down,
        down_columns=inner,
        payload_bytes=payload,
        trailer_bytes=round_up(payload, LINE_BYTES),
        end_bytes=end,
        globals_bytes=globals_bytes,
        biases_bytes=biases,
        record_bytes=round_up(end, PAGE_BYTES),
    )
