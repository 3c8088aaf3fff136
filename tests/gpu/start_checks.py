"""Both ways to start the CPU from a graph."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Final

from freetokend.enginehost.cpu_start import choose_start
from freetokend.experts.gpu.cpu_fork import StreamFork
from freetokend.experts.gpu.doorbells import TritonDoorbell
from freetokend.experts.gpu.transfers import queue_in
from tests.gpu.bench import Bench
from tests.gpu.rows import GPU, Row, not_run

_MOST_WAIT_S: Final = 5.0
_CHECK: Final = "replayed steps whose CPU part is started by a doorbell"


def starts(bench: Bench, replay: Callable[[], tuple[float, float]]) -> list[Row]:
    """replay: steps as new graphs, all misses on the CPU; (error of the logits, gate).

    Not run where the CPU's part is a call.
    """
    fork = bench.fork
    if not isinstance(fork, StreamFork):
        return [not_run(_CHECK, GPU, "on the host device the CPU's part is a call")]
    interpreted = bench.kind.interpreted
    doorbell = TritonDoorbell(
        bench.branch,
        bench.buffers,
        bench.kind.device,
        queue_in=(lambda stream: nullcontext()) if interpreted else queue_in,
        limit_s=_MOST_WAIT_S,
        interpreted=interpreted,
    )
    reason = choose_start(
        fork,
        doorbell,
        bench.buffers,
        bench.kind.backend(),
        bench.kind.device,
        bench.kind.synchronize,
    )
    fork.doorbell = doorbell
    before = bench.branch.executions_count
    error, gate = replay()
    executed = bench.branch.executions_count - before
    fork.doorbell = None
    return [
        Row(
            check=_CHECK,
            measured=f"{error:.1e}, {executed} executions; quicker: {reason}",
            gate=f"<= {gate:.0e}, some executions, a doorbell does not fail",
            passed=error <= gate and executed > 0 and "failed" not in reason,
        )
    ]
