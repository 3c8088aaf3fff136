"""While a long prompt is swept, a resize waits for the layer at hand and not for the prompt."""

from __future__ import annotations

import queue

from freetokend.core import logs
from freetokend.engine.work import StepOutcome, StepWork, Sweep, SweepEngine
from freetokend.enginehost.built import BuiltEngine
from freetokend.enginehost.cache_control import CacheCommands
from freetokend.enginehost.inbox import Inbox, Incoming
from freetokend.enginehost.loop import LoopCommands, StepLoop
from freetokend.enginehost.trace_control import TraceCommands, no_experts
from freetokend.ftw.reader import FtwDirectory
from freetokend.link.messages import (
    CacheResized,
    EngineMessage,
    ResizeCache,
    ResizeOutcome,
    Shutdown,
    StepReport,
)
from tests.enginehost.local_engine import Served, ask, local_engine, serve

LOG = logs.logger("freetokend.test")
PROMPT = tuple(range(3, 203))
SLOTS = (20, 17, 32, 16, 24, 18)


class Grabbed:
    """Somebody takes memory in the middle of every layer of every sweep."""

    def __init__(self, built: BuiltEngine, source: queue.SimpleQueue[Incoming]) -> None:
        assert isinstance(built.engine, SweepEngine)
        self.engine: SweepEngine = built.engine
        self.source = source
        self.layers_count = 0
        self.asked: dict[int, int] = {}
        self.sweep: Sweep | None = None

    def run(self, work: StepWork) -> StepOutcome:
        return self.engine.run(work)

    @property
    def sweep_from_tokens(self) -> int:
        return self.engine.sweep_from_tokens

    def begin_sweep(self, work: StepWork) -> Grabbed:
        self.sweep = self.engine.begin_sweep(work)
        return self

    def advance(self) -> StepOutcome | None:
        assert self.sweep is not None
        generation = self.layers_count = self.layers_count + 1
        self.asked[generation] = self.layers_count
        self.source.put(
            ResizeCache(
                generation=generation,
                slots_count=SLOTS[generation % len(SLOTS)],
                kv_pages_count=40 + 10 * generation,
                urgent=True,
            )
        )
        return self.sweep.advance()

    def abandon(self) -> None:
        assert self.sweep is not None
        self.sweep.abandon()


class Link:
    """Notes how many layers were computed when an answer came."""

    def __init__(self) -> None:
        self.engine: Grabbed | None = None
        self.served = Served()
        self.answers: dict[int, tuple[CacheResized, int]] = {}

    def send(self, message: EngineMessage) -> None:
        assert self.engine is not None
        if isinstance(message, CacheResized):
            self.answers[message.generation] = message, self.engine.layers_count
        elif isinstance(message, StepReport):
            self.served.take(message.outputs)

    def progress(self, count: int = 1) -> None:
        """Nobody watches."""

    def set_busy(self, busy: bool) -> None:
        """Nobody watches."""


def test_a_resize_waits_for_one_layer_at_most(deep: FtwDirectory) -> None:
    requests = [ask("decodes", range(7), 60), ask("prompt", PROMPT, 12)]
    with local_engine(deep, backend="cpu") as built:
        expected = {one.request_id: serve(built, [one]).tokens[one.request_id] for one in requests}
    with local_engine(
        deep, device="host", backend="offload", slots_count=20, sweep_tokens=100
    ) as built:
        source: queue.SimpleQueue[Incoming] = queue.SimpleQueue()
        link, engine = Link(), Grabbed(built, source)
        link.engine = engine
        for one in (*requests, Shutdown(drain=True)):
            source.put(one)
        loop = StepLoop(
            inbox=Inbox(source),
            link=link,
            scheduler=built.scheduler,
            engine=engine,
            probe=lambda: None,
            gauges=lambda stats: stats,
            log=LOG,
            commands=LoopCommands(
                cache=CacheCommands(built.cache, kv=built.kv, send=link.send, log=LOG),
                traces=TraceCommands(
                    no_experts(), send=link.send, waiting_bytes=lambda: 0, log=LOG
                ),
            ),
        )
        assert loop.run() == 0
    assert dict(link.served.tokens) == expected
    assert len(engine.asked) >= 2 * 2, "two sweeps of two layers or more"
    assert link.answers.keys() == engine.asked.keys()
    for generation, (answer, layers_count) in link.answers.items():
        assert layers_count == engine.asked[generation], "answered before the next layer"
        assert answer.outcome is ResizeOutcome.DONE
        assert answer.slots_count == SLOTS[generation % len(SLOTS)]
        assert answer.kv_pages_count == 40 + 10 * generation
