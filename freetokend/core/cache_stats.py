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
class CallTimes:
    """One layer's call that had misses, in distinct experts.

    bucket: of its tokens per expert. cpu_count: experts that cpu_s was spent on, which are more
    than the misses where the CPU computes hits too. The branches begin together; layer_s is the end
    of both and what comes behind.
    """

    bucket: int
    misses_count: int
    fills_count: int
    cpu_count: int
    fill_s: float
    cpu_s: float
    layer_s: float

    @property
    def is_split(self) -> bool:
        return 0 < self.fills_count < self.misses_count


@dataclass(frozen=True, slots=True, kw_only=True)
class Bandwidth:
    """What one branch of a layer reaches now.

    link: "fill" or "cpu"; beside: while the other runs as well, or alone. source: "profile", what
    it began with, or "passive", learned from steps; age_s: since the last step that told it, of a
    profile since it was measured.
    """

    link: str
    beside: bool
    bytes_per_s: float
    source: str
    age_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitCounters:
    """How misses are split now, in layers where they are.

    branch: "split", or the way that all of them go as long as the split is not worth it, with the
    reason. regret_ratio: what steps lately took longer than with the table that followed from
    them, by the estimate. trials_count: calls that went another way to compare; fallbacks_count:
    how often the split was given up; tables_count: tables that followed.
    """

    branch: str
    reason: str = ""
    bandwidths: tuple[Bandwidth, ...] = ()
    fill_fixed_s: float = 0.0
    cpu_fixed_s: float = 0.0
    regret_ratio: float = 0.0
    trials_count: int = 0
    fallbacks_count: int = 0
    tables_count: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheCounters:
    """The state of the cache and what it did; one consistent look.

    slots_count: slots that exist; slots_capacity: the most there can be; resident_count: experts
    that have one. committed_bytes: memory of the slots. generation: goes up with every resize.
    layers: by MoE layer index. fill_counts[bucket][m]: how many of m misses are filled, bucket b
    for steps of up to 2^b tokens per expert (the last: and more).
    fills_count, fill_bytes, fill_busy_s: of the link, prefill included; streamed_count: experts
    that prefill streamed. split: None where no rates are followed.
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
    split: SplitCounters | None = None
