"""Sweeps over a fake program: where they stop, what is streamed when, and what failures leave."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

import pytest
import torch

from freetokend.engine.sweep import KnownAhead, SweepingEngine, layer_ends
from freetokend.engine.work import SamplingParams, SequenceWork, StepWork, SweepEngine
from freetokend.kvcache.torch_store import TorchKvStore
from freetokend.policy.kv_sizing import KvShape
from freetokend.tensor.program import Add, Experts, Op, StepProgram
from freetokend.tensor.protocols import KvView, StepInput
from freetokend.tensor.sampling import ChosenTokens

VOCAB = 50


def program(kinds: str) -> StepProgram:
    """ "e" for a MoE layer's experts, "." for any other op."""
    ops: list[Op] = []
    for at, kind in enumerate(kinds):
        experts = Experts(moe_layer_index=kinds[:at].count("e"), x=0, ids=1, weights=2, out=3)
        ops.append(experts if kind == "e" else Add(residual=0, delta=1))
    return StepProgram(buffers=(), ops=tuple(ops))


@dataclass
class FakeRunner:
    """Notes which ops were run; fails at the op `broken`."""

    program: StepProgram
    log: list[object]
    broken: int | None = None

    @property
    def vocab_size(self) -> int:
        return VOCAB

    def choose(self, step: StepInput, kv: KvView) -> ChosenTokens:
        self.log.append("choose")
        return self.chosen(step)

    def execute(self, step: StepInput, kv: KvView, *, first: int = 0, last: int = -1) -> None:
        if self.broken is not None and first <= self.broken < last:
            raise MemoryError
        self.log.append((first, last))

    def chosen(self, step: StepInput) -> ChosenTokens:
        ids = step.token_ids[step.logits_index].int()
        return ChosenTokens(token_ids=ids + 1, peaks=torch.full(ids.shape, 5.0))


@dataclass
class FakeStream:
    log: list[object] = field(default_factory=list)
    can_sweep: bool = True

    def prefetch(self, moe_layer_index: int, *, wanted: torch.Tensor | None = None) -> None:
        some = "" if wanted is None else f" {wanted.nonzero().flatten().tolist()}"
        self.log.append(f"prefetch {moe_layer_index}{some}")

    def let_go(self) -> None:
        self.log.append("let go")


@dataclass
class Rig:
    engine: SweepingEngine
    runner: FakeRunner
    stream: FakeStream
    log: list[object]


class TableOfFirst:
    """Routing by token id in all layers but the last."""

    def wanted(self, moe_layer_index: int, token_ids: torch.Tensor) -> torch.Tensor | None:
        if moe_layer_index == 2:
            return None
        chosen = torch.zeros(VOCAB, dtype=torch.int32)
        chosen[token_ids + moe_layer_index] = 1
        return chosen


def rig(kinds: str = "..e..e..e.", known_ahead: KnownAhead | None = None) -> Rig:
    log: list[object] = []
    runner, stream = FakeRunner(program(kinds), log), FakeStream(log)
    shape = KvShape(layers_count=1, kv_heads_count=1, head_size=2, element_bytes=4, page_tokens=4)
    store = TorchKvStore(shape, 8, kv_dtype=torch.float32, activation_dtype=torch.float32)
    engine = SweepingEngine(
        FakeRunner(program("."), log),
        runner,
        store,
        stream,
        sweep_from_tokens=7,
        known_ahead=known_ahead,
    )
    return Rig(engine, runner, stream, log)


def work(*draws: int | None) -> StepWork:
    return StepWork(
        sequences=tuple(
            SequenceWork(
                key=key,
                token_ids=[3, 4, 10 + key],
                first_position=0,
                pages=array("i", [key]),
                sampling=SamplingParams(temperature=0.0),
                draw_index=draw,
            )
            for key, draw in enumerate(draws)
        )
    )


def test_it_stops_behind_the_experts_of_each_layer_but_the_last() -> None:
    assert layer_ends(program("..e..e..e.")) == (3, 6, 10)
    assert layer_ends(program("..e.")) == (4,)
    assert layer_ends(program("e")) == (1,)
    assert layer_ends(program("...")) == (3,)


def test_every_op_is_run_once_and_the_ends_of_prompts_are_sampled() -> None:
    made = rig()
    assert isinstance(made.engine, SweepEngine)
    sweep = made.engine.begin_sweep(work(0, None, 0))
    assert made.log == ["prefetch 0"]
    assert sweep.advance() is None
    made.engine.run(work(0))  # a decode step in between uses the other program
    assert sweep.advance() is None
    outcome = sweep.advance()
    assert outcome is not None
    assert [(one.key, one.token_id) for one in outcome.outcomes] == [(0, 11), (2, 13)]
    assert made.log == ["prefetch 0", (0, 3), "choose", (3, 6), (6, 10)]


def test_experts_known_ahead_are_asked_for_before_the_layer_ahead_of_them() -> None:
    made = rig(known_ahead=TableOfFirst())
    sweep = made.engine.begin_sweep(work(0))
    while sweep.advance() is None:
        pass
    assert made.log == [
        "prefetch 0 [3, 4, 10]",
        "prefetch 1 [4, 5, 11]",
        (0, 3),
        (3, 6),
        (6, 10),
    ]


def test_no_room_for_two_layers_no_sweep() -> None:
    made = rig()
    assert made.engine.sweep_from_tokens == 7
    made.stream.can_sweep = False
    assert made.engine.sweep_from_tokens == 0


def test_one_that_is_abandoned_lets_go() -> None:
    made = rig()
    sweep = made.engine.begin_sweep(work(0))
    sweep.advance()
    sweep.abandon()
    assert made.log[-1] == "let go"


@pytest.mark.parametrize("broken", [0, 4, 9])
def test_one_that_fails_lets_go(broken: int) -> None:
    made = rig()
    made.runner.broken = broken
    sweep = made.engine.begin_sweep(work(0))
    for end in layer_ends(made.runner.program):
        if broken >= end:
            assert sweep.advance() is None
            continue
        with pytest.raises(MemoryError):
            sweep.advance()
        break
    assert made.log[-1] == "let go"
