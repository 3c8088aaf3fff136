"""Finds the locality of the drawn traces, so that a plain LRU misses as often as published.

usage: python -m benchmarks.fit_locality

Bisects `drift_share` of each case of `benchmarks.routing_cases`: the greater it is, the more the
tokens of a text need the experts of the tokens before, and the less an LRU misses.
"""

from __future__ import annotations

from typing import Final

from benchmarks.routing_cases import CONVERSATION_SHARE, SYNTHETIC, SyntheticCase
from freetokend.policy.eviction import Lru
from freetokend.traces.compare import slots_at
from freetokend.traces.replay import layer_calls, replay_cache

_RESOLUTION: Final = 0.01


def lru_ratio(case: SyntheticCase, drift_share: float) -> float:
    """Misses of a plain LRU at the published size."""
    calls = layer_calls(case.trace(drift_share))
    slots_count = slots_at(case.shape, case.published.capacity_ratio)
    return replay_cache(case.shape, calls, Lru(), slots_count, keep_prompts=False).ratio


def fitted(case: SyntheticCase) -> float:
    """The drift_share at which the LRU meets the published figure."""
    low, high = 0.0, 1.0 - CONVERSATION_SHARE
    while high - low > _RESOLUTION:
        middle = (low + high) / 2
        found = lru_ratio(case, middle)
        print(f"  drift_share {middle:.3f}: LRU misses {100 * found:.1f} %", flush=True)
        low, high = (middle, high) if found > case.published.lru else (low, middle)
    return (low + high) / 2


def main() -> None:
    """Fit every case."""
    for case in SYNTHETIC:
        published = case.published
        print(
            f"{case.name}: LRU is to miss {100 * published.lru:.0f} % with "
            f"{100 * published.capacity_ratio:.0f} % of the experts"
        )
        print(f"  drift_share = {fitted(case):.2f}")


if __name__ == "__main__":
    main()
