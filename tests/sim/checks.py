"""What must hold in every run, looked at from outside: nothing here asks the controller.

Each line that a check writes is a violation. Times in which the controller could not see or reach
the engine do not count for the two seconds that it has after a grab.
"""

from __future__ import annotations

from collections import deque

from freetokend.core.units import GIB, MIB
from freetokend.policy.controller import (
    TICK_S,
    EngineFacts,
    LoadModel,
    Phase,
    ReasonCode,
    Resize,
    Sleep,
    UnloadModel,
    Wake,
)
from freetokend.policy.controller.commands import EngineCommand
from freetokend.policy.kv_sizing import pages_for
from tests.sim.card import FIXED_BYTES, SHAPE
from tests.sim.engine import granule_bytes, plan_floor_bytes
from tests.sim.machine import Machine
from tests.sim.plan import Fault

GRAB_S = 2.0
HOLD_S = 30.0
HOLD_MOST_S = 240.0
REVERSAL_S = 60.0
# An answer that does not come is waited for so long in all, over six messages.
GIVEN_UP_S = 0.5 * (2**6 - 1)
GIVEN_UP_WAKE_S = 10.0 * (2**6 - 1)
CUSHION_BYTES = 1536 * MIB
MARGIN_BYTES = 512 * MIB
FLOOR_SLOTS = 8
FLOOR_PAGES = pages_for(4096, SHAPE.kv_page_tokens)


class Checks:
    """Looks at the machine after each step."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.violations: list[str] = []
        self.service_s = 0.0
        self.rooms: deque[tuple[float, int, int]] = deque()
        self.seen_rooms: deque[tuple[float, int]] = deque()
        self.outstanding: tuple[EngineCommand, float, int] | None = None
        self.commands: dict[int, EngineCommand] = {}
        self.resizes_s: deque[float] = deque()
        self.boots = machine.boots
        self.growths_s: list[float] = []
        self.reversals_s: list[float] = []
        self.last_shrink_s: float | None = None
        self.resizes_count = 0

    def look(self) -> None:
        """After a step: the world first, then what the controller commanded in it."""
        self._bytes()
        if self.machine.boots != self.boots or self.machine.engine is None:
            self.boots = self.machine.boots
            self.outstanding = None
            self.resizes_s.clear()
            self.growths_s.clear()
            self.rooms.clear()
        self._grab()
        self._settled()
        for command in self.machine.commands:
            if isinstance(command, Resize | Sleep | Wake):
                self._engine_command(command)
            if isinstance(command, UnloadModel | LoadModel):
                self._model_command(command)

    def _wrong(self, text: str) -> None:
        machine = self.machine
        self.violations.append(f"{machine.now_s - machine.start_s:.2f} s: {text}")

    def required_bytes(self) -> int:
        """What others shall have free, by the rules as people read them."""
        machine = self.machine
        snapshot = machine.snapshot
        assert snapshot is not None
        assert snapshot.local_minute is not None
        keep_bytes = CUSHION_BYTES
        if "game.exe" in machine.card.others_bytes:
            keep_bytes = max([keep_bytes, *(rule.keep_free_bytes for rule in machine.spec.rules)])
        for window in machine.spec.windows:
            if window.start_minute <= snapshot.local_minute < window.end_minute:
                keep_bytes = max(keep_bytes, window.keep_free_bytes)
        return keep_bytes + sum(hold.size_bytes for hold in machine.spec.holds)

    def _bytes(self) -> None:
        card, engine = self.machine.card, self.machine.engine
        held_bytes = 0 if engine is None else engine.fixed_held_bytes + engine.elastic_bytes
        if card.engine_bytes != held_bytes:
            self._wrong(f"the engine claims {held_bytes}, the card shows {card.engine_bytes}")
        if card.free_bytes < 0:
            self._wrong(f"the card has {card.free_bytes} bytes free")
        if engine is not None and engine.used_pages > engine.pages:
            self._wrong(f"{engine.used_pages} KV pages used of {engine.pages}")

    def _grab(self) -> None:
        """More than the card had room for at any time of the last two seconds."""
        machine = self.machine
        engine = machine.engine
        if engine is None or engine.phase is Phase.ASLEEP or engine.wakes_s is not None:
            self.rooms.clear()
            return
        if self._is_excused():
            return
        # With rules, nobody knows who plays while the driver gives no list.
        blind = machine.has(Fault.NO_PROCESSES) and bool(machine.spec.rules)
        if not blind:
            room_bytes = machine.card.free_bytes + engine.elastic_bytes - self.required_bytes()
        else:
            room_bytes = machine.card.free_bytes + engine.elastic_bytes - CUSHION_BYTES
        self.service_s += TICK_S
        pages = max(FLOOR_PAGES, engine.used_pages)
        floor_bytes = granule_bytes(FLOOR_SLOTS, pages)
        self.rooms.append((self.service_s, room_bytes, floor_bytes))
        while self.rooms[0][0] < self.service_s - GRAB_S:
            self.rooms.popleft()
        if self.service_s - self.rooms[0][0] < GRAB_S:
            return
        most_bytes = max(max(room, floor) for _, room, floor in self.rooms)
        if engine.elastic_bytes > most_bytes:
            self._wrong(
                f"{engine.elastic_bytes / GIB:.2f} GiB held two seconds after there was room for "
                f"{most_bytes / GIB:.2f} GiB only"
            )

    def _is_excused(self) -> bool:
        machine = self.machine
        return (
            not machine.reading_is_good or machine.facts_lost or machine.lost_generation is not None
        )

    def _settled(self) -> None:
        """Forget the command under way when the controller can know that it is done."""
        if self.outstanding is None:
            return
        command, sent_s, _ = self.outstanding
        facts = self.machine.facts
        given_up_s = GIVEN_UP_WAKE_S if isinstance(command, Wake) else GIVEN_UP_S
        if facts is None or self.machine.now_s - sent_s >= given_up_s:
            self.outstanding = None
            return
        if facts.answer is not None and facts.answer.generation == command.generation:
            if facts.answer.outcome.value == "failed" and self.growths_s:
                self.growths_s.pop()  # it took nothing that could be taken back
            # a deferred one is answered too: what comes after it need not be less
            if isinstance(command, Resize) or facts.answer.outcome.value != "done":
                self.outstanding = None
        if self.outstanding is None:
            return
        if isinstance(command, Resize):
            if (facts.slots_count, facts.kv_pages_count) == (
                command.slots_count,
                command.kv_pages_count,
            ):
                self.outstanding = None
        elif facts.phase is (Phase.ASLEEP if isinstance(command, Sleep) else Phase.AWAKE):
            self.outstanding = None

    def _engine_command(self, command: EngineCommand) -> None:
        known = self.commands.get(command.generation)
        if known is not None:
            if known != command:
                self._wrong(f"generation {command.generation} is two commands")
            return
        if self.commands and command.generation <= max(self.commands):
            self._wrong(f"generation {command.generation} comes after {max(self.commands)}")
        self.commands[command.generation] = command
        facts = self.machine.facts
        assert facts is not None
        after_bytes = 0
        if isinstance(command, Resize | Wake):
            after_bytes = granule_bytes(command.slots_count, command.kv_pages_count)
            self._sizes(command, facts, after_bytes)
        if self.outstanding is not None:
            before_bytes = self.outstanding[2]
            if not (isinstance(command, Resize) and after_bytes < before_bytes):
                self._wrong(f"generation {command.generation} while another is under way")
        self.outstanding = (command, self.machine.now_s, after_bytes)
        if isinstance(command, Resize):
            self._rate()
            self._swing(command, facts, after_bytes)

    def _sizes(self, command: Resize | Wake, facts: EngineFacts, after_bytes: int) -> None:
        least_slots = min(FLOOR_SLOTS, facts.slots_count) if isinstance(command, Resize) else 8
        least_pages = min(FLOOR_PAGES, facts.kv_pages_count) if isinstance(command, Resize) else 1
        if command.slots_count < least_slots or command.kv_pages_count < least_pages:
            self._wrong(f"below the floor: {command.slots_count}, {command.kv_pages_count} pages")
        if after_bytes <= facts.elastic_bytes:
            return
        machine = self.machine
        reading = machine.last_reading
        if not machine.reading_is_fresh or reading is None or reading.free_bytes is None:
            self._wrong(f"generation {command.generation} grows while the card is not known")
            return
        missing_bytes = 0
        if isinstance(command, Wake):
            missing_bytes = FIXED_BYTES
        most_bytes = reading.free_bytes + facts.elastic_bytes - missing_bytes
        engine = machine.engine
        if engine is not None and engine.elastic_bytes == facts.elastic_bytes:
            blind = machine.has(Fault.NO_PROCESSES) and bool(machine.spec.rules)
            most_bytes -= CUSHION_BYTES if blind else self.required_bytes()
            if after_bytes > max(most_bytes, plan_floor_bytes()):
                self._wrong(
                    f"generation {command.generation} grows to {after_bytes / GIB:.2f} GiB, there "
                    f"is room for {most_bytes / GIB:.2f} GiB"
                )

    def _rate(self) -> None:
        now_s = self.machine.now_s
        self.resizes_count += 1
        self.resizes_s.append(now_s)
        while now_s - self.resizes_s[0] >= 60.0:
            self.resizes_s.popleft()
        if len(self.resizes_s) > 6:
            self._wrong(f"{len(self.resizes_s)} resizes within a minute")

    def _swing(self, command: Resize, facts: EngineFacts, after_bytes: int) -> None:
        """No oscillation: an automatic growth waits for its hold after a grab, the hold doubles
        with each growth that was taken back within a minute, and never is room given that was not
        there all the time."""
        now_s = self.machine.now_s
        if command.reason.code is ReasonCode.VRAM_FREE:
            recent = sum(1 for at_s in self.reversals_s if now_s - at_s < 600.0)
            hold_s = min(HOLD_S * 2**recent, HOLD_MOST_S)
            if self.last_shrink_s is not None and now_s - self.last_shrink_s < hold_s:
                self._wrong(
                    f"grows {now_s - self.last_shrink_s:.1f} s after it shrank; {recent} growths "
                    "were taken back"
                )
            if after_bytes > facts.elastic_bytes:
                self._held(after_bytes)
                self.growths_s.append(now_s)
        elif after_bytes < facts.elastic_bytes and command.reason.code in (
            ReasonCode.VRAM_TAKEN,
            ReasonCode.HOLD,
            ReasonCode.PROCESS_RULE,
        ):
            if self.growths_s and now_s - self.growths_s[-1] <= REVERSAL_S - 2:
                self.reversals_s.append(now_s)
                self.growths_s.clear()
            self.last_shrink_s = now_s

    def _held(self, after_bytes: int) -> None:
        now_s = self.machine.now_s
        for at_s, room_bytes in self.seen_rooms:
            if now_s - at_s <= HOLD_S - 2 * TICK_S and room_bytes < after_bytes:
                self._wrong(
                    f"grows to {after_bytes / GIB:.2f} GiB; {now_s - at_s:.1f} s ago there was "
                    f"room for {room_bytes / GIB:.2f} GiB"
                )
                return

    def remember_room(self) -> None:
        """What the controller could see of the card in this step, for a later growth."""
        machine = self.machine
        engine, facts = machine.engine, machine.facts
        if engine is None or facts is None or not machine.reading_is_good or machine.facts_lost:
            return
        if engine.phase is Phase.ASLEEP:
            self.seen_rooms.clear()
            return
        blind = machine.has(Fault.NO_PROCESSES) and bool(machine.spec.rules)
        required_bytes = CUSHION_BYTES if blind else self.required_bytes()
        room_bytes = machine.card.free_bytes + engine.elastic_bytes - required_bytes
        self.seen_rooms.append((machine.now_s, room_bytes))
        while machine.now_s - self.seen_rooms[0][0] > HOLD_S:
            self.seen_rooms.popleft()

    def _model_command(self, command: UnloadModel | LoadModel) -> None:
        """The last rung is for a shortage, and what was left is taken up only with room for it."""
        available_bytes = self.machine.available_bytes
        if isinstance(command, UnloadModel):
            # carried out already: what it gave back is not what there was
            if available_bytes - 20 * GIB > 768 * MIB:
                self._wrong(f"unloads the model with {available_bytes / GIB:.2f} GiB available")
        elif available_bytes < 768 * MIB:
            self._wrong(f"loads the model into {available_bytes / GIB:.2f} GiB")

    def finish(self) -> None:
        """At the end of the run: every request has one answer."""
        for request in self.machine.plan.requests:
            came = request.came_s >= self.machine.start_s
            if came and len(request.answers) != 1:
                self._wrong(
                    f"a request of {request.tokens} tokens that came at "
                    f"{request.came_s - self.machine.start_s:.1f} s has the answers "
                    f"{request.answers}"
                )
