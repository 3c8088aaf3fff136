"""How the room is divided between slots and KV: `plan_vram`, and what sessions need beyond it.

What was asked is met where it fits. Where it does not, it is an upper bound: others on the card go
first, and the floor is the least.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from freetokend.core.errors import ResourceError
from freetokend.policy.controller.facts import EngineFacts
from freetokend.policy.controller.spec import Floor
from freetokend.policy.controller.state import Division, Sizes, State
from freetokend.policy.kv_sizing import pages_for
from freetokend.policy.vram_budget import (
    LEAST_CONTEXT_TOKENS,
    Preset,
    VramFacts,
    VramPlan,
    VramWishes,
    plan_vram,
)

# A live context is given this much room to grow before the next resize.
_CONTEXT_GROWTH_PERCENT: Final = 125


def bytes_of_slots(shape: VramFacts, slots_count: int) -> int:
    """Of so many slots, in what the driver commits at a time."""
    return _whole(slots_count * shape.record_bytes, shape.granularity_bytes)


def bytes_of_pages(shape: VramFacts, kv_pages_count: int) -> int:
    """Of so many KV pages, in what they are committed in."""
    return _whole(kv_pages_count * shape.kv_page_bytes, shape.kv_granule_bytes)


def _whole(size_bytes: int, granule_bytes: int) -> int:
    return -(-size_bytes // granule_bytes) * granule_bytes


def _fitting_pages(shape: VramFacts, room_bytes: int) -> int:
    granule_bytes = shape.kv_granule_bytes
    return room_bytes // granule_bytes * granule_bytes // shape.kv_page_bytes


def sizes_of(shape: VramFacts, slots_count: int, kv_pages_count: int) -> Sizes:
    """Both, and the memory they take."""
    return Sizes(
        slots_count=slots_count,
        kv_pages_count=kv_pages_count,
        size_bytes=bytes_of_slots(shape, slots_count) + bytes_of_pages(shape, kv_pages_count),
    )


def filled(
    shape: VramFacts, start: Sizes, *, most_slots: int, most_pages: int, room_bytes: int
) -> Sizes:
    """More slots, then more pages, as far as they may go and the room does."""
    granule = shape.granularity_bytes
    for_slots = room_bytes - bytes_of_pages(shape, start.kv_pages_count)
    fitting = for_slots // granule * granule // shape.record_bytes
    slots = min(max(start.slots_count, fitting), most_slots)
    fitting = _fitting_pages(shape, room_bytes - bytes_of_slots(shape, slots))
    return sizes_of(shape, slots, min(max(start.kv_pages_count, fitting), most_pages))


def floor_sizes(engine: EngineFacts, floor: Floor) -> Sizes:
    """The least that a cache is shrunk to: one token's or one layer's experts, a short context."""
    return _least(engine, floor, used_pages=0)


def reachable_sizes(engine: EngineFacts, floor: Floor) -> Sizes:
    """The least that it can be shrunk to now: the KV pages that are in use stay."""
    return _least(engine, floor, used_pages=engine.kv_pages_used_count)


def _least(engine: EngineFacts, floor: Floor, *, used_pages: int) -> Sizes:
    shape = engine.shape
    slots = shape.top_k if floor is Floor.ONE_TOKEN else shape.experts_per_layer_count
    context_tokens = min(LEAST_CONTEXT_TOKENS, shape.model_context_tokens)
    pages = max(pages_for(context_tokens, shape.kv_page_tokens), used_pages)
    return sizes_of(
        shape,
        min(slots, shape.experts_count, engine.slots_capacity_count),
        min(pages, engine.kv_pages_capacity_count),
    )


def wanted_pages(engine: EngineFacts) -> int:
    """KV pages for the longest live context with room to grow, and for the prompts that wait.

    In steps of a quarter of the next lower power of two, so that a context that grows by a token a
    step is not a resize a second.
    """
    page_tokens = engine.shape.kv_page_tokens
    needs = engine.needs
    context_tokens = min(
        needs.longest_context_tokens * _CONTEXT_GROWTH_PERCENT // 100,
        engine.shape.model_context_tokens,
    )
    pages = pages_for(max(context_tokens, 0), page_tokens)
    if needs.waiting_prompt_tokens > 0:
        waiting = pages_for(needs.waiting_prompt_tokens, page_tokens)
        pages = max(pages, engine.kv_pages_used_count + waiting)
    most = pages_for(engine.shape.model_context_tokens, page_tokens)
    return min(_stepped(pages), most * engine.shape.max_running_count)


def _stepped(pages: int) -> int:
    if pages < 8:
        return pages
    step = 1 << (pages.bit_length() - 3)
    return -(-pages // step) * step


def divide(
    state: State, engine: EngineFacts, wishes: VramWishes, floor: Floor, room_bytes: int
) -> tuple[State, Sizes]:
    """The sizes for so much room; the state remembers them for the next tick.

    They take more than the room only where the floor does.
    """
    least = reachable_sizes(engine, floor)
    wanted = min(wanted_pages(engine), engine.kv_pages_capacity_count)
    known = state.division
    if (
        known is not None
        and known.room_bytes == room_bytes
        and known.least_pages_count == least.kv_pages_count
        and known.wanted_pages_count == wanted
        and known.wishes == wishes
        and known.shape == engine.shape
    ):
        return state, known.sizes
    sizes = _divided(engine, _met(engine.shape, wishes), least, wanted, room_bytes)
    division = Division(
        shape=engine.shape,
        wishes=wishes,
        room_bytes=room_bytes,
        least_pages_count=least.kv_pages_count,
        wanted_pages_count=wanted,
        sizes=sizes,
    )
    return replace(state, division=division), sizes


def _divided(
    engine: EngineFacts, wishes: VramWishes, least: Sizes, wanted: int, room_bytes: int
) -> Sizes:
    shape = engine.shape
    base = _best(shape, wishes, room_bytes)
    if base is None:
        return least
    slots, pages = base
    needed = least.kv_pages_count if wishes.kv_bytes is not None else max(wanted, pages)
    needed = max(needed, least.kv_pages_count)
    if needed > pages:
        beside = _fitting_pages(shape, room_bytes - bytes_of_slots(shape, least.slots_count))
        pages = max(min(needed, beside), least.kv_pages_count)
        with_pages = _best(
            shape, replace(wishes, kv_bytes=pages * shape.kv_page_bytes), room_bytes, pages
        )
        slots = least.slots_count if with_pages is None else with_pages[0]
    return sizes_of(
        shape,
        max(min(slots, engine.slots_capacity_count), least.slots_count),
        max(min(pages, engine.kv_pages_capacity_count), least.kv_pages_count),
    )


def _best(
    shape: VramFacts, wishes: VramWishes, room_bytes: int, pages: int | None = None
) -> tuple[int, int] | None:
    """Slots and pages for what was asked; where that does not fit, for what it leaves to us, as
    far as it was asked; None where not even that fits."""
    plan = _planned(shape, wishes, room_bytes)
    if plan is not None:
        return plan.slots_count, plan.kv_pages_count
    kv_bytes = None if pages is None else pages * shape.kv_page_bytes
    plan = _planned(shape, VramWishes(kv_bytes=kv_bytes), room_bytes)
    if plan is None:
        return None
    most_slots, most_pages = shape.experts_count, plan.kv_pages_count
    if wishes.slots_count is not None:
        most_slots = wishes.slots_count
    if wishes.kv_bytes is not None:
        most_pages = max(wishes.kv_bytes // shape.kv_page_bytes, 1)
    start = sizes_of(shape, min(plan.slots_count, most_slots), min(plan.kv_pages_count, most_pages))
    sizes = filled(
        shape, start, most_slots=most_slots, most_pages=most_pages, room_bytes=room_bytes
    )
    return sizes.slots_count, sizes.kv_pages_count


def _planned(shape: VramFacts, wishes: VramWishes, room_bytes: int) -> VramPlan | None:
    if room_bytes < 0:
        return None
    room_only = replace(
        shape,
        free_bytes=room_bytes,
        own_bytes=0,
        dense_bytes=0,
        workspace_bytes=0,
        state_bytes=0,
        graph_bytes=0,
        cushion_bytes=0,
    )
    try:
        return plan_vram(room_only, wishes)
    except ResourceError:
        return None


def _met(shape: VramFacts, wishes: VramWishes) -> VramWishes:
    """What was asked, as near as the model can meet it: it may be another one than when it was."""
    slots, kv_bytes = wishes.slots_count, wishes.kv_bytes
    if slots is not None:
        slots = min(max(slots, min(1, shape.experts_count)), shape.experts_count)
    if kv_bytes is not None:
        kv_bytes = max(kv_bytes, shape.kv_page_bytes)
    context = wishes.max_context_tokens
    if context is not None:
        context = max(context, 1)
    preset = wishes.preset if shape.experts_count else Preset.AUTO
    return VramWishes(
        preset=preset, slots_count=slots, kv_bytes=kv_bytes, max_context_tokens=context
    )
