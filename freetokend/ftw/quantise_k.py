"""Quantisation to q4_K and q6_K: groups within blocks of 256 columns, scales quantised too.

Values come as [256 columns, blocks]. Each group first gets the scale (and minimum) that suits it
best; these are then rounded in units of the block, and the codes are taken for what became of them.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from freetokend.ftw.matrix import half_values
from freetokend.ftw.quantise_integers import (
    halved,
    improves,
    inverse,
    least_squares,
    rounded_to,
    signed_extreme,
    squared_error,
)

F32 = NDArray[np.float32]
Arrays = dict[str, NDArray[Any]]

_Q4_GROUP: Final = 32
_Q6_GROUP: Final = 16
_SCALE_TOP: Final = 63  # of the 6-bit scales and minima of q4_K
# By what part of a group's range the 15 steps are narrowed before the fit.
_Q4_SPANS: Final = (1.0, 0.93, 0.86)
_FIT_ROUNDS: Final = 2
# Where a group's number of largest magnitude is put, in steps of -32..31.
_Q6_REACHES: Final = (-32.0, -31.0, 31.0)


def quantise_q4_k(values: F32) -> Arrays:
    """Codes u8 0..15 [256, n]; scales and mins u8 [8, n]; d and dmin u16 [1, n]."""
    blocks = values.shape[1]
    groups = _as_groups(values, _Q4_GROUP)
    scales, minima = _fit_groups(groups)
    scales, minima = (part.reshape(-1, blocks) for part in (scales, minima))
    d, sc = _six_bits(scales)
    dmin, mn = _six_bits(minima)
    step = (half_values(d, "f16") * sc).reshape(-1)
    offset = (half_values(dmin, "f16") * mn).reshape(-1)
    codes = rounded_to(groups + offset, step, 0, 15)
    return {
        "codes": _as_columns(codes, blocks),
        "scales": sc.astype(np.uint8),
        "mins": mn.astype(np.uint8),
        "d": d,
        "dmin": dmin,
    }


def quantise_q6_k(values: F32) -> Arrays:
    """Codes u8 0..63 [256, n]; scales u8 (bits of i8) [16, n]; d u16 [1, n]."""
    blocks = values.shape[1]
    groups = _as_groups(values, _Q6_GROUP)
    extreme = signed_extreme(groups)
    best = np.zeros(groups.shape[1], np.float32)
    best_error = np.full(groups.shape[1], np.nan, np.float32)
    for reach in _Q6_REACHES:
        scales = least_squares(groups, rounded_to(groups, extreme / np.float32(reach), -32, 31))
        error = squared_error(groups, rounded_to(groups, scales, -32, 31) * scales)
        better = improves(error, best_error)
        best_error[better] = error[better]
        best[better] = scales[better]
    scales = best.reshape(-1, blocks)
    # The largest scale becomes -128 units, whatever its sign: i8 reaches one further below zero.
    d = halved(signed_extreme(scales) / np.float32(-128.0), "f16")[None]
    sc = rounded_to(scales, half_values(d, "f16")[0], -128, 127)
    step = (half_values(d, "f16") * sc).reshape(-1)
    codes = rounded_to(groups, step, -32, 31) + 32
    return {
        "codes": _as_columns(codes, blocks),
        "scales": sc.astype(np.int8).view(np.uint8),
        "d": d,
    }


def _as_groups(values: F32, group: int) -> F32:
    """[256, blocks] -> [columns of a group, groups x blocks], groups outermost."""
    blocks = values.shape[1]
    cube = values.reshape(-1, group, blocks).transpose(1, 0, 2)
    return np.ascontiguousarray(cube).reshape(group, -1)


def _as_columns(codes: F32, blocks: int) -> NDArray[np.uint8]:
    """The inverse of `_as_groups`, as bytes."""
    cube = codes.astype(np.uint8).reshape(codes.shape[0], -1, blocks).transpose(1, 0, 2)
    return np.ascontiguousarray(cube).reshape(-1, blocks)


def _six_bits(numbers: F32) -> tuple[NDArray[np.uint16], F32]:
    """Non-negative numbers [groups, blocks] in units d of their block: bits of d, 0..63."""
    d = halved(numbers.max(axis=0, keepdims=True) / np.float32(_SCALE_TOP), "f16")
    return d, rounded_to(numbers, half_values(d, "f16")[0], 0, _SCALE_TOP)


def _fit_groups(groups: F32) -> tuple[F32, F32]:
    """Scale and minimum, both >= 0, with which scale * code - minimum fits each group best."""
    low, high = np.minimum(groups.min(axis=0), 0.0), groups.max(axis=0)
    best_scale = np.zeros(groups.shape[1], np.float32)
    best_minimum = np.zeros(groups.shape[1], np.float32)
    best_error = np.full(groups.shape[1], np.nan, np.float32)
    for span in _Q4_SPANS:
        minimum = -low * np.float32(span)
        scale = np.maximum(high * np.float32(span / 15), 0.0) + minimum / np.float32(15)
        for _ in range(_FIT_ROUNDS):
            codes = rounded_to(groups + minimum, scale, 0, 15)
            error = squared_error(groups, codes * scale - minimum)
            better = improves(error, best_error)
            best_error[better] = error[better]
            best_scale[better] = scale[better]
            best_minimum[better] = minimum[better]
            scale, minimum = _line_through(groups, codes)
    return best_scale, best_minimum


def _line_through(groups: F32, codes: F32) -> tuple[F32, F32]:
    """Least squares of groups = scale * codes - minimum, with a minimum that is not negative."""
    mean_code, mean_value = codes.mean(axis=0), groups.mean(axis=0)
    off_code = codes - mean_code
    spread = (off_code * off_code).sum(axis=0)
    scale = (off_code * (groups - mean_value)).sum(axis=0) * inverse(spread)
    minimum = scale * mean_code - mean_value
    through_zero = least_squares(groups, codes)
    alone = (minimum < 0.0) | (spread == 0.0)
    scale = np.where(alone, through_zero, scale)
    minimum = np.where(alone, np.float32(0.0), minimum)
    usable = np.isfinite(scale) & np.isfinite(minimum) & (scale > 0.0)
    return np.where(usable, scale, np.float32(0.0)), np.where(usable, minimum, np.float32(0.0))
