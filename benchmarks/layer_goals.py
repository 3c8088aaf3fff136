"""What the layer benchmark is to reach, by format and batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from freetokend.ftw.formats import Kind
from freetokend.native.host import HUGE_PAGE_BYTES

FOUR_BIT: Final = frozenset({Kind.INT4, Kind.MXFP4, Kind.NVFP4, Kind.Q4_K})
# Shares of the read ceiling with one token.
_EXACT: Final = {
    Kind.BF16: 0.88,
    Kind.FP8_BLOCK: 0.78,
    Kind.MXFP4: 0.70,
    Kind.NVFP4: 0.68,
    Kind.INT8: 0.70,
    Kind.INT4: 0.65,
}
# The same with activations in int8.
_FAST: Final = {Kind.INT8: 0.78, Kind.INT4: 0.73, Kind.MXFP4: 0.73, Kind.NVFP4: 0.72}
# bf16 on pages of 4 KiB: the ceiling is read from huge ones.
_BF16_SMALL_PAGES: Final = 0.80
# Times the best rival, one token.
_RIVAL_ONE: Final = {
    Kind.BF16: 1.2,
    Kind.FP8_BLOCK: 1.8,
    Kind.INT8: 1.8,
    Kind.INT4: 1.6,
    Kind.MXFP4: 1.95,
    Kind.NVFP4: 4.0,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A case of the benchmark; its goals are ratios, 0 where nothing is asked.

    held_to_avx2: somebody asked for AVX2, so that the rivals have no better one either. A machine
    that has nothing else is no such case.
    """

    kind: Kind
    fast: bool
    held_to_avx2: bool
    tokens: int
    page_bytes: int

    def ceiling_goal(self) -> float:
        """Share of the read ceiling."""
        if self.tokens != 1:
            return 0.0
        if self.kind is Kind.BF16 and self.page_bytes < HUGE_PAGE_BYTES:
            return _BF16_SMALL_PAGES
        shares = {**_EXACT, **_FAST} if self.fast else _EXACT
        return shares.get(self.kind, 0.0)

    def rival_goal(self, program: str) -> float:
        """Times the speed of a rival ("ggml", "kt"); torch is only reported."""
        if program == "torch":
            return 0.0
        match self.tokens:
            case 1:
                return self._one_token()
            case 32:
                return {Kind.BF16: 2.0}.get(self.kind, 3.0 if self.kind in FOUR_BIT else 0.0)
            case 512:
                plain = {Kind.BF16: 1.6, Kind.FP8_BLOCK: 1.2}.get(self.kind, 0.0)
                return 3.0 if self.kind in FOUR_BIT and program == "ggml" else plain
            case _:
                return 0.0

    def _one_token(self) -> float:
        if self.held_to_avx2 and self.kind is Kind.BF16:
            return 1.35
        if self.held_to_avx2 and self.kind in FOUR_BIT:
            return 1.7
        return _RIVAL_ONE.get(self.kind, 0.0)
