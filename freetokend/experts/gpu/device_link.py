"""Fills of a GPU as a link that can be measured: a list from the host, a ticket to wait for."""

from __future__ import annotations

import torch

from freetokend.experts.gpu.dispatch import FillRecords
from freetokend.experts.gpu.transfers import Transfers


class DeviceLink:
    """`experts.host_rates.MeasuredLink` over the fills of a device; for slots that nobody uses."""

    def __init__(self, fill: FillRecords, transfers: Transfers, device: torch.device) -> None:
        self._fill = fill
        self._transfers = transfers
        self._device = device
        self._lists: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def submit(self, fills: torch.Tensor, fills_count: int) -> int:
        """Queue the first `fills_count` of int32 [F, 2] (expert_id, slot); returns a ticket."""
        there = fills.to(self._device)
        count = torch.full((1,), fills_count, dtype=torch.int32, device=self._device)
        ticket = self._transfers.begin(lambda: self._fill(there, count))
        self._lists[ticket] = (there, count)  # until they have been read
        return ticket

    def wait(self, ticket: int) -> None:
        """Return when this and all earlier submissions are in their slots."""
        self._transfers.finish(ticket)
        self._lists = {later: one for later, one in self._lists.items() if later > ticket}

    def is_done(self, ticket: int) -> bool:
        """Whether `wait` would return at once."""
        return self._transfers.is_done(ticket)
