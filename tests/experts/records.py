"""Random expert records in memory, and what they mean in float64."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from freetokend.ftw.formats import BF16
from freetokend.ftw.matrix import QuantMatrix
from freetokend.ftw.packing import bf16_to_f32, f32_to_bf16
from freetokend.ftw.packing_record import ExpertMatrices, pack_record

Floats = npt.NDArray[np.float64]
Expert = tuple[Floats, Floats, Floats]


def random_expert(hidden_size: int, intermediate_size: int, seed: int) -> Expert:
    """gate [I, H], up [I, H], down [H, I]: bf16 values of real magnitudes, as float64."""
    random = np.random.default_rng(seed)
    gate, up, down = (
        bf16_to_f32(
            f32_to_bf16(
                random.standard_normal(size, dtype=np.float32) * np.float32(size[1] ** -0.5)
            )
        ).astype(np.float64)
        for size in (
            (intermediate_size, hidden_size),
            (intermediate_size, hidden_size),
            (hidden_size, intermediate_size),
        )
    )
    return gate, up, down


def packed(expert: Expert, record_bytes: int) -> bytes:
    """The expert as a record."""
    gate, up, down = (
        QuantMatrix(
            format=BF16,
            rows_count=part.shape[0],
            columns_count=part.shape[1],
            codes=f32_to_bf16(part.astype(np.float32)),
        )
        for part in expert
    )
    record = pack_record(ExpertMatrices(gate=gate, up=up, down=down)).tobytes()
    assert len(record) == record_bytes
    return record


def exact(expert: Expert, x: Floats) -> Floats:
    """down(silu(gate x) * up x) of one token, in float64."""
    gate, up, down = expert
    inner = gate @ x
    return np.asarray(down @ (inner / (1.0 + np.exp(-inner)) * (up @ x)))


def bf16(values: Floats) -> Floats:
    """Rounded to bf16."""
    return bf16_to_f32(f32_to_bf16(values.astype(np.float32))).astype(np.float64)
