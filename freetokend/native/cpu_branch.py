"""The CPU's part of a step that a GPU runs as a graph: typed face of the `_exec` extension module.

The GPU starts it at addresses that never change: by a host function that the driver calls, or by a
doorbell, a word that the stream writes and whose answer it waits for.
"""

from __future__ import annotations

from dataclasses import dataclass

from freetokend.core.errors import InternalError
from freetokend.native import _exec
from freetokend.native.executor import Executor, faults
from freetokend.native.program import BankExperts


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuBranchBuffers:
    """Addresses of pinned memory that the GPU shares, T tokens and k experts per token.

    x: bf16 [T, H]; ids: int32 [T, k], experts of the layer, -1 where the GPU computes; weights:
    fp32 [T, k]; tokens: int32 [1], rows that count; y: fp32 [T, k, H], already weighted, rows of -1
    left as they are. ring: uint32 [2], (number, MoE layer), written by the GPU alone, the layer
    before a number other than the last; done: uint32 [1], the number that is answered, written by
    the CPU alone; 0 for none.
    """

    x: int
    ids: int
    weights: int
    tokens: int
    y: int
    tokens_capacity: int
    top_k: int
    ring: int = 0
    done: int = 0


class CpuBranch:
    """Experts of one MoE layer at a time, executed in the pool. Close it before its memory goes."""

    def __init__(self, executor: Executor, bank: BankExperts, buffers: CpuBranchBuffers) -> None:
        with faults():
            self._native: _exec.CpuBranch | None = _exec.CpuBranch(
                executor.native,
                bank.native,
                x=buffers.x,
                ids=buffers.ids,
                weights=buffers.weights,
                tokens=buffers.tokens,
                y=buffers.y,
                tokens_capacity=buffers.tokens_capacity,
                top_k=buffers.top_k,
                ring=buffers.ring,
                done=buffers.done,
            )

    @property
    def host_function(self) -> int:
        """Address of what the driver is to call: void (void*)."""
        return _exec.CpuBranch.host_function()

    def task(self, moe_layer_index: int) -> int:
        """What to call it with for a layer; good until `close`."""
        with faults():
            return self._open.task(moe_layer_index)

    def begin_step(self) -> None:
        """Watch the doorbell, at the price of a core, until `end_step`; also when it is watched."""
        with faults():
            self._open.begin_step()

    def end_step(self) -> None:
        """Rest. Does not wait for what is being computed."""
        self._open.end_step()

    def check(self) -> None:
        """InternalError with what went wrong since the last call; the step's result is void."""
        fault = self._open.take_fault()
        if fault:
            raise InternalError(f"the CPU's part of a step failed: {fault}")

    @property
    def executions_count(self) -> int:
        """(token, expert) pairs; from any thread."""
        return self._open.executions_count

    @property
    def busy_s(self) -> float:
        """Time spent computing; from any thread."""
        return self._open.busy_s

    def close(self) -> None:
        """End its thread. May be called twice."""
        self._native = None

    @property
    def _open(self) -> _exec.CpuBranch:
        if self._native is None:
            raise InternalError("the CPU branch is closed")
        return self._native
