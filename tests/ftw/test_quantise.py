"""Quantisers against the numbers they were given: how far off, and never anything but numbers."""

from __future__ import annotations

import numpy as np
import pytest

from freetokend.ftw.formats import parse_format
from freetokend.ftw.matrix import QuantMatrix, dequantise, problem_of
from freetokend.ftw.numbers import e2m1_values, e4m3_values
from freetokend.ftw.quantise import e2m1_codes, e4m3_codes, nvfp4_global, quantise, round_e2m1

# Relative RMS error of normally distributed weights; the least that was measured, a little wider.
ERRORS = {
    "bf16": 0.002,
    "fp8_block": 0.0275,
    "mxfp4": 0.115,
    "nvfp4": 0.086,
    "int4_g32_f16": 0.083,
    "int4_g64_bf16": 0.093,
    "int4_g128_f16": 0.101,
    "int4_g32_f16_zp": 0.081,
    "int4_g128_bf16_zp": 0.098,
    "int8_g32_f16": 0.0056,
    "int8_g64_bf16_zp": 0.0058,
    "int8_g128_bf16": 0.0068,
    "q4_K": 0.076,
    "q6_K": 0.018,
}


def quantised(values: np.ndarray, name: str) -> QuantMatrix:
    weight_format = parse_format(name)
    factor = nvfp4_global(float(np.abs(values).max())) if weight_format.has_global else 1.0
    return quantise(values.astype(np.float32), weight_format, global_scale=factor)


def difference(found: np.ndarray, values: np.ndarray) -> float:
    """RMS of what is off / RMS of what was given."""
    wanted = values.astype(np.float64)
    return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))


def relative_error(values: np.ndarray, matrix: QuantMatrix) -> float:
    return difference(dequantise(matrix), values)


def weights(rows: int = 192, columns: int = 512, seed: int = 0) -> np.ndarray:
    values = np.random.default_rng(seed).standard_normal((rows, columns)) * 0.02
    return values.astype(np.float32)


@pytest.mark.parametrize("name", ERRORS)
def test_errors_at_the_magnitudes_of_weights(name: str) -> None:
    values = weights()
    matrix = quantised(values, name)
    assert problem_of(matrix) is None
    assert 0.5 * ERRORS[name] < relative_error(values, matrix) < ERRORS[name]


@pytest.mark.parametrize("name", [name for name in ERRORS if "bf16" in name or "_" not in name])
@pytest.mark.parametrize("magnitude", [2.0**-20, 2.0**40])
def test_errors_are_the_same_at_other_magnitudes(name: str, magnitude: float) -> None:
    if name in ("q4_K", "q6_K"):
        magnitude = min(magnitude, 2.0**10) if magnitude > 1 else 2.0**-4  # scales are halves
    values = weights(64) * np.float32(magnitude)
    assert relative_error(values, quantised(values, name)) < 1.02 * ERRORS[name]


@pytest.mark.parametrize("name", ERRORS)
def test_rows_are_quantised_on_their_own(name: str) -> None:
    """A part of a matrix gets the codes that it gets in the whole (fp8: from a row of 128 on)."""
    values = weights(rows=256)
    factor = nvfp4_global(float(np.abs(values).max())) if name == "nvfp4" else 1.0
    whole = quantise(values, parse_format(name), global_scale=factor)
    part = quantise(values[128:], parse_format(name), global_scale=factor)
    assert np.array_equal(whole.codes[128:], part.codes)
    assert np.array_equal(dequantise(whole)[128:], dequantise(part))


@pytest.mark.parametrize("name", ERRORS)
def test_zeros_stay_zeros(name: str) -> None:
    values = weights(rows=48)
    values[5] = 0.0
    values[16:32] = 0.0
    values[40, 256:] = 0.0
    found = dequantise(quantised(values, name))
    assert not found[5].any()
    assert not found[16:32].any()
    assert not found[40, 256:].any()
    nothing = quantised(np.zeros((32, 256)), name)
    assert problem_of(nothing) is None
    assert not dequantise(nothing).any()


@pytest.mark.parametrize("name", ERRORS)
def test_one_outlier_costs_its_block_alone(name: str) -> None:
    values = weights(rows=256)
    values[3, 7] = 3.0
    matrix = quantised(values, name)
    found = dequantise(matrix)
    assert found[3, 7] == pytest.approx(3.0, rel=0.15)
    # Half the matrix away nothing is felt of it; a global factor reaches everywhere, but little.
    assert difference(found[128:], values[128:]) < 1.1 * ERRORS[name]


@pytest.mark.parametrize("name", ERRORS)
@pytest.mark.parametrize("magnitude", [1e-45, 1e-38, 1e-30, 1e-9])
def test_tiny_numbers_become_small_or_zero(name: str, magnitude: float) -> None:
    values = np.where(weights(48) > 0, np.float32(magnitude), np.float32(-magnitude))
    matrix = quantised(values, name)
    assert problem_of(matrix) is None
    found = dequantise(matrix)
    assert np.isfinite(found).all()
    assert np.abs(found).max() <= 2.1 * magnitude


@pytest.mark.parametrize("name", ERRORS)
@pytest.mark.parametrize("magnitude", [6e4, 1e20, 3e38])
def test_huge_numbers_are_kept_or_found(name: str, magnitude: float) -> None:
    """Never silently zero: either the format has them or `problem_of` says so."""
    values = (weights(48) * np.float32(50 / 4)).clip(-1, 1) * np.float32(magnitude)
    values[:, ::64] = magnitude
    matrix = quantised(values, name)
    if problem_of(matrix) is None:
        found = dequantise(matrix)
        assert difference(found / magnitude, values / np.float32(magnitude)) < 0.3
    else:
        assert "f16" in name or "bf16" in name or "_K" in name


def test_fp8_of_a_tail_block() -> None:
    values = weights(rows=200, columns=301)
    matrix = quantised(values, "fp8_block")
    assert matrix.scales is not None
    assert matrix.scales.shape == (13, 3)
    for block in range(8):
        assert (matrix.scales[block] == matrix.scales[0]).all()
    assert relative_error(values, matrix) < ERRORS["fp8_block"]
    largest = np.abs(values[:128, :128]).max()
    assert matrix.scales[0, 0] == np.float32(largest / np.float32(448))


def test_mxfp4_takes_the_better_of_two_scales() -> None:
    # Floor(log2 7.9) - 2 = 0: 7.9 saturates to 6; twice the scale makes it 8.
    values = np.full((1, 32), 0.0, np.float32)
    values[0, :2] = 7.9, 1.0
    matrix = quantised(values, "mxfp4")
    assert matrix.scales is not None
    assert matrix.scales[0, 0] == 128
    assert dequantise(matrix)[0, :2].tolist() == [8.0, 1.0]
    values[0, :2] = 6.0, 0.5
    matrix = quantised(values, "mxfp4")
    assert dequantise(matrix)[0, :2].tolist() == [6.0, 0.5]


def test_search_beats_the_plain_scale() -> None:
    values = weights()
    groups = values.reshape(-1, 16)
    scales = np.abs(groups).max(axis=1, keepdims=True) / 6
    plain = round_e2m1((np.abs(groups) / scales).astype(np.float32)) * scales
    error = np.linalg.norm(plain - np.abs(groups)) / np.linalg.norm(groups)
    assert relative_error(values, quantised(values, "nvfp4")) < 0.95 * error
    groups = values.reshape(-1, 32)
    scales = np.abs(groups).max(axis=1, keepdims=True) / 7
    plain = np.rint(groups / scales) * scales
    error = np.linalg.norm(plain - groups) / np.linalg.norm(groups)
    assert relative_error(values, quantised(values, "int4_g32_f16")) < 0.95 * error


def test_e2m1_rounds_to_nearest_even() -> None:
    table = e2m1_values()[:8].astype(np.float64)
    magnitudes = np.concatenate((np.linspace(0, 8, 4001), [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5]))
    codes = e2m1_codes(round_e2m1(magnitudes.astype(np.float32)), magnitudes < 0)
    for magnitude, code in zip(magnitudes, codes.tolist(), strict=True):
        off = np.abs(table - float(np.float32(magnitude)))
        nearest = np.flatnonzero(off == off.min())
        wanted = next((c for c in nearest if c % 2 == 0), nearest[0])
        assert code == wanted, magnitude


def test_e4m3_rounds_to_nearest_even() -> None:
    table = e4m3_values()[:127].astype(np.float64)
    middles = (table[1:] + table[:-1]) / 2
    magnitudes = np.concatenate((table, middles, np.geomspace(1e-4, 600, 2000), [448, 1e9]))
    magnitudes = magnitudes.astype(np.float32)
    for magnitude, code in zip(magnitudes.tolist(), e4m3_codes(magnitudes).tolist(), strict=True):
        off = np.abs(table - magnitude)
        nearest = np.flatnonzero(off == off.min())
        wanted = next((c for c in nearest if c % 2 == 0), nearest[0])
        assert code == wanted, magnitude


def test_widths_that_a_format_does_not_have_are_refused() -> None:
    with pytest.raises(ValueError, match="q4_K matrices are no 576 columns wide"):
        quantise(np.zeros((1, 576), np.float32), parse_format("q4_K"))
