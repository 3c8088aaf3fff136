"""What follows when a GPU ends the engine that uses it, where the CPU can serve as well.

The next engine does without the GPU at once: starting the same one again would spend the restart
budget on a device that fails. The GPU is tried again later, each time after twice as long. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from freetokend.core.errors import Reason

# By these an operator or the kernel's memory killer ends an engine; a driver does not.
_OTHERS_SIGNALS: Final = ("SIGKILL", "SIGTERM", "SIGINT", "SIGHUP", "SIGSTOP")
_GPU_REASONS: Final = frozenset({Reason.DEVICE_UNUSABLE, Reason.DEVICE_MEMORY, Reason.INTERNAL})


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuPatience:
    """When a GPU that has failed is tried again: after first_s, and each time twice that."""

    first_s: float = 600.0
    most_s: float = 86_400.0
    forget_s: float = 86_400.0  # an engine that lived so long on the GPU makes it a new one


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuState:
    """faults_count: of all; recent_count: without a long good time between; fault: why it is not
    used now, empty when it may be; retry_s: when it is tried again."""

    faults_count: int = 0
    recent_count: int = 0
    fault: str = ""
    retry_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuDeath:
    """How an engine ended. signal: its name, empty when it exited; stuck: it was replaced because
    it did nothing any more; lived_s: since it was started."""

    on_gpu: bool
    signal: str
    stuck: bool
    reason: Reason
    lived_s: float
    cause: str


def is_gpu_fault(death: GpuDeath) -> bool:
    """Whether the GPU is the likely cause: a crash in native code, a hang, or an engine that says
    its device computes nothing any more."""
    if not death.on_gpu:
        return False
    if death.stuck:
        return True
    if death.signal:
        return death.signal not in _OTHERS_SIGNALS
    return death.reason in _GPU_REASONS


def after_engine_death(
    patience: GpuPatience, state: GpuState, death: GpuDeath, now_s: float
) -> GpuState:
    """For an engine that may do without a GPU."""
    if not is_gpu_fault(death):
        return state
    recent_count = 1 if death.lived_s >= patience.forget_s else state.recent_count + 1
    wait_s = min(patience.first_s * 2.0 ** min(recent_count - 1, 32), patience.most_s)
    return GpuState(
        faults_count=state.faults_count + 1,
        recent_count=recent_count,
        fault=death.cause,
        retry_s=now_s + wait_s,
    )


def tried_again(state: GpuState) -> GpuState:
    """The next engine may use it."""
    return replace(state, fault="", retry_s=None)
