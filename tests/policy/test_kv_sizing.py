"""KV sizing: floors, shares, explicit sizes, and the arithmetic of what cannot be met."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from freetokend.core.errors import ConfigError, Reason, ResourceError
from freetokend.policy.kv_sizing import AGENT_FLOOR_TOKENS, KvDemand, KvShape, size_kv

MIB = 1 << 20
SHAPE = KvShape(layers_count=30, kv_heads_count=3, head_size=64, element_bytes=2, page_tokens=16)


def demand(available_bytes: int, **changes: int | None) -> KvDemand:
    values: dict[str, int | None] = {"model_context_tokens": 131_072, "max_running_count": 64}
    return KvDemand(available_bytes=available_bytes, **{**values, **changes})  # type: ignore[arg-type]


def test_bytes_of_a_page_by_hand() -> None:
    assert SHAPE.bytes_per_token == 2 * 30 * 3 * 64 * 2
    assert SHAPE.page_bytes == 368_640


def test_auto_keeps_the_agent_floor_where_the_share_would_be_smaller() -> None:
    floor_bytes = AGENT_FLOOR_TOKENS * SHAPE.bytes_per_token
    plan = size_kv(SHAPE, demand(floor_bytes + MIB))
    assert plan.servable_context_tokens == AGENT_FLOOR_TOKENS
    assert plan.kv_bytes == floor_bytes
    assert "the KV pool" in plan.limited_by


def test_auto_takes_a_share_when_there_is_plenty() -> None:
    plan = size_kv(SHAPE, demand(16 << 30))
    assert 0.99 * (4 << 30) < plan.kv_bytes <= 4 << 30
    assert plan.pages_count * 16 > plan.servable_context_tokens == 131_072


def test_auto_never_exceeds_every_sequence_at_full_length() -> None:
    plan = size_kv(SHAPE, demand(1 << 40, model_context_tokens=2_048, max_running_count=4))
    assert plan.pages_count == 4 * 128
    assert plan.servable_context_tokens == 2_048
    assert plan.limited_by == "the model"


def test_auto_below_the_floor_takes_what_fits_and_says_so() -> None:
    plan = size_kv(SHAPE, demand(100 * SHAPE.page_bytes))
    assert plan.pages_count == 100
    assert plan.servable_context_tokens == 1_600
    assert "1600 for one" in plan.split


def test_a_context_limit_is_the_floor_itself_and_never_rises_above_the_model() -> None:
    asked = size_kv(SHAPE, demand(64 << 30, max_context_tokens=65_536, max_running_count=1))
    assert asked.servable_context_tokens == 65_536
    assert asked.limited_by == "engine.max_context_tokens"
    above = size_kv(SHAPE, demand(64 << 30, max_context_tokens=1 << 20, max_running_count=1))
    assert above.servable_context_tokens == 131_072


def test_an_explicit_size_is_met_or_refused_with_the_arithmetic() -> None:
    plan = size_kv(SHAPE, demand(1 << 30, kv_bytes=64 * MIB))
    assert 64 * MIB - SHAPE.page_bytes < plan.kv_bytes <= 64 * MIB
    with pytest.raises(ConfigError, match=r"less than one page of 16 tokens.*368640 bytes"):
        size_kv(SHAPE, demand(1 << 30, kv_bytes=1000))
    with pytest.raises(ResourceError, match=r"asks for 2\.00 GiB.*leave 1\.00 GiB") as caught:
        size_kv(SHAPE, demand(1 << 30, kv_bytes=2 << 30))
    assert caught.value.reason is Reason.HOST_MEMORY


def test_more_than_is_useful_is_cut_and_told() -> None:
    limits = {"model_context_tokens": 2_048, "max_running_count": 4}
    most_bytes = 4 * 2_048 * SHAPE.bytes_per_token
    cut = size_kv(SHAPE, demand(64 << 30, kv_bytes=1 << 40, **limits))
    assert cut.kv_bytes == most_bytes
    assert cut.note == (
        "engine.kv_bytes asks for 1 TiB of KV memory; 180 MiB is reserved, all that 4 running "
        "requests of 2048 tokens can use."
    )
    for kv_bytes in (most_bytes, most_bytes + SHAPE.page_bytes - 1, None):
        plan = size_kv(SHAPE, demand(64 << 30, kv_bytes=kv_bytes, **limits))
        assert (plan.kv_bytes, plan.note) == (most_bytes, "")


@pytest.mark.parametrize("available_bytes", [-5, 0, SHAPE.page_bytes - 1])
def test_no_memory_for_one_page_is_an_error_not_a_service_without_context(
    available_bytes: int,
) -> None:
    with pytest.raises(ResourceError, match="No memory is left"):
        size_kv(SHAPE, demand(available_bytes))


@given(
    available_bytes=st.integers(SHAPE.page_bytes, 1 << 42),
    model_context_tokens=st.integers(1, 1 << 20),
    max_running_count=st.integers(1, 256),
    max_context_tokens=st.one_of(st.none(), st.integers(1, 1 << 20)),
)
def test_what_is_promised_fits(
    available_bytes: int,
    model_context_tokens: int,
    max_running_count: int,
    max_context_tokens: int | None,
) -> None:
    plan = size_kv(
        SHAPE,
        KvDemand(
            model_context_tokens=model_context_tokens,
            max_running_count=max_running_count,
            available_bytes=available_bytes,
            max_context_tokens=max_context_tokens,
        ),
    )
    assert 1 <= plan.servable_context_tokens <= plan.pages_count * SHAPE.page_tokens
    assert plan.servable_context_tokens <= model_context_tokens
    assert plan.kv_bytes == plan.pages_count * SHAPE.page_bytes <= available_bytes
    if max_context_tokens is not None:
        assert plan.servable_context_tokens <= max_context_tokens
    # more memory is never worse
    more = size_kv(SHAPE, demand(2 * available_bytes, model_context_tokens=model_context_tokens))
    same = size_kv(SHAPE, demand(available_bytes, model_context_tokens=model_context_tokens))
    assert more.servable_context_tokens >= same.servable_context_tokens
