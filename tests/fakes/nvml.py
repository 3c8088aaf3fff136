"""Builds the fake driver library and scripts what it says, for this process and for others.

A process finds the library as it finds the real one, by the name libnvidia-ml.so.1, when
`FakeNvml.environment` is part of its environment: LD_LIBRARY_PATH has the library's directory,
FREETOKEN_FAKE_NVML the file of its state. That is how a daemon in a test gets it. In the process of
the tests themselves, where the loader's path is settled and a real library may be there, a fresh
copy of the bindings takes it by its path: `FakeNvml.bindings`.

Every change is one atomic replacement of the file, and the library reads the file at each call, so
that a process under test sees it at once.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any, Final

HERE: Final = Path(__file__).parent
STATE_VARIABLE: Final = "FREETOKEN_FAKE_NVML"
NOT_AVAILABLE: Final = 2**64 - 1
# The driver's codes that tests name.
NOT_SUPPORTED: Final = 3
NO_PERMISSION: Final = 4
TIMEOUT: Final = 10
FUNCTION_NOT_FOUND: Final = 13
VERSION_MISMATCH: Final = 18
UNKNOWN: Final = 999
# How long a call hangs that nobody lets go; a test that forgets it ends all the same.
LONG_HANG_MS: Final = 20_000
GIB: Final = 1 << 30


def build_fake_nvml() -> Path:
    """Path of the library, compiled once per source into a directory that this user keeps."""
    source = HERE / "fake_nvml.c"
    digest = hashlib.sha256(source.read_bytes()).hexdigest()[:16]
    directory = Path(tempfile.gettempdir()) / f"freetoken-fake-nvml-{os.getuid()}-{digest}"
    library = directory / "libnvidia-ml.so.1"
    if library.exists():
        return library
    directory.mkdir(mode=0o700, exist_ok=True)
    fresh = directory / f"building-{os.getpid()}"
    flags = ("-std=c11", "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC")
    # No soname: a library loaded by its path must not answer to the real one's name.
    subprocess.run(
        ["gcc", *flags, "-fvisibility=hidden", "-o", str(fresh), str(source)], check=True
    )
    fresh.rename(library)
    return library


@dataclass(frozen=True, kw_only=True)
class FakeGpu:
    """What the library says of one GPU. Bytes of a process: `NOT_AVAILABLE` as the driver does."""

    uuid: str = "GPU-11111111-2222-3333-4444-555555555555"
    name: str = "NVIDIA GeForce RTX 4090"
    total: int = 24 * GIB
    used: int = 0
    reserved: int = 400 << 20
    link_generation: int = 4
    link_generation_max: int = 4
    link_width: int = 16
    link_width_max: int = 16
    clock_reasons: int = 0
    lost: bool = False
    compute: Mapping[int, int] = field(default_factory=dict)
    graphics: Mapping[int, int] = field(default_factory=dict)

    def lines(self) -> list[str]:
        """As the state's file has it."""
        numbers = (
            *("total", "used", "reserved", "clock_reasons", "lost"),
            *("link_generation", "link_generation_max", "link_width", "link_width_max"),
        )
        return [
            f"gpu {self.uuid} {self.name}",
            *(f"set {key} {int(getattr(self, key))}" for key in numbers),
            *(f"compute {pid} {length_bytes}" for pid, length_bytes in self.compute.items()),
            *(f"graphics {pid} {length_bytes}" for pid, length_bytes in self.graphics.items()),
        ]


class FakeNvml:
    """The script: GPUs, failures and hangs. Owns the state's file in `directory`."""

    def __init__(self, directory: Path, *gpus: FakeGpu) -> None:
        """One ordinary GPU unless others are given."""
        self.library = build_fake_nvml()
        self.state_file = directory / "nvml-state"
        self._driver = "580.65.06"
        self._gpus = list(gpus) or [FakeGpu()]
        self._failures: dict[str, str] = {}
        self._hangs: dict[str, str] = {}
        self._write()

    @property
    def environment(self) -> dict[str, str]:
        """What a process needs in its environment to find this library."""
        paths = [str(self.library.parent), os.environ.get("LD_LIBRARY_PATH", "")]
        return {
            "LD_LIBRARY_PATH": os.pathsep.join(filter(None, paths)),
            STATE_VARIABLE: str(self.state_file),
        }

    def bindings(self) -> ModuleType:
        """A copy of pynvml of its own that has loaded this library; STATE_VARIABLE is the
        caller's to set."""
        bindings = fresh_bindings()
        vars(bindings)["nvmlLib"] = ctypes.CDLL(str(self.library))
        return bindings

    def change(self, index: int = 0, **values: Any) -> None:
        """Other values for the fields of a `FakeGpu`."""
        self._gpus[index] = replace(self._gpus[index], **values)
        self._write()

    def plug(self, *gpus: FakeGpu) -> None:
        """These GPUs instead of those there were; none is possible."""
        self._gpus = list(gpus)
        self._write()

    def set_driver(self, version: str) -> None:
        """The version of the driver."""
        self._driver = version
        self._write()

    def unload_driver(self) -> None:
        """As if the kernel module had gone, until the next change."""
        self.state_file.unlink()

    def fail(self, call: str, code: int, times: int = -1) -> None:
        """The call of this name, as the library exports it, fails so many times (-1: always)."""
        self._failures[call] = f"fail {call} {code} {times} {time.monotonic_ns()}"
        self._write()

    def hang(self, call: str, for_ms: int = LONG_HANG_MS) -> None:
        """The call takes that long, or until `heal`."""
        self._hangs[call] = f"hang {call} {for_ms}"
        self._write()

    def heal(self) -> None:
        """No failures and no hangs any more."""
        self._failures.clear()
        self._hangs.clear()
        self._write()

    def _write(self) -> None:
        lines = [f"driver {self._driver}", *(line for gpu in self._gpus for line in gpu.lines())]
        lines += [*self._failures.values(), *self._hangs.values()]
        fresh = self.state_file.with_suffix(".new")
        fresh.write_text("\n".join(lines) + "\n")
        fresh.rename(self.state_file)


def fresh_bindings(*, without_library: bool = False) -> ModuleType:
    """A copy of pynvml that has loaded nothing yet; `without_library`: nor ever finds any."""
    installed = importlib.util.find_spec("pynvml")
    assert installed is not None
    assert installed.origin is not None
    spec = importlib.util.spec_from_file_location("pynvml_under_test", installed.origin)
    assert spec is not None
    assert spec.loader is not None
    bindings = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = bindings  # it looks itself up there while it is executed
    try:
        spec.loader.exec_module(bindings)
    finally:
        del sys.modules[spec.name]
    if without_library:
        vars(bindings)["CDLL"] = _no_library
    return bindings


def _no_library(name: str) -> ctypes.CDLL:
    raise OSError(f"{name}: cannot open shared object file: No such file or directory")
