"""An engine killed with SIGKILL and its successor, in the running service, on a pool of real size.

usage: python -m benchmarks.engine_restart [--quick] [--model DIR] [--rounds N] [--json FILE]

Without --model a random model with a pool of about 2.7 GB is made first. Every round kills the
engine and waits for the next one; attaching, background pinning and the warm-up token are the
engine's own figures, and its bytes read from storage come from /proc. The rival is the first load
of the same run.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.concurrent_streams import service
from benchmarks.result import Row, write
from freetokend.ftw.convert import convert
from tests.support.tiny_checkpoints import write_tiny_mixtral

_ATTACH_GOAL_S = 1.0


def _status(runtime_dir: Path) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "freetokend.ctl", "status", "-o", "json"],
        env={**os.environ, "FREETOKEN_SOCKET": str(runtime_dir / "monitor.sock")},
        capture_output=True,
        text=True,
        check=True,
    )
    status: dict[str, Any] = json.loads(done.stdout)
    return status


def _storage_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/io").read_text(encoding="utf-8").splitlines():
        if line.startswith("read_bytes:"):
            return int(line.split()[1])
    raise RuntimeError("no read_bytes in /proc/PID/io")


def _next_ready(runtime_dir: Path, old_pid: int) -> None:
    while not ((status := _status(runtime_dir))["ready"] and status["engine"]["pid"] != old_pid):
        time.sleep(0.1)


def _pinned(runtime_dir: Path) -> dict[str, Any]:
    while not (status := _status(runtime_dir))["pool"]["pin_done"]:
        time.sleep(0.1)
    return status


async def _run(model_dir: Path, rounds_count: int) -> list[Row]:
    attach: list[float] = []
    pin: list[float] = []
    first_token: list[float] = []
    back: list[float] = []
    async with service(model_dir) as running:
        runtime_dir = running.runtime_dir
        first = await asyncio.to_thread(_pinned, runtime_dir)
        for _ in range(rounds_count):
            pid = (await asyncio.to_thread(_status, runtime_dir))["engine"]["pid"]
            killed_s = time.monotonic()
            os.kill(pid, signal.SIGKILL)
            await asyncio.to_thread(_next_ready, runtime_dir, pid)
            back.append(time.monotonic() - killed_s)
            status = await asyncio.to_thread(_pinned, runtime_dir)
            if not status["pool"]["reattached"]:
                raise RuntimeError("the engine did not re-attach to the pool")
            attach.append(status["pool"]["attach_s"])
            pin.append(status["pool"]["pin_s"])
            first_token.append(status["engine"]["first_token_s"])
            read_bytes = _storage_bytes(status["engine"]["pid"])
    pool_bytes = int(first["pool"]["size_bytes"])
    print(
        f"pool {pool_bytes / 1e9:.2f} GB in pages of {first['pool']['page_bytes']} bytes; "
        f"attach {statistics.median(attach):.4f} s, pin {statistics.median(pin):.3f} s, "
        f"warm-up token {statistics.median(first_token):.3f} s; "
        f"killed to ready {statistics.median(back):.2f} s; "
        f"read from storage by the last engine: {read_bytes} bytes"
    )
    attach_s = statistics.median(attach)
    load_s = float(first["pool"]["load_s"])
    return [
        Row(
            case=f"attach to a filled pool of {pool_bytes / 1e9:.1f} GB",
            ours=attach_s,
            rival="first load in this run",
            rival_value=load_s,
            unit="s",
            ratio=load_s / max(attach_s, 1e-9),
            goal=load_s / _ATTACH_GOAL_S,
        )
    ]


def main() -> None:
    """Run and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, help="an FTW directory")
    parser.add_argument("--quick", action="store_true", help="2 rounds")
    parser.add_argument("--rounds", type=int, default=None, help="default: 5")
    parser.add_argument("--json", type=Path, help="write the result here")
    arguments = parser.parse_args()
    rounds_count = arguments.rounds or (2 if arguments.quick else 5)
    with tempfile.TemporaryDirectory(prefix="ftk-", dir="/var/tmp") as name:
        model_dir = arguments.model
        if model_dir is None:
            source = Path(name) / "checkpoint"
            write_tiny_mixtral(
                source,
                layers=8,
                hidden=1024,
                inter=3328,
                experts=16,
                heads=16,
                kv_heads=4,
                head_dim=64,
            )
            model_dir = Path(name) / "model"
            convert(source, model_dir, progress=lambda _: None)
        write(asyncio.run(_run(model_dir, rounds_count)), arguments.json)


if __name__ == "__main__":
    main()
