"""The watch over the machine: one look per tick, and the newest one for everybody."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from typing import Final

from freetokend.control.probes.probe_set import MachineReadings, ProbeQuery, ProbeSet
from freetokend.link.messages import EngineSnapshot

AUTO: Final = "auto"
_GPU_DEVICE: Final = "GPU-"


class MachineWatch:
    """Looks at the machine every `tick_s`. Owns the newest readings and the set of probes.

    `changed` is called when what is told of the probes changes (a fault, a lost GPU), not at every
    new figure. Belongs to the event loop.
    """

    def __init__(
        self,
        probes: ProbeSet,
        query: Callable[[], ProbeQuery],
        *,
        tick_s: float,
        changed: Callable[[], None],
        looked: Callable[[], None] = lambda: None,
    ) -> None:
        self._probes = probes
        self._query = query
        self._tick_s = tick_s
        self._changed = changed
        self._looked = looked
        self._newest = MachineReadings()
        self._one_look = asyncio.Lock()

    def newest(self) -> MachineReadings:
        """The last look; empty before the first."""
        return self._newest

    async def look(self) -> MachineReadings:
        """Look now, out of turn as well."""
        async with self._one_look:
            before = _standing(self._newest)
            self._newest = await self._probes.tick(self._query())
        if _standing(self._newest) != before:
            self._changed()
        self._looked()
        return self._newest

    async def run(self) -> None:
        """Look until cancelled. A look that takes longer than a tick delays the next one."""
        while True:
            begun_s = time.monotonic()
            await self.look()
            await asyncio.sleep(max(0.0, self._tick_s - (time.monotonic() - begun_s)))

    async def close(self) -> None:
        """Let go of the driver; after `run` has been cancelled."""
        await self._probes.close()


def _standing(readings: MachineReadings) -> tuple[object, ...]:
    return (
        readings.host is None,
        readings.gpu_absent_reason,
        *((fault.probe, fault.reason) for fault in readings.faults),
    )


def probe_query(snapshot: EngineSnapshot, asked_gpu: str) -> ProbeQuery:
    """Whom to look for while the engine is as in `snapshot`. `asked_gpu` as in control.gpu."""
    engine = snapshot.description
    gpu = "" if asked_gpu == AUTO else asked_gpu
    if not gpu and engine is not None:
        kind, _, uuid = engine.device.partition(":")
        gpu = uuid if kind == "cuda" and uuid.startswith(_GPU_DEVICE) else ""
    engine_pids = frozenset() if snapshot.pid is None else frozenset({snapshot.pid})
    return ProbeQuery(
        gpu=gpu,
        gpu_pids=engine_pids,
        own_pids=engine_pids | {os.getpid()},
        executor_cpus=frozenset() if engine is None else frozenset(engine.cpus),
    )
