"""Fills of the host device: the right records, in order, at the rate of the link."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch

from freetokend.core.errors import InternalError
from freetokend.device.copier import HostCopier
from freetokend.device.host_arena import HostArena
from freetokend.experts.fill import FillLink
from freetokend.experts.slot_pool import SlotPool
from tests.experts.slot_support import RandomBank, random_bank

RECORD_BYTES = 256 << 10
SLOTS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Cache:
    """Slots, and the bank that fills them."""

    pool: SlotPool
    bank: RandomBank

    def put(self, expert_id: int, slot: int) -> None:
        """What a plan writes for a fill."""
        self.pool.state.expert_of_slot[slot] = expert_id
        self.pool.state.slot_of_expert[expert_id] = slot

    def wrong_slots(self) -> list[int]:
        """Slots that do not hold their experts."""
        return [found.slot for found in self.pool.verify(self.bank.mapped).differences]


@pytest.fixture
def cache() -> Iterator[Cache]:
    bank = random_bank(layers_count=2, experts_count=8, record_bytes=RECORD_BYTES)
    arena = HostArena(SLOTS * RECORD_BYTES)
    pool = SlotPool(
        arena, HostCopier(), record_bytes=RECORD_BYTES, experts_count=16, slots_capacity=SLOTS
    )
    pool.resize(SLOTS - 1)
    yield Cache(pool=pool, bank=bank)
    arena.close()


def fills(*pairs: tuple[int, int]) -> torch.Tensor:
    """A fill list."""
    return torch.tensor(pairs, dtype=torch.int32).reshape(-1, 2)


def test_records_arrive_in_their_slots(cache: Cache) -> None:
    link = FillLink(cache.bank.mapped, cache.pool)
    for expert_id, slot in ((15, 0), (3, 6), (4, 2)):
        cache.put(expert_id, slot)
    assert cache.wrong_slots() == [0, 2, 6]
    link.submit(fills((15, 0), (3, 6)), 2)
    ticket = link.submit(fills((4, 2), (9, 5)), 1)  # one behind the count is none
    link.wait(ticket)
    assert cache.wrong_slots() == []
    totals = link.totals()
    assert (totals.fills_count, totals.bytes) == (3, 3 * RECORD_BYTES)
    assert totals.busy_s > 0
    link.close()


def test_a_rate_stands_for_a_link(cache: Cache) -> None:
    rate_bytes_per_s = 64e6  # 4.1 ms for a record
    link = FillLink(cache.bank.mapped, cache.pool, rate_bytes_per_s=rate_bytes_per_s)
    assert link.rate_bytes_per_s == rate_bytes_per_s
    started_s = time.monotonic()
    for _ in range(5):
        link.submit(fills(*((slot, slot) for slot in range(4))), 4)
    submitted_s = time.monotonic() - started_s
    link.drain()
    elapsed_s = time.monotonic() - started_s
    expected_s = 20 * RECORD_BYTES / rate_bytes_per_s
    assert submitted_s < expected_s / 2
    assert expected_s <= elapsed_s < 1.5 * expected_s + 0.05
    assert link.totals().busy_s == pytest.approx(elapsed_s, abs=0.02)
    link.set_rate_bytes_per_s(None)
    assert link.rate_bytes_per_s is None
    link.close()


def test_what_does_not_exist_is_refused_whole(cache: Cache) -> None:
    link = FillLink(cache.bank.mapped, cache.pool)
    for wrong in ((16, 0), (-1, 0), (0, -1), (0, SLOTS - 1), (0, SLOTS)):
        with pytest.raises(InternalError, match="slot"):
            link.submit(fills((1, 1), wrong), 2)
    for announced in (-1, 2):
        with pytest.raises(InternalError, match="announced"):
            link.submit(fills((1, 1)), announced)
    link.wait(link.submit(fills(), 0))
    assert link.totals().fills_count == 0
    for rate_bytes_per_s in (0.0, -5.0, 10.0, float("nan")):
        with pytest.raises(InternalError):
            link.set_rate_bytes_per_s(rate_bytes_per_s)
        with pytest.raises(InternalError):
            FillLink(cache.bank.mapped, cache.pool, rate_bytes_per_s=rate_bytes_per_s)
    link.close()


def test_a_link_of_another_bank_is_refused(cache: Cache) -> None:
    other = random_bank(layers_count=1, experts_count=8, record_bytes=RECORD_BYTES)
    with pytest.raises(InternalError, match="records of this bank"):
        FillLink(other.mapped, cache.pool)
    with pytest.raises(InternalError, match="made for"):
        cache.pool.verify(other.mapped)


def test_closing_ends_a_slow_link(cache: Cache) -> None:
    link = FillLink(cache.bank.mapped, cache.pool, rate_bytes_per_s=1000.0)
    ticket = link.submit(fills((1, 1), (2, 2)), 2)
    started_s = time.monotonic()
    link.close()
    link.close()
    assert time.monotonic() - started_s < 5
    with pytest.raises(RuntimeError, match="stopped"):
        link.wait(ticket)
