"""The controller: snapshots of the machine in, commands with reasons out. Pure.

Read `facts` (what it is told), `spec` (what people want), `commands` (what it decides), then
`tick`. `sizing` has the rules for the cache, `sleeping` those for the card as a whole,
`host_ladder` those for the host's memory.
"""

from freetokend.policy.controller.commands import (
    Command,
    DropIdlePools,
    DropSpill,
    EngineCommand,
    HostCommand,
    LoadModel,
    Reason,
    ReasonCode,
    RefuseLongPrompts,
    RefuseWaiting,
    Resize,
    Sleep,
    UnloadModel,
    Wake,
)
from freetokend.policy.controller.facts import (
    Answer,
    EngineFacts,
    HostFacts,
    Outcome,
    Phase,
    SessionNeeds,
    Snapshot,
)
from freetokend.policy.controller.spec import (
    TICK_S,
    Floor,
    Hold,
    HostLimits,
    Limits,
    ProcessRule,
    Spec,
    Window,
    limits_for,
)
from freetokend.policy.controller.state import State, Trigger
from freetokend.policy.controller.tick import tick

__all__ = [
    "TICK_S",
    "Answer",
    "Command",
    "DropIdlePools",
    "DropSpill",
    "EngineCommand",
    "EngineFacts",
    "Floor",
    "Hold",
    "HostCommand",
    "HostFacts",
    "HostLimits",
    "Limits",
    "LoadModel",
    "Outcome",
    "Phase",
    "ProcessRule",
    "Reason",
    "ReasonCode",
    "RefuseLongPrompts",
    "RefuseWaiting",
    "Resize",
    "SessionNeeds",
    "Sleep",
    "Snapshot",
    "Spec",
    "State",
    "Trigger",
    "UnloadModel",
    "Wake",
    "Window",
    "limits_for",
    "tick",
]
