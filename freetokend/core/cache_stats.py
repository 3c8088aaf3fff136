"""What the expert cache counts, as values that cross every border of the engine."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCounters:
    """One MoE layer since the engine started. All count distinct experts of a decode step.

    misses_count = fills_count + cpu_count once a step is through, also where it took rounds.
    evictions_count: experts of any layer that lost their slot to one of this layer.
    """

    hits_count: int = 0
    misses_count: int = 0
    fills_count: int = 0
    cpu_count: int = 0
    evictions_count: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheCounters:
    """The state of the cache and what it did; one consistent look.

    slots_count: slots that exist; slots_capacity: the most there can be; resident_count: experts
    that have one. committed_bytes: memory of the slots. generation: goes up with every resize.
    layers: by MoE layer index. fill_counts[bucket][m]: how many of m misses are filled, bucket b
    for steps of up to 2^b tokens per expert (the last: and more).
    fills_count, fill_bytes, fill_busy_s: of the link, prefill included; streamed_count: experts
    that prefill streamed.
    """

    slots_count: int
    slots_capacity: int
    resident_count: int
    slot_bytes: int
    committed_bytes: int
    generation: int
    layers: tuple[LayerCounters, ...] = ()
    fill_counts: tuple[tuple[int, ...], ...] = ()
    fills_count: int = 0
    fill_bytes: int = 0
    fill_busy_s: float = 0.0
    streamed_count: int = 0
