"""Token rates: exact on steady streams, falling in silence, never negative."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from freetokend.control.rates import WINDOW_S, RateWindow


def test_no_samples_no_rate() -> None:
    window = RateWindow()
    assert window.rates(5.0).decode_tokens_per_s == 0.0
    window.observe(5.0, prefill_tokens_count=9, decode_tokens_count=9)
    assert window.rates(5.0).decode_tokens_per_s == 0.0


def test_a_young_stream_is_measured_over_its_own_life() -> None:
    window = RateWindow()
    window.observe(0.0, prefill_tokens_count=0, decode_tokens_count=0)
    window.observe(1.0, prefill_tokens_count=100, decode_tokens_count=30)
    rates = window.rates(1.0)
    assert (rates.prefill_tokens_per_s, rates.decode_tokens_per_s) == (100.0, 30.0)


def test_a_new_engine_starts_its_counters_anew() -> None:
    window = RateWindow()
    window.observe(0.0, prefill_tokens_count=0, decode_tokens_count=1_000_000)
    window.observe(1.0, prefill_tokens_count=0, decode_tokens_count=10)
    window.observe(2.0, prefill_tokens_count=0, decode_tokens_count=20)
    assert window.rates(2.0).decode_tokens_per_s == pytest.approx(20.0)


@given(
    rate=st.integers(1, 1000),
    spacing_s=st.floats(0.001, 2.0),
    length_s=st.floats(WINDOW_S, 3 * WINDOW_S),
)
def test_a_steady_stream_has_its_rate(rate: int, spacing_s: float, length_s: float) -> None:
    window = RateWindow()
    steps = int(length_s / spacing_s) + 2
    for step in range(steps):
        window.observe(
            step * spacing_s,
            prefill_tokens_count=0,
            decode_tokens_count=round(rate * step * spacing_s),
        )
    seen = window.rates((steps - 1) * spacing_s).decode_tokens_per_s
    # Counters hold between samples: one spacing of tokens may fall on either side of the window.
    assert seen == pytest.approx(rate, abs=rate * (max(spacing_s, 0.05) / WINDOW_S) + 1)


@given(
    st.lists(st.tuples(st.floats(0, 10), st.integers(0, 10**6), st.integers(0, 10**6)), max_size=50)
)
def test_rates_are_never_negative_and_samples_are_bounded(
    samples: list[tuple[float, int, int]],
) -> None:
    window = RateWindow()
    now_s = 0.0
    for pause_s, prefill, decode in samples:
        now_s += pause_s
        window.observe(now_s, prefill_tokens_count=prefill, decode_tokens_count=decode)
        rates = window.rates(now_s)
        assert rates.prefill_tokens_per_s >= 0.0
        assert rates.decode_tokens_per_s >= 0.0
