"""The choice of experts on its way to whoever runs them: typed face of `_exec`.

A tap stands before a program's dispatch and forwards every call unchanged; results are those
without it. While it is off it costs one atomic load per layer.
"""

from __future__ import annotations

from dataclasses import dataclass

from freetokend.native import _exec
from freetokend.native.executor import faults
from freetokend.native.program import NativeDispatch


@dataclass(frozen=True, slots=True, kw_only=True)
class TappedLayer:
    """One call of a step: so many tokens chose `experts_per_token` experts each."""

    moe_layer_index: int
    tokens_count: int
    experts_per_token: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Tapped:
    """What a tap kept. ids: u16 little endian [layers][tokens][k]; overflowed: some had no room."""

    layers: tuple[TappedLayer, ...]
    ids: bytes
    overflowed: bool


class RoutingTap:
    """A NativeDispatch before another. All but `native` is for the thread that runs steps."""

    def __init__(self, inner: NativeDispatch) -> None:
        with faults():
            self.native = _exec.RoutingTap(inner.native)

    def start(self, capacity_ids: int) -> None:
        """Keep what comes from now on, at most so many ids until `take` or `clear`."""
        with faults():
            self.native.start(capacity_ids)

    def stop(self) -> None:
        """Keep nothing any more, and give the memory back."""
        self.native.stop()

    def clear(self) -> None:
        """Forget what was kept: another step begins."""
        self.native.clear()

    def take(self) -> Tapped:
        """What was kept since the last `clear` or `take`, forgotten here."""
        with faults():
            layers, ids, overflowed = self.native.take()
        return Tapped(
            layers=tuple(
                TappedLayer(moe_layer_index=layer, tokens_count=tokens, experts_per_token=top_k)
                for layer, tokens, top_k in layers
            ),
            ids=ids,
            overflowed=overflowed,
        )
