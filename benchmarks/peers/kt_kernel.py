"""kt-kernel: its wheel, unpacked beside our own packages (it pins an older torch)."""

from __future__ import annotations

import shutil
import zipfile
from pathlib import Path
from typing import Final

from benchmarks.peers.cache import PeerUnavailableError, cache_directory, downloaded, locked, run

KT_KERNEL: Final = "0.7.2"


def ensure_kt_kernel() -> Path:
    """The directory to import kt_kernel from. PeerUnavailableError where no wheel fits."""
    target = cache_directory() / f"kt_kernel-{KT_KERNEL}"
    with locked("kt-kernel"):
        if not target.exists():
            wheel = downloaded(
                f"kt-kernel=={KT_KERNEL}", f"kt_kernel-{KT_KERNEL}-*.whl", source=False
            )
            partial = target.with_suffix(".partial")
            shutil.rmtree(partial, ignore_errors=True)
            with zipfile.ZipFile(wheel) as archive:
                # the package and its libraries; the wheel also carries GPU code of others
                names = [
                    n for n in archive.namelist() if n.startswith(("kt_kernel/", "kt_kernel."))
                ]
                archive.extractall(partial, names)
            partial.rename(target)
    return target


def ensure_yield_library() -> Path:
    """The library that lets its idle workers give up their cores; see `kt_yield.c`."""
    source = Path(__file__).with_name("kt_yield.c")
    library = cache_directory() / "kt_yield.so"
    with locked("kt-yield"):
        if not library.exists() or library.stat().st_mtime < source.stat().st_mtime:
            if shutil.which("gcc") is None:
                raise PeerUnavailableError("kt-kernel with as many workers as cores needs gcc")
            run(["gcc", "-O2", "-shared", "-fPIC", source, "-o", library], "building kt_yield")
    return library
