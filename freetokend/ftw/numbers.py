"""The small number formats that weights are made of, as tables of the values of all their codes."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]

E4M3_MAX: Final = 448.0
E2M1_MAX: Final = 6.0
_E2M1_MAGNITUDES: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def e2m1_values() -> F32:
    """fp32 [16]: sign, two bits of exponent, one of mantissa."""
    magnitudes = np.array(_E2M1_MAGNITUDES, np.float32)
    return np.concatenate((magnitudes, -magnitudes))


def e4m3_values() -> F32:
    """fp32 [256]: the "fn" variant without infinities; 0x7f and 0xff are NaN."""
    codes = np.arange(128)
    exponent, mantissa = codes >> 3, codes & 7
    normal = np.ldexp(1.0 + mantissa / 8.0, exponent - 7)
    magnitudes = np.where(exponent == 0, np.ldexp(mantissa / 8.0, -6), normal).astype(np.float32)
    magnitudes[127] = np.nan
    return np.concatenate((magnitudes, -magnitudes))


def e8m0_values() -> F32:
    """fp32 [256]: 2^(code - 127); 255 is NaN."""
    values = np.ldexp(1.0, np.arange(256) - 127)
    values[255] = np.nan
    return values.astype(np.float32)
