"""Experts in slots computed by torch from the slots' bytes: what could differ does not, and a slot
with a wrong expert shows."""

from __future__ import annotations

import ctypes
import os
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch

from freetokend.engine.step import Engine
from freetokend.engine.work import SamplingParams, SequenceWork, StepWork
from freetokend.enginehost.build import KV_ELEMENT_BYTES, PAGE_TOKENS, read_model_facts
from freetokend.experts.bank import MappedBank
from freetokend.experts.cpu import bank_experts
from freetokend.ftw.reader import FtwDirectory
from freetokend.kvcache.arena import KvArena
from freetokend.kvcache.native_store import NativeKvStore
from freetokend.models.registry import build_program
from freetokend.native.executor import Executor
from freetokend.policy.kv_sizing import KvShape
from freetokend.tensor.native_program import NativeProgram
from freetokend.tensor.pool_weights import PoolWeights
from freetokend.tensor.protocols import Observer
from tests.enginehost.local_engine import attach, new_pool
from tests.enginehost.second_slots import SecondSlots

# Of a row of logits, by its norm. Both sum the same bf16 products in fp32 in another order, which
# now and then rounds an inner activation to the other bf16 neighbour.
BOUND = 0.02
TOP_K = 2
PAGES = 16
PROMPT, STEPS = 40, 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A mapped model, and runs of it."""

    directory: FtwDirectory
    mapped: MappedBank
    executor: Executor

    def logits(self, observer: Observer | None = None) -> torch.Tensor:
        """A prompt in one step and tokens one by one, always the same: fp32 [steps, vocab]."""
        index, facts = self.directory.index, read_model_facts(self.directory)
        program = NativeProgram(
            build_program(self.directory.model_config()),
            PoolWeights(self.mapped.region_address, index),
            self.executor,
            bank_experts(index.expert_bank, self.mapped.region_address),
            observer=observer,
        )
        shape = KvShape(
            layers_count=facts.layers_count,
            kv_heads_count=facts.kv_heads_count,
            head_size=facts.head_size,
            element_bytes=KV_ELEMENT_BYTES,
            page_tokens=PAGE_TOKENS,
        )
        engine = Engine(program, NativeKvStore(self.executor, KvArena(shape, PAGES)))
        tokens = [(7 * index + 3) % facts.vocab_size for index in range(PROMPT + STEPS)]
        rows = []
        for first, end in ((0, PROMPT), *((at, at + 1) for at in range(PROMPT, PROMPT + STEPS))):
            one = SequenceWork(
                key=0,
                token_ids=tokens[first:end],
                first_position=first,
                pages=array("i", range(PAGES)),
                sampling=SamplingParams(temperature=0.0),
                draw_index=0,
            )
            prepared = engine.prepare(StepWork(sequences=(one,)))
            rows.append(program.forward(prepared.step, prepared.kv))
        return torch.cat(rows)

    def second(
        self, slots_count: int, *, fill_misses: bool, plant: Callable[[int], None] | None = None
    ) -> tuple[torch.Tensor, SecondSlots]:
        """The same with experts by the second implementation, closed."""
        slots = SecondSlots(
            self.mapped,
            self.executor,
            slots_count=slots_count,
            top_k=TOP_K,
            fill_misses=fill_misses,
            plant=plant or (lambda _: None),
        )
        try:
            logits = self.logits(slots)
            if plant is None:
                slots.pool.check_integrity()
                assert slots.pool.verify(self.mapped).differences == ()
            return logits, slots
        finally:
            slots.close()


@pytest.fixture(scope="module")
def model(deep: FtwDirectory) -> Iterator[Model]:
    with (
        new_pool(deep) as pool,
        Executor(sorted(os.sched_getaffinity(0))[:1]) as executor,
        attach(pool, deep).mapping as mapping,
    ):
        mapped = MappedBank(bank=deep.index.expert_bank, region_address=mapping.region_address)
        yield Model(directory=deep, mapped=mapped, executor=executor)


@pytest.fixture(scope="module")
def expected(model: Model) -> torch.Tensor:
    return model.logits()


def worst(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float(((found - expected).norm(dim=1) / expected.norm(dim=1)).max())


@pytest.mark.parametrize("fill_misses", [False, True], ids=["split", "fill"])
@pytest.mark.parametrize("slots_count", [1, TOP_K, TOP_K + 1, 16, 32])
def test_logits_stay_within_the_bound_whatever_is_resident(
    model: Model, expected: torch.Tensor, slots_count: int, fill_misses: bool
) -> None:
    found, slots = model.second(slots_count, fill_misses=fill_misses)
    assert worst(found, expected) < BOUND
    assert slots.slot_pairs_count > 0
    assert (slots.cpu_pairs_count > 0) is not fill_misses


@pytest.mark.parametrize("slots_count", [TOP_K, 16])
def test_a_slot_with_a_wrong_expert_shows(
    model: Model, expected: torch.Tensor, slots_count: int
) -> None:
    record_bytes = model.mapped.bank.record_bytes
    planted = 0

    def plant(slot_address: int) -> None:
        nonlocal planted
        planted += 1
        if planted == 5:
            ctypes.memmove(slot_address, model.mapped.record_address(3, 7), record_bytes)

    found, _ = model.second(slots_count, fill_misses=True, plant=plant)
    assert planted >= 5
    assert worst(found, expected) > 3 * BOUND
