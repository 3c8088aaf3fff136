"""Rotary position embedding: frequencies of each kind, and a table of rotations by position.

Frequencies and angles are computed in fp32, as in the programs the checkpoints were trained with:
at position 100,000 an exact angle differs from the trained one by hundredths of a radian. The
cosine and sine of that fp32 angle are then taken in fp64 and rounded once.
"""

from __future__ import annotations

import math
from typing import Final, Protocol

import torch

from freetokend.core.errors import InternalError
from freetokend.core.rope_config import RopeConfig, RopeKind

# Rows are always computed in blocks of this many positions, so that a position's rotation is the
# same number whenever and for whatever context its row is made.
_BLOCK_TOKENS: Final = 1024


def inverse_frequencies(rope: RopeConfig, head_size: int) -> torch.Tensor:
    """Radians per position of each rotated pair: fp32 [head_size / 2].

    `dynamic` stretches only contexts beyond the trained one, which are not served, so it is the
    plain table here.
    """
    exponents = torch.arange(0, head_size, 2, dtype=torch.int64).to(torch.float32) / head_size
    periods = rope.theta**exponents
    match rope.kind:
        case RopeKind.DEFAULT | RopeKind.DYNAMIC:
            return 1.0 / periods
        case RopeKind.LINEAR:
            return 1.0 / periods / rope.factor
        case RopeKind.YARN:
            return _yarn(rope, periods, head_size)
        case RopeKind.LLAMA3:
            return _llama3(rope, 1.0 / periods)


def _yarn(rope: RopeConfig, periods: torch.Tensor, head_size: int) -> torch.Tensor:
    """Fast pairs keep their frequency, slow ones are divided by the factor, a ramp in between."""

    def pair_turning(turns: float) -> float:
        """The pair (a real number) that makes so many turns over the trained context."""
        per_turn = rope.original_context_tokens / (turns * 2 * math.pi)
        return head_size * math.log(per_turn) / (2 * math.log(rope.theta))

    first, last = pair_turning(rope.beta_fast), pair_turning(rope.beta_slow)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_size - 1)
    if first == last:
        last += 0.001
    pairs = torch.arange(head_size // 2, dtype=torch.float32)
    kept = 1 - ((pairs - first) / (last - first)).clamp(0, 1)
    return 1.0 / (rope.factor * periods) * (1 - kept) + 1.0 / periods * kept


def _llama3(rope: RopeConfig, frequencies: torch.Tensor) -> torch.Tensor:
    """Long wavelengths are divided by the factor, short ones kept, those between interpolated."""
    low, high = rope.low_frequency_factor, rope.high_frequency_factor
    context = rope.original_context_tokens
    wavelengths = 2 * math.pi / frequencies
    weight = (context / wavelengths - low) / (high - low)
    between = (1 - weight) * frequencies / rope.factor + weight * frequencies
    scaled = torch.where(wavelengths > context / low, frequencies / rope.factor, between)
    return torch.where(wavelengths < context / high, frequencies, scaled)


class Rotations(Protocol):
    """Where an op finds the rotations of its tokens."""

    def rotations(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """positions: int64 [T], T > 0 -> cosines [T, 1, 1, D/2], signed sines [T, 1, 2, D/2].

        The first half of the signed sines is negated: see `rotate`.
        """
        ...


class RopeTable:
    """Cosines and sines by position, grown as positions come into use.

    One owner: a runner's step, which is called from one thread at a time.
    """

    def __init__(self, rope: RopeConfig, head_size: int, dtype: torch.dtype) -> None:
        self._frequencies = inverse_frequencies(rope, head_size)
        self._scale = rope.attention_factor
        self._dtype = dtype
        self._table = torch.empty(0, 2, head_size // 2, dtype=dtype)

    def rotations(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """As of `Rotations`."""
        self._cover(int(positions.max()) + 1)
        return _gather(self._table, positions)

    def rows(self, end: int) -> tuple[int, int]:
        """Address of [positions, 2, D/2] cosines and sines of at least the positions [0, end), and
        how many positions it has. The address is valid until a longer table is asked for."""
        self._cover(end)
        return self._table.data_ptr(), self._table.shape[0]

    def table(self, end: int) -> torch.Tensor:
        """[end, 2, D/2]: cosines and sines of the positions [0, end)."""
        self._cover(end)
        return self._table[:end]

    def _cover(self, end: int) -> None:
        if end > self._table.shape[0]:
            self._grow(end)

    def _grow(self, end: int) -> None:
        # Doubling keeps the copying linear in the context.
        have = self._table.shape[0] // _BLOCK_TOKENS
        want = max(-(-end // _BLOCK_TOKENS), 2 * have)
        blocks = [self._block(index) for index in range(have, want)]
        self._table = torch.cat((self._table, *blocks))

    def _block(self, index: int) -> torch.Tensor:
        start = index * _BLOCK_TOKENS
        positions = torch.arange(start, start + _BLOCK_TOKENS).to(torch.float32)
        angles = (positions[:, None] * self._frequencies).to(torch.float64)
        return (torch.stack((angles.cos(), angles.sin()), dim=1) * self._scale).to(self._dtype)


class FixedRopeTable:
    """`Rotations` on a device, of the positions [0, positions_count).

    Nothing is computed or allocated later, so that a captured graph may read it. A position
    behind the end is the caller's fault: an error where torch can see it, on a GPU a fault of the
    device.
    """

    def __init__(
        self, rope: RopeConfig, head_size: int, *, positions_count: int, device: torch.device
    ) -> None:
        """fp32. InternalError without a position."""
        if positions_count < 1:
            raise InternalError(f"a table of rotations for {positions_count} positions")
        growing = RopeTable(rope, head_size, torch.float32)
        self._table = growing.table(positions_count).to(device)

    def rotations(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """As of `Rotations`."""
        return _gather(self._table, positions)


def _gather(table: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    cosines, sines = table.index_select(0, positions).unbind(1)
    signed_sines = torch.stack((-sines, sines), dim=1)
    return cosines.unsqueeze(1).unsqueeze(1), signed_sines.unsqueeze(1)


def rotate(x: torch.Tensor, cosines: torch.Tensor, signed_sines: torch.Tensor) -> torch.Tensor:
    """x: [T, N, D] -> the same, pair (i, i + D/2) of each head turned by its token's angle.

    Separate products and one sum: exact IEEE operations, so rows do not depend on the batch.
    """
    halves = x.view(x.shape[0], x.shape[1], 2, x.shape[2] // 2)
    return (halves * cosines + halves.flip(2) * signed_sines).view(x.shape)
