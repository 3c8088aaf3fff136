"""Rates of a GPU's branches that are given instead of measured."""

from __future__ import annotations

import pytest

from freetokend.enginehost.cuda_profile import SlotProfile, SlotRates
from freetokend.ftw.reader import FtwDirectory
from freetokend.policy.fill_table import FillRates


def rated(
    monkeypatch: pytest.MonkeyPatch, deep: FtwDirectory, *, link: float, cpu: float, slot: float
) -> FillRates:
    """What the profile finds, in bytes per second."""
    record_bytes = deep.index.expert_bank.record_bytes
    rates = FillRates(
        record_bytes=record_bytes,
        fill_bytes_per_s=link,
        fill_alone_bytes_per_s=link,
        cpu_bytes_per_s=cpu,
        cpu_alone_bytes_per_s=cpu,
        cpu_slowdown_ratios=(1.0,) * 5,
    )

    def measured(profile: SlotProfile, *_: object) -> SlotRates | None:
        return SlotRates(rates=rates, source="given") if profile.layers_count else None

    monkeypatch.setattr(SlotProfile, "measured", measured)
    monkeypatch.setattr(SlotProfile, "token_s", lambda *_, top_k, **__: top_k * record_bytes / slot)
    return rates
