"""llama.cpp's own benchmarks, run as processes: one run is one burst."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.peers.cache import PeerUnavailableError, locked
from benchmarks.peers.ggml import ensure_targets
from benchmarks.rounds import Burst

PROGRAMS: Final = ("llama-bench", "llama-batched-bench")
POLL_S: Final = 0.02


def ensure_llama_bench() -> Path:
    """The directory with both programs, built for this machine: ten minutes the first time."""
    with locked("ggml-native"):
        return ensure_targets("native", PROGRAMS) / "bin"


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaSide:
    """Decode of `tokens` tokens in `sequences` sequences, or a prompt when `sequences` is 0.

    A burst is a run of the program, which loads the model each time and times its work inside;
    rates are in tokens per second.
    """

    programs: Path
    model: Path
    cpus: Sequence[int]
    sequences: int
    tokens: int

    @property
    def name(self) -> str:
        return "llama.cpp"

    def burst(self, seconds: float) -> Burst:
        del seconds  # the work is fixed
        output, cpu_share = _run([*self._command(), "-t", str(len(self.cpus))], self.cpus)
        found = json.loads(output[output.index("[" if self.sequences <= 1 else "{") :])
        rate = found[0]["avg_ts"] if self.sequences <= 1 else found["speed_tg"]
        return Burst(rate=float(rate), cpu_share=cpu_share)

    def _command(self) -> list[str]:
        if self.sequences <= 1:
            prompt, decoded = (self.tokens, 0) if self.sequences == 0 else (0, self.tokens)
            program = [str(self.programs / "llama-bench"), "-o", "json", "-r", "1"]
            return [*program, "-m", str(self.model), "-p", str(prompt), "-n", str(decoded)]
        context = self.sequences * (PROMPT_TOKENS + self.tokens)
        return [
            *(str(self.programs / "llama-batched-bench"), "--output-format", "jsonl"),
            *("-m", str(self.model), "-c", str(context), "-npp", str(PROMPT_TOKENS)),
            *("-ntg", str(self.tokens), "-npl", str(self.sequences)),
        ]


# Before a decode of several sequences, in both programs.
PROMPT_TOKENS: Final = 16


def _run(command: Sequence[str], cpus: Sequence[int]) -> tuple[str, float]:
    """Standard output, and the share of the cpu time asked for."""
    pinned = ["taskset", "-c", ",".join(map(str, cpus)), *command]
    environment = {**os.environ, "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
    process = subprocess.Popen(
        pinned,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=environment,
    )
    assert process.stdout is not None
    times: dict[str, tuple[int, int]] = {}
    while process.poll() is None:
        times |= _thread_times(process.pid)
        time.sleep(POLL_S)
    output = process.stdout.read()
    process.stdout.close()
    if process.returncode:
        raise PeerUnavailableError(f"{command[0]} ended with status {process.returncode}")
    ran = sum(ran for ran, _ in times.values())
    waited = sum(waited for _, waited in times.values())
    return output, ran / max(ran + waited, 1)


def _thread_times(pid: int) -> dict[str, tuple[int, int]]:
    """Nanoseconds run and waited, by thread."""
    found = {}
    try:
        for task in Path(f"/proc/{pid}/task").iterdir():
            ran, waited, _ = (task / "schedstat").read_text().split()
            found[task.name] = (int(ran), int(waited))
    except (OSError, ValueError):
        pass  # it ends just now
    return found
