"""Drawn traces: what their parameters promise."""

from __future__ import annotations

import numpy as np
import pytest

from freetokend.traces.synthetic import Locality, Workload, synthetic_trace
from freetokend.traces.trace import Phase, RoutingTrace, TraceShape

SHAPE = TraceShape(layers_count=6, experts_per_layer=32, experts_per_token=4)
WORKLOAD = Workload(conversations_count=2, turns_count=2, prompt_tokens=40, decode_tokens=60)


def drawn(conversation: float = 0.1, drift: float = 0.5, memory: float = 16.0) -> RoutingTrace:
    locality = Locality(conversation_share=conversation, drift_share=drift, drift_tokens=memory)
    return synthetic_trace(SHAPE, locality, WORKLOAD, seed=5)


def decoded(trace: RoutingTrace) -> list[np.ndarray]:
    return [step.ids[:, 0] for step in trace.steps if step.phase is Phase.DECODE]


def overlap(trace: RoutingTrace, lag: int) -> float:
    """Share of a token's experts that the token `lag` steps later needs too, in the first turn."""
    steps = decoded(trace)[: WORKLOAD.decode_tokens]
    shares = [
        len(np.intersect1d(row, later)) / SHAPE.experts_per_token
        for step, other in zip(steps, steps[lag:], strict=False)
        for row, later in zip(step, other, strict=True)
    ]
    return float(np.mean(shares))


def test_turns_and_steps() -> None:
    trace = drawn()
    prompts = [step for step in trace.steps if step.phase is Phase.PREFILL]
    assert [step.tokens_count for step in prompts] == [40] * 4
    assert len(decoded(trace)) == 240
    for step in trace.steps:
        assert step.ids.shape == (6, step.tokens_count, 4)
        assert int(step.ids.max()) < 32
        ordered = np.sort(step.ids, axis=2)
        assert bool((ordered[:, :, 1:] != ordered[:, :, :-1]).all())


def test_the_same_seed_gives_the_same_trace() -> None:
    one, other = drawn(), drawn()
    assert all(np.array_equal(a.ids, b.ids) for a, b in zip(one.steps, other.steps, strict=True))


def test_without_shares_tokens_have_nothing_in_common() -> None:
    by_chance = SHAPE.experts_per_token / SHAPE.experts_per_layer
    assert overlap(drawn(conversation=0, drift=0), 1) == pytest.approx(by_chance, abs=0.02)


def test_drift_binds_neighbours_and_forgets() -> None:
    trace = drawn(conversation=0, drift=0.8, memory=8)
    assert overlap(trace, 1) > 0.4
    assert overlap(trace, 1) > overlap(trace, 8) + 0.1


def test_a_conversation_lasts() -> None:
    trace = drawn(conversation=0.6, drift=0, memory=8)
    assert overlap(trace, 50) > 0.35
    # Step 60 is the first of the other conversation, which is about something else.
    steps = decoded(trace)
    apart = [np.intersect1d(a, b) for a, b in zip(steps[0], steps[60], strict=True)]
    assert np.mean([len(one) for one in apart]) / 4 < 0.35


def test_every_expert_is_as_likely_over_conversations() -> None:
    many = Workload(conversations_count=60, turns_count=1, prompt_tokens=1, decode_tokens=20)
    locality = Locality(conversation_share=0.3, drift_share=0.3, drift_tokens=8)
    trace = synthetic_trace(SHAPE, locality, many, seed=1)
    counts = np.bincount(np.concatenate(decoded(trace)).ravel(), minlength=32)
    assert counts.max() < 1.5 * counts.mean()
    assert counts.min() > 0.5 * counts.mean()


@pytest.mark.parametrize(
    ("conversation", "drift", "memory"), [(-0.1, 0, 1), (0.6, 0.5, 1), (0, 0, 0)]
)
def test_localities_that_cannot_be(conversation: float, drift: float, memory: float) -> None:
    with pytest.raises(ValueError, match="shares"):
        Locality(conversation_share=conversation, drift_share=drift, drift_tokens=memory)
