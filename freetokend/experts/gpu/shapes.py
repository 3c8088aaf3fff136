"""What the kernels are compiled for: the record of a bank, its codes, and sizes of tiles."""

from __future__ import annotations

from types import MappingProxyType
from typing import Final, NamedTuple

from freetokend.experts.gpu.triton_codes import Codes
from freetokend.experts.gpu.triton_experts import Record
from freetokend.ftw.formats import (
    GROUPS_PER_HEADER,
    K_BLOCK_COLUMNS,
    Kind,
    WeightFormat,
    block_bytes,
    group_bytes,
    header_bytes,
    parse_format,
    record_layout,
)
from freetokend.ftw.layout import ExpertBank

# Columns of a word, and its bytes.
_WORDS: Final = MappingProxyType({Kind.BF16: (2, 4), Kind.FP8_BLOCK: (2, 2), Kind.INT8: (4, 4)})
_OTHER_WORDS: Final = (8, 4)
# More of them leave too few registers for decoding.
_MOST_COLUMNS: Final = 64


class Shapes(NamedTuple):
    """Sizes of the kernels' tiles.

    steps: words of a row that a program for one token has in flight; tokens, rows, columns: of a
    tile on the tensor cores, columns being of one group where the format has groups.
    """

    steps: int
    tokens: int
    rows: int
    columns: int


def codes_of(weight_format: WeightFormat) -> Codes:
    """The format as the kernels see it."""
    kind = weight_format.kind
    step, word_bytes = _WORDS.get(kind, _OTHER_WORDS)
    if kind in (Kind.BF16, Kind.FP8_BLOCK):
        groups_per_header = 0
    elif kind in (Kind.Q4_K, Kind.Q6_K):
        groups_per_header = K_BLOCK_COLUMNS // weight_format.group_columns
    else:
        groups_per_header = GROUPS_PER_HEADER
    return Codes(
        kind=kind.value,
        step=step,
        word_bytes=word_bytes,
        group=0 if kind is Kind.BF16 else weight_format.group_columns,
        groups_per_header=groups_per_header,
        header_bytes=header_bytes(weight_format),
        group_bytes=group_bytes(weight_format) if groups_per_header else 0,
        half_scales=weight_format.scale_dtype != "bf16",
        zero_points=weight_format.zero_points,
    )


def record_of(bank: ExpertBank, *, slot_bytes: int, top_k: int) -> Record:
    """Where everything lies in a slot."""
    weight_format = parse_format(bank.format)
    layout = record_layout(
        weight_format, bank.hidden_size, bank.intermediate_size, has_bias=bank.has_bias
    )
    gate_bias, up_bias, down_bias = layout.biases_bytes or (0, 0, 0)
    return Record(
        hidden=bank.hidden_size,
        inner=layout.down_columns,
        slot_bytes=slot_bytes,
        gate_up_block_bytes=block_bytes(weight_format, bank.hidden_size),
        down_offset=layout.down_bytes,
        down_block_bytes=block_bytes(weight_format, layout.down_columns),
        globals_offset=layout.globals_bytes or 0,
        gate_bias_offset=gate_bias,
        up_bias_offset=up_bias,
        down_bias_offset=down_bias,
        top_k=top_k,
        activation=bank.activation,
        limit=bank.activation_limit,
        alpha=bank.activation_alpha,
    )


def shapes_of(weight_format: WeightFormat) -> Shapes:
    """Sizes for a GPU: 32 bytes of weights in flight per thread, tiles that fit every one."""
    kind = weight_format.kind
    columns = _MOST_COLUMNS
    if kind not in (Kind.BF16, Kind.FP8_BLOCK):
        columns = min(columns, weight_format.group_columns)
    steps = 64 if kind in (Kind.BF16, Kind.FP8_BLOCK) else 32
    return Shapes(steps=steps, tokens=64, rows=128, columns=columns)
