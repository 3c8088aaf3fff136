"""Exceptions of the engine's computations, and how many are too many."""

from __future__ import annotations

from typing import Final

from freetokend.core.errors import Reason, ResourceError
from freetokend.scheduler.limits import StepFault

# So many requests in a row that fail alone, or sweeps in a row that fail, without one that worked,
# mean that the engine itself is broken, whatever its probe says.
MOST_FAILURES_IN_A_ROW: Final = 8


def step_fault(error: Exception) -> StepFault:
    """An exception as the scheduler sees it; torch tells of a failed allocation in words only."""
    text = str(error) or type(error).__name__
    memory = (
        isinstance(error, MemoryError)
        or (isinstance(error, ResourceError) and error.reason is Reason.HOST_MEMORY)
        or "can't allocate memory" in text
    )
    return StepFault(message=text.splitlines()[0], memory=memory)
