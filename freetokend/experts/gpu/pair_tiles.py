"""Routed pairs brought together by slot, on the device and without a word to the host."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch

_NO_SLOT: Final = (1 << 31) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PairTiles:
    """Runs of at most `tokens` pairs of one slot each.

    order: int32 [pairs + tokens], numbers of the pairs, those of a slot together, slots rising;
    pairs without a slot come last, then -1. start: int32 [tiles], where each run begins in `order`;
    -1 for the tiles that are not needed.
    """

    order: torch.Tensor
    start: torch.Tensor


def tiles_capacity(pairs_count: int, slots_count: int, tokens: int) -> int:
    """The most tiles that so many pairs of at most so many slots can need."""
    slots = min(pairs_count, slots_count)
    return slots + (pairs_count - slots) // tokens


def pair_tiles(physical: torch.Tensor, *, slots_count: int, tokens: int) -> PairTiles:
    """physical: int32, slot of each pair, below 0 for none; at most `slots_count` distinct slots.

    Shapes depend on the numbers of pairs and slots alone.
    """
    flat = physical.reshape(-1)
    pairs_count = flat.shape[0]
    key, order = torch.sort(torch.where(flat < 0, _NO_SLOT, flat), stable=True)
    present = key != _NO_SLOT
    place = torch.arange(pairs_count, device=flat.device)
    first = torch.ones_like(present)
    first[1:] = key[1:] != key[:-1]
    run_start = torch.where(first, place, 0).cummax(0).values
    begins = present & ((place - run_start) % tokens == 0)
    capacity = tiles_capacity(pairs_count, slots_count, tokens)
    number = torch.where(begins, begins.cumsum(0) - 1, capacity)
    start = torch.full((capacity + 1,), -1, dtype=torch.int32, device=flat.device)
    # What begins no tile goes behind the last one.
    start.scatter_(0, number.clamp(max=capacity), place.int())
    padded = torch.full((pairs_count + tokens,), -1, dtype=torch.int32, device=flat.device)
    padded[:pairs_count] = order.int()
    return PairTiles(order=padded, start=start[:capacity])
