#!/usr/bin/env bash
# Sets up and runs the whole test suite. CI runs exactly this.
#   bash tests/run.sh [--full] [PYTEST ARGUMENT...]
# --full adds the long fuzzing and the larger matrices. Ends in pytest's own summary line.
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$ROOT"
# shellcheck source=packaging/common.sh
. "$ROOT/packaging/common.sh"

FULL='' PYTEST_ARGS=()
if [ "${1:-}" = --full ]; then
  FULL=1 PYTEST_ARGS=(--full)
  shift
fi
# The coverage floor (pyproject.toml) speaks of the whole suite only.
[ $# -gt 0 ] || PYTEST_ARGS+=(--cov=freetokend --cov-report=term:skip-covered)
PYTEST_ARGS+=("$@")
TOOLS=$ROOT/build/tools

cpu_s() { awk '{ split($0, f, ") "); split(f[2], v, " "); print int((v[12] + v[13] + v[14] + v[15]) / 100) }' "/proc/$$/stat"; }
area() { # area NAME COMMAND...: runs it and prints what it cost
  local name=$1 before
  shift
  before=$(cpu_s)
  say "$name"
  "$@" || die "$name failed: see above"
  note "$name: $(($(cpu_s) - before)) CPU-seconds"
}

# promtool without the prometheus package's service, which would start on a machine with systemd.
fetch_promtool() {
  [ ! -x "$TOOLS/usr/bin/promtool" ] || return 0
  note "promtool, out of the package prometheus"
  mkdir -p "$TOOLS"
  cd "$TOOLS"
  # apt's lists may be missing or old where every other package was there already
  apt-get download -qq prometheus || { as_root apt-get update -qq && apt-get download -qq prometheus; } ||
    die "the Debian package prometheus could not be downloaded: run apt-get update as root and try again."
  dpkg-deb -x prometheus_*.deb . && rm -f ./*.deb
  cd "$ROOT"
}

set_up() {
  apt_install "the virtual environment, the native build and the tests" \
    python3 python3-venv python3-dev g++ cmake ninja-build ca-certificates libgtest-dev \
    systemd shellcheck
  # a CUDA build of torch, three sanitizer builds, and the demo models in every format in the cache
  need_disk_bytes "$ROOT" 21000000000 "The test suite"
  fetch_promtool
  make_venv
  install_project engine demo test
}

lint() {
  local bin=$VENV/bin
  "$bin/ruff" check . && "$bin/ruff" format --check . && "$bin/mypy" &&
    find native -type f -regex '.*\.\(cpp\|hpp\|h\)' -exec "$bin/clang-format" --dry-run --Werror {} + &&
    shellcheck -x packaging/*.sh tests/run.sh tests/gpu/run.sh .ci/run
}

# The C++ core without Python, its tests under each sanitizer.
sanitizers() {
  local preset log
  log=$(mktemp)
  for preset in asan ubsan tsan; do
    note "$preset"
    if ! { cmake --preset "$preset" && cmake --build --preset "$preset" -j2 &&
      ctest --preset "$preset" --output-on-failure; } >"$log" 2>&1; then
      tail -n 60 "$log" >&2
      return 1
    fi
  done
  rm -f "$log"
}

# Minutes of CPU for findings that change rarely: part of --full.
tidy() {
  apt_install "clang-tidy" clang-tidy
  cmake --preset asan >/dev/null
  find native -name '*.cpp' -not -name bindings.cpp -print0 |
    xargs -0 -n 4 -P 2 clang-tidy --quiet -p build/asan
}

area "Set-up" set_up
export PATH=$TOOLS/usr/bin:$PATH
area "Lint and types" lint
area "C++ tests under sanitizers" sanitizers
[ -z "$FULL" ] || area "clang-tidy" tidy
say "pytest"
exec "$VENV/bin/python" -m pytest "${PYTEST_ARGS[@]}"
