"""A run from its seed to its verdict: faults first, then calm with a bound on how long it takes."""

from __future__ import annotations

from dataclasses import dataclass, replace

from freetokend.core.errors import ResourceError
from freetokend.policy.controller import Phase, tick
from freetokend.policy.controller.commands import Resize
from freetokend.policy.vram_budget import VramWishes, plan_vram
from tests.sim.card import CONTEXT_BYTES, FIXED_BYTES, SHAPE
from tests.sim.checks import CUSHION_BYTES, FLOOR_PAGES, FLOOR_SLOTS, MARGIN_BYTES, Checks
from tests.sim.engine import plan_floor_bytes
from tests.sim.machine import Machine, Tick
from tests.sim.plan import draw

# Twice the longest hold (the first growth takes what there was all the time, which may have begun
# before the calm), the longest back-off, an answer that is waited for, and a minute's limit.
CALM_S = 2 * 240.0 + 120.0 + 32.0 + 60.0
STILL_S = 45.0
_STEP_BYTES = 256 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What a run found. reached_s: from the calm to the target."""

    seed: int
    violations: tuple[str, ...]
    resizes_count: int
    ticks_count: int
    reached_s: float | None
    faults: tuple[str, ...]


def simulate(seed: int, tick: Tick = tick) -> Verdict:
    """One run. Stops at the first violation: what follows from one is no news."""
    plan = draw(seed)
    machine = Machine(plan, tick)
    checks = Checks(machine)
    ticks_count = 0
    while machine.in_faults and not checks.violations:
        _step(machine, checks)
        ticks_count += 1
    reached_s = None
    if not checks.violations:
        machine.become_calm()
        calm_s = machine.now_s
        while machine.now_s - calm_s < CALM_S and not checks.violations:
            _step(machine, checks)
            ticks_count += 1
            if _is_reached(machine):
                reached_s = machine.now_s - calm_s
                break
        if reached_s is None and not checks.violations:
            checks.violations.append(f"calm for {CALM_S:g} s: {_where(machine)}")
        ticks_count += _stay(machine, checks)
        checks.finish()
    return Verdict(
        seed=seed,
        violations=tuple(checks.violations),
        resizes_count=checks.resizes_count,
        ticks_count=ticks_count,
        reached_s=reached_s,
        faults=tuple(sorted(plan.faults)),
    )


def _step(machine: Machine, checks: Checks) -> None:
    machine.step()
    checks.look()
    checks.remember_room()


def _stay(machine: Machine, checks: Checks) -> int:
    """Once the target is reached nothing is resized any more, and all requests are answered."""
    ticks_count = 0
    settled_s = machine.now_s
    while machine.now_s - settled_s < STILL_S and not checks.violations:
        before = machine.engine and machine.engine.elastic_bytes
        _step(machine, checks)
        ticks_count += 1
        resizes = [c for c in machine.commands if isinstance(c, Resize)]
        if resizes and machine.engine and machine.engine.elastic_bytes == before:
            checks.violations.append(f"resizes at rest: {resizes[0].reason.text}")
    return ticks_count


def room_bytes_for(machine: Machine, elastic_bytes: int) -> int:
    """What slots and KV can have with cushion and margin; what is held needs no margin."""
    room_bytes = machine.card.total_bytes - sum(machine.card.others_bytes.values())
    room_bytes -= FIXED_BYTES + CONTEXT_BYTES + CUSHION_BYTES
    return max(min(elastic_bytes, room_bytes), room_bytes - MARGIN_BYTES)


def goal(machine: Machine, elastic_bytes: int) -> tuple[int, int] | None:
    """The slots and pages that there can be, by dividing the memory afresh. None where what was
    asked in numbers does not fit, or nothing does."""
    asked = machine.spec.wishes
    room_bytes = room_bytes_for(machine, elastic_bytes)
    bound = asked.slots_count is not None or asked.kv_bytes is not None
    for wishes in (asked,) if bound else (asked, VramWishes()):
        facts = replace(
            SHAPE,
            free_bytes=max(room_bytes, 0),
            dense_bytes=0,
            workspace_bytes=0,
            graph_bytes=0,
            cushion_bytes=0,
        )
        try:
            plan = plan_vram(facts, wishes)
            return max(plan.slots_count, FLOOR_SLOTS), max(plan.kv_pages_count, FLOOR_PAGES)
        except ResourceError:
            continue
    return None


def _is_reached(machine: Machine) -> bool:
    engine = machine.engine
    facts = machine.host_facts
    if engine is None or not facts.model_loaded or facts.long_prompts_refused:
        return False
    if engine.running or engine.waiting or machine.state.in_flight is not None:
        return False
    if engine.phase is Phase.ASLEEP:
        return True
    if machine.state.revision not in (None, machine.spec.revision):
        return False  # what was asked waits for its turn
    if machine.state.growth.pending is not None:
        return False
    over_bytes = CUSHION_BYTES - machine.card.free_bytes
    if over_bytes > 0:
        return engine.elastic_bytes <= plan_floor_bytes()
    plan = goal(machine, engine.elastic_bytes)
    if plan is None:
        asked = machine.spec.wishes
        left_bytes = room_bytes_for(machine, engine.elastic_bytes) - engine.elastic_bytes
        # all of it, or all that was asked of both
        return left_bytes < _STEP_BYTES or (
            asked.slots_count == engine.slots
            and asked.kv_bytes == engine.pages * SHAPE.kv_page_bytes
        )
    slots_bytes = abs(engine.slots - plan[0]) * SHAPE.record_bytes
    kv_bytes = abs(engine.pages - plan[1]) * SHAPE.kv_page_bytes
    return max(slots_bytes, kv_bytes) < _STEP_BYTES


def _where(machine: Machine) -> str:
    engine = machine.engine
    if engine is None:
        return f"no engine; {machine.host_facts}; rung {machine.state.ladder.rung}"
    plan = goal(machine, engine.elastic_bytes)
    return (
        f"{engine.slots} slots, {engine.pages} pages, {engine.elastic_bytes} bytes, goal {plan}, "
        f"{len(engine.running)} running, {len(engine.waiting)} waiting, "
        f"{machine.state.standing.text} {machine.state.growth}"
    )
