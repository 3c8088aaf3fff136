"""Graph backends without a GPU: one that records operations, and one that repeats a call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import make_fx


class RecordingBackend:
    """Records the torch operations of a step and repeats those alone.

    As in a real graph no Python of the step runs again: what it read from Python is fixed, what it
    read from tensors that were there before is read again. Unlike there the operations are also
    done once while they are recorded.
    """

    def __init__(self) -> None:
        self.graphs: list[RecordedGraph] = []

    def capture(self, run: Callable[[], torch.Tensor]) -> RecordedGraph:
        """See `GraphBackend.capture`."""
        self.graphs.append(RecordedGraph(make_fx(run)()))
        return self.graphs[-1]


class RecordedGraph:
    """Operations; `result` stays where it is."""

    def __init__(self, operations: Any) -> None:
        self.operations = operations
        self.replays_count = 0
        self._result: torch.Tensor | None = None

    def replay(self) -> torch.Tensor:
        """See `CapturedGraph.replay`."""
        self.replays_count += 1
        found = self.operations()
        if self._result is None:
            self._result = found
        return self._result.copy_(found)


class RepeatingBackend:
    """Repeats the call itself: for steps with native code in them, which cannot be recorded."""

    def __init__(self) -> None:
        self.captures_count = 0

    def capture(self, run: Callable[[], torch.Tensor]) -> RepeatedCall:
        """See `GraphBackend.capture`."""
        self.captures_count += 1
        return RepeatedCall(run)


class RepeatedCall:
    """A call."""

    def __init__(self, run: Callable[[], torch.Tensor]) -> None:
        self.replay = run
