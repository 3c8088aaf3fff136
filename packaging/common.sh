# shellcheck shell=bash
# Shared by packaging/quickstart.sh and tests/run.sh; sourced, never run. Needs ROOT set.
# Every function says what it does and fails with one sentence that says what to do.

say() { printf '== %s\n' "$*" >&2; }
note() { printf '   %s\n' "$*" >&2; }
die() {
  printf 'error: %s\n' "$*" >&2
  exit 1
}

VENV=$ROOT/.venv
# The interpreter of the distribution: a service user can execute it, and its headers are one
# apt package away. FREETOKEND_PYTHON names another one.
SYSTEM_PYTHON=${FREETOKEND_PYTHON:-/usr/bin/python3}

as_root() {
  if [ "$(id -u)" = 0 ]; then "$@"; else sudo -n "$@"; fi
}

# apt_install WHY PACKAGE...: installs those that are missing, after saying so.
apt_install() {
  local why=$1 missing=() package
  shift
  for package in "$@"; do
    [ "$(dpkg-query -W -f='${db:Status-Status}' "$package" 2>/dev/null)" = installed ] ||
      missing+=("$package")
  done
  [ ${#missing[@]} -gt 0 ] || return 0
  command -v apt-get >/dev/null 2>&1 ||
    die "these are missing ($why): ${missing[*]}. This system has no apt-get: install the same tools with its own package manager and run this again."
  if [ "$(id -u)" != 0 ] && ! sudo -n true 2>/dev/null; then
    die "these packages are missing ($why): ${missing[*]}. Install them with: sudo apt-get install -y ${missing[*]}"
  fi
  say "Installing with apt ($why): ${missing[*]}"
  as_root apt-get update -qq ||
    die "apt-get update failed: check the network and the package sources in /etc/apt, then run this again."
  as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
    -o Dpkg::Use-Pty=0 "${missing[@]}" >/dev/null ||
    die "apt-get could not install ${missing[*]}: see its message above."
}

# need_disk_bytes PATH BYTES WHAT
need_disk_bytes() {
  local free_bytes
  free_bytes=$(($(df -Pk "$1" | awk 'NR==2 {print $4}') * 1024))
  [ "$free_bytes" -ge "$2" ] ||
    die "$3 needs $(($2 / 1000000)) MB of disk below $1, but $((free_bytes / 1000000)) MB are free: make room or clone to another disk."
}

python_tag() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])'; }

make_venv() {
  [ -x "$SYSTEM_PYTHON" ] || die "$SYSTEM_PYTHON is not there: install python3 (3.11 or newer) or set FREETOKEND_PYTHON."
  "$SYSTEM_PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    die "$SYSTEM_PYTHON is $("$SYSTEM_PYTHON" -V), but freetokend needs Python 3.11 or newer (Debian 12, Ubuntu 24.04): set FREETOKEND_PYTHON to one."
  if [ -x "$VENV/bin/python" ] && "$VENV/bin/python" -c 'import pip' 2>/dev/null &&
    [ "$(python_tag "$VENV/bin/python")" = "$(python_tag "$SYSTEM_PYTHON")" ]; then
    return 0
  fi
  say "Making a virtual environment in .venv with $SYSTEM_PYTHON"
  rm -rf "$VENV"
  "$SYSTEM_PYTHON" -m venv "$VENV" || die "$SYSTEM_PYTHON could not make .venv: see its message above."
}

# What the native build and the dependencies come from; a change means installing again.
install_stamp() {
  (cd "$ROOT" && {
    printf '%s\n' "${FREETOKEND_TORCH_INDEX:-}"
    find native proto pyproject.toml CMakeLists.txt packaging/constraints.txt -type f \
      -not -name '*.md' -print0 | LC_ALL=C sort -z | xargs -0 sha256sum
  }) | sha256sum | cut -d' ' -f1
}

# One sentence from a failed pip's log.
pip_cause() {
  if grep -qi -e 'No space left' -e 'Errno 28' "$1"; then
    echo "the disk is full. Make room (a CUDA build of torch takes several gigabytes) and run this again."
  elif grep -qi -e 'NewConnectionError' -e 'ConnectionError' -e 'Temporary failure in name' -e 'timed out' "$1"; then
    echo "the package index cannot be reached. Check the network and run this again."
  elif grep -qi -e 'CMAKE_CXX_COMPILER' -e 'compiler' -e 'CMake Error' "$1"; then
    echo "the native build failed. Is a C++20 compiler (g++ 12 or newer) installed? The end of the build's output is above."
  else
    echo "the end of pip's output is above, all of it is in $1."
  fi
}

# pip_run WHAT ARG...: pip in the background; says every 10 s how far it is, and shows its own
# output only when it fails.
pip_run() {
  local what=$1 log pid waited_s=0
  shift
  log=$(mktemp)
  "$VENV/bin/python" -m pip --disable-pip-version-check "$@" >"$log" 2>&1 &
  pid=$!
  while kill -0 "$pid" 2>/dev/null; do
    sleep 1
    waited_s=$((waited_s + 1))
    if [ $((waited_s % 10)) = 0 ]; then
      note "$waited_s s: $(grep -v -e WARNING -e '^$' "$log" | tail -n 1 | sed 's/^ *//' | cut -c 1-72)"
    fi
  done
  if ! wait "$pid"; then
    tail -n 25 "$log" >&2
    die "$what failed: $(pip_cause "$log")"
  fi
  rm -f "$log"
}

# install_project EXTRA...: the project in place, its native modules beside the sources.
# torch is asked for by plain name; FREETOKEND_TORCH_INDEX names another index to take it from.
# The stamp file holds the stamp and every extra that is installed, so that the two commands of
# the README do not undo each other's work.
install_project() {
  local stamp_file=$VENV/.freetokend-stamp stamp have='' extra lacking='' extras
  stamp=$(install_stamp)
  if [ -f "$stamp_file" ]; then
    have=$(sed 1d "$stamp_file")
    for extra in "$@"; do
      grep -qxF "$extra" <<<"$have" || lacking=1
    done
    [ -n "$lacking" ] || [ "$(head -n 1 "$stamp_file")" != "$stamp" ] || return 0
  fi
  rm -f "$stamp_file"
  if [ -n "${FREETOKEND_TORCH_INDEX:-}" ]; then
    say "Installing torch from the index in FREETOKEND_TORCH_INDEX"
    pip_run "Installing torch" install -c "$ROOT/packaging/constraints.txt" \
      --index-url "$FREETOKEND_TORCH_INDEX" torch
  fi
  say "Installing Python packages and building the native modules (some minutes the first time)"
  # shellcheck disable=SC2086  # one word per installed extra
  extras=$(printf '%s\n' $have "$@" | LC_ALL=C sort -u)
  pip_run "Installing freetokend" install -c "$ROOT/packaging/constraints.txt" \
    -e "${ROOT}[$(paste -sd, <<<"$extras")]"
  printf '%s\n%s\n' "$stamp" "$extras" >"$stamp_file"
}
