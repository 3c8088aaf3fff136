"""Rounds of alternating bursts: how two programs are compared on a machine that is never quiet.

Each round runs every side once, for a fraction of a second, in turn; ratios are taken within a
round and reported as median and range. One side is the ceiling: the rate at which the same threads
read memory. A round is void when a side waited for a core for more than 3 % of its time, or when
the ceiling fell below 85 % of its best. Three rounds may be repeated; if then fewer than wanted
are left the machine was busy, which is neither a pass nor a miss.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from benchmarks.peers.cache import PeerUnavailableError
from benchmarks.result import Row

LEAST_CPU_SHARE: Final = 0.97
LEAST_CEILING_SHARE: Final = 0.85
EXTRA_ROUNDS: Final = 3
# A pass: the median reaches the goal, and this part of the rounds comes within 5 % of it.
PASSING_SHARE: Final = 5 / 7
NEAR_GOAL: Final = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class Burst:
    """What a side did in one burst: units of work per second, and its share of the cpu time that
    it asked for (1.0 when no thread ever waited for a core)."""

    rate: float
    cpu_share: float


class Side(Protocol):
    """A program that is timed."""

    @property
    def name(self) -> str: ...

    def burst(self, seconds: float) -> Burst:
        """Work for about `seconds` and tell the rate. The first burst may be a warm-up."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How many rounds are wanted, how long the bursts are."""

    rounds_count: int = 7
    burst_s: float = 0.3
    ceiling_s: float = 0.1

    @classmethod
    def quick(cls) -> Plan:
        """For a look; 7 rounds all the same, but short ones."""
        return cls(burst_s=0.1, ceiling_s=0.05)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The rounds that count: per round the bursts by side, in the order of `names`.

    On a busy machine all rounds, so that their figures can be shown for what they are.
    """

    names: tuple[str, ...]
    rounds: tuple[tuple[Burst, ...], ...]
    void_count: int
    busy: bool

    def disturbance(self) -> str:
        """How quiet the machine was, in one line."""
        shares = [burst.cpu_share for bursts in self.rounds for burst in bursts]
        ceilings = [bursts[-1].rate for bursts in self.rounds]
        return (
            f"{self.void_count} void rounds; least share of cpu time {min(shares):.2f}, "
            f"least ceiling {min(ceilings) / max(ceilings):.2f} of the best"
        )

    def rates(self, name: str) -> list[float]:
        """Of one side, per round."""
        index = self.names.index(name)
        return [bursts[index].rate for bursts in self.rounds]

    def row(
        self,
        case: str,
        ours: str,
        rival: str,
        unit: str,
        goal: float,
        *,
        scale: float = 1.0,
        page_bytes: int = 0,
    ) -> Row:
        """The comparison of two sides. `unit` is what rates times `scale` are; higher is better."""
        own = [scale * rate for rate in self.rates(ours)]
        other = [scale * rate for rate in self.rates(rival)]
        ratios = [mine / theirs for mine, theirs in zip(own, other, strict=True)]
        return Row(
            case=case,
            ours=statistics.median(own) if own else 0.0,
            rival=rival,
            rival_value=statistics.median(other) if other else 0.0,
            unit=unit,
            ratio=statistics.median(ratios) if ratios else 0.0,
            goal=goal,
            ratio_min=min(ratios, default=0.0),
            ratio_max=max(ratios, default=0.0),
            rounds_count=len(ratios),
            verdict=verdict(ratios, goal, busy=self.busy),
            page_bytes=page_bytes,
        )


def verdict(ratios: Sequence[float], goal: float, *, busy: bool) -> str:
    """ "pass", "miss", "reported" (no goal) or "machine busy"."""
    if busy:
        return "machine busy"
    if not goal:
        return "reported"
    near_count = sum(ratio >= NEAR_GOAL * goal for ratio in ratios)
    passed = statistics.median(ratios) >= goal and near_count >= PASSING_SHARE * len(ratios)
    return "pass" if passed else "miss"


def is_busy(undisturbed: Sequence[Burst]) -> bool:
    """Whether too many rounds were disturbed, by what their reference (a ceiling, or ours alone)
    reached in each: for benchmarks that cannot repeat a round."""
    best = max(burst.rate for burst in undisturbed)
    steady_count = sum(
        burst.cpu_share >= LEAST_CPU_SHARE and burst.rate >= LEAST_CEILING_SHARE * best
        for burst in undisturbed
    )
    return steady_count < PASSING_SHARE * len(undisturbed)


def play(sides: Sequence[Side], ceiling: Side, plan: Plan) -> Outcome:
    """Run the rounds; the ceiling is the last of the names."""
    names = (*(side.name for side in sides), ceiling.name)
    for side in sides:
        side.burst(plan.burst_s / 3)
    played: list[tuple[Burst, ...]] = []
    kept: list[tuple[Burst, ...]] = []
    while len(kept) < plan.rounds_count and len(played) < plan.rounds_count + EXTRA_ROUNDS:
        bursts = [side.burst(plan.burst_s) for side in sides]
        played.append((*bursts, ceiling.burst(plan.ceiling_s)))
        # A better ceiling found later voids earlier rounds too.
        best = max(round_[-1].rate for round_ in played)
        kept = [
            round_
            for round_ in played
            if all(burst.cpu_share >= LEAST_CPU_SHARE for burst in round_)
            and round_[-1].rate >= LEAST_CEILING_SHARE * best
        ]
    busy = len(kept) < plan.rounds_count
    return Outcome(
        names=names,
        rounds=tuple(played if busy else kept),
        void_count=len(played) - len(kept),
        busy=busy,
    )


@dataclass(kw_only=True)
class _Watched:
    """A side that remembers that it failed."""

    side: Side
    failed: bool = False

    @property
    def name(self) -> str:
        return self.side.name

    def burst(self, seconds: float) -> Burst:
        try:
            return self.side.burst(seconds)
        except PeerUnavailableError:
            self.failed = True
            raise


def play_rivals(
    ours: Side, rivals: Sequence[Side], ceiling: Side, plan: Plan, notes: list[str]
) -> Outcome:
    """`play` of ours with those rivals that last: one that fails in the middle becomes a note, and
    the rounds begin anew without it. The outcome's `names` tell which are left."""
    watched = [_Watched(side=rival) for rival in rivals]
    while True:
        try:
            return play([ours, *watched], ceiling, plan)
        except PeerUnavailableError as error:
            notes.append(f"left out in the middle of the rounds: {error}")
            watched = [one for one in watched if not one.failed]


def waited_s(ignored_ids: Sequence[int] = ()) -> float:
    """Seconds for which threads of this process were ready to run and had no core, in all.

    `ignored_ids`: threads that are meant to wait. 0 where the kernel does not account for it.
    """
    total_ns = 0
    for task in Path("/proc/self/task").iterdir():
        if int(task.name) in ignored_ids:
            continue
        try:
            total_ns += int((task / "schedstat").read_text().split()[1])
        except (OSError, IndexError):
            continue  # a thread that has just ended, or no such accounting
    return total_ns / 1e9


def run_burst(
    call: Callable[[int], None],
    work_per_call: float,
    seconds: float,
    threads_count: int,
    *,
    first: int = 0,
    ignored_ids: Sequence[int] = (),
) -> tuple[Burst, int]:
    """Calls numbered from `first` on until the time is over; the burst and the next number."""
    waited_before_s = waited_s(ignored_ids)
    index = first
    start_s = time.perf_counter()
    while True:
        call(index)
        index += 1
        elapsed_s = time.perf_counter() - start_s
        if elapsed_s >= seconds:
            break
    lost_s = waited_s(ignored_ids) - waited_before_s
    share = max(0.0, 1.0 - lost_s / (threads_count * elapsed_s))
    return Burst(rate=(index - first) * work_per_call / elapsed_s, cpu_share=share), index


class CallSide:
    """A side in this process: numbered calls, the caller being one of its threads."""

    def __init__(
        self, name: str, call: Callable[[int], None], work_per_call: float, threads_count: int
    ) -> None:
        self._name = name
        self._call = call
        self._work_per_call = work_per_call
        self._threads_count = threads_count
        self._next = 0

    @property
    def name(self) -> str:
        return self._name

    def burst(self, seconds: float) -> Burst:
        burst, self._next = run_burst(
            self._call, self._work_per_call, seconds, self._threads_count, first=self._next
        )
        return burst


@contextmanager
def foreground(asked: bool) -> Iterator[None]:
    """While rounds are played: this session before all others, where that is asked for.

    Sets the niceness of the session's autogroup, for which root is needed. Raises OSError where
    that is impossible. Start the benchmark with `setsid`, or everything else that was started
    from the same terminal is put first as well.
    """
    if not asked:
        yield
        return
    group = Path("/proc/self/autogroup")
    before = group.read_text(encoding="ascii").split()[-1]
    group.write_text("-20", encoding="ascii")
    try:
        yield
    finally:
        group.write_text(before, encoding="ascii")
