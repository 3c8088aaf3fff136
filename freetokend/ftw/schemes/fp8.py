"""fp8 weights with a scale per block of 128 x 128, as DeepSeek-V3 and Qwen3 checkpoints have them.

`NAME.weight` e4m3 [N, K] and `NAME.weight_scale_inv` [ceil(N/128), ceil(K/128)], despite its name
a factor. DeepSeek-V4 calls it `NAME.scale`, has it in e8m0, and holds routed experts as mxfp4 with
scales of that name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from freetokend.core.quantization_config import QuantScheme
from freetokend.ftw.checkpoint import Checkpoint
from freetokend.ftw.formats import (
    FP8_BLOCK_COLUMNS,
    FP8_BLOCK_ROWS,
    ROWS_PER_BLOCK,
    Kind,
    WeightFormat,
    parse_format,
)
from freetokend.ftw.matrix import MatrixSource, QuantMatrix
from freetokend.ftw.safetensors import SourceTensor
from freetokend.ftw.schemes.fp4 import open_mxfp4
from freetokend.ftw.schemes.parts import FLOATS, WEIGHT, Parts, scale_values
from freetokend.ftw.schemes.scheme import PlainScheme

_SCALE_NAMES: Final = (".weight_scale_inv", ".scale")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8Source:
    """A `MatrixSource` of format fp8_block: blocks of 128 rows are cut into row blocks of 16."""

    name: str
    format: WeightFormat
    rows_count: int
    columns_count: int
    parts: Parts
    codes: SourceTensor
    scales: SourceTensor

    def read_rows(self, first_row: int, count: int) -> QuantMatrix:
        """See `MatrixSource`."""
        blocks = np.arange(first_row, first_row + count, ROWS_PER_BLOCK) // FP8_BLOCK_ROWS
        first_block = int(blocks[0])
        raw = self.parts.rows(self.scales, first_block, int(blocks[-1]) - first_block + 1)
        scales = scale_values(raw.reshape(-1), self.scales.dtype).reshape(len(raw), -1)
        return QuantMatrix(
            format=self.format,
            rows_count=count,
            columns_count=self.columns_count,
            codes=self.parts.rows(self.codes, first_row, count),
            scales=scales[blocks - first_block],
        )


def open_fp8(parts: Parts, name: str, scale: str, rows: int, columns: int) -> Fp8Source:
    """The fp8 matrix `name` [rows, columns] with its factors in `scale`."""
    grid = (-(-rows // FP8_BLOCK_ROWS), -(-columns // FP8_BLOCK_COLUMNS))
    return Fp8Source(
        name=name,
        format=parse_format(Kind.FP8_BLOCK),
        rows_count=rows,
        columns_count=columns,
        parts=parts,
        codes=parts.need(name, [(rows, columns)], ("F8_E4M3",), of=name),
        scales=parts.need(scale, [grid], (*FLOATS, "F8_E8M0"), of=name),
    )


class Fp8Scheme(PlainScheme):
    """A checkpoint with fp8 matrices; every other tensor is plain."""

    name = QuantScheme.FP8.value

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(checkpoint)
        self._parts = Parts(checkpoint)
        self.consumed = self._parts.consumed

    def matrix(self, name: str, rows: int, columns: int) -> MatrixSource | None:
        """See `Scheme`."""
        weight = self._parts.find(name)
        if weight is None or weight.dtype not in ("F8_E4M3", "I8"):
            return None
        base = name.removesuffix(WEIGHT)
        names = [base + suffix for suffix in _SCALE_NAMES]
        scale = next((name for name in names if self._parts.has(name)), names[0])
        # Factors of activations quantised in advance; ours stay as they are.
        self._parts.drop(base + ".activation_scale", base + ".input_scale")
        if weight.dtype == "I8":
            return open_mxfp4(self._parts, name, name, scale, rows, columns)
        return open_fp8(self._parts, name, scale, rows, columns)
