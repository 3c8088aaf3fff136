"""Engines that route by their tokens, before taps without native code."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from freetokend.engine.work import StepOutcome, StepWork
from freetokend.enginehost.trace_control import RoutingTaps, Traced
from freetokend.native.routing_tap import Tapped, TappedLayer
from freetokend.traces.trace import TraceShape
from tests.scheduler.paged_echo import PagedEchoEngine

SHAPE = TraceShape(layers_count=3, experts_per_layer=200, experts_per_token=2)


class FakeTap:
    """`native.routing_tap.RoutingTap` for `route` to fill."""

    def __init__(self) -> None:
        self.capacity_ids = 0
        self.overflowed = False
        self.error: Exception | None = None
        self._layers: list[tuple[int, NDArray[np.uint16]]] = []

    def start(self, capacity_ids: int) -> None:
        if self.error is not None:
            raise self.error
        self.capacity_ids = capacity_ids

    def stop(self) -> None:
        self.capacity_ids = 0
        self.clear()

    def clear(self) -> None:
        self._layers.clear()

    def take(self) -> Tapped:
        layers, self._layers = self._layers, []
        return Tapped(
            layers=tuple(
                TappedLayer(moe_layer_index=layer, tokens_count=len(ids), experts_per_token=2)
                for layer, ids in layers
            ),
            ids=b"".join(ids.tobytes() for _, ids in layers),
            overflowed=self.overflowed,
        )

    def route(self, layer: int, ids: NDArray[np.uint16]) -> None:
        if self.capacity_ids:
            self._layers.append((layer, ids))


def chosen(layer: int, token_ids: list[int]) -> NDArray[np.uint16]:
    """[tokens, 2]: what a layer chooses for these tokens."""
    return np.array([[token, 100 + layer] for token in token_ids], dtype="<u2").reshape(-1, 2)


def feed(tap: FakeTap, work: StepWork, layer: int) -> None:
    """What a layer of a step shows; the last one computes what wants a token."""
    if layer + 1 < SHAPE.layers_count:
        tokens = [token for one in work.sequences for token in one.token_ids]
    else:
        tokens = [one.token_ids[-1] for one in work.sequences if one.draw_index is not None]
    tap.route(layer, chosen(layer, tokens))


def traced(steps: FakeTap, sweeps: FakeTap | None = None) -> Traced:
    return Traced(taps=RoutingTaps(steps=steps, sweeps=sweeps), shape=SHAPE, source="echo")


class TappedEcho(PagedEchoEngine):
    """Shows its routing; fails behind the first layer when `fails_left` is above 0."""

    def __init__(self, tap: FakeTap) -> None:
        super().__init__(4)
        self.tap = tap
        self.fails_left = 0

    def run(self, work: StepWork) -> StepOutcome:
        for layer in range(SHAPE.layers_count):
            feed(self.tap, work, layer)
            if self.fails_left:
                self.fails_left -= 1
                raise RuntimeError("a layer fails")
        return super().run(work)
