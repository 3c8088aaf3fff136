"""ggml's CPU kernels: fetched with the source archive of llama-cpp-python and built on demand."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Final

from benchmarks.peers.cache import (
    PeerUnavailableError,
    cache_directory,
    downloaded,
    locked,
    run,
    unpacked,
)

LLAMA_CPP_PYTHON: Final = "0.3.36"
# ggml's names of what it has of our formats.
TYPE_OF_FORMAT: Final = {
    "bf16": ("bf16",),
    "int8_g32_f16": ("q8_0",),
    "int4_g32_f16": ("q4_0", "q4_K"),
    "q4_K": ("q4_K",),
    "q6_K": ("q6_K",),
    "mxfp4": ("mxfp4",),
    "nvfp4": ("nvfp4",),
}
_AVX2: Final = (
    *("-DGGML_NATIVE=OFF", "-DGGML_SSE42=ON", "-DGGML_AVX=ON", "-DGGML_AVX2=ON"),
    *("-DGGML_FMA=ON", "-DGGML_F16C=ON", "-DGGML_BMI2=ON"),
)
_FLAGS: Final = {"native": ("-DGGML_NATIVE=ON",), "avx2": _AVX2}
_COMMON: Final = (
    *("-DCMAKE_BUILD_TYPE=Release", "-DBUILD_SHARED_LIBS=ON", "-DLLAMA_CURL=OFF"),
    *("-DLLAMA_OPENSSL=OFF", "-DLLAMA_BUILD_TESTS=OFF", "-DLLAMA_BUILD_EXAMPLES=OFF"),
    "-DLLAMA_BUILD_SERVER=OFF",
)


def llama_cpp_source() -> Path:
    """The sources of llama.cpp in the cache."""
    archive = downloaded(
        f"llama-cpp-python=={LLAMA_CPP_PYTHON}",
        f"llama_cpp_python-{LLAMA_CPP_PYTHON}.tar.gz",
        source=True,
    )
    return unpacked(archive) / "vendor" / "llama.cpp"


def ensure_targets(isa: str, targets: tuple[str, ...], jobs_count: int = 2) -> Path:
    """Build targets of llama.cpp for `isa` ("native" or "avx2"); the build directory."""
    build = cache_directory() / f"llama-{isa}"
    if not (build / "build.ninja").exists():
        cmake = shutil.which("cmake")
        if cmake is None or shutil.which("ninja") is None or shutil.which("g++") is None:
            raise PeerUnavailableError("ggml needs cmake, ninja and g++ to be built")
        configure: list[str | Path] = [
            cmake,
            "-G",
            "Ninja",
            "-S",
            llama_cpp_source(),
            "-B",
            build,
            *_COMMON,
        ]
        if shutil.which("ccache"):
            configure += [
                "-DCMAKE_C_COMPILER_LAUNCHER=ccache",
                "-DCMAKE_CXX_COMPILER_LAUNCHER=ccache",
            ]
        run([*configure, *_FLAGS[isa]], "configuring llama.cpp")
    run(
        ["cmake", "--build", build, f"-j{jobs_count}", "--target", *targets],
        f"building {', '.join(targets)}",
    )
    return build


def ensure_ggml_layer(isa: str) -> Path:
    """The shared library of `ggml_layer.cpp` over ggml for `isa`; some minutes the first time."""
    driver = Path(__file__).with_name("ggml_layer.cpp")
    library = cache_directory() / f"libggml_layer_{isa}.so"
    with locked(f"ggml-{isa}"):
        if library.exists() and library.stat().st_mtime > driver.stat().st_mtime:
            return library
        build = ensure_targets(isa, ("ggml",))
        headers = llama_cpp_source() / "ggml" / "include"
        binaries = build / "bin"
        run(
            [
                *("g++", "-O2", "-std=c++20", "-shared", "-fPIC", "-I", headers, driver),
                *("-o", library, "-L", binaries, f"-Wl,-rpath,{binaries}"),
                *("-lggml", "-lggml-cpu", "-lggml-base"),
            ],
            "building the driver of ggml",
        )
    return library


def version() -> str:
    """What the rows compare with."""
    return f"ggml of llama-cpp-python {LLAMA_CPP_PYTHON}"
