"""Lets FakeTensorMode pretend the device "cuda" on machines that have none."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path
from typing import Final

import torch
from torch.utils.cpp_extension import include_paths, library_paths

_SOURCE: Final = Path(__file__).parent / "cuda_guard.cpp"


def pretend_cuda(directory: Path) -> torch.device:
    """Register the guard in this process, for good; where there is a GPU its own is kept.

    directory: where to build it. The device "cuda:0" then has tensors under FakeTensorMode, and
    without it no more than before.
    """
    if not torch.cuda.is_available():
        library = directory / "cuda_guard.so"
        new_abi = int(torch.compiled_with_cxx11_abi())
        libraries = library_paths()
        subprocess.run(
            [
                *("g++", "-std=c++20", "-O1", "-shared", "-fPIC", str(_SOURCE), "-o", str(library)),
                f"-D_GLIBCXX_USE_CXX11_ABI={new_abi}",
                *(f"-isystem{path}" for path in include_paths()),
                *(f"-L{path}" for path in libraries),
                "-lc10",
            ],
            check=True,
        )
        ctypes.CDLL(str(library))
    return torch.device("cuda", 0)
