"""The split of misses follows the steps that are served: between two of them. Torch-free.

What is decided is `policy.split_following`'s; here the cache is told, and told back.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final, Protocol

from freetokend.core.cache_stats import Bandwidth, CallTimes, SplitCounters
from freetokend.core.logs import EventLogger
from freetokend.policy.backend_choice import LayerBranch
from freetokend.policy.fill_table import FillRates
from freetokend.policy.split_calls import split_times
from freetokend.policy.split_estimate import BranchLines, estimated_rates
from freetokend.policy.split_following import Following, after_step, begin_following

PROFILE: Final = "profile"
PASSIVE: Final = "passive"


class FollowedCache(Protocol):
    """An expert cache whose split can be changed between two steps."""

    @property
    def experts_per_layer_count(self) -> int:
        """The most that can be missing in a call."""
        ...

    def take_call_times(self) -> Sequence[CallTimes]:
        """Of the decode calls with misses since this was asked last."""
        ...

    def set_fill_counts(self, table: Sequence[Sequence[int]]) -> None:
        """The table of the layers that are split, [buckets][misses + 1]."""
        ...

    def set_branches(self, branches: Sequence[LayerBranch]) -> None:
        """What happens to each layer's misses."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowedSplit:
    """A cache with what its branches are and the rates that its table was made of."""

    cache: FollowedCache
    branches: tuple[LayerBranch, ...]
    rates: FillRates


class SplitSteps(Protocol):
    """Who is told of every decode step."""

    def step_begins(self) -> None: ...

    def step_ended(self) -> None: ...


class NoSplit:
    """`SplitSteps` of an engine that has nothing to split."""

    def step_begins(self) -> None:
        """Nothing."""

    def step_ended(self) -> None:
        """Nothing."""


class SplitFollower:
    """Owner of what was learned. All but `counters` is called by the loop's thread.

    A trial holds for one step alone, so that sweeps and resizes never meet one.
    """

    def __init__(
        self,
        followed: FollowedSplit,
        *,
        log: EventLogger,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cache = followed.cache
        self._configured = followed.branches
        self._split_layers = [
            layer for layer, branch in enumerate(followed.branches) if branch is LayerBranch.SPLIT
        ]
        self._clock = clock
        self._log = log
        self._began_s = clock()
        self._failed = False
        self._following = begin_following(
            followed.rates,
            followed.cache.experts_per_layer_count,
            len(self._split_layers),
            now_s=self._began_s,
        )

    @property
    def following(self) -> Following:
        """What holds now."""
        return self._following

    def step_begins(self) -> None:
        """The layer of the trial, if there is one, goes its way."""
        trial = self._following.trial
        if trial is not None and not self._failed:
            branches = self._branches()
            branches[self._split_layers[trial.layer]] = trial.branch
            self._cache.set_branches(branches)

    def step_ended(self) -> None:
        """Learn from the step; what follows from it holds from the next one on.

        A step that was computed does not fail because nothing could be learned from it: then the
        split stays what it is.
        """
        if self._failed:
            return
        try:
            self._learn()
        except Exception:
            self._failed = True
            self._log.exception("split-following-failed")
            self._following = replace(
                self._following,
                branch=LayerBranch.SPLIT,
                trial=None,
                reason="following failed, see the journal: the table stays what it is",
            )
            self._cache.set_branches(self._configured)

    def _learn(self) -> None:
        before = self._following
        calls = split_times(self._cache.take_call_times())
        after = after_step(before, calls, now_s=self._clock())
        self._following = after
        if before.trial is not None or after.branch is not before.branch:
            self._cache.set_branches(self._branches())
        if after.table is not before.table:
            self._cache.set_fill_counts(after.table)
        if after.branch is not before.branch:
            tell = self._log.info if after.branch is LayerBranch.SPLIT else self._log.warning
            tell("split-changed", branch=after.branch.value, cause=after.reason or "tried again")

    def _branches(self) -> list[LayerBranch]:
        branches = list(self._configured)
        for layer in self._split_layers:
            branches[layer] = self._following.branch
        return branches

    def counters(self) -> SplitCounters:
        """From any thread."""
        state, now_s = self._following, self._clock()
        rates = estimated_rates(state.estimate)
        fills, cpu = state.estimate.fills, state.estimate.cpu
        return SplitCounters(
            branch=state.branch.value if self._split_layers else "",
            reason=state.reason,
            bandwidths=(
                self._bandwidth("fill", fills, rates.fill_bytes_per_s, now_s, beside=True),
                self._bandwidth("fill", fills, rates.fill_alone_bytes_per_s, now_s, beside=False),
                self._bandwidth("cpu", cpu, rates.cpu_bytes_per_s, now_s, beside=True),
                self._bandwidth("cpu", cpu, rates.cpu_alone_bytes_per_s, now_s, beside=False),
            ),
            fill_fixed_s=rates.fill_fixed_s,
            cpu_fixed_s=rates.cpu_fixed_s,
            regret_ratio=state.regret_ratio,
            trials_count=state.trials_count,
            fallbacks_count=state.fallbacks_count,
            tables_count=state.tables_count,
        )

    def _bandwidth(
        self, link: str, lines: BranchLines, bytes_per_s: float, now_s: float, *, beside: bool
    ) -> Bandwidth:
        """A line that is moved with its partner is as old as that one's last sample."""
        taken_s = lines.taken_s
        return Bandwidth(
            link=link,
            beside=beside,
            bytes_per_s=bytes_per_s,
            source=PROFILE if taken_s is None else PASSIVE,
            age_s=max(now_s - (self._began_s if taken_s is None else taken_s), 0.0),
        )
