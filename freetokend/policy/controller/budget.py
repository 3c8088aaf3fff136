"""What slots and KV may take now: the card's reading against what others shall have free.

    free now + own = fixed costs + slots + KV + required free,   own: by the engine's own account

so that a PID namespace in which the driver does not show our process makes no difference. A reading
that is not to be trusted is no reading: it is never replaced by an older one or by another
quantity.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from freetokend.policy.controller.commands import Reason, ReasonCode
from freetokend.policy.controller.facts import EngineFacts, Snapshot
from freetokend.policy.controller.spec import Hold, Limits, Spec
from freetokend.policy.controller.state import State
from freetokend.policy.memory import gib
from freetokend.policy.readings import GpuReading
from freetokend.policy.vram_budget import VramFacts

# A driver that does not know says 2^64 - 1.
_UNKNOWN_FROM_BYTES: Final = 1 << 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Required:
    """What others shall have free of the card, and for what most of it; rules: those that hold."""

    free_bytes: int
    code: ReasonCode
    text: str
    rules: frozenset[str]
    cushion_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """What slots and KV may take together.

    by_free_bytes: by what is free and what others shall have; may be negative. by_limit_bytes: by
    the operator's limit. free_bytes: of the card now; fresh: seen so lately that growth can go by
    it.
    """

    free_bytes: int
    by_free_bytes: int
    by_limit_bytes: int | None
    required: Required
    fresh: bool

    @property
    def most_bytes(self) -> int:
        """More than this is over the budget."""
        return self.less_margin(0)

    def less_margin(self, margin_bytes: int) -> int:
        """What leaves others so much more; the operator's limit needs no margin."""
        left_bytes = self.by_free_bytes - margin_bytes
        return left_bytes if self.by_limit_bytes is None else min(left_bytes, self.by_limit_bytes)


def fixed_bytes(shape: VramFacts) -> int:
    """What an engine that is awake holds besides slots and KV."""
    return shape.dense_bytes + shape.workspace_bytes + shape.state_bytes + shape.graph_bytes


def usable_reading(state: State, snapshot: Snapshot, limits: Limits) -> GpuReading | Reason:
    """The reading, or why there is none that anything may be decided from."""
    reading = snapshot.gpu
    if reading is None or reading.is_lost or reading.free_bytes is None:
        what = "is lost" if reading is not None and reading.is_lost else "does not say what is free"
        return _unknown(f"The GPU {what}")
    if not 0 <= reading.free_bytes < _UNKNOWN_FROM_BYTES:
        return _unknown(f"The driver says that {reading.free_bytes} bytes are free")
    if reading.total_bytes is not None and reading.free_bytes > reading.total_bytes:
        return _unknown(
            f"The driver says that {reading.free_bytes} of {reading.total_bytes} bytes are free"
        )
    age_s = snapshot.now_s - reading.taken_s
    if not 0 <= age_s <= limits.stale_s:
        return _unknown(f"The last reading of the GPU is {age_s:.1f} s old")
    if state.reading_s is not None and reading.taken_s < state.reading_s:
        return _unknown(
            f"The reading of the GPU is {state.reading_s - reading.taken_s:.1f} s older than the "
            "one before"
        )
    if state.changed_s is not None and reading.taken_s < state.changed_s:
        return Reason(
            code=ReasonCode.WAITING,
            text="The GPU was not looked at since the cache changed.",
        )
    return reading


def _unknown(what: str) -> Reason:
    return Reason(
        code=ReasonCode.GPU_UNKNOWN, text=f"{what}; the cache stays as it is until that is known."
    )


def required_free(state: State, snapshot: Snapshot, reading: GpuReading | None) -> Required:
    """The cushion, or more where a rule or a window says so, and on top of it what is held.

    Without a list of processes rules stay as they were.
    """
    spec = snapshot.spec
    cushion_bytes = spec.limits.cushion_bytes
    rules = _active_rules(state, spec, reading)
    keep = (cushion_bytes, ReasonCode.VRAM_TAKEN, f"cushion {gib(cushion_bytes)}")
    for rule in spec.rules:
        if rule.name.casefold() in rules and rule.keep_free_bytes > keep[0]:
            text = f"{gib(rule.keep_free_bytes)} while {rule.name} runs"
            keep = (rule.keep_free_bytes, ReasonCode.PROCESS_RULE, text)
    if snapshot.local_minute is not None and snapshot.local_weekday is not None:
        for window in spec.windows:
            if (
                window.holds(snapshot.local_minute, snapshot.local_weekday)
                and window.keep_free_bytes > keep[0]
            ):
                text = f"{gib(window.keep_free_bytes)} in the window {window.name}"
                keep = (window.keep_free_bytes, ReasonCode.WINDOW, text)
    held_bytes = sum(_unused_bytes(hold, reading) for hold in spec.holds)
    free_bytes, code, text = keep
    if held_bytes:
        code = ReasonCode.HOLD
        text = f"{text}, {gib(held_bytes)} held: {'; '.join(h.reason for h in spec.holds)}"
    return Required(
        free_bytes=free_bytes + held_bytes,
        code=code,
        text=text,
        rules=rules,
        cushion_bytes=cushion_bytes,
    )


def _active_rules(state: State, spec: Spec, reading: GpuReading | None) -> frozenset[str]:
    names = frozenset(rule.name.casefold() for rule in spec.rules)
    if reading is None or reading.processes is None:
        return names & state.active_rules
    return names & {p.name.casefold() for p in reading.processes if p.name is not None}


def _unused_bytes(hold: Hold, reading: GpuReading | None) -> int:
    """What a hold's owner has not taken yet."""
    used_bytes = 0
    if reading is not None and reading.processes is not None:
        used_bytes = sum(
            process.used_bytes or 0 for process in reading.processes if process.pid in hold.pids
        )
    return max(hold.size_bytes - used_bytes, 0)


def room_for(
    engine: EngineFacts, spec: Spec, free_bytes: int, required: Required, *, fresh: bool
) -> Room:
    """What slots and KV may take beside the fixed costs, also those that are not held yet."""
    missing_bytes = max(fixed_bytes(engine.shape) - engine.fixed_held_bytes, 0)
    by_limit_bytes = None
    if spec.vram_limit_bytes is not None:
        by_limit_bytes = spec.vram_limit_bytes - fixed_bytes(engine.shape)
    return Room(
        free_bytes=free_bytes,
        by_free_bytes=free_bytes + engine.elastic_bytes - missing_bytes - required.free_bytes,
        by_limit_bytes=by_limit_bytes,
        required=required,
        fresh=fresh,
    )
