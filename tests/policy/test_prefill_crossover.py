"""The crossover from the decode path to streaming: against every length, and its limits."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freetokend.core.errors import InternalError
from freetokend.policy.fill_table import FillRates, fill_table, ideal_rates, split_s
from freetokend.policy.prefill_crossover import (
    PrefillFacts,
    decode_path_s,
    expected_misses,
    prefill_crossover,
    streaming_s,
)
from freetokend.policy.step_cost import StepCosts

# 40 layers of 256 experts, top 8, a pool of 64.4 GB over a link of 52.7 GB/s, 37 % resident.
COSTS = StepCosts(
    moe_layers_count=40,
    experts_per_layer_count=256,
    top_k=8,
    rates=ideal_rates(6_289_062, link_bytes_per_s=52.7e9, host_bytes_per_s=53.8e9),
    slot_bytes_per_s=1e12,
    device_dense_s=3e-3,
    cpu_dense_s=5e-2,
)
FACTS = PrefillFacts(
    costs=COSTS,
    resident_ratio=0.37,
    miss_ratio=0.16,
    cpu_kernel=True,
    fillable_layers_count=40,
    stream_token_s=1e-4,
    decode_token_s=1e-4,
)


@st.composite
def any_facts(draw: st.DrawFn) -> PrefillFacts:
    experts = draw(st.integers(1, 24))
    rate = st.floats(1e8, 1e11)
    return PrefillFacts(
        costs=replace(
            COSTS,
            experts_per_layer_count=experts,
            top_k=draw(st.integers(1, experts)),
            rates=FillRates(
                record_bytes=1 << 20,
                fill_bytes_per_s=draw(rate),
                fill_alone_bytes_per_s=draw(rate),
                cpu_bytes_per_s=draw(rate),
                cpu_alone_bytes_per_s=draw(rate),
                fill_fixed_s=draw(st.floats(0, 1e-2)),
                cpu_fixed_s=draw(st.floats(0, 1e-2)),
                cpu_slowdown_ratios=tuple(
                    draw(st.lists(st.floats(0.5, 20), min_size=1, max_size=4))
                ),
            ),
        ),
        resident_ratio=draw(st.floats(0, 0.99)),
        miss_ratio=draw(st.floats(0.01, 1)),
        cpu_kernel=draw(st.booleans()),
        fillable_layers_count=draw(st.integers(1, 40)),
        stream_token_s=draw(st.floats(1e-5, 1e-1)),
        decode_token_s=draw(st.floats(1e-5, 1e-1)),
    )


@given(any_facts(), st.integers(1, 40))
@settings(deadline=None)
def test_below_it_the_decode_path_is_not_slower_and_from_it_on_it_is(
    facts: PrefillFacts, most: int
) -> None:
    crossover = prefill_crossover(facts, most_tokens=most)
    assert 1 <= crossover <= most + 1
    for tokens in range(1, most + 1):
        decode_path, streaming = decode_path_s(facts, tokens), streaming_s(facts, tokens)
        if math.isclose(decode_path, streaming, rel_tol=1e-9):
            continue
        assert (decode_path < streaming) == (tokens < crossover), tokens


@given(any_facts())
def test_one_token_misses_its_share_and_many_miss_all_that_is_absent(facts: PrefillFacts) -> None:
    absent = facts.costs.experts_per_layer_count * (1 - facts.resident_ratio)
    one = min(facts.costs.top_k * facts.miss_ratio, absent)
    assert expected_misses(facts, 1) == pytest.approx(one)
    assert expected_misses(facts, 0) == 0
    counts = [expected_misses(facts, tokens) for tokens in range(0, 2000, 100)]
    assert counts == sorted(counts)
    assert counts[-1] <= absent
    assert expected_misses(facts, 10**6) == pytest.approx(absent, rel=1e-3)


def test_a_chunk_costs_what_is_absent_over_the_link() -> None:
    cold = replace(FACTS, resident_ratio=0.0, miss_ratio=1.0)
    assert streaming_s(cold, 1) == streaming_s(cold, 8192) == pytest.approx(1.222, abs=0.001)
    assert streaming_s(FACTS, 8192) == pytest.approx(8192e-4)
    assert streaming_s(FACTS, 1) == pytest.approx(0.63 * 1.222, abs=0.001)


def test_the_decode_path_by_hand() -> None:
    """One token: 1.28 misses per layer, between the cost of one and of two."""
    (row,) = fill_table(COSTS.rates, 2)
    one, two = (split_s(COSTS.rates, bucket=0, misses_count=m, fills_count=row[m]) for m in (1, 2))
    expected = 40 * (one + 0.28 * (two - one)) + 1e-4
    assert decode_path_s(FACTS, 1) == pytest.approx(expected)


def test_a_crossover_of_hundreds_of_tokens_on_a_real_shape() -> None:
    """A suffix of some tokens is not worth 0.77 s of streaming."""
    crossover = prefill_crossover(FACTS, most_tokens=8192)
    assert 100 < crossover < 1000
    assert decode_path_s(FACTS, crossover // 4) < streaming_s(FACTS, crossover // 4) / 1.5
    ratios = (1.0, 1.0, 1.1, 1.3)
    slow_link = ideal_rates(6_289_062, link_bytes_per_s=11.8e9, host_bytes_per_s=47.5e9)
    fast, slow = (
        replace(FACTS, costs=replace(COSTS, rates=replace(rates, cpu_slowdown_ratios=ratios)))
        for rates in (COSTS.rates, slow_link)
    )
    assert crossover <= prefill_crossover(fast, most_tokens=8192)
    assert (
        prefill_crossover(fast, most_tokens=8192) < prefill_crossover(slow, most_tokens=8192) < 8192
    )


def test_a_step_that_computes_slowly_lowers_it() -> None:
    slow = replace(FACTS, decode_token_s=3e-3)
    assert prefill_crossover(slow, most_tokens=8192) < prefill_crossover(FACTS, most_tokens=8192)


def test_what_the_cpu_was_not_measured_for_is_taken_to_grow_with_the_tokens() -> None:
    """The link is slow and the CPU fast: for few tokens per expert the CPU takes most of it."""
    rates = ideal_rates(6_289_062, link_bytes_per_s=11.8e9, host_bytes_per_s=47.5e9)
    crossovers = [
        prefill_crossover(
            replace(FACTS, costs=replace(COSTS, rates=replace(rates, cpu_slowdown_ratios=ratios))),
            most_tokens=8192,
        )
        for ratios in ((1.0,), (1.0, 1.0), (1.0, 2.0, 4.0, 8.0), (1.0, 1.0, 1.1, 1.3))
    ]
    # The third differs from the first in that its table knows, and fills more.
    assert crossovers == sorted(set(crossovers))
    assert 100 < crossovers[0] < crossovers[-1] < 8192


def test_nothing_to_stream_or_no_way_to() -> None:
    for facts in (
        replace(FACTS, fillable_layers_count=0, decode_token_s=1.0),
        replace(FACTS, resident_ratio=1.0, miss_ratio=0.0, decode_token_s=1.0),
    ):
        assert prefill_crossover(facts, most_tokens=512) == 513
    assert expected_misses(replace(FACTS, resident_ratio=1.0), 100) == 0


def test_every_expert_asked_for_by_one_token() -> None:
    """k = E on a cold cache: one token moves the pool either way, and streaming hides the rest."""
    dense = replace(
        FACTS, costs=replace(COSTS, top_k=256), resident_ratio=0.0, miss_ratio=1.0, cpu_kernel=False
    )
    assert prefill_crossover(dense, most_tokens=64) == 1
    assert expected_misses(dense, 1) == 256


def test_no_tokens() -> None:
    with pytest.raises(InternalError):
        prefill_crossover(FACTS, most_tokens=0)
