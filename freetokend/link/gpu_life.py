"""What the supervisor knows of the GPU: whether the next engine may use it, and when again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from freetokend.link.engine_settings import EngineSettings
from freetokend.link.session import EngineEnd
from freetokend.policy.gpu_faults import (
    GpuDeath,
    GpuPatience,
    GpuState,
    after_engine_death,
    tried_again,
)


class GpuLife:
    """Lives in the event loop. Of an engine that was told to use a GPU nothing is ever given up."""

    def __init__(
        self, settings: EngineSettings, patience: GpuPatience, clock: Callable[[], float]
    ) -> None:
        self._may_do_without = settings.device == "auto" and settings.backend == "auto"
        self._patience = patience
        self._clock = clock
        self._started_s = clock()
        self.state = GpuState()
        # While an engine is being ended so that the next one can try the GPU.
        self.is_retrying = False

    def engine_starts(self) -> None:
        """The next engine is about to be started."""
        self._started_s = self._clock()
        if self.is_retrying:
            self.state = tried_again(self.state)
        self.is_retrying = False

    def engine_ended(self, end: EngineEnd) -> bool:
        """By itself. True when it ended by the GPU, and the next one is to do without."""
        if not self._may_do_without:
            return False
        before = self.state.faults_count
        now_s = self._clock()
        death = GpuDeath(
            on_gpu=end.on_gpu,
            signal=end.signal,
            stuck=end.stuck,
            reason=end.reason,
            lived_s=now_s - self._started_s,
            cause=end.cause,
        )
        self.state = after_engine_death(self._patience, self.state, death, now_s)
        return self.state.faults_count > before

    async def wait_due(self) -> None:
        """Until the GPU is to be tried again, if ever."""
        retry_s = self.state.retry_s
        if retry_s is None:
            await asyncio.Event().wait()
            return
        await asyncio.sleep(max(retry_s - self._clock(), 0.0))
