"""The division of VRAM: never over budget, more memory never gives less, what is asked is met."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freetokend.core.errors import ConfigError, FreetokenError, InternalError, Reason, ResourceError
from freetokend.policy.kv_sizing import AGENT_FLOOR_TOKENS
from freetokend.policy.vram_budget import (
    KV_SHARE_PERCENT,
    LEAST_CONTEXT_TOKENS,
    Preset,
    VramFacts,
    VramPlan,
    VramWishes,
    plan_vram,
)

MIB = 1 << 20
GIB = 1 << 30
AUTO = VramWishes()

# 40 layers of 256 experts, 6 MiB each: a pool of 60 GiB. 20 KiB of KV per token.
FACTS = VramFacts(
    free_bytes=30 * GIB,
    own_bytes=0,
    dense_bytes=4 * GIB,
    workspace_bytes=GIB,
    state_bytes=256 * MIB,
    graph_bytes=256 * MIB,
    record_bytes=6 * MIB,
    experts_count=40 * 256,
    experts_per_layer_count=256,
    top_k=8,
    kv_page_bytes=16 * 20 * 1024,
    kv_page_tokens=16,
    model_context_tokens=262_144,
    max_running_count=8,
)
FIXED_BYTES = 4 * GIB + GIB + 512 * MIB + 3 * GIB // 2


def with_room(room_bytes: int, **changes: int) -> VramFacts:
    """So many bytes for slots and KV together."""
    return replace(FACTS, free_bytes=FIXED_BYTES + room_bytes, **changes)


@st.composite
def any_facts(draw: st.DrawFn) -> VramFacts:
    per_layer = draw(st.integers(1, 16))
    size = st.integers(0, 3000)
    return VramFacts(
        free_bytes=draw(st.integers(0, 40_000)),
        own_bytes=draw(size),
        dense_bytes=draw(size),
        workspace_bytes=draw(size),
        state_bytes=draw(size),
        graph_bytes=draw(size),
        cushion_bytes=draw(size),
        granularity_bytes=draw(st.sampled_from((1, 64, 1000))),
        record_bytes=draw(st.integers(1, 700)),
        experts_count=per_layer * draw(st.integers(0, 6)),
        experts_per_layer_count=per_layer,
        top_k=draw(st.integers(1, per_layer)),
        kv_page_bytes=draw(st.integers(1, 900)),
        kv_page_tokens=draw(st.sampled_from((1, 16, 4096))),
        model_context_tokens=draw(st.integers(1, 80_000)),
        max_running_count=draw(st.integers(1, 5)),
    )


@st.composite
def any_wishes(draw: st.DrawFn) -> VramWishes:
    def maybe(low: int, high: int) -> int | None:
        return draw(st.one_of(st.none(), st.integers(low, high)))

    return VramWishes(
        preset=draw(st.sampled_from(Preset)),
        slots_count=maybe(-1, 100),
        kv_bytes=maybe(-1, 20_000),
        max_context_tokens=maybe(0, 90_000),
    )


def plan_or_error(facts: VramFacts, wishes: VramWishes) -> VramPlan | FreetokenError:
    try:
        return plan_vram(facts, wishes)
    except (ConfigError, ResourceError) as error:
        return error


@given(any_facts(), any_wishes())
@settings(max_examples=300, deadline=None)
def test_never_over_budget_and_the_rows_are_the_whole(facts: VramFacts, wishes: VramWishes) -> None:
    plan = plan_or_error(facts, wishes)
    if isinstance(plan, FreetokenError):
        return
    assert facts.free_bytes is not None
    assert plan.left_bytes >= 0
    assert sum(row.size_bytes for row in plan.rows) == facts.free_bytes + facts.own_bytes
    assert plan.slots_bytes >= plan.slots_count * facts.record_bytes
    assert plan.kv_bytes >= plan.kv_pages_count * facts.kv_page_bytes
    assert plan.slots_bytes % facts.granularity_bytes == 0
    assert plan.kv_bytes % facts.granularity_bytes == 0
    assert 0 <= plan.slots_count <= facts.experts_count
    assert 1 <= plan.servable_context_tokens <= facts.model_context_tokens
    assert plan.servable_context_tokens <= plan.kv_pages_count * facts.kv_page_tokens


@given(any_facts(), any_wishes())
@settings(max_examples=300, deadline=None)
def test_numbers_are_met_exactly_or_refused_by_name(facts: VramFacts, wishes: VramWishes) -> None:
    plan = plan_or_error(facts, wishes)
    if isinstance(plan, FreetokenError):
        if isinstance(plan, ConfigError):
            assert plan.param is not None
            assert plan.param in plan.message
        else:
            assert plan.reason is Reason.DEVICE_MEMORY
            for name, value in (
                ("slots_count", wishes.slots_count),
                ("kv_bytes", wishes.kv_bytes),
                ("max_context_tokens", wishes.max_context_tokens),
            ):
                assert (f"engine.{name} = {value}" in plan.message) == (value is not None)
        return
    if wishes.slots_count is not None:
        assert plan.slots_count == wishes.slots_count
    if wishes.kv_bytes is not None:
        assert plan.kv_pages_count == wishes.kv_bytes // facts.kv_page_bytes
    if wishes.max_context_tokens is not None:
        asked = min(wishes.max_context_tokens, facts.model_context_tokens)
        assert plan.servable_context_tokens <= asked
        if wishes.kv_bytes is None:
            assert plan.servable_context_tokens == asked


@given(any_facts(), any_wishes(), st.integers(1, 5000))
@settings(max_examples=500, deadline=None)
def test_more_memory_never_gives_less(
    facts: VramFacts, wishes: VramWishes, more_bytes: int
) -> None:
    assert facts.free_bytes is not None
    before = plan_or_error(facts, wishes)
    after = plan_or_error(replace(facts, free_bytes=facts.free_bytes + more_bytes), wishes)
    if isinstance(before, ConfigError):
        assert isinstance(after, ConfigError)
    elif isinstance(before, VramPlan):
        assert isinstance(after, VramPlan)
        assert after.slots_count >= before.slots_count
        assert after.kv_pages_count >= before.kv_pages_count


@given(any_facts(), any_wishes(), st.integers(0, 3000))
@settings(max_examples=100, deadline=None)
def test_own_memory_counts_like_free_memory(
    facts: VramFacts, wishes: VramWishes, moved_bytes: int
) -> None:
    assert facts.free_bytes is not None
    moved = min(moved_bytes, facts.free_bytes)
    other = replace(facts, free_bytes=facts.free_bytes - moved, own_bytes=facts.own_bytes + moved)
    before, after = plan_or_error(facts, wishes), plan_or_error(other, wishes)
    if isinstance(before, VramPlan):
        assert isinstance(after, VramPlan)
        assert before.rows == after.rows
    else:
        assert type(before) is type(after)


@given(any_facts())
@settings(max_examples=200, deadline=None)
def test_auto_wastes_less_than_one_step_of_its_path(facts: VramFacts) -> None:
    """Less is left than one slot and one page, each with what the other takes beside it."""
    plan = plan_or_error(facts, AUTO)
    if isinstance(plan, FreetokenError) or plan.all_resident:
        return
    slot_bytes = facts.record_bytes * (1 + KV_SHARE_PERCENT / (100 - KV_SHARE_PERCENT))
    page_bytes = facts.kv_page_bytes * (1 + (100 - KV_SHARE_PERCENT) / KV_SHARE_PERCENT)
    assert plan.left_bytes < slot_bytes + page_bytes + 2 * facts.granularity_bytes


def test_auto_keeps_the_agents_context_and_two_layers_then_divides() -> None:
    plan = plan_vram(FACTS, AUTO)
    assert plan.two_layers
    assert not plan.all_resident
    assert plan.servable_context_tokens >= AGENT_FLOOR_TOKENS
    floors_bytes = 512 * 6 * MIB + AGENT_FLOOR_TOKENS * 20 * 1024
    extra_kv_bytes = plan.kv_bytes - AGENT_FLOOR_TOKENS * 20 * 1024
    assert extra_kv_bytes == pytest.approx(0.12 * (30 * GIB - FIXED_BYTES - floors_bytes), rel=0.01)
    assert plan.left_bytes < 16 * MIB


@pytest.mark.parametrize(
    ("room_bytes", "slots", "tokens"),
    [
        # one token's experts and the least context, to the granule
        (48 * MIB + 80 * MIB, 8, LEAST_CONTEXT_TOKENS),
        (60 * MIB + 80 * MIB, 10, LEAST_CONTEXT_TOKENS),
        # one layer of slots before more context
        (256 * 6 * MIB + 80 * MIB, 256, LEAST_CONTEXT_TOKENS),
        (256 * 6 * MIB + 160 * MIB, 256, 2 * LEAST_CONTEXT_TOKENS),
        # the agents' context before a second layer
        (256 * 6 * MIB + 640 * MIB, 256, AGENT_FLOOR_TOKENS),
        (300 * 6 * MIB + 640 * MIB, 300, AGENT_FLOOR_TOKENS),
        (512 * 6 * MIB + 640 * MIB, 512, AGENT_FLOOR_TOKENS),
    ],
)
def test_auto_step_by_step(room_bytes: int, slots: int, tokens: int) -> None:
    plan = plan_vram(with_room(room_bytes), AUTO)
    assert (plan.slots_count, plan.servable_context_tokens) == (slots, tokens)
    assert plan.two_layers == (slots >= 512)
    assert plan.left_bytes == 0


def test_auto_on_a_card_larger_than_the_model_has_every_expert_and_all_useful_kv() -> None:
    plan = plan_vram(replace(FACTS, free_bytes=200 * GIB), AUTO)
    assert plan.all_resident
    assert plan.kv_pages_count == 8 * 262_144 // 16
    assert plan.limited_by == "the model"
    assert plan.left_bytes > 60 * GIB


def test_presets() -> None:
    minimum = plan_vram(FACTS, VramWishes(preset=Preset.MINIMUM))
    assert (minimum.slots_count, minimum.servable_context_tokens) == (256, 4096)
    chat = plan_vram(FACTS, VramWishes(preset=Preset.CHAT))
    assert chat.servable_context_tokens == 10_240
    assert chat.slots_count == (30 * GIB - FIXED_BYTES - 200 * MIB) // (6 * MIB)
    agent = plan_vram(FACTS, VramWishes(preset=Preset.AGENT))
    assert agent.servable_context_tokens >= 51_200
    assert agent.slots_count >= 512
    auto = plan_vram(FACTS, AUTO)
    assert minimum.kv_bytes < chat.kv_bytes < auto.kv_bytes < agent.kv_bytes
    tight = plan_vram(with_room(512 * 6 * MIB + 1000 * MIB), VramWishes(preset=Preset.AGENT))
    assert (tight.slots_count, tight.servable_context_tokens) == (512, 51_200)


@pytest.mark.parametrize("preset", [Preset.MINIMUM, Preset.CHAT, Preset.AGENT])
def test_a_preset_that_does_not_fit_is_refused_with_every_number(preset: Preset) -> None:
    with pytest.raises(ResourceError) as caught:
        plan_vram(with_room(100 * MIB, own_bytes=0), VramWishes(preset=preset))
    message = caught.value.message
    assert message.startswith(f'The preset "{preset}" cannot be met: dense weights 4.00 GiB + ')
    for part in (
        "workspace 1.00 GiB",
        "recurrent states 0.25 GiB",
        "graphs 0.25 GiB",
        "cushion 1.50 GiB",
        "slots of 6 MiB",
        "pages of 16 tokens",
        "free 7.10 GiB + own 0.00 GiB",
        "too little",
        'The preset "auto" takes what there is.',
    ):
        assert part in message


def test_a_preset_of_a_model_with_a_shorter_context_takes_less() -> None:
    short = replace(FACTS, model_context_tokens=2048, max_running_count=1)
    for preset in Preset:
        plan = plan_vram(short, VramWishes(preset=preset))
        assert plan.servable_context_tokens == 2048
        assert plan.kv_pages_count == 128


def test_explicit_slots_leave_the_rest_to_kv_and_the_other_way_round() -> None:
    slots = plan_vram(FACTS, VramWishes(slots_count=1000))
    assert slots.slots_count == 1000
    assert slots.kv_pages_count == pytest.approx(
        (30 * GIB - FIXED_BYTES - 6000 * MIB) // (320 * 1024), abs=8
    )
    kv = plan_vram(FACTS, VramWishes(kv_bytes=GIB))
    assert kv.kv_pages_count == GIB // (320 * 1024)
    assert kv.slots_count == (30 * GIB - FIXED_BYTES - kv.kv_bytes) // (6 * MIB)


def test_explicit_sizes_that_do_not_fit_name_what_would() -> None:
    facts = with_room(1000 * MIB)
    with pytest.raises(ResourceError) as caught:
        plan_vram(facts, VramWishes(slots_count=500))
    assert caught.value.param == "engine.slots_count"
    assert "153 slots would fit" in caught.value.message
    assert plan_vram(facts, VramWishes(slots_count=153)).slots_count == 153
    with pytest.raises(ResourceError) as caught:
        plan_vram(facts, VramWishes(kv_bytes=2 * GIB))
    assert caught.value.param == "engine.kv_bytes"
    fitting_bytes = 952 * MIB // (320 * 1024) * 320 * 1024
    assert f"{fitting_bytes} bytes of KV would fit" in caught.value.message
    assert plan_vram(facts, VramWishes(kv_bytes=fitting_bytes)).slots_count == 8


@pytest.mark.parametrize(
    ("wishes", "param"),
    [
        (VramWishes(slots_count=0), "engine.slots_count"),
        (VramWishes(slots_count=-5), "engine.slots_count"),
        (VramWishes(slots_count=40 * 256 + 1), "engine.slots_count"),
        (VramWishes(kv_bytes=0), "engine.kv_bytes"),
        (VramWishes(kv_bytes=320 * 1024 - 1), "engine.kv_bytes"),
        (VramWishes(max_context_tokens=0), "engine.max_context_tokens"),
    ],
)
def test_numbers_that_no_card_could_meet(wishes: VramWishes, param: str) -> None:
    with pytest.raises(ConfigError) as caught:
        plan_vram(FACTS, wishes)
    assert caught.value.param == param


def test_an_asked_context_is_a_floor() -> None:
    facts = with_room(500 * MIB)
    asked = plan_vram(facts, VramWishes(max_context_tokens=16_384))
    assert asked.servable_context_tokens == 16_384
    assert asked.limited_by == "engine.max_context_tokens"
    assert plan_vram(facts, AUTO).servable_context_tokens == LEAST_CONTEXT_TOKENS
    with pytest.raises(ResourceError, match=r"engine\.max_context_tokens = 32768 cannot be met"):
        plan_vram(facts, VramWishes(max_context_tokens=32_768))


def test_more_kv_than_is_useful_is_given_and_said() -> None:
    facts = replace(FACTS, model_context_tokens=1024, max_running_count=2)
    plan = plan_vram(facts, VramWishes(kv_bytes=GIB))
    assert plan.kv_pages_count == GIB // (320 * 1024)
    assert "can use 128" in plan.note
    assert plan_vram(facts, AUTO).note == ""


def test_nothing_fits() -> None:
    with pytest.raises(ResourceError) as caught:
        plan_vram(with_room(-GIB, own_bytes=GIB // 2), AUTO)
    assert caught.value.reason is Reason.DEVICE_MEMORY
    assert caught.value.message.startswith("The model does not fit on this GPU: dense weights 4.00")
    assert "experts 48.00 MiB (8 of 10240 slots of 6 MiB)" in caught.value.message
    assert "there is 6.50 GiB (free 6.00 GiB + own 0.50 GiB), 0.62 GiB too little" in (
        caught.value.message
    )
    assert "Close other programs that use the GPU" in caught.value.message
    assert 'set engine.backend to "cpu"' in caught.value.message


def test_the_host_device_speaks_of_its_own_memory() -> None:
    with pytest.raises(ResourceError) as caught:
        plan_vram(replace(with_room(-GIB), on_host=True), AUTO)
    message = caught.value.message
    assert message.startswith("The model does not fit into the host device: ")
    assert message.endswith('Raise engine.device_bytes, or set engine.backend to "cpu".')
    assert "GPU" not in message


@pytest.mark.parametrize("free_bytes", [None, (1 << 64) - 1, -1])
def test_unknown_memory_is_not_a_number(free_bytes: int | None) -> None:
    with pytest.raises(ResourceError, match="not known"):
        plan_vram(replace(FACTS, free_bytes=free_bytes), AUTO)


def test_figures_that_make_no_sense_are_our_fault() -> None:
    for changes in ({"own_bytes": -1}, {"record_bytes": 0}, {"kv_page_bytes": 0}):
        with pytest.raises(InternalError):
            plan_vram(replace(FACTS, **changes), AUTO)


def test_a_model_without_experts_has_no_slots() -> None:
    plan = plan_vram(replace(FACTS, experts_count=0), AUTO)
    assert (plan.slots_count, plan.slots_bytes) == (0, 0)
    assert plan.all_resident
    assert plan.two_layers


def test_the_split_as_people_read_it() -> None:
    assert plan_vram(FACTS, VramWishes(preset=Preset.MINIMUM)).split == (
        "dense weights 4.00 GiB + workspace 1.00 GiB + recurrent states 0.25 GiB + graphs 0.25 GiB "
        "+ cushion 1.50 GiB + experts 1.50 GiB (256 of 10240 slots of 6 MiB) + KV 80.00 MiB (256 "
        "pages of 16 tokens) = 8.58 GiB, 21.42 GiB left of 30.00 GiB (free 30.00 GiB + own 0.00 "
        "GiB); 4096 tokens of KV for all requests, 4096 for one, limited by the KV pool"
    )
