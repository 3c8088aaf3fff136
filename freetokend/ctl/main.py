"""`freetokenctl`: reads and steers a running freetokend, and works on model files.

Nothing heavy is imported before the verb is known: `freetokenctl status` must feel instant.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from typing import Final, NoReturn

from freetokend.core.errors import FreetokenError, Reason, reaction
from freetokend.ctl.arguments import SOCKET_HELP, Verbs, add_output, add_verb
from freetokend.ctl.bandwidth_verbs import add_bandwidth
from freetokend.ctl.quick_start import spare_imports

# Their libraries do not like stand-ins for modules.
_ARITHMETIC_VERBS: Final = frozenset(("ftw", "plan", "trace"))

EXIT_OK: Final = 0
EXIT_USAGE: Final = 64
EXIT_INTERRUPTED: Final = 130

_EPILOG: Final = """\
exit codes:
   0  done
   1  ftw verify: the files are damaged; verify-cache: a slot differs; plan: it would not run
  64  the command line is wrong
  65  the model's files, or a recorded trace, cannot be used
  69  freetokend is not running, or its engine has failed for good
  70  a fault of freetokend itself
  71  not enough memory, or no usable device
  73  not enough disk space
  74  a file could not be read or written
  75  not yet: not ready in time, requests still running, or no answer in time
  77  not permitted
  78  the configuration is wrong
 130  interrupted

examples:
  freetokenctl status            what is served, on what, how busy
  freetokenctl top               the same, followed
  freetokenctl cache             which experts are on the device, and what misses cost
  freetokenctl wait --timeout 600 && curl http://127.0.0.1:8440/v1/models
  freetokenctl drain && sudo systemctl restart freetokend
  freetokenctl config show --origin
  freetokenctl ftw convert ~/models/Qwen3-30B-A3B /var/lib/freetokend/qwen3
  freetokenctl plan --gpu-gib 32 --b-p 52.7GB/s --b-h 60GB/s --model qwen3-30b-a3b
"""


class Parser(argparse.ArgumentParser):
    """An argument parser whose usage errors have the exit code of sysexits(3)."""

    def error(self, message: str) -> NoReturn:
        """Usage and the message on standard error, then exit code 64."""
        self.print_usage(sys.stderr)
        self.exit(EXIT_USAGE, f"{self.prog}: {message}\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        if not _ARITHMETIC_VERBS & set(arguments):
            spare_imports()
        parsed = build_parser(arguments).parse_args(arguments)
        code: int = _handler(parsed)(parsed)
        sys.stdout.flush()
        return code
    except FreetokenError as error:
        print(f"freetokenctl: {error.message}", file=sys.stderr)
        return reaction(error.reason).exit_code
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader (head, less) has seen enough. Python would complain again at its exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_OK
    except Exception as error:
        print(f"freetokenctl: a fault of its own: {type(error).__name__}: {error}", file=sys.stderr)
        return reaction(Reason.INTERNAL).exit_code


def _handler(parsed: argparse.Namespace) -> Callable[[argparse.Namespace], int]:
    """The verb's function: set by its parser, as such or as "module:function" to be imported."""
    handler = parsed.handler
    if isinstance(handler, str):
        module, _, function = handler.partition(":")
        handler = getattr(importlib.import_module(f"freetokend.ctl.{module}"), function)
    found: Callable[[argparse.Namespace], int] = handler
    return found


def build_parser(arguments: Sequence[str] = ()) -> argparse.ArgumentParser:
    """The parser; `arguments` tells which offline verbs must be imported to build theirs."""
    parser: argparse.ArgumentParser = Parser(
        prog="freetokenctl",
        description="Reads and steers a running freetokend, and works on model files.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--socket", metavar="PATH", help=SOCKET_HELP)
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    _add_reading(verbs)
    _add_changing(verbs)
    _add_memory(verbs)
    _add_config(verbs)
    _add_ftw(verbs, wanted="ftw" in arguments)
    add_bandwidth(verbs)
    _add_trace(verbs)
    _add_plan(verbs)
    return parser


def _add_reading(verbs: Verbs[argparse.ArgumentParser]) -> None:
    add_output(add_verb(verbs, "status", "reading:status", "show the state of the service"))
    top = add_verb(
        verbs,
        "top",
        "top:top",
        "follow the state of the service",
        "Follows the state of the service: in place on a terminal, else a line per interval. "
        "Ctrl-C ends it.",
    )
    add_output(top)
    top.add_argument(
        "--interval",
        type=float,
        default=1.0,
        metavar="S",
        dest="interval_s",
        help="seconds between updates, 0.1 to 3600 (default: %(default)s)",
    )
    top.add_argument(
        "--count", type=int, default=0, metavar="N", help="end after N updates (default: never)"
    )
    wait = add_verb(
        verbs,
        "wait",
        "reading:wait",
        "wait until the service takes requests",
        "Waits until the service takes requests, also for a daemon that is still to be started. "
        "Exit code 75: not in time; 69: no daemon was there, or its engine failed for good.",
    )
    add_output(wait)
    wait.add_argument(
        "--ready", action="store_true", help="wait for readiness (this is the default)"
    )
    wait.add_argument(
        "--timeout",
        type=float,
        default=300.0,
        metavar="S",
        dest="timeout_s",
        help="seconds to wait at most (default: %(default)s)",
    )
    add_output(
        add_verb(
            verbs,
            "cache",
            "cache:cache",
            "show the expert cache",
            "Shows the expert cache: slots, hits layer by layer, how misses are split between "
            "fills and the CPU, and where the rates come from. JSON has the whole fill table.",
        )
    )
    add_output(
        add_verb(verbs, "version", "reading:version", "show the versions of client and daemon")
    )


def _add_changing(verbs: Verbs[argparse.ArgumentParser]) -> None:
    drain = add_verb(
        verbs,
        "drain",
        "changing:drain",
        "refuse new requests and wait for the running ones",
        "Refuses new requests (503, with a hint to retry) and waits for the running ones. "
        "Exit code 75: some still ran at the deadline. The service stays drained until `resume`.",
    )
    add_output(drain)
    drain.add_argument(
        "--timeout",
        type=float,
        default=0.0,
        metavar="S",
        dest="timeout_s",
        help="seconds to wait at most (default: service.drain_timeout_s)",
    )
    add_output(add_verb(verbs, "resume", "changing:resume", "accept requests again after a drain"))
    stop = add_verb(
        verbs,
        "stop",
        "changing:stop",
        "stop the daemon",
        "Stops the daemon after a drain and waits until it has gone. Under systemd prefer "
        "`systemctl stop freetokend`.",
    )
    add_output(stop)
    stop.add_argument("--now", action="store_true", help="do not wait for running requests")
    stop.add_argument(
        "--timeout",
        type=float,
        default=120.0,
        metavar="S",
        dest="timeout_s",
        help="seconds to wait for the end; the stop goes on (default: %(default)s)",
    )
    add_output(
        add_verb(
            verbs,
            "verify-cache",
            "cache:verify_cache",
            "compare the expert cache with the weights",
            "Compares every slot of the expert cache with the weights in host memory, between two "
            "steps; requests wait meanwhile. Exit code 1: a slot differs; 71: there is no cache.",
        )
    )
    level = add_verb(
        verbs,
        "log-level",
        "changing:log_level",
        "show or change what is logged, until the next restart",
    )
    add_output(level)
    level.add_argument(
        "level", nargs="?", choices=("debug", "info", "warning", "error"), help="the new level"
    )


def _add_memory(verbs: Verbs[argparse.ArgumentParser]) -> None:
    resize = add_verb(
        verbs,
        "resize",
        "memory:resize",
        "change what the GPU's memory is used for, while requests run",
        "Changes what the engine uses the GPU's memory for, while requests run, and tells what "
        "really happened. The wish stands until the next one or a restart; what other programs "
        "take still goes first. Exit code 75: it cannot be done now; 71: there is no such memory.",
    )
    size = resize.add_mutually_exclusive_group(required=True)
    size.add_argument("--slots", metavar="N|P%", help="experts in the cache, or a share of them")
    size.add_argument("--vram", metavar="SIZE", help="the most that the engine holds; 0: no limit")
    size.add_argument("--kv", metavar="TOKENS", help="tokens of all contexts, as 65536 or 64k")
    size.add_argument(
        "--preset", choices=("auto", "minimum", "chat", "agent"), help="instead of other wishes"
    )
    resize.add_argument("--wait", action="store_true", help="until it is done, not only decided")
    add_output(resize)
    hold = add_verb(
        verbs,
        "hold",
        "memory:hold",
        "keep memory of the GPU free for another program",
        "Keeps memory of the GPU free for another program, until Ctrl-C or while COMMAND runs, "
        "which is started as soon as the memory is free and whose exit code is passed on.",
    )
    hold.add_argument("--vram", metavar="SIZE", required=True, help="how much, such as 8GiB")
    hold.add_argument("--reason", metavar="TEXT", default="", help="for those who see the hold")
    hold.add_argument("command", nargs="*", metavar="-- COMMAND", help="what to hold it for")
    add_output(add_verb(verbs, "holds", "memory:holds", "list the holds that stand"))
    add_output(
        add_verb(
            verbs,
            "sleep",
            "memory:sleep",
            "give the GPU back until a request comes",
            "Gives all memory of the GPU back once no request runs or waits; the weights stay in "
            "host memory and the next request wakes the engine. Exit code 75: requests still run.",
        )
    )
    add_output(
        add_verb(
            verbs,
            "wake",
            "memory:wake",
            "take the GPU again without a request",
            "Takes memory of the GPU again. Exit code 71: other programs leave too little of it.",
        )
    )
    events = add_verb(
        verbs,
        "events",
        "memory:events",
        "show what happened to the memory, and why",
        "Shows what happened to the memory of the GPU and of the host: decisions with their "
        "reasons, resizes, holds, sleep. JSON is one object per line.",
    )
    add_output(events)
    events.add_argument("-w", "--watch", action="store_true", help="go on with what comes")
    events.add_argument(
        "--after", type=int, default=0, metavar="N", help="only those after number N"
    )


def _add_config(verbs: Verbs[argparse.ArgumentParser]) -> None:
    config = verbs.add_parser("config", help="show the configuration")
    config_verbs = config.add_subparsers(dest="config_verb", required=True, metavar="VERB")
    show = add_verb(
        config_verbs,
        "show",
        "reading:config_show",
        "show the configuration that the daemon runs with",
    )
    show.add_argument(
        "--origin",
        action="store_true",
        help="also where each value was written, and why an automatic one is what it is",
    )
    add_output(show)
    add_verb(
        config_verbs,
        "keys",
        "config_keys:keys",
        "list every key with its default and meaning (needs no daemon)",
    )


def _add_ftw(verbs: Verbs[argparse.ArgumentParser], *, wanted: bool) -> None:
    if wanted:
        # Its arithmetic libraries take longer to import than `status` may take in all.
        importlib.import_module("freetokend.ctl.ftw_commands").register(verbs)
    else:
        verbs.add_parser("ftw", help="convert, check and describe model directories")


def _add_trace(verbs: Verbs[argparse.ArgumentParser]) -> None:
    trace = verbs.add_parser("trace", help="record routing, and compare cache policies on it")
    trace_verbs = trace.add_subparsers(dest="trace_verb", required=True, metavar="VERB")
    record = add_verb(
        trace_verbs,
        "record",
        "trace_record:record",
        "record which experts the running model chooses",
        "Records which experts the running model chooses, step by step, until Ctrl-C or a limit, "
        "for `trace replay`. A trace holds numbers of experts: no tokens, no text, nothing of who "
        "asked. Requests are not slowed down: what cannot keep up is the recording, which then "
        "ends and says so. Whatever ends it, FILE is whole and holds what was recorded.",
    )
    record.add_argument("--out", required=True, metavar="FILE", help="the trace to write")
    record.add_argument("--force", action="store_true", help="replace FILE if it is there")
    limit = record.add_mutually_exclusive_group()
    limit.add_argument(
        "--seconds",
        type=_seconds,
        default=0.0,
        metavar="S",
        dest="duration_s",
        help="end after S seconds (default: never)",
    )
    limit.add_argument(
        "--steps",
        type=_above_0,
        default=0,
        metavar="N",
        dest="steps_count",
        help="end after N steps of the engine (default: never)",
    )
    add_output(record)
    replay = add_verb(
        trace_verbs,
        "replay",
        "trace_commands:replay",
        "show what a recorded trace would miss under every policy (needs no daemon)",
        "Replays a routing trace over the expert cache, a plain LRU, two fixed placements and the "
        "optimum that knows the future. Needs no daemon; takes seconds per size.",
    )
    replay.add_argument("file", help="the trace")
    replay.add_argument(
        "--slots",
        type=_above_0,
        action="append",
        metavar="N",
        help="slots of the cache; may be repeated (default: 5 to 80 %% of the experts)",
    )
    add_output(replay)


def _add_plan(verbs: Verbs[argparse.ArgumentParser]) -> None:
    plan = add_verb(
        verbs,
        "plan",
        "plan:plan",
        "tell whether a model would run on a machine, how fast, and what to buy (needs no daemon)",
        "Tells from a few figures of a machine, which need not be this one, whether a model would "
        "run on it, how its GPU's memory would be divided, how fast it would write, what limits it "
        "and which single change helps most. Nothing is measured: the model of the machine was "
        "fitted to published results of six others. Exit code 0: it would run; 1: it would not. "
        "RATE is a rate such as 52.7GB/s, or a range such as 56.7-77.3GB/s.",
    )
    plan.add_argument(
        "--gpu-gib", required=True, metavar="N", help="memory of the GPU in GiB, 0.5 to 4096"
    )
    plan.add_argument(
        "--b-p", required=True, metavar="RATE", help="copies to the GPU, pinned (B_P)"
    )
    plan.add_argument(
        "--b-h", required=True, metavar="RATE", help="experts executed by the CPU (B_H)"
    )
    plan.add_argument(
        "--gpu-bandwidth",
        metavar="RATE",
        help="the GPU's own memory (default: what GPUs of that size have, as a range)",
    )
    plan.add_argument(
        "--ram-gib",
        metavar="N",
        help="memory of the host in GiB, 1 to 65536 (default: not compared with the need)",
    )
    plan.add_argument("--cores", metavar="N", help="physical cores that execute experts, 1 to 4096")
    plan.add_argument(
        "--context", metavar="TOKENS", help="context that one request must be able to have"
    )
    plan.add_argument(
        "--preset",
        choices=("auto", "minimum", "chat", "agent"),
        default="auto",
        help="what the GPU's memory is divided for (default: %(default)s)",
    )
    plan.add_argument(
        "--model",
        required=True,
        metavar="DIR|NAME",
        help="an FTW directory, one with a config.json (no weights needed), or a published model: "
        "qwen3.6-35b-a3b, qwen3.6-35b-a3b-nvfp4, qwen3-30b-a3b, deepseek-v4-flash, glm-5.2",
    )
    plan.add_argument(
        "--format",
        metavar="FORMAT",
        help="weight format of the experts, for a config.json (default: the checkpoint's)",
    )
    add_output(plan)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds") from None
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


def _above_0(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value
