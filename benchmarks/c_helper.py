"""Small C libraries of the benchmarks: what a machine can do is not to be measured in Python."""

from __future__ import annotations

import ctypes
import shutil
from pathlib import Path

from benchmarks.peers.cache import PeerUnavailableError, cache_directory, locked, run


def c_helper(name: str) -> ctypes.CDLL:
    """The library of NAME.c beside this file, built where it is missing or older.

    Raises PeerUnavailableError without gcc.
    """
    source = Path(__file__).with_name(f"{name}.c")
    library = cache_directory() / f"{name}.so"
    with locked(name.replace("_", "-")):
        if not library.exists() or library.stat().st_mtime < source.stat().st_mtime:
            if shutil.which("gcc") is None:
                raise PeerUnavailableError(f"{name} needs gcc")
            run(["gcc", "-O2", "-shared", "-fPIC", source, "-o", library], f"building {name}")
    return ctypes.CDLL(str(library))
