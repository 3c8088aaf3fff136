"""`freetokend-engine --scripted FILE`: the entry of the scripted engine."""

from __future__ import annotations

import argparse
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from freetokend.core.errors import FreetokenError, reaction
from freetokend.link.engine_side import EngineLinkClient, take_link_token
from freetokend.link.messages import LINK_VERSION
from freetokend.native.lifeline import Lifeline, receive_pool
from freetokend.scripted.cache import ScriptedCache
from freetokend.scripted.engine import ScriptedEngine
from freetokend.scripted.script import read_script

_HANDOVER_TIMEOUT_S: Final = 30.0


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line, run, return the exit code; one sentence on stderr on an error."""
    parser = argparse.ArgumentParser(
        prog="freetokend-engine --scripted",
        description="An engine that follows a script (for development and tests).",
    )
    parser.add_argument("--scripted", type=Path, required=True, metavar="FILE")
    parser.add_argument("--link", required=True, metavar="unix:PATH")
    parser.add_argument("--lifeline-fd", type=int, required=True, metavar="N")
    arguments = parser.parse_args(argv)
    try:
        return _run(arguments.scripted, arguments.link, arguments.lifeline_fd)
    except FreetokenError as error:
        print(f"freetokend-engine: {error.message}", file=sys.stderr)
        return reaction(error.reason).exit_code


def _run(script_path: Path, address: str, lifeline_fd: int) -> int:
    with socket.socket(fileno=lifeline_fd) as lifeline:
        lifeline.set_inheritable(False)
        lifeline.settimeout(_HANDOVER_TIMEOUT_S)
        pool = receive_pool(lifeline)
        lifeline.settimeout(None)
        Lifeline.start(lifeline.detach())
    pool_bytes = 0
    if pool is not None:
        pool_bytes = os.fstat(pool.fd).st_size
        os.close(pool.fd)  # a script needs no weights
    script = read_script(script_path)
    cache = None if script.cache is None else ScriptedCache(script.cache)
    client = EngineLinkClient(
        address,
        token=take_link_token(),
        kind="scripted",
        heartbeat_s=script.heartbeat_s,
        cache=lambda: None if cache is None else cache.counters(),
        link_version=script.link_version or LINK_VERSION,
    )
    try:
        return ScriptedEngine(script, client, script_path, pool_bytes, cache).run()
    finally:
        client.close()
