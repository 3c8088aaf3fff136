"""Another program that takes the device's memory while the cache is full, and gives it back.

On a GPU it allocates there. On the host device it takes ordinary memory, and a rig plays a device
of a fixed size: what is free is that size without what the slots have and without what the kernel
shows for the other process. How many slots there may be follows from the budget that an engine
starts with.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Final, NamedTuple

from freetokend.policy.vram_budget import VramFacts, VramWishes, plan_vram
from tests.gpu.bench import Bench
from tests.gpu.judge import LOGITS_ERROR, Judge
from tests.gpu.rows import Row

_CONTEXT_TOKENS: Final = 4096
_PAGE_TOKENS: Final = 16
# What a GPU's allocator may need beside what it was asked for.
_LEFT_BYTES: Final = 16 << 20
_MOST_WAIT_S: Final = 5.0

_ON_HOST: Final = """
import sys
print("there", flush=True)
taken = bytearray(int(sys.stdin.readline()))
taken[::4096] = b"1" * len(taken[::4096])
print("taken", flush=True)
sys.stdin.readline()
"""
_ON_CUDA: Final = """
import sys, torch
torch.zeros(1, device="cuda")
print("there", flush=True)
left = int(sys.stdin.readline())
free, _ = torch.cuda.mem_get_info()
taken = torch.empty(max(free - left, 1), dtype=torch.uint8, device="cuda")
print("taken", flush=True)
sys.stdin.readline()
"""


class Found(NamedTuple):
    """Slots before, beside and after the neighbour; bytes free for others beside it."""

    before: int
    beside: int
    after: int
    wanted_beside: int
    free_bytes: int
    cushion_bytes: int
    error: float


class Neighbour:
    """The other process."""

    def __init__(self, on_cuda: bool) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _ON_CUDA if on_cuda else _ON_HOST],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._expect("there")
        self._before_bytes = self._resident_bytes()

    def take(self, number: int) -> None:
        """On a GPU all but so many bytes, on the host so many."""
        self._stream(self._process.stdin).write(f"{number}\n")
        self._stream(self._process.stdin).flush()
        self._expect("taken")

    def taken_bytes(self) -> int:
        """On the host, as the kernel shows it; 0 when the process is gone."""
        if self._process.poll() is not None:
            return 0
        return max(self._resident_bytes() - self._before_bytes, 0)

    def leave(self) -> None:
        """End it and wait for that."""
        self._process.kill()
        self._process.communicate()

    def _resident_bytes(self) -> int:
        pages = Path(f"/proc/{self._process.pid}/statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")

    def _expect(self, word: str) -> None:
        said = self._stream(self._process.stdout).readline().strip()
        assert said == word, f"the neighbour said {said!r} and not {word!r}"

    @staticmethod
    def _stream(stream: IO[str] | None) -> IO[str]:
        assert stream is not None
        return stream


@contextmanager
def _neighbour(bench: Bench) -> Iterator[Neighbour]:
    one = Neighbour(bench.kind.driver is not None)
    try:
        yield one
    finally:
        one.leave()


def neighbour(bench: Bench, judge: Judge) -> list[Row]:
    """The cache gives way to it, computes the same, and grows again when it has left."""
    bench.split_misses(1.0)
    bench.pool.resize(bench.facts.experts_count)
    claim_bytes = bench.pool.committed_bytes
    # So that half of the slots have to go, and what they leave is whole granules.
    cushion_bytes = claim_bytes // 2
    size_bytes = 3 * claim_bytes
    with _neighbour(bench) as other:
        free_bytes = _free_bytes(bench, other, size_bytes)

        def slots_now() -> int:
            return _slots_of(bench, free_bytes(), cushion_bytes)

        before = slots_now()
        bench.pool.resize(before)
        judge.error_now(bench)
        other.take(_LEFT_BYTES if bench.kind.driver else size_bytes - claim_bytes)
        wanted = slots_now()
        if wanted:
            bench.pool.resize(wanted)
        beside, left_bytes = bench.pool.slots_count, free_bytes()
        bench.pool.check_integrity()
        error = judge.error_now(bench)
    deadline_s = time.monotonic() + _MOST_WAIT_S
    while (after := slots_now()) < before and time.monotonic() < deadline_s:
        time.sleep(0.05)  # a driver may need a moment to take back what the process had
    bench.pool.resize(after)
    error = max(error, judge.error_now(bench))
    bench.pool.check_integrity()
    bench.pool.resize(0)
    return [
        _row(
            Found(
                before=before,
                beside=beside,
                after=after,
                wanted_beside=wanted,
                free_bytes=left_bytes,
                cushion_bytes=cushion_bytes,
                error=error,
            )
        )
    ]


def _row(found: Found) -> Row:
    gave_way = 0 < found.beside == found.wanted_beside < found.before
    return Row(
        check="a neighbour process takes the device's memory and leaves",
        measured=f"{found.before}, {found.beside}, {found.after} slots; {found.free_bytes} bytes "
        f"free beside it of a cushion of {found.cushion_bytes}; {found.error:.1e}",
        gate=f"fewer slots beside it and as many after; >= 95 % of the cushion free; "
        f"<= {LOGITS_ERROR:.0e}",
        passed=gave_way
        and found.after == found.before
        and found.free_bytes >= 0.95 * found.cushion_bytes
        and found.error <= LOGITS_ERROR,
    )


def _free_bytes(bench: Bench, other: Neighbour, size_bytes: int) -> Callable[[], int]:
    """What the driver says, or what the rig's device of this size has left."""
    driver = bench.kind.driver
    if driver is not None:
        return lambda: driver.memory().free_bytes
    return lambda: max(size_bytes - bench.pool.claimed_bytes() - other.taken_bytes(), 0)


def _slots_of(bench: Bench, free_bytes: int, cushion_bytes: int) -> int:
    """As the budget has it, for experts and nothing else but the least of KV."""
    facts = bench.facts
    granularity_bytes = bench.arena.granularity_bytes
    plan = plan_vram(
        VramFacts(
            free_bytes=free_bytes + granularity_bytes,  # that of the KV, which is not claimed here
            own_bytes=bench.pool.committed_bytes,
            dense_bytes=0,
            workspace_bytes=0,
            state_bytes=0,
            graph_bytes=0,
            record_bytes=facts.record_bytes,
            experts_count=facts.experts_count,
            experts_per_layer_count=facts.experts_per_layer_count,
            top_k=bench.shape.top_k,
            kv_page_bytes=_PAGE_TOKENS,
            kv_page_tokens=_PAGE_TOKENS,
            model_context_tokens=_CONTEXT_TOKENS,
            max_running_count=1,
            on_host=bench.kind.driver is None,
            cushion_bytes=cushion_bytes,
            granularity_bytes=granularity_bytes,
        ),
        VramWishes(),
    )
    return plan.slots_count
