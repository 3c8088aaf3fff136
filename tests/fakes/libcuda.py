"""Builds the fake libcuda, and speaks to it from a process that has loaded it."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

HERE: Final = Path(__file__).parent
ROOT: Final = HERE.parents[1]
GIB: Final = 1 << 30


def build_fake_libcuda(directory: Path) -> Path:
    """Compile it as libcuda.so.1 into `directory`."""
    library = directory / "libcuda.so.1"
    flags = ("-std=c11", "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC")
    subprocess.run(
        [
            *("gcc", *flags, "-fvisibility=hidden", "-Wl,-soname,libcuda.so.1"),
            *("-o", str(library), *map(str, sorted(HERE.glob("fake_libcuda*.c")))),
        ],
        check=True,
    )
    return library


def run_with_fake(
    library: Path, module: str, arguments: Sequence[str] = ()
) -> subprocess.CompletedProcess[str]:
    """Run a module of the tests in a process where the CUDA bindings find the fake."""
    paths = [str(library.parent), os.environ.get("LD_LIBRARY_PATH", "")]
    return subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=ROOT,
        env=os.environ | {"LD_LIBRARY_PATH": os.pathsep.join(filter(None, paths))},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


class FakeLibcuda:
    """The script of the fake that this process has loaded."""

    def __init__(self) -> None:
        """OSError unless the loader finds the fake under the driver's name."""
        self._library = ctypes.CDLL("libcuda.so.1")
        for name in ("fakeCudaUsedBytes", "fakeCudaRegisteredBytes"):
            getattr(self._library, name).restype = ctypes.c_size_t
        self._library.fakeCudaLog.restype = ctypes.c_char_p

    def reset(self, memory_bytes: int = 8 * GIB) -> None:
        """A fresh device with this much memory; the context that was retained stays."""
        self._library.fakeCudaReset(ctypes.c_size_t(memory_bytes))

    @contextmanager
    def failing(self, call: str, *, nth: int = 1, times: int = 1, code: int = 2) -> Iterator[None]:
        """While inside, the nth call of this name and those after it return `code`."""
        self._library.fakeCudaFail(call.encode(), nth, times, code)
        try:
            yield
        finally:
            self._library.fakeCudaForgetFailures()

    def poison(self, code: int) -> None:
        """From now on every call returns `code`; 0 ends that."""
        self._library.fakeCudaPoison(code)

    def set_foreign_bytes(self, length_bytes: int) -> None:
        """What other programs hold."""
        self._library.fakeCudaSetForeignBytes(ctypes.c_size_t(length_bytes))

    def set_register_limit(self, length_bytes: int) -> None:
        """The most host memory that can be registered."""
        self._library.fakeCudaSetRegisterLimit(ctypes.c_size_t(length_bytes))

    def run_last_first(self, yes: bool) -> None:
        """Whether a launched graph runs what was submitted last first, where its waits allow it."""
        self._library.fakeCudaRunLastFirst(int(yes))

    def shuffle(self, seed: int) -> None:
        """Have launched graphs run in orders of this seed that their waits allow; 0 ends that."""
        self._library.fakeCudaShuffle(seed)

    @property
    def used_bytes(self) -> int:
        """Memory of allocations that are alive."""
        return int(self._library.fakeCudaUsedBytes())

    @property
    def registered_bytes(self) -> int:
        """Host memory that is registered."""
        return int(self._library.fakeCudaRegisteredBytes())

    @contextmanager
    def recording(self) -> Iterator[list[str]]:
        """The calls made inside, one "name arguments" or "name arguments -> code" each."""
        calls: list[str] = []
        self._library.fakeCudaClearLog()
        yield calls
        calls += self._library.fakeCudaLog().decode().splitlines()
