"""Recordings on a GPU, on one that is ordinary memory: what was chosen, real rows alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from freetokend.core.errors import InternalError
from freetokend.engine.work import StepWork, SweepEngine
from freetokend.enginehost.built import BuiltEngine
from freetokend.enginehost.routed_steps import routed_steps
from freetokend.enginehost.trace_control import STEP_CAPACITY_IDS, RoutingTaps
from freetokend.experts.gpu.device_tap import DeviceTap
from freetokend.experts.gpu.sweeps import SwitchedExperts
from freetokend.ftw.reader import FtwDirectory
from freetokend.traces.trace import SKIPPED, Phase, TraceShape
from tests.enginehost.cpu_platform import CpuPlatform, engine_on
from tests.enginehost.local_engine import ask

SHAPE = TraceShape(layers_count=4, experts_per_layer=8, experts_per_token=2)


class Seen:
    """What goes into the experts of a program, whoever runs them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.layers: list[torch.Tensor] = []
        dispatch = SwitchedExperts.dispatch

        def spy(
            experts: SwitchedExperts,
            layer: int,
            x: torch.Tensor,
            expert_ids: torch.Tensor,
            weights: torch.Tensor,
        ) -> torch.Tensor:
            self.layers.append(expert_ids.clone())
            return dispatch(experts, layer, x, expert_ids, weights)

        monkeypatch.setattr(SwitchedExperts, "dispatch", spy)

    def rows(self, work: StepWork) -> np.ndarray:
        """uint16 [layers, tokens, k]; SKIPPED where the last layer has computed fewer."""
        layers, self.layers = self.layers, []
        tokens, ids = work.tokens_count, np.full((4, work.tokens_count, 2), SKIPPED, np.uint16)
        ends = np.cumsum([len(one.token_ids) for one in work.sequences]) - 1
        wanted = [
            end for end, one in zip(ends, work.sequences, strict=True) if one.draw_index is not None
        ]
        for layer, found in enumerate(layers):
            if len(found) >= tokens:
                ids[layer] = found[:tokens].numpy()
            else:
                ids[layer, wanted] = found.numpy()
        return ids


@contextmanager
def taped(deep: FtwDirectory, **more: int | str) -> Iterator[tuple[BuiltEngine, RoutingTaps]]:
    sizes = {"max_context_tokens": 96, "max_running_count": 5, "kv_bytes": 2 << 20}
    given = {"backend": "hybrid", **sizes, **more}
    with engine_on(CpuPlatform(), deep, **given) as built:
        assert built.taps is not None
        for tap in built.taps.all:
            tap.start(STEP_CAPACITY_IDS)
        yield built, built.taps


@pytest.mark.parametrize(("backend", "slots"), [("hybrid", 3), ("offload", 3), ("offload", 32)])
def test_every_step_is_told_whether_it_is_captured_or_not(
    deep: FtwDirectory, monkeypatch: pytest.MonkeyPatch, backend: str, slots: int
) -> None:
    seen, kinds = Seen(monkeypatch), set()
    with taped(deep, backend=backend, slots_count=slots, step_tokens=40) as (built, taps):
        for one in range(3):
            built.scheduler.submit(ask(f"r{one}", range(7 * one, 7 * one + 5 + 25 * one), 9))
        while (work := built.scheduler.plan()) is not None:
            taps.steps.clear()
            seen.layers.clear()
            outcome = built.engine.run(work)
            expected = seen.rows(work)
            steps = routed_steps(work, taps.steps.take(), SHAPE)
            found = np.concatenate([one.ids for one in steps], axis=1)
            assert np.array_equal(np.sort(found, axis=1), np.sort(expected, axis=1))
            if len(steps) == 1:
                assert np.array_equal(found, expected)
            kinds.add(tuple(one.phase for one in steps))
            built.scheduler.commit(outcome)
    assert kinds == {(Phase.PREFILL,), (Phase.PREFILL, Phase.DECODE), (Phase.DECODE,)}


def test_a_sweep_is_told_whatever_is_computed_between_its_layers(
    deep: FtwDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    with taped(deep, slots_count=18, step_tokens=24, sweep_tokens=90) as (built, taps):
        assert isinstance(built.engine, SweepEngine)
        assert taps.sweeps is not None
        built.scheduler.submit(ask("p", range(60), 4))
        built.scheduler.set_sweep_from(2)
        work = built.scheduler.plan_sweep()
        assert work is not None
        seen = Seen(monkeypatch)
        sweep = built.engine.begin_sweep(work)
        while (outcome := sweep.advance()) is None:
            pass
        (step,) = routed_steps(work, taps.sweeps.take(), SHAPE)
        assert np.array_equal(step.ids, seen.rows(work))
        built.scheduler.commit_sweep(outcome)
        assert taps.steps.take().layers == ()


def test_a_tap_that_is_full_says_so_and_one_that_is_off_keeps_nothing() -> None:
    tap, ids = DeviceTap(pinned=False), torch.arange(6, dtype=torch.int32).view(3, 2)
    tap.keep(0, ids)
    with pytest.raises(InternalError, match="off"):
        tap.take()
    tap.start(8)
    tap.keep(0, ids)
    tap.keep(1, ids)
    full = tap.take()
    assert full.overflowed
    assert full.ids == ids.numpy().astype("<u2").tobytes()
    tap.keep(1, ids)
    again = tap.take()
    assert not again.overflowed
    assert [one.moe_layer_index for one in again.layers] == [1]
    tap.stop()
    assert not tap.is_on
