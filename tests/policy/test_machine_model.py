"""The model of a machine: its terms one by one, and what must hold whatever the figures."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from freetokend.ftw.formats import parse_format, record_layout
from freetokend.policy.known_models import KNOWN_MODELS
from freetokend.policy.machine_model import (
    FITTED,
    DecodeEstimate,
    MachineParameters,
    MachineRates,
    MissTimes,
    Range,
    decode_estimate,
    exactly,
)

QWEN = KNOWN_MODELS["qwen3.6-35b-a3b"]
RATES = MachineRates(device=exactly(1e12), link=exactly(25e9), host=exactly(60e9))


def estimate(
    rates: MachineRates = RATES, *, slots: Range | None = None, context_tokens: int = 0
) -> DecodeEstimate:
    return decode_estimate(
        QWEN,
        rates,
        FITTED,
        slots_count=slots or exactly(2000),
        context_tokens=context_tokens,
    )


def misses(*, link: float = 10.0, host: float = 40.0, least: int = 1) -> MissTimes:
    return MissTimes(
        record_bytes=1,
        link_bytes_per_s=link,
        host_bytes_per_s=host / 2,
        paced_link_bytes_per_s=link / 2,
        least_fills_count=least,
    )


def test_a_token_with_every_expert_resident_is_its_reads_and_fixed_costs() -> None:
    parameters = MachineParameters(
        layer_s=1e-4, device_efficiency_ratio=0.5, host_efficiency_ratio=0.5
    )
    found = decode_estimate(
        QWEN, RATES, parameters, slots_count=exactly(QWEN.experts_count), context_tokens=1000
    )
    assert found.miss_ratio == 0
    assert found.times.misses_s == 0
    assert found.times.fixed_s == pytest.approx(40e-4)
    assert found.times.dense_s == pytest.approx((3.9e9 + 1000 * 20_480) / 0.5e12)
    assert found.times.slots_s == pytest.approx(40 * 8 * 6_291_456 / 0.5e12)
    assert found.middle_tokens_per_s == pytest.approx(1 / found.times.total_s)


@pytest.mark.parametrize(
    ("count", "least", "seconds", "fills"),
    [
        (0, 1, 0.0, 0),
        # One miss with a fill at least is a fill; without, the CPU's.
        (1, 1, 1 / 10, 1),
        (1, 0, 1 / 20, 0),
        # Four: one fill and three on the CPU, as 10:40 wants; both end together.
        (4, 1, 4 / 20, 1),
        (4, 0, 4 / 20, 1),
        (8, 1, 8 / 20, 2),
    ],
)
def test_the_misses_of_a_layer(count: int, least: int, seconds: float, fills: int) -> None:
    assert misses(least=least).best_s(count) == pytest.approx(seconds)
    assert misses(least=least).fills_count(count) == fills


def test_a_link_that_is_as_fast_as_the_memory_fills_everything() -> None:
    assert misses(link=40.0).best_s(5) == pytest.approx(5 / 40)
    assert misses(link=40.0).fills_count(5) == 5


def test_more_misses_never_take_less() -> None:
    for link, host in itertools.product((5.0, 10.0, 30.0, 60.0), repeat=2):
        for least in (0, 1):
            times = [misses(link=link, host=host, least=least).best_s(m) for m in range(17)]
            assert times == sorted(times)


def test_more_of_a_resource_is_never_slower() -> None:
    """Each resource on a fine grid, the others anywhere."""
    grid = [5e9 * 1.07**step for step in range(60)]
    for other in (8e9, 25e9, 70e9):
        for name in ("device", "link", "host"):
            base = MachineRates(device=exactly(other), link=exactly(other), host=exactly(other))
            speeds = [
                estimate(dataclasses.replace(base, **{name: exactly(rate)})).middle_tokens_per_s
                for rate in grid
            ]
            assert speeds == sorted(speeds), (name, other)
    speeds = [estimate(slots=exactly(n)).middle_tokens_per_s for n in range(0, 10240, 256)]
    assert speeds == sorted(speeds)


def test_more_context_is_slower() -> None:
    assert estimate(context_tokens=100_000).middle_tokens_per_s < estimate().middle_tokens_per_s


def test_the_range_has_its_ends_where_every_input_has() -> None:
    wide = MachineRates(
        device=Range(low=0.8e12, high=1.2e12),
        link=Range(low=20e9, high=30e9),
        host=Range(low=50e9, high=70e9),
    )
    found = estimate(wide, slots=Range(low=1500, high=2500))
    ends = [
        estimate(
            MachineRates(device=exactly(device), link=exactly(link), host=exactly(host)),
            slots=exactly(slots),
        ).middle_tokens_per_s
        for device, link, host, slots in (
            (0.8e12, 20e9, 50e9, 1500),
            (1.2e12, 30e9, 70e9, 2500),
        )
    ]
    assert [found.tokens_per_s.low, found.tokens_per_s.high] == pytest.approx(ends)
    assert ends[0] < found.middle_tokens_per_s < ends[1]


@pytest.mark.parametrize(
    ("name", "hidden_size", "expert_size", "pool_bytes"),
    [
        ("qwen3.6-35b-a3b", 2048, 512, 64.4e9),
        ("qwen3.6-35b-a3b-nvfp4", 2048, 512, 18.2e9),
        ("qwen3-30b-a3b", 2048, 768, 58.0e9),
        ("deepseek-v4-flash", 4096, 2048, 147e9),
        ("glm-5.2", 6144, 2048, 408e9),
    ],
)
def test_known_models_have_the_records_that_their_files_would(
    name: str, hidden_size: int, expert_size: int, pool_bytes: float
) -> None:
    model = KNOWN_MODELS[name]
    layout = record_layout(parse_format(model.weight_format), hidden_size, expert_size)
    assert model.record_bytes == layout.record_bytes
    assert model.pool_bytes == pytest.approx(pool_bytes, rel=0.01)
    assert 0 < model.dense_read_bytes.low <= model.dense_bytes.low
    assert model.dense_read_bytes.high <= model.dense_bytes.high
