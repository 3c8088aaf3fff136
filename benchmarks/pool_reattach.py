"""How soon a restarted engine has its pool back: attaching and pinning against loading.

usage: python -m benchmarks.pool_reattach [--quick] [--json FILE] [--directory DIR] [--bytes N]

A child process fills a pool from files and is killed with SIGKILL, as a crashed engine is. New
processes then attach to the same memory; each measures apart: attaching (header, mapping), the
first pass over every page (which maps them), and pinning in the background. The rival of the
attachment is the load that it saves; the rival of pinning is the rate that the design counts on.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

from benchmarks.ftw_load import IDENTITY, drop_caches, write_shards
from benchmarks.result import Row, write
from freetokend.native.loader import ShardFile
from freetokend.native.pool import PoolFile, PoolMapping, create_pool_file, read_header

EXPECTED_PIN_S_PER_GIB: Final = 0.025
ATTACH_GOAL_S: Final = 0.1
PASS_BYTES: Final = 64 << 20


def fill(fd: int, shards_json: str) -> None:
    """In a child: load, mark, say how long it took, and wait to be killed."""
    shards = [ShardFile(**fields) for fields in json.loads(shards_json)]
    mapping = PoolMapping(fd)
    result = mapping.load(shards)
    mapping.mark_filled()
    mapping.protect()
    print(json.dumps({"load_s": result.elapsed_s}), flush=True)
    signal.pause()


def attach(fd: int) -> None:
    """In a child: attach, touch every page, pin; print the times."""
    started_s = time.perf_counter()
    mapping = PoolMapping(fd)
    read_header(fd).check(identity=IDENTITY, region_bytes=mapping.region_bytes)
    if not mapping.filled:
        sys.exit("the pool is not filled")
    mapping.protect()
    attach_s = time.perf_counter() - started_s
    pinning = mapping.pin()
    while not pinning.state().done:
        time.sleep(0.001)
    pin = pinning.state()
    started_s = time.perf_counter()
    for at in range(0, mapping.region_bytes, PASS_BYTES):
        bytes(mapping.view(at, min(PASS_BYTES, mapping.region_bytes - at))[::4096])
    pass_s = time.perf_counter() - started_s
    print(
        json.dumps(
            {
                "attach_s": attach_s,
                "pin_s": pin.elapsed_s,
                "pinned_bytes": pin.pinned_bytes,
                "note": pin.note,
                "pass_s": pass_s,
            }
        )
    )
    mapping.close()


def _child(verb: str, fd: int, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "benchmarks.pool_reattach", verb, str(fd), *arguments],
        pass_fds=[fd],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parent.parent,
    )


def _fill_and_kill(pool: PoolFile, shards: list[ShardFile]) -> float:
    fields = [
        {"path": s.path, "offset_bytes": s.offset_bytes, "length_bytes": s.length_bytes}
        for s in shards
    ]
    drop_caches(shards)
    with _child("fill", pool.fd, json.dumps(fields)) as child:
        assert child.stdout is not None
        load_s: float = json.loads(child.stdout.readline())["load_s"]
        child.kill()
    return load_s


def measure(directory: Path, total_bytes: int, rounds_count: int) -> list[Row]:
    """One fill, several attachments."""
    print(f"writing {total_bytes >> 20} MiB to {directory}", flush=True)
    shards = write_shards(directory, total_bytes)
    region_bytes = sum(shard.length_bytes for shard in shards)
    pool = create_pool_file("freetoken-pool-bench", region_bytes, IDENTITY)
    load_s = _fill_and_kill(pool, shards)
    for shard in shards:
        os.unlink(shard.path)  # whoever reads the disk now fails
    print(f"loaded in {load_s:.2f} s ({pool.reason}), engine killed", flush=True)
    rounds: list[dict[str, Any]] = []
    for _ in range(rounds_count):
        with _child("attach", pool.fd) as child:
            rounds.append(json.loads(child.communicate()[0]))
        print(f"  {rounds[-1]}", flush=True)
    pool.close()
    attach_s = statistics.median(one["attach_s"] for one in rounds)
    pinned_gib = statistics.median(one["pinned_bytes"] for one in rounds) / (1 << 30)
    pin_s = statistics.median(one["pin_s"] for one in rounds)
    rows = [
        Row(
            case=f"attach to {region_bytes / 1e9:.2f} GB",
            ours=attach_s,
            rival="loading it from the disk",
            rival_value=load_s,
            unit="s",
            ratio=load_s / attach_s,
            goal=load_s / ATTACH_GOAL_S,
        )
    ]
    if pinned_gib > 0:
        rows.append(
            Row(
                case=f"pin {pinned_gib:.2f} GiB in the background",
                ours=pin_s / pinned_gib,
                rival="the rate that the design counts on",
                rival_value=EXPECTED_PIN_S_PER_GIB,
                unit="s/GiB",
                ratio=EXPECTED_PIN_S_PER_GIB * pinned_gib / pin_s,
                goal=0.1,
            )
        )
    return rows


def main() -> None:
    """Measure and print; the verbs `fill` and `attach` are for its own children."""
    match sys.argv[1:]:
        case ["fill", fd, shards_json]:
            fill(int(fd), shards_json)
            return
        case ["attach", fd]:
            attach(int(fd))
            return
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="256 MiB, 3 rounds")
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--directory", default=None, help="where the files are written")
    parser.add_argument("--bytes", type=int, default=None, help="size of the pool")
    arguments = parser.parse_args()
    total_bytes = arguments.bytes or (256 << 20 if arguments.quick else 2 << 30)
    with tempfile.TemporaryDirectory(dir=arguments.directory, prefix="pool-reattach-") as directory:
        rows = measure(Path(directory), total_bytes, 3 if arguments.quick else 7)
    write(rows, arguments.json)


if __name__ == "__main__":
    main()
