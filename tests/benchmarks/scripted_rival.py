"""A rival for tests: bursts at a fixed rate, until it is told to end in one way or another."""

from __future__ import annotations

import os
import signal
import sys

from benchmarks.peers.child import serve
from benchmarks.rounds import Burst


class ScriptedRival:
    """`open(bursts_left, ending)`: after so many bursts it ends as `ending` says."""

    def __init__(self) -> None:
        self._left = 1 << 30
        self._ending = ""

    def open(self, bursts_left: int = 1 << 30, ending: str = "") -> dict[str, object]:
        self._left = bursts_left
        self._ending = ending
        if bursts_left < 0:
            self._end()
        return {"class": "scripted"}

    def batch(self, tokens: int) -> dict[str, object]:
        return {"error_ratio": 0.0}

    def burst(self, seconds: float) -> Burst:
        if self._left == 0:
            self._end()
        self._left -= 1
        return Burst(rate=1.0, cpu_share=1.0)

    def _end(self) -> None:
        print("no such instruction here", file=sys.stderr, flush=True)
        match self._ending:
            case "abort":
                os.kill(os.getpid(), signal.SIGABRT)
            case "refuse":
                raise ValueError("not with these weights")
            case _:
                os._exit(3)


if __name__ == "__main__":
    rival = ScriptedRival()
    serve(rival, {"open": rival.open, "batch": rival.batch})
