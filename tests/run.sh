#!/usr/bin/env bash
# Sets up and runs the whole test suite. CI runs exactly this.
#   bash tests/run.sh [--full] [PYTEST ARGUMENT...]
# --full adds the long fuzzing and the larger matrices. Ends in pytest's own summary line.
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$ROOT"
# shellcheck source=packaging/common.sh
. "$ROOT/packaging/common.sh"

FULL=()
if [ "${1:-}" = --full ]; then
  FULL=(--full)
  shift
fi

cpu_s() { awk '{ split($0, f, ") "); split(f[2], v, " "); print int((v[12] + v[13] + v[14] + v[15]) / 100) }' "/proc/$$/stat"; }
area() { # area NAME COMMAND...: runs it and prints what it cost
  local name=$1 before
  shift
  before=$(cpu_s)
  say "$name"
  "$@" || die "$name failed: see above"
  note "$name: $(($(cpu_s) - before)) CPU-seconds"
}

set_up() {
  apt_install "the virtual environment, the native build and the tests" \
    python3 python3-venv python3-dev g++ cmake ninja-build ca-certificates \
    prometheus systemd clang-format
  need_disk_bytes "$ROOT" 6000000000 "The test suite"
  make_venv
  install_project engine,demo,test
}

lint() {
  local bin=$VENV/bin
  "$bin/ruff" check . && "$bin/ruff" format --check . && "$bin/mypy" &&
    git ls-files -z 'native/*.cpp' 'native/*.hpp' | xargs -0 -r clang-format --dry-run --Werror
}

# The C++ core without Python, its tests under each sanitizer.
sanitizers() {
  local preset
  for preset in asan ubsan tsan; do
    note "$preset"
    cmake --preset "$preset" >/dev/null && cmake --build --preset "$preset" -j2 >/dev/null &&
      ctest --preset "$preset" --output-on-failure >/dev/null ||
      { ctest --preset "$preset" --output-on-failure --rerun-failed | tail -n 40 >&2; return 1; }
  done
}

area "Set-up" set_up
area "Lint and types" lint
area "C++ tests under sanitizers" sanitizers
say "pytest"
exec "$VENV/bin/python" -m pytest "${FULL[@]}" "$@"
