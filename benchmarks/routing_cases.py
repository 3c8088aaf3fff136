"""The traces of `benchmarks.miss_rate`: one recorded, two drawn with stated locality.

The drawn ones have the sizes of Qwen3.6-35B-A3B and of DeepSeek-V4-Flash. Of a published system it
is known how often a plain LRU missed there: 16 % with room for 37 % of the experts, 39 % with room
for 11 %. `benchmarks.fit_locality` moves one parameter of each trace, the share of what is being
said just now (`drift_share`), until our plain LRU misses as often. Everything else is the same for
both and was chosen beforehand: a tenth of a logit's variance belongs to the conversation, what is
being said is forgotten with 32 tokens, three conversations take two turns of 256 tokens read and
128 written. What placements miss on these traces is not fitted: it is a prediction.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from freetokend.traces.synthetic import Locality, Workload, synthetic_trace
from freetokend.traces.trace import RoutingTrace, TraceShape
from freetokend.traces.trace_file import read_trace

RECORDED: Final = Path(__file__).parent / "traces" / "demo.trace"
WORKLOAD: Final = Workload(
    conversations_count=3, turns_count=2, prompt_tokens=256, decode_tokens=128
)
SEED: Final = 1
CONVERSATION_SHARE: Final = 0.1
DRIFT_TOKENS: Final = 32.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """Misses, as a ratio, at one size; `lru_tolerance` is how near ours must be."""

    capacity_ratio: float
    lru: float
    lru_tolerance: float
    placement: float
    static: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SyntheticCase:
    """A drawn trace. drift_share: as found by `benchmarks.fit_locality`, two digits."""

    name: str
    shape: TraceShape
    drift_share: float
    published: Published

    def trace(self, drift_share: float | None = None) -> RoutingTrace:
        """Draw it, perhaps with another locality."""
        locality = Locality(
            conversation_share=CONVERSATION_SHARE,
            drift_share=self.drift_share if drift_share is None else drift_share,
            drift_tokens=DRIFT_TOKENS,
        )
        return synthetic_trace(self.shape, locality, WORKLOAD, seed=SEED)


SYNTHETIC: Final = (
    SyntheticCase(
        name="40 x 256 top-8",
        shape=TraceShape(layers_count=40, experts_per_layer=256, experts_per_token=8),
        drift_share=0.55,
        published=Published(
            capacity_ratio=0.37, lru=0.16, lru_tolerance=0.02, placement=0.41, static=0.62
        ),
    ),
    SyntheticCase(
        name="43 x 256 top-6",
        shape=TraceShape(layers_count=43, experts_per_layer=256, experts_per_token=6),
        drift_share=0.52,
        published=Published(
            capacity_ratio=0.11, lru=0.39, lru_tolerance=0.03, placement=0.59, static=0.89
        ),
    ),
)


def recorded_trace() -> RoutingTrace:
    """What `benchmarks.record_trace` wrote for the demo model."""
    return read_trace(RECORDED)
