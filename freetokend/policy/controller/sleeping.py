"""When the engine gives the card back altogether, and when it takes it again.

It sleeps only while no request runs or waits. A request wakes it, if the card has room for the
floor; otherwise the request is told so at once.
"""

from __future__ import annotations

from dataclasses import replace

from freetokend.policy.controller.budget import Room
from freetokend.policy.controller.commands import Reason, ReasonCode, RefuseWaiting, Sleep, Wake
from freetokend.policy.controller.division import divide, floor_sizes
from freetokend.policy.controller.facts import EngineFacts, Snapshot
from freetokend.policy.controller.state import InFlight, State, Trigger
from freetokend.policy.memory import gib


def fall_asleep(
    state: State, snapshot: Snapshot, engine: EngineFacts
) -> tuple[State, Sleep | None]:
    """For an engine that is awake. State's standing of the last tick says whether the floor is
    over the budget."""
    spec = snapshot.spec
    if state.wake_ticket != spec.wake_ticket:
        state = replace(state, wake_ticket=spec.wake_ticket)
    if engine.running_count or engine.waiting_count or state.in_flight is not None:
        return state, None
    reason = _why_sleep(state, snapshot, engine)
    if reason is None:
        return state, None
    command = Sleep(generation=state.generation + 1, reason=reason)
    return replace(
        state,
        generation=command.generation,
        sleep_ticket=spec.sleep_ticket,
        in_flight=InFlight(command=command, trigger=Trigger.SLEEP, sent_s=snapshot.now_s),
        standing=reason,
    ), command


def _why_sleep(state: State, snapshot: Snapshot, engine: EngineFacts) -> Reason | None:
    spec = snapshot.spec
    if spec.sleep_ticket != state.sleep_ticket:
        return Reason(code=ReasonCode.OPERATOR, text="Asked to sleep until a request comes.")
    if spec.sleep_idle_s is not None and engine.idle_s >= spec.sleep_idle_s:
        return Reason(
            code=ReasonCode.IDLE, text=f"No request for {engine.idle_s:.0f} s: the card is free."
        )
    if (
        snapshot.local_minute is not None
        and snapshot.local_weekday is not None
        and engine.idle_s >= spec.window_idle_s
    ):
        for window in spec.windows:
            if window.sleep and window.holds(snapshot.local_minute, snapshot.local_weekday):
                text = f"The window {window.name} wants the card free, and nobody uses it."
                return Reason(code=ReasonCode.WINDOW, text=text)
    if spec.sleep_over_budget and state.standing.code is ReasonCode.FLOOR:
        return Reason(
            code=ReasonCode.FLOOR, text=f"Even the floor is too much: {state.standing.text}"
        )
    return None


def wake_up(
    state: State, snapshot: Snapshot, engine: EngineFacts, room: Room | Reason
) -> tuple[State, Wake | RefuseWaiting | None]:
    """For an engine that sleeps. `room`: for slots and KV beside the fixed costs, or why that is
    not known."""
    spec, now_s = snapshot.spec, snapshot.now_s
    if state.sleep_ticket != spec.sleep_ticket:
        state = replace(state, sleep_ticket=spec.sleep_ticket)
    if state.growth.pending is not None:
        state = replace(state, growth=replace(state.growth, pending=None))
    if state.in_flight is not None:
        return state, None
    asked = spec.wake_ticket != state.wake_ticket
    if not engine.waiting_count and not asked:
        reason = Reason(code=ReasonCode.ASLEEP, text="The engine sleeps until a request comes.")
        return state if state.standing == reason else replace(state, standing=reason), None
    retry_s = state.growth.retry_s
    if retry_s is not None and now_s < retry_s:
        text = f"Waking failed {state.growth.failures_count} times; tried again in "
        return _refused(state, snapshot, ReasonCode.BACK_OFF, f"{text}{retry_s - now_s:.0f} s.")
    if isinstance(room, Room) and not room.fresh:
        return state, None
    if isinstance(room, Reason):
        # One look that fails is no reason to turn a request away.
        if state.known_s is not None and now_s - state.known_s <= spec.limits.gap_s:
            return replace(state, standing=room), None
        return _refused(state, snapshot, room.code, f"The engine sleeps. {room.text}")
    floor = floor_sizes(engine, spec.floor)
    if floor.size_bytes > room.most_bytes:
        text = (
            f"The card is busy: {gib(floor.size_bytes)} for slots and KV are the least, and there "
            f"is room for {gib(max(room.most_bytes, 0))} ({gib(room.free_bytes)} free, "
            f"{gib(room.required.free_bytes)} kept: {room.required.text})."
        )
        return _refused(state, snapshot, ReasonCode.CARD_BUSY, text)
    growable_bytes = room.less_margin(spec.limits.margin_bytes)
    state, sizes = divide(state, engine, spec.wishes, spec.floor, growable_bytes)
    code = ReasonCode.REQUEST if engine.waiting_count else ReasonCode.OPERATOR
    reason = Reason(
        code=code,
        text=f"Awake for {engine.waiting_count} requests with {sizes.slots_count} slots and "
        f"{sizes.kv_pages_count} KV pages, {gib(sizes.size_bytes)}.",
    )
    command = Wake(
        generation=state.generation + 1,
        slots_count=sizes.slots_count,
        kv_pages_count=sizes.kv_pages_count,
        reason=reason,
    )
    in_flight = InFlight(
        command=command,
        trigger=Trigger.WAKE,
        sent_s=now_s,
        target_bytes=sizes.size_bytes,
        grows=True,
    )
    return replace(
        state,
        generation=command.generation,
        wake_ticket=spec.wake_ticket,
        in_flight=in_flight,
        standing=reason,
    ), command


def _refused(
    state: State, snapshot: Snapshot, code: ReasonCode, text: str
) -> tuple[State, RefuseWaiting]:
    reason = Reason(code=code, text=text)
    state = replace(state, standing=reason, wake_ticket=snapshot.spec.wake_ticket)
    return state, RefuseWaiting(reason=reason)
