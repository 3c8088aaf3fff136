"""Random matrices in any weight format, of the magnitude of a model's weights.

Codes are drawn directly, not quantised from numbers: any codes with sound scales take the same
time, and drawing them is a hundred times faster.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from freetokend.ftw.formats import Kind, WeightFormat
from freetokend.ftw.matrix import QuantMatrix

# Root of the mean square of the weights.
MAGNITUDE = 0.02


def _half_bits(values: NDArray[np.floating], scale_dtype: str) -> NDArray[np.uint16]:
    if scale_dtype == "f16":
        return values.astype(np.float16).view(np.uint16)
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def random_matrix(
    weight_format: WeightFormat, rows: int, columns: int, rng: np.random.Generator
) -> QuantMatrix:
    """A matrix [rows, columns]. ValueError when the format cannot have this width."""
    groups = (rows, columns // weight_format.group_columns)
    make = _Maker(weight_format, rows, columns, rng)

    def halves(shape: tuple[int, int], magnitude: float) -> NDArray[np.uint16]:
        values = rng.uniform(0.8, 1.2, shape) * magnitude
        return _half_bits(values, weight_format.scale_dtype if shape == groups else "f16")

    match weight_format.kind:
        case Kind.BF16:
            values = rng.standard_normal((rows, columns), dtype=np.float32) * MAGNITUDE
            return make.matrix(_half_bits(values, "bf16"))
        case Kind.FP8_BLOCK:
            codes = make.codes(256)
            codes[(codes & 0x7F) == 0x7F] = 0
            shape = (-(-rows // 16), -(-columns // 128))
            scales = (rng.uniform(0.8, 1.2, shape) * MAGNITUDE / 110).astype(np.float32)
            return make.matrix(codes, scales=scales)
        case Kind.MXFP4:
            scales8 = rng.integers(118, 121, groups, dtype=np.uint8)
            return make.matrix(make.codes(16), scales=scales8)
        case Kind.NVFP4:
            scales8 = rng.integers(0x30, 0x50, groups, dtype=np.uint8)
            return make.matrix(make.codes(16), scales=scales8, global_scale=MAGNITUDE / 4)
        case Kind.INT4:
            zeros = make.small(groups, 6, 11) if weight_format.zero_points else None
            scales16 = halves(groups, MAGNITUDE / 4.6)
            return make.matrix(make.codes(16), scales=scales16, zeros=zeros)
        case Kind.INT8:
            zeros = make.small(groups, 126, 131) if weight_format.zero_points else None
            scales16 = halves(groups, MAGNITUDE / 74)
            return make.matrix(make.codes(256), scales=scales16, zeros=zeros)
        case Kind.Q4_K:
            supers = (rows, columns // 256)
            return make.matrix(
                make.codes(16),
                scales=make.small(groups, 20, 64),
                mins=make.small(groups, 20, 64),
                d=halves(supers, MAGNITUDE / 200),
                dmin=halves(supers, MAGNITUDE / 27),
            )
        case Kind.Q6_K:
            scales8 = rng.integers(-100, 100, groups, dtype=np.int8).view(np.uint8)
            d = halves((rows, columns // 256), MAGNITUDE / 1100)
            return make.matrix(make.codes(64), scales=scales8, d=d)


class _Maker:
    """What the formats share."""

    def __init__(
        self, weight_format: WeightFormat, rows: int, columns: int, rng: np.random.Generator
    ) -> None:
        self._format = weight_format
        self._rows = rows
        self._columns = columns
        self._rng = rng

    def codes(self, count: int) -> NDArray[np.uint8]:
        return self.small((self._rows, self._columns), 0, count)

    def small(self, shape: tuple[int, int], low: int, high: int) -> NDArray[np.uint8]:
        return self._rng.integers(low, high, shape, dtype=np.uint8)

    def matrix(
        self,
        codes: NDArray[np.uint8] | NDArray[np.uint16],
        *,
        scales: NDArray[np.uint8] | NDArray[np.uint16] | NDArray[np.float32] | None = None,
        zeros: NDArray[np.uint8] | None = None,
        mins: NDArray[np.uint8] | None = None,
        d: NDArray[np.uint16] | None = None,
        dmin: NDArray[np.uint16] | None = None,
        global_scale: float = 1.0,
    ) -> QuantMatrix:
        return QuantMatrix(
            format=self._format,
            rows_count=self._rows,
            columns_count=self._columns,
            codes=codes,
            scales=scales,
            zeros=zeros,
            mins=mins,
            d=d,
            dmin=dmin,
            global_scale=global_scale,
        )
