"""Quantisation to int4 and int8 groups, with and without zero points.

Values come as [columns of a group, groups], so that a reduction over a group runs over whole lines
of memory.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from freetokend.ftw.matrix import half_values
from freetokend.ftw.packing import f32_to_bf16

U8 = NDArray[np.uint8]
U16 = NDArray[np.uint16]
F32 = NDArray[np.float32]

# Where the number of largest magnitude is put, in steps. The range of 4 bits is -8..7, and a group
# whose ends reach a little beyond it often has the smaller squared error.
_INT4_REACHES: Final = (-8.6, -8.0, -7.5, -7.0, 7.0, 7.5)
# By what part of the whole range the steps are narrowed.
_INT4_SPANS: Final = (1.0, 0.94, 0.88)


def halved(values: F32, scale_dtype: str) -> U16:
    """The bits of the nearest "f16" or "bf16" numbers."""
    if scale_dtype == "bf16":
        return f32_to_bf16(values)
    return values.astype(np.float16).view(np.uint16)


def inverse(scales: F32) -> F32:
    """1 / scale; 0 where the scale is 0 or too small for that."""
    found = np.float32(1.0) / scales
    found[~np.isfinite(found)] = 0.0
    return found


def least_squares(values: F32, codes: F32) -> F32:
    """The scale of each group that fits `codes` to `values` best; 0 where all codes are 0."""
    found: F32 = (values * codes).sum(axis=0) / np.maximum((codes * codes).sum(axis=0), 1.0)
    return found


def signed_extreme(values: F32) -> F32:
    """Of each group the number of largest magnitude, with its sign."""
    high, low = values.max(axis=0), values.min(axis=0)
    found: F32 = np.where(high >= -low, high, low)
    return found


def rounded_to(values: F32, scales: F32, low: int, high: int) -> F32:
    """values / scale, rounded and kept within low..high."""
    codes = values * inverse(scales)
    np.rint(codes, out=codes)
    np.clip(codes, low, high, out=codes)
    codes[np.isnan(codes)] = 0.0
    return codes


def squared_error(values: F32, approximation: F32) -> F32:
    """Sum of squared differences of each group; infinite where it overflows."""
    off = values - approximation
    off *= off
    error: F32 = off.sum(axis=0)
    return np.nan_to_num(error, copy=False, nan=np.inf, posinf=np.inf)


def improves(error: F32, best_error: F32) -> NDArray[np.bool_]:
    """Which groups to take the candidate for.

    best_error is NaN before the first candidate, which is taken whatever its error: that of numbers
    beyond 1e19 is infinite.
    """
    return (error < best_error) | np.isnan(best_error)


def quantise_int4(values: F32, scale_dtype: str, *, zero_points: bool) -> dict[str, NDArray[Any]]:
    """Codes u8 0..15 [columns, groups], scales u16 [1, groups], with zero points u8 [1, groups]."""
    if zero_points:
        return _with_zero_points(values, scale_dtype, bits=4)
    extreme = signed_extreme(values)
    best_error = np.full(values.shape[1], np.nan, np.float32)
    best_codes = np.zeros_like(values)
    best_scales = np.zeros(values.shape[1], np.uint16)
    for reach in _INT4_REACHES:
        first = rounded_to(values, extreme / np.float32(reach), -8, 7)
        bits = halved(least_squares(values, first), scale_dtype)
        scales = half_values(bits, scale_dtype)
        codes = rounded_to(values, scales, -8, 7)
        error = squared_error(values, codes * scales)
        better = improves(error, best_error)
        best_error[better] = error[better]
        best_scales[better] = bits[better]
        np.copyto(best_codes, codes, where=better)
    return {"codes": (best_codes + 8).astype(np.uint8), "scales": best_scales[None]}


def quantise_int8(values: F32, scale_dtype: str, *, zero_points: bool) -> dict[str, NDArray[Any]]:
    """As `quantise_int4`; codes are the bits of signed values, scale amax / 127."""
    if zero_points:
        return _with_zero_points(values, scale_dtype, bits=8)
    bits = halved(np.abs(values).max(axis=0) / np.float32(127.0), scale_dtype)
    codes = rounded_to(values, half_values(bits, scale_dtype), -127, 127)
    return {"codes": codes.astype(np.int8).view(np.uint8), "scales": bits[None]}


def _with_zero_points(values: F32, scale_dtype: str, *, bits: int) -> dict[str, NDArray[Any]]:
    """Codes over the range of each group, which is made to include 0 so that 0 stays exact."""
    top = (1 << bits) - 1
    low, high = np.minimum(values.min(axis=0), 0.0), np.maximum(values.max(axis=0), 0.0)
    best_error = np.full(values.shape[1], np.nan, np.float32)
    best: dict[str, NDArray[Any]] = {
        "codes": np.zeros(values.shape, np.uint8),
        "scales": np.zeros((1, values.shape[1]), np.uint16),
        "zeros": np.zeros((1, values.shape[1]), np.uint8),
    }
    for span in _INT4_SPANS if bits == 4 else (1.0,):
        # Divided first: the difference of two large numbers may be infinite.
        step = (high * np.float32(span / top)) - (low * np.float32(span / top))
        scale_bits = halved(step, scale_dtype)
        scales = half_values(scale_bits, scale_dtype)
        zeros = np.clip(np.rint(-low * np.float32(span) * inverse(scales)), 0, top)
        codes = np.rint(values * inverse(scales)) + zeros
        codes = np.nan_to_num(np.clip(codes, 0, top), copy=False)
        error = squared_error(values, (codes - zeros) * scales)
        better = improves(error, best_error)
        best_error[better] = error[better]
        found = {"codes": codes, "scales": scale_bits[None], "zeros": zeros[None]}
        for name, part in found.items():
            np.copyto(best[name], part, where=better, casting="unsafe")
    if bits == 8:
        best["codes"] ^= 128  # stored as signed, as are the zero points' meanings
    return best
