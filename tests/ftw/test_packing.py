from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freetokend.ftw.formats import BF16, rows16_bytes
from freetokend.ftw.packing import (
    as_bf16,
    as_f32,
    bf16_to_f32,
    f16_to_bf16,
    f32_to_bf16,
    pack_rows16,
    unpack_rows16,
)
from tests.ftw import naive

finite = st.floats(width=32, allow_nan=False, allow_infinity=False)


@given(st.lists(finite, min_size=1, max_size=200))
def test_fp32_rounds_to_nearest_even(values: list[float]) -> None:
    array = np.array(values, np.float32)
    ours = bf16_to_f32(f32_to_bf16(array))
    assert ours.tolist() == [naive.nearest_bf16(float(value)) for value in array]


@pytest.mark.parametrize(
    ("bits", "rounded"),
    [
        (0x3F808000, 0x3F80),  # a tie goes to the even neighbour below
        (0x3F818000, 0x3F82),  # and above
        (0x3F808001, 0x3F81),
        (0x7F7FFFFF, 0x7F80),  # the largest fp32 overflows
        (0x80000001, 0x8000),  # a denormal vanishes, its sign stays
        (0x00018000, 0x0002),
        (0x7F800000, 0x7F80),
        (0xFF800000, 0xFF80),
    ],
)
def test_fp32_edges(bits: int, rounded: int) -> None:
    assert f32_to_bf16(np.array([bits], np.uint32).view(np.float32)).tolist() == [rounded]


@pytest.mark.parametrize("bits", [0x7F800001, 0x7FC00000, 0xFFFFFFFF, 0xFF80FFFF, 0x7FFFFFFF])
def test_nan_stays_nan_with_its_sign(bits: int) -> None:
    (result,) = f32_to_bf16(np.array([bits], np.uint32).view(np.float32)).tolist()
    assert np.isnan(bf16_to_f32(np.array([result], np.uint16)))
    assert result >> 15 == bits >> 31


def test_every_half_converts_as_its_fp32_value() -> None:
    halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    ours = bf16_to_f32(f16_to_bf16(halves))
    numbers = ~np.isnan(halves) & ~np.isinf(halves)
    assert np.isnan(ours[np.isnan(halves)]).all()
    assert np.isinf(ours[np.isinf(halves)]).all()
    assert ours[numbers].tolist() == [naive.nearest_bf16(float(half)) for half in halves[numbers]]


def test_chunked_conversion_has_no_seams() -> None:
    values = np.random.default_rng(1).standard_normal((3, 70_001), dtype=np.float32)
    values[2, 5] = np.nan
    whole = f32_to_bf16(values)
    assert whole.shape == values.shape
    for row in range(3):
        assert np.array_equal(whole[row], f32_to_bf16(values[row]))


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
def test_source_types_agree_on_numbers_that_all_can_hold(dtype: str) -> None:
    values = np.array([0.0, -0.5, 1.0, 1.5, -240.0], np.float32)
    raw = {
        "BF16": f32_to_bf16(values),
        "F16": values.astype(np.float16),
        "F32": values,
    }[dtype].view(np.uint8)
    assert bf16_to_f32(as_bf16(raw, dtype)).tolist() == values.tolist()
    assert as_f32(raw, dtype).tolist() == values.tolist()


def test_unknown_source_types_are_refused() -> None:
    for conversion in (as_bf16, as_f32):
        with pytest.raises(ValueError, match="no conversion from I8"):
            conversion(np.zeros(4, np.uint8), "I8")


def random_bits(seed: int, rows: int, columns: int) -> np.ndarray:
    # Finite, non-zero patterns: NaN would compare unequal, zero would look like padding.
    return np.random.default_rng(seed).integers(1, 0x7F80, (rows, columns), dtype=np.uint16)


@settings(max_examples=40)
@given(st.integers(0, 99), st.integers(1, 50), st.integers(1, 40))
def test_rows16_against_the_element_formula(seed: int, rows: int, columns: int) -> None:
    matrix = random_bits(seed, rows, columns)
    packed = pack_rows16(matrix)
    assert packed.nbytes == rows16_bytes(BF16, rows, columns)
    region = packed.tobytes()
    assert np.array_equal(naive.unpack_rows16(region, rows, columns), bf16_to_f32(matrix))
    assert np.count_nonzero(packed) == matrix.size, "padding must be zero"
    assert np.array_equal(unpack_rows16(packed.reshape(-1), rows, columns), matrix)
