"""Step programs: typed face of the `_exec` extension module.

A program is a list of ops over row buffers (`freetokend.tensor.program` says what each computes);
one `run` executes all of them on an Executor's threads. Buffers, weights and inputs are given by
address, as in `executor`. Memory of the buffers grows to the largest step and is kept, so a step
allocates nothing once sizes have settled.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from freetokend.native import _exec
from freetokend.native.executor import Executor, faults


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferSpec:
    """per_output: one row per output of the step instead of one per token."""

    row_bytes: int
    per_output: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class BankSpec:
    """Expert records in memory: `layers_count` MoE layers of equal records one after another.

    Names of format and activation are those of `Executor.experts`; fast: int8 activations.
    """

    records: int
    record_bytes: int
    layers_count: int
    experts_per_layer_count: int
    hidden_size: int
    intermediate_size: int
    weight_format: str
    has_bias: bool
    activation: str
    activation_limit: float
    activation_alpha: float
    fast: bool


class BankExperts:
    """Every routed expert executed in place by the CPU; counts (token, expert) executions."""

    def __init__(self, bank: BankSpec) -> None:
        with faults():
            self.native = _exec.BankExperts(
                bank.records,
                record_bytes=bank.record_bytes,
                layers_count=bank.layers_count,
                experts_per_layer_count=bank.experts_per_layer_count,
                hidden_size=bank.hidden_size,
                intermediate_size=bank.intermediate_size,
                weight_format=bank.weight_format,
                has_bias=bank.has_bias,
                activation=bank.activation,
                activation_limit=bank.activation_limit,
                activation_alpha=bank.activation_alpha,
                fast=bank.fast,
            )

    @property
    def executions_count(self) -> int:
        """From any thread."""
        return self.native.executions_count


class NativeDispatch(Protocol):
    """Whoever runs a program's experts in native code."""

    @property
    def native(self) -> _exec.ExpertDispatch: ...


class KvPages:
    """Addresses of the pages of every layer: bf16 [pages, Nkv, page_tokens, D] keys and values.

    The memory must outlive this object and the steps made with it.
    """

    def __init__(
        self,
        layers: Sequence[tuple[int, int]],
        *,
        pages_count: int,
        kv_heads_count: int,
        page_tokens: int,
        head_size: int,
    ) -> None:
        with faults():
            self.native = _exec.KvPages(
                list(layers),
                pages_count=pages_count,
                kv_heads=kv_heads_count,
                page_tokens=page_tokens,
                head_size=head_size,
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInputs:
    """Addresses of one step's inputs: T tokens, O outputs, S sequences.

    token_ids: int64 [T]; outputs: int64 [O], which tokens want logits (O may be 0); sampling:
    [O] as `Executor.sample` has them, 0 where the op that reads them is not run; page_table: int32
    [S, max_pages]; sequence_index, positions: int32 [T]; rotations: per rope table of the program
    its address, fp32 [positions, 2, head size / 2] (cosines, sines), and its positions.
    """

    token_ids: int
    tokens_count: int
    outputs: int
    outputs_count: int
    page_table: int
    sequence_index: int
    positions: int
    sequences_count: int
    max_pages: int
    rotations: tuple[tuple[int, int], ...]
    sampling: int = 0


class Program:
    """Ops in the order in which they were added. One step at a time."""

    def __init__(self, buffers: Sequence[BufferSpec], experts: NativeDispatch | None) -> None:
        """`experts` runs the routed experts of the program's MoE layers."""
        with faults():
            self._native = _exec.Program(
                [(one.row_bytes, one.per_output) for one in buffers],
                None if experts is None else experts.native,
            )

    @contextmanager
    def adding(self) -> Iterator[_exec.Program]:
        """The native program, to add ops to. InternalError for an op that does not fit."""
        with faults():
            yield self._native

    @property
    def ops_count(self) -> int:
        return self._native.ops_count

    @property
    def finished_ops_count(self) -> int:
        """Ops finished since the program was made; from any thread, also during a run."""
        return self._native.finished_ops_count

    @property
    def arena_bytes(self) -> int:
        """What all buffers take, for the largest step so far."""
        return self._native.arena_bytes

    def prepare(self, inputs: StepInputs, kv: KvPages) -> _exec.Step:
        """A step to run; makes room for it. What `inputs` points at must outlive the step."""
        with faults():
            step = _exec.Step(
                token_ids=inputs.token_ids,
                tokens=inputs.tokens_count,
                outputs=inputs.outputs,
                outputs_count=inputs.outputs_count,
                sampling=inputs.sampling,
                page_table=inputs.page_table,
                sequence_index=inputs.sequence_index,
                positions=inputs.positions,
                sequences=inputs.sequences_count,
                max_pages=inputs.max_pages,
                kv=kv.native,
                rotations=list(inputs.rotations),
            )
            self._native.prepare(step)
            return step

    def run(self, executor: Executor, step: _exec.Step, first: int = 0, last: int = -1) -> None:
        """Execute ops [first, last) (-1: to the end) of the step that was prepared last."""
        with faults():
            self._native.run(
                executor.native, step, first, self._native.ops_count if last < 0 else last
            )

    def buffer(self, index: int) -> int:
        """Address of a buffer; valid until a larger step is prepared."""
        with faults():
            return self._native.buffer(index)
