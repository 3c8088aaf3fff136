"""When the cache is resized, and to what.

What others take goes first and does not wait. Growth waits until there was room for `hold_s`.
Two promises have to hold together: the memory is back within two seconds after a grab, and a cache
is not resized more than so many times a minute (`Limits.resizes_count`):

- growth, sessions and the operator may use up only a part of the resizes of a minute;
- a shrink frees, beside what is short and the margin, as much again as others took in the last
  minute, so that each one doubles what a run of grabs has to take until the next;
- the last of the minute goes to the floor, below which nothing more could be given anyway.

So there is always a resize left for a grab, or nothing left to give. A shrink pre-empts what is
under way unless that suffices; a newer generation makes the engine drop the older.
"""

from __future__ import annotations

from dataclasses import replace

from freetokend.policy.controller.budget import Room, fixed_bytes
from freetokend.policy.controller.commands import Reason, ReasonCode, Resize
from freetokend.policy.controller.division import (
    divide,
    filled,
    floor_sizes,
    reachable_sizes,
    sizes_of,
    wanted_pages,
)
from freetokend.policy.controller.facts import EngineFacts, Snapshot
from freetokend.policy.controller.spec import Limits
from freetokend.policy.controller.state import (
    Growth,
    InFlight,
    Pending,
    Resized,
    Sizes,
    State,
    Trigger,
)
from freetokend.policy.memory import gib


def resize(
    state: State, snapshot: Snapshot, engine: EngineFacts, room: Room
) -> tuple[State, Resize | None]:
    """What the sizes shall be, if they shall be others than they are."""
    growth = _decayed(state.growth, snapshot.spec.limits, snapshot.now_s)
    if growth is not state.growth:
        state = replace(state, growth=growth)
    if engine.elastic_bytes > room.most_bytes:
        return _shrink(state, snapshot, engine, room)
    if not room.fresh:
        text = "The card was not looked at lately enough to take more of it."
        return _standing(state, ReasonCode.GPU_UNKNOWN, text), None
    if state.revision is None:
        state = replace(state, revision=snapshot.spec.revision)
    in_flight = state.in_flight
    if in_flight is not None and in_flight.is_deferred:
        asked_again = state.revision != snapshot.spec.revision
        is_last = len(state.recent) >= snapshot.spec.limits.resizes_count
        if not is_last and (in_flight.trigger is not Trigger.OPERATOR or asked_again):
            in_flight = None  # nobody needs the rest any more
            state = replace(state, in_flight=None)
    if in_flight is not None:
        why = "waits for KV pages in use" if in_flight.is_deferred else "has not answered"
        text = f"The engine {why}: generation {in_flight.command.generation}."
        return _standing(state, ReasonCode.IN_FLIGHT, text), None
    if state.revision != snapshot.spec.revision:
        return _as_asked(state, snapshot, engine, room)
    wanted = min(wanted_pages(engine), engine.kv_pages_capacity_count)
    if wanted > engine.kv_pages_count and not _is_backing_off(state, snapshot):
        state, command = _for_sessions(state, snapshot, engine, room)
        if command is not None:
            return state, command
    return _grow(state, snapshot, engine, room)


def _shrink(
    state: State, snapshot: Snapshot, engine: EngineFacts, room: Room
) -> tuple[State, Resize | None]:
    limits = snapshot.spec.limits
    in_flight = state.in_flight
    if in_flight is not None and _attainable_bytes(in_flight, engine) <= room.most_bytes:
        text = f"{_short_text(engine, room)}; generation {in_flight.command.generation} gives it."
        return _standing(state, ReasonCode.IN_FLIGHT, text), None
    state = replace(state, growth=replace(state.growth, pending=None))
    least = _no_more_than(engine, reachable_sizes(engine, snapshot.spec.floor))
    count = len(state.recent)
    if least.size_bytes >= engine.elastic_bytes:
        text = f"{_short_text(engine, room)}; {_sizes_text(least)} is the floor."
        return _standing(state, ReasonCode.FLOOR, text), None
    if count + 1 >= limits.resizes_count:
        # pages in use follow, under the same generation, as they become free
        target = _no_more_than(engine, floor_sizes(engine, snapshot.spec.floor))
    else:
        taken_bytes = sum(entry.freed_bytes for entry in state.recent)
        goal_bytes = room.less_margin(limits.margin_bytes + taken_bytes)
        state, sizes = divide(state, engine, snapshot.spec.wishes, snapshot.spec.floor, goal_bytes)
        target = _kept(engine, sizes, goal_bytes)
        if target.size_bytes > room.most_bytes:
            target = least
    if in_flight is not None and target.size_bytes >= in_flight.target_bytes:
        text = f"{_short_text(engine, room)}; nothing below generation "
        text += f"{in_flight.command.generation} can be given."
        return _standing(state, ReasonCode.IN_FLIGHT, text), None
    if count >= limits.resizes_count:
        text = f"{_short_text(engine, room)}, but there were {count} resizes within "
        return _standing(state, ReasonCode.RATE_LIMIT, f"{text}{limits.window_s:g} s."), None
    code = _short_code(room)
    state = _after_reversal(state, limits, snapshot.now_s)
    freed_bytes = engine.elastic_bytes - target.size_bytes
    reason = Reason(
        code=code,
        text=f"{_short_text(engine, room)}: {gib(freed_bytes)} given back, {_sizes_text(target)} "
        "stay.",
    )
    return _commanded(
        state,
        snapshot,
        target,
        Trigger.BUDGET,
        reason,
        taken_bytes=freed_bytes if code is ReasonCode.VRAM_TAKEN else 0,
    )


def _attainable_bytes(in_flight: InFlight, engine: EngineFacts) -> int:
    """What a command under way leads to, with the KV pages that are in use; 0 for sleep and wake,
    which are let come to their end."""
    command = in_flight.command
    if not isinstance(command, Resize):
        return 0
    pages = max(command.kv_pages_count, engine.kv_pages_used_count)
    return sizes_of(engine.shape, command.slots_count, pages).size_bytes


def _no_more_than(engine: EngineFacts, sizes: Sizes) -> Sizes:
    return sizes_of(
        engine.shape,
        min(sizes.slots_count, engine.slots_count),
        min(sizes.kv_pages_count, engine.kv_pages_count),
    )


def _kept(engine: EngineFacts, sizes: Sizes, goal_bytes: int) -> Sizes:
    """The division, of which nothing grows: what one of both has less of than it, the other keeps
    of what it has."""
    return filled(
        engine.shape,
        _no_more_than(engine, sizes),
        most_slots=engine.slots_count,
        most_pages=engine.kv_pages_count,
        room_bytes=goal_bytes,
    )


def _as_asked(
    state: State, snapshot: Snapshot, engine: EngineFacts, room: Room
) -> tuple[State, Resize | None]:
    """The operator said so: no hold, any difference."""
    limits = snapshot.spec.limits
    state, target = _target(state, snapshot, engine, room.less_margin(limits.margin_bytes), room)
    if _same(target, engine):
        return replace(
            _standing(state, ReasonCode.STEADY, f"{_sizes_text(target)}, as asked."),
            revision=snapshot.spec.revision,
        ), None
    if len(state.recent) >= limits.operator_count:
        return _rate_limited(state, limits), None
    state = replace(state, revision=snapshot.spec.revision)
    reason = Reason(
        code=ReasonCode.OPERATOR,
        text=f"As asked: {_sizes_text(target)}; there is room for {gib(room.most_bytes)}.",
    )
    grows = target.size_bytes > engine.elastic_bytes
    return _commanded(state, snapshot, target, Trigger.OPERATOR, reason, grows=grows)


def _for_sessions(
    state: State, snapshot: Snapshot, engine: EngineFacts, room: Room
) -> tuple[State, Resize | None]:
    """Contexts and prompts need pages now; slots give way."""
    limits = snapshot.spec.limits
    if len(state.recent) >= limits.sessions_count:
        return _rate_limited(state, limits), None
    state, target = _target(state, snapshot, engine, room.less_margin(limits.margin_bytes), room)
    if target.kv_pages_count <= engine.kv_pages_count:
        return state, None
    reason = Reason(
        code=ReasonCode.SESSIONS,
        text=f"Sessions need {wanted_pages(engine)} KV pages, there are {engine.kv_pages_count}: "
        f"{_sizes_text(target)}.",
    )
    return _commanded(state, snapshot, target, Trigger.SESSIONS, reason, grows=True)


def _grow(
    state: State, snapshot: Snapshot, engine: EngineFacts, room: Room
) -> tuple[State, Resize | None]:
    """Growth, or another split of the same memory, once there was room for it for long enough."""
    limits, growth, now_s = snapshot.spec.limits, state.growth, snapshot.now_s
    growable_bytes = room.less_margin(limits.margin_bytes)
    pending = growth.pending
    least_bytes = growable_bytes
    if pending is not None:
        least_bytes = min(least_bytes, pending.least_room_bytes)
    state, target = _target(state, snapshot, engine, least_bytes, room)
    if pending is not None and not _is_worth_it(target, engine, limits):
        pending = None
        state, target = _target(state, snapshot, engine, growable_bytes, room)
        least_bytes = growable_bytes
    if not _is_worth_it(target, engine, limits):
        text = f"{gib(room.free_bytes)} free of the card, {gib(room.required.free_bytes)} wanted."
        if growth.pending is not None:
            state = replace(state, growth=replace(growth, pending=None))
        return _standing(state, ReasonCode.STEADY, text), None
    since_s = now_s if pending is None else pending.since_s
    pending = Pending(since_s=since_s, least_room_bytes=least_bytes)
    if pending != growth.pending:
        state = replace(state, growth=replace(growth, pending=pending))
    hold_s = max(growth.hold_s, limits.hold_s)
    if _is_backing_off(state, snapshot):
        text = f"{growth.failures_count} growths failed in a row; tried again later, with less."
        return _standing(state, ReasonCode.BACK_OFF, text), None
    if now_s - since_s < hold_s:
        text = f"{gib(room.free_bytes)} are free; the cache grows when that has held {hold_s:g} s."
        return _standing(state, ReasonCode.WAITING, text), None
    if len(state.recent) >= limits.growth_count:
        return _rate_limited(state, limits), None
    if target.size_bytes > engine.elastic_bytes and growth.share_ratio < 1:
        gain_bytes = int((target.size_bytes - engine.elastic_bytes) * growth.share_ratio)
        state, target = divide(
            state,
            engine,
            snapshot.spec.wishes,
            snapshot.spec.floor,
            engine.elastic_bytes + gain_bytes,
        )
    reason = Reason(
        code=ReasonCode.VRAM_FREE,
        text=f"There was room for {gib(least_bytes)} for {hold_s:g} s: {_sizes_text(target)}.",
    )
    return _commanded(state, snapshot, target, Trigger.GROWTH, reason, grows=True)


def _target(
    state: State, snapshot: Snapshot, engine: EngineFacts, growable_bytes: int, room: Room
) -> tuple[State, Sizes]:
    """The best for the room; what is held already needs no margin, or each grab within the margin
    would be a resize."""
    kept_bytes = min(engine.elastic_bytes, room.most_bytes)
    spec = snapshot.spec
    return divide(state, engine, spec.wishes, spec.floor, max(kept_bytes, growable_bytes))


def _same(target: Sizes, engine: EngineFacts) -> bool:
    return (target.slots_count, target.kv_pages_count) == (
        engine.slots_count,
        engine.kv_pages_count,
    )


def _is_worth_it(target: Sizes, engine: EngineFacts, limits: Limits) -> bool:
    """More memory by a step, or as much of it moved between slots and KV."""
    shape = engine.shape
    slots_bytes = (target.slots_count - engine.slots_count) * shape.record_bytes
    kv_bytes = (target.kv_pages_count - engine.kv_pages_count) * shape.kv_page_bytes
    gain_bytes = target.size_bytes - engine.elastic_bytes
    return max(gain_bytes, abs(slots_bytes), abs(kv_bytes)) >= max(limits.growth_step_bytes, 1)


def _decayed(growth: Growth, limits: Limits, now_s: float) -> Growth:
    if growth.hold_s <= limits.hold_s or now_s - growth.changed_s < limits.hold_decay_s:
        return growth
    return replace(growth, hold_s=max(growth.hold_s / 2, limits.hold_s), changed_s=now_s)


def _after_reversal(state: State, limits: Limits, now_s: float) -> State:
    """A growth that is taken back at once came too early: the next waits twice as long."""
    growth = state.growth
    in_flight = state.in_flight
    growing = in_flight is not None and in_flight.trigger is Trigger.GROWTH
    if not growing and (growth.grown_s is None or now_s - growth.grown_s > limits.reversal_s):
        return state
    hold_s = min(max(growth.hold_s, limits.hold_s) * 2, limits.hold_most_s)
    return replace(state, growth=replace(growth, grown_s=None, hold_s=hold_s, changed_s=now_s))


def _is_backing_off(state: State, snapshot: Snapshot) -> bool:
    retry_s = state.growth.retry_s
    return retry_s is not None and snapshot.now_s < retry_s


def _commanded(
    state: State,
    snapshot: Snapshot,
    target: Sizes,
    trigger: Trigger,
    reason: Reason,
    *,
    grows: bool = False,
    taken_bytes: int = 0,
) -> tuple[State, Resize]:
    command = Resize(
        generation=state.generation + 1,
        slots_count=target.slots_count,
        kv_pages_count=target.kv_pages_count,
        # Others may come to want what it frees while it waits for the end of a prefill chunk.
        urgent=target.size_bytes < state.elastic_bytes,
        reason=reason,
    )
    in_flight = InFlight(
        command=command,
        trigger=trigger,
        sent_s=snapshot.now_s,
        target_bytes=target.size_bytes,
        grows=grows,
    )
    return replace(
        state,
        generation=command.generation,
        in_flight=in_flight,
        recent=(*state.recent, Resized(at_s=snapshot.now_s, freed_bytes=taken_bytes)),
        standing=reason,
    ), command


def _standing(state: State, code: ReasonCode, text: str) -> State:
    if state.standing.text == text and state.standing.code is code:
        return state
    return replace(state, standing=Reason(code=code, text=text))


def _rate_limited(state: State, limits: Limits) -> State:
    text = (
        f"There were {len(state.recent)} resizes within {limits.window_s:g} s; the rest of "
        f"{limits.resizes_count} are kept for what others may take."
    )
    return _standing(state, ReasonCode.RATE_LIMIT, text)


def _short_code(room: Room) -> ReasonCode:
    """What the room is short for: what others took, before what they shall have."""
    if room.by_limit_bytes is not None and room.by_limit_bytes < room.by_free_bytes:
        return ReasonCode.VRAM_LIMIT
    if room.free_bytes < room.required.cushion_bytes:
        return ReasonCode.VRAM_TAKEN
    return room.required.code


def _short_text(engine: EngineFacts, room: Room) -> str:
    if _short_code(room) is ReasonCode.VRAM_LIMIT:
        held_bytes = engine.elastic_bytes + fixed_bytes(engine.shape)
        limit_bytes = (room.by_limit_bytes or 0) + fixed_bytes(engine.shape)
        return f"{gib(held_bytes)} of the card held, the limit is {gib(limit_bytes)}"
    short_bytes = engine.elastic_bytes - room.most_bytes
    return (
        f"{gib(room.free_bytes)} free of the card, {gib(room.required.free_bytes)} wanted "
        f"({room.required.text}), {gib(short_bytes)} short"
    )


def _sizes_text(sizes: Sizes) -> str:
    return f"{sizes.slots_count} slots and {sizes.kv_pages_count} KV pages, {gib(sizes.size_bytes)}"
