#!/usr/bin/env bash
# One command from a bare machine to a mixture-of-experts model that answers over HTTP.
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=packaging/common.sh
. "$ROOT/packaging/common.sh"

usage() {
  cat <<'TXT'
usage: bash packaging/quickstart.sh [--port N] [--model DIR] [--prompt TEXT]
       bash packaging/quickstart.sh --stop

Sets up freetokend in this checkout, starts it on loopback in the background, asks it one
question and leaves it running.

  --port N       HTTP port on 127.0.0.1 (default 8440)
  --model DIR    serve this model (an FTW directory or a Hugging Face checkpoint) instead of the
                 demo model
  --prompt TEXT  what to ask
  --stop         stop the daemon that an earlier run left running

Environment: FREETOKEND_PYTHON        interpreter to use instead of /usr/bin/python3
             FREETOKEND_TORCH_INDEX   package index to take torch from (a CPU build, say)
             FREETOKEND_QUICKSTART    where model, log and sockets go (default: .quickstart here)
TXT
}

PORT=8440 MODEL='' STOP='' PROMPT='What is the capital of France? Answer in one sentence.'
while [ $# -gt 0 ]; do
  case $1 in
    --port) [ $# -ge 2 ] || die "--port needs a number"; PORT=$2; shift 2 ;;
    --model) [ $# -ge 2 ] || die "--model needs a directory"; MODEL=$2; shift 2 ;;
    --prompt) [ $# -ge 2 ] || die "--prompt needs a text"; PROMPT=$2; shift 2 ;;
    --stop) STOP=1; shift ;;
    -h | --help) usage; exit 0 ;;
    *) usage >&2; die "unknown argument: $1" ;;
  esac
done
case $PORT in '' | *[!0-9]* | ??????*) die "--port takes a number from 1 to 65535, not '$PORT'" ;; esac
PORT=$((10#$PORT)) # 08440 is 8440 to a person and no number to TOML
if [ "$PORT" -lt 1 ] || [ "$PORT" -gt 65535 ]; then
  die "--port takes a number from 1 to 65535, not '$PORT'"
fi

# Said before minutes of setting up.
[ -z "$MODEL" ] || [ -d "$MODEL" ] || die "--model $MODEL: there is no such directory"

WORK=${FREETOKEND_QUICKSTART:-$ROOT/.quickstart}
PID_FILE=$WORK/freetokend.pid LOG=$WORK/freetokend.log

# The pid of our own daemon, or nothing: a pid file alone can name a stranger after a reboot.
running_pid() {
  local pid
  [ -f "$PID_FILE" ] || return 0
  pid=$(cat "$PID_FILE")
  if [ -n "$pid" ] && [ -r "/proc/$pid/cmdline" ] &&
    tr '\0' ' ' <"/proc/$pid/cmdline" | grep -qF "$WORK/freetokend.toml"; then
    printf '%s' "$pid"
  fi
}

stop_daemon() {
  local pid tries=0
  pid=$(running_pid)
  if [ -z "$pid" ]; then
    rm -f "$PID_FILE"
    return 1
  fi
  kill -TERM "$pid"
  while [ -d "/proc/$pid" ]; do
    tries=$((tries + 1))
    [ "$tries" -le 400 ] || die "the daemon (pid $pid) has not stopped after 40 s; see $LOG"
    sleep 0.1
  done
  rm -f "$PID_FILE"
}

if [ -n "$STOP" ]; then
  if stop_daemon; then say "freetokend has stopped"; else say "freetokend was not running"; fi
  exit 0
fi

# -- what kind of machine is it ---------------------------------------------------------------
# Three cases, each said: a driver (the GPU extra is installed), a card without a driver, no card.
nvidia_card() {
  local device
  for device in /sys/bus/pci/devices/*; do
    [ "$(cat "$device/vendor" 2>/dev/null)" = 0x10de ] || continue
    case $(cat "$device/class" 2>/dev/null) in 0x03*) return 0 ;; esac
  done
  return 1
}

# torch's plain name is a CUDA build on most indexes: count on the larger one unless told otherwise
EXTRAS=(engine demo) NEED_BYTES=9000000000
[ -z "${FREETOKEND_TORCH_INDEX:-}" ] || NEED_BYTES=3000000000
if [ -e /proc/driver/nvidia/version ]; then
  say "NVIDIA driver: $(head -n 1 /proc/driver/nvidia/version)"
  EXTRAS=(engine gpu demo) NEED_BYTES=14000000000
elif nvidia_card; then
  say "An NVIDIA GPU is in this machine, but no driver is loaded, so it cannot be used: install the driver and run this again. Going on with the CPU."
else
  say "No NVIDIA GPU found: freetokend will run on the CPU"
fi

apt_install "the virtual environment and the native build" python3 python3-venv python3-dev g++ ca-certificates
mkdir -p "$WORK/models" || die "cannot create $WORK: choose another place with FREETOKEND_QUICKSTART"
[ -x "$VENV/bin/freetokend" ] || need_disk_bytes "$ROOT" "$NEED_BYTES" "Setting up"
make_venv
install_project "${EXTRAS[@]}"
PY=$VENV/bin/python

if [ -e /proc/driver/nvidia/version ]; then
  "$PY" "$ROOT/packaging/check_gpu.py" || note "Going on with the CPU."
fi

# -- the model ----------------------------------------------------------------------------------
if [ -n "$MODEL" ]; then
  MODEL=$(cd "$MODEL" && pwd)
  if [ -f "$MODEL/freetoken_weight.json" ]; then
    FTW=$MODEL
  else
    FTW=$WORK/models/$(basename "$MODEL")
    say "Converting $MODEL to FTW (once)"
    "$VENV/bin/freetokenctl" ftw convert "$MODEL" "$FTW"
  fi
else
  FTW=$WORK/models/freetoken-demo-8x135m
  if [ ! -f "$FTW/freetoken_weight.json" ]; then
    need_disk_bytes "$WORK" 3200000000 "The demo model"
    say "Making the demo model: SmolLM2-135M-Instruct upcycled to 8 experts, top-2 (once)"
    note "Real weights and real routing, there to prove the path; it writes like the 135M model it comes from."
    "$PY" -m freetokend.demo build --out "$WORK/demo-checkpoint"
    "$VENV/bin/freetokenctl" ftw convert "$WORK/demo-checkpoint" "$FTW"
    rm -rf "$WORK/demo-checkpoint"
  fi
fi

# -- the daemon ---------------------------------------------------------------------------------
cat >"$WORK/freetokend.toml.new" <<TOML
# Written by packaging/quickstart.sh at every run.
[model]
path = "$FTW"

[service]
runtime_dir = "$WORK/run"
state_dir = "$WORK/state"

[http]
port = $PORT
TOML
if [ -n "$(running_pid)" ] && cmp -s "$WORK/freetokend.toml.new" "$WORK/freetokend.toml"; then
  say "freetokend is already running (pid $(running_pid))"
  rm -f "$WORK/freetokend.toml.new"
else
  # Before an earlier daemon is stopped: a run that cannot succeed must not end one that serves.
  earlier_port=$(sed -n 's/^port = //p' "$WORK/freetokend.toml" 2>/dev/null || true)
  if [ -z "$(running_pid)" ] || [ "$earlier_port" != "$PORT" ]; then
    if (exec 3<>"/dev/tcp/127.0.0.1/$PORT") 2>/dev/null; then
      die "port $PORT on 127.0.0.1 is taken by another program: choose another with --port N"
    fi
  fi
  if stop_daemon; then say "Stopped the daemon of an earlier run: its settings differ"; fi
  mv "$WORK/freetokend.toml.new" "$WORK/freetokend.toml"
  say "Starting freetokend on http://127.0.0.1:$PORT (log: $LOG)"
  : >"$LOG"
  setsid "$VENV/bin/freetokend" --config "$WORK/freetokend.toml" </dev/null >>"$LOG" 2>&1 &
  echo $! >"$PID_FILE"
fi
export FREETOKEN_SOCKET=$WORK/run/monitor.sock
if ! "$PY" "$ROOT/packaging/quickstart_client.py" wait --pid "$(cat "$PID_FILE")" --port "$PORT"; then
  tail -n 15 "$LOG" >&2
  [ -n "$(running_pid)" ] || rm -f "$PID_FILE"
  die "freetokend did not become ready: the end of its log is above ($LOG)"
fi
"$PY" "$ROOT/packaging/quickstart_client.py" chat --port "$PORT" --prompt "$PROMPT"
say "freetokenctl status"
"$VENV/bin/freetokenctl" status
cat <<TXT

freetokend keeps running in the background. Go on with:

  curl http://127.0.0.1:$PORT/v1/chat/completions -H 'content-type: application/json' \\
    -d '{"model": "$(basename "$FTW")", "messages": [{"role": "user", "content": "Tell me a joke."}]}'

  from openai import OpenAI        # pip install openai
  client = OpenAI(base_url="http://127.0.0.1:$PORT/v1", api_key="unused")

  export FREETOKEN_SOCKET='$WORK/run/admin.sock' PATH='$VENV/bin':\$PATH
  freetokenctl top

  bash packaging/quickstart.sh --stop
TXT
