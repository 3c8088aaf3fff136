#!/usr/bin/env bash
# Checks the engine layer on a GPU, or with --device host on any machine. Offline: it installs
# nothing and needs Python 3.11 or 3.12 with torch >= 2.11, triton >= 3.6, numpy and, for a GPU,
# cuda-bindings; to build the native parts also pybind11, cmake, ninja and g++.
#   bash tests/gpu/run.sh --device host|cuda [--require flashinfer|nvidia-ml-py] [--json FILE]
# PYTHON chooses the interpreter. One line per check; the exit status is 0 when all that ran passed.
# What was not run, for lack of a GPU or of a package, is said; --require makes a package's lack an
# error.
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
cd "$ROOT"
PYTHON=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
export PYTHONPATH=$ROOT PYTHONUNBUFFERED=1

native_is_there() { "$PYTHON" -c 'import freetokend.native._exec, freetokend.native._host' 2>/dev/null; }

if ! native_is_there; then
  echo "building the native parts"
  # These two targets alone: the rest of the project's build needs the compiler of protocol buffers.
  cmake -S . -B build/gpu-checks -G Ninja -DCMAKE_BUILD_TYPE=Release \
    -DPython_EXECUTABLE="$(command -v "$PYTHON")" \
    -Dpybind11_DIR="$("$PYTHON" -c 'import pybind11; print(pybind11.get_cmake_dir())')" >/dev/null
  cmake --build build/gpu-checks --target _exec _host
  native_is_there || {
    echo "the native parts were built and cannot be loaded" >&2
    exit 1
  }
fi
exec "$PYTHON" -m tests.gpu.checks "$@"
