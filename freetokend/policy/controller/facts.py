"""What the controller is told of the world at one instant: the `Snapshot`, and nothing else.

None means "not known" throughout.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from freetokend.policy.controller.spec import Spec
from freetokend.policy.readings import GpuReading, HostReading
from freetokend.policy.vram_budget import VramFacts


class Phase(StrEnum):
    """Whether the engine holds memory of the card."""

    AWAKE = "awake"
    ASLEEP = "asleep"


class Outcome(StrEnum):
    """What became of a command to the engine; the words of the link."""

    DONE = "done"
    UNCHANGED = "unchanged"
    DEFERRED = "deferred"
    SUPERSEDED = "superseded"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The engine's answer to the command of a generation. `text`: why it is deferred or failed."""

    generation: int
    outcome: Outcome
    text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionNeeds:
    """What requests need of the KV pool.

    longest_context_tokens: of one that runs or may be continued; waiting_prompt_tokens: of all
    prompts that wait for pages.
    """

    longest_context_tokens: int = 0
    waiting_prompt_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """The engine as it was last heard of.

    boot_count: goes up with every start of an engine. shape: the card's fixed costs and the
    model's sizes; its free_bytes, own_bytes and cushion_bytes are not looked at. The committed
    bytes are whole granules. fixed_held_bytes: what the engine holds now of weights, workspace,
    states and graphs; as much as `shape` says while it is awake, next to nothing while it sleeps.
    newest_generation: the highest that this engine was sent. idle_s: since the last request ended;
    0 while one runs or waits.
    """

    boot_count: int
    phase: Phase
    shape: VramFacts
    slots_count: int
    slots_bytes: int
    slots_capacity_count: int
    kv_pages_count: int
    kv_pages_used_count: int
    kv_pages_capacity_count: int
    kv_bytes: int
    fixed_held_bytes: int
    newest_generation: int = 0
    answer: Answer | None = None
    running_count: int = 0
    waiting_count: int = 0
    idle_s: float = 0.0
    needs: SessionNeeds = SessionNeeds()

    @property
    def elastic_bytes(self) -> int:
        """Slots and KV."""
        return self.slots_bytes + self.kv_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFacts:
    """What the host's memory is spent on, and what the ladder has done so far.

    spill_bytes: KV kept in host memory for later. idle_pools_bytes: pools of models that nobody
    uses. model_bytes: what loading the model takes, its pool and all.
    """

    spill_bytes: int = 0
    idle_pools_bytes: int = 0
    model_bytes: int = 0
    model_loaded: bool = True
    long_prompts_refused: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """Everything that a tick decides from.

    now_s: monotonic. gpu, host: None where the probe failed. engine: None while there is none.
    local_minute, local_weekday: the wall clock where the machine stands, minutes since midnight
    and 0 for Monday.
    """

    now_s: float
    spec: Spec
    engine: EngineFacts | None = None
    gpu: GpuReading | None = None
    host: HostReading | None = None
    host_facts: HostFacts = HostFacts()
    local_minute: int | None = None
    local_weekday: int | None = None
