"""Random matrices of every format: any codes, scales of real magnitudes."""

from __future__ import annotations

import numpy as np

from freetokend.ftw.formats import Kind, parse_format
from freetokend.ftw.matrix import QuantMatrix
from freetokend.ftw.packing import f32_to_bf16

FORMATS = (
    "bf16",
    "fp8_block",
    "mxfp4",
    "nvfp4",
    "int4_g32_f16",
    "int4_g64_bf16_zp",
    "int4_g128_bf16",
    "int8_g32_f16",
    "int8_g64_f16_zp",
    "int8_g128_bf16",
    "q4_K",
    "q6_K",
)


def random_matrix(name: str, rows: int, columns: int, seed: int) -> QuantMatrix:
    """A matrix [rows, columns] whose codes take every finite value."""
    random = np.random.default_rng(seed)
    weight_format = parse_format(name)
    groups = (rows, columns // weight_format.group_columns)
    supers = (rows, columns // 256)

    def below(limit: int, shape: tuple[int, int], start: int = 0) -> np.ndarray:
        return random.integers(start, limit, shape).astype(np.uint8)

    def halves(shape: tuple[int, int], dtype: str = "f16") -> np.ndarray:
        values = random.uniform(1e-3, 2e-3, shape).astype(np.float32)
        if dtype == "bf16":
            return f32_to_bf16(values)
        return values.astype(np.float16).view(np.uint16)

    def matrix(codes: np.ndarray, **parts: object) -> QuantMatrix:
        return QuantMatrix(
            format=weight_format, rows_count=rows, columns_count=columns, codes=codes, **parts
        )  # type: ignore[arg-type]

    shape = (rows, columns)
    match weight_format.kind:
        case Kind.BF16:
            return matrix(random.integers(1, 0x7F80, shape).astype(np.uint16))
        case Kind.FP8_BLOCK:
            blocks = ((rows + 15) // 16, (columns + 127) // 128)
            codes = below(127, shape) | (below(2, shape) << 7)
            return matrix(codes, scales=random.uniform(1e-4, 1e-3, blocks).astype(np.float32))
        case Kind.MXFP4:
            return matrix(below(16, shape), scales=below(125, groups, 110))
        case Kind.NVFP4:
            scales = below(127, groups)
            return matrix(below(16, shape), scales=scales, global_scale=float(np.float32(3e-5)))
        case Kind.INT4 | Kind.INT8:
            top = 16 if weight_format.kind is Kind.INT4 else 256
            zeros = below(top, groups) if weight_format.zero_points else None
            scales = halves(groups, weight_format.scale_dtype)
            return matrix(below(top, shape), scales=scales, zeros=zeros)
        case Kind.Q4_K:
            return matrix(
                below(16, shape),
                scales=below(64, groups),
                mins=below(64, groups),
                d=halves(supers),
                dmin=halves(supers),
            )
        case Kind.Q6_K:
            return matrix(below(64, shape), scales=below(256, groups), d=halves(supers))
