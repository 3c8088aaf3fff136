"""Fills on the host device: records copied from the pool into slots, in the background."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from freetokend.core.errors import InternalError
from freetokend.experts.bank import MappedBank
from freetokend.experts.slot_pool import SlotPool
from freetokend.native import _exec
from freetokend.tensor.memory import address_of


@dataclass(frozen=True, slots=True, kw_only=True)
class FillTotals:
    """What a link has carried since it was made; busy_s leaves out its rests."""

    fills_count: int
    bytes: int
    busy_s: float


class FillLink:
    """A thread that copies, one submission after the other, at a rate that stands for a link.

    Nothing may compute with a slot between the submission of its fill and `wait`; a resize comes
    after `drain`, and the end of the bank or the slots after `close`.
    """

    def __init__(
        self, mapped: MappedBank, pool: SlotPool, *, rate_bytes_per_s: float | None = None
    ) -> None:
        """rate_bytes_per_s: at least 1000, None for as fast as memory copies."""
        bank = mapped.bank
        if (bank.record_bytes, bank.experts_count) != (
            pool.record_bytes,
            pool.state.experts_count,
        ):
            raise InternalError("the slots are not made for the records of this bank")
        try:
            self._link = _exec.FillLink(
                bank=mapped.region_address + bank.offset_bytes,
                record_bytes=bank.record_bytes,
                experts_count=bank.experts_count,
                slots=pool.base_address,
                slots_capacity=pool.slots_capacity,
                rate_bytes_per_s=_native_rate(rate_bytes_per_s),
            )
        except ValueError as error:
            raise InternalError(str(error)) from error
        self._pool = pool

    @property
    def native(self) -> _exec.FillLink:
        """For native code that submits by itself."""
        return self._link

    def submit(self, fills: torch.Tensor, fills_count: int) -> int:
        """Queue the first `fills_count` of int32 [F, 2] (expert_id, slot); returns a ticket.

        The list is read before this returns. InternalError for experts and slots that do not
        exist; nothing is copied then.
        """
        if fills.dim() != 2 or fills.shape[1] != 2 or not 0 <= fills_count <= fills.shape[0]:
            raise InternalError(
                f"{fills_count} fills were announced in a list of shape {list(fills.shape)}"
            )
        try:
            return self._link.submit(
                address_of(fills, torch.int32), fills_count, self._pool.slots_count
            )
        except IndexError as error:
            raise InternalError(str(error)) from error

    def wait(self, ticket: int) -> None:
        """Return when this and all earlier submissions of its kind are in their slots.

        RuntimeError, here and in `drain`, when `close` came first.
        """
        self._link.wait(ticket)

    def is_done(self, ticket: int) -> bool:
        """Whether `wait` would return at once."""
        return self._link.is_done(ticket)

    def drain(self) -> None:
        """Return when everything that was submitted is in its slots."""
        self._link.drain()

    def close(self) -> None:
        """End the thread; what is queued is not copied. May be called twice."""
        self._link.stop()

    def totals(self) -> FillTotals:
        """Counters of finished submissions, consistent with each other."""
        now = self._link.totals()
        return FillTotals(fills_count=now.fills_count, bytes=now.bytes, busy_s=now.busy_s)

    @property
    def rate_bytes_per_s(self) -> float | None:
        """The rate it keeps to, None for as fast as memory copies."""
        return self._link.rate_bytes_per_s or None

    def set_rate_bytes_per_s(self, rate_bytes_per_s: float | None) -> None:
        """Change the rate, from the next record on."""
        try:
            self._link.set_rate_bytes_per_s(_native_rate(rate_bytes_per_s))
        except ValueError as error:
            raise InternalError(str(error)) from error


def _native_rate(rate_bytes_per_s: float | None) -> float:
    if rate_bytes_per_s is None:
        return 0.0
    if rate_bytes_per_s <= 0.0:
        raise InternalError(f"a link cannot carry {rate_bytes_per_s} bytes a second")
    return rate_bytes_per_s
