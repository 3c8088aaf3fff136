"""`freetokend`: from the command line to a running service, and its exit status.

An error is one clear sentence on standard error and the exit code of its reason; a traceback only
shows for a fault of ours, in the log at level debug.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import uvloop

from freetokend.core import logs
from freetokend.core.config import gather_facts, load_config, resolve
from freetokend.core.errors import FreetokenError, Reason, reaction
from freetokend.core.host_facts import HostFiles, read_host_memory
from freetokend.daemon.notify import ServiceManager
from freetokend.daemon.options import Options, parse_options
from freetokend.daemon.preflight import check_cache, check_memory, check_model, check_start
from freetokend.daemon.service import Service, ServicePlan

_log = logs.logger(__name__)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the daemon; returns its exit status."""
    try:
        options = parse_options(argv)
        plan = make_plan(options)
        if options.check_config:
            check_start(plan.config, plan.index)
            _print_checked(plan)
            return 0
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_run(plan))
    except FreetokenError as error:
        _complain(error.message)
        return reaction(error.reason).exit_code
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        _log.exception("fault")
        _complain(f"a fault of freetokend itself: {type(error).__name__}: {error}")
        return reaction(Reason.INTERNAL).exit_code
    return 0


def make_plan(options: Options) -> ServicePlan:
    """Configuration, model and memory, checked. Raises the errors that the user can mend."""
    facts = gather_facts()
    asked = load_config(options.config_file, overrides=options.overrides)
    config = resolve(asked, facts)
    logs.set_up_logging(config.log.level, config.log.format)
    index = None
    if options.script_file is None:
        index = check_model(Path(config.model.path))
        cap_bytes = config.pool.max_bytes or None
        check_memory(index, read_host_memory(HostFiles(), cap_bytes))
    check_cache(config, index)
    return ServicePlan(config=config, facts=facts, index=index, script_file=options.script_file)


async def _run(plan: ServicePlan) -> None:
    service = Service(plan, ServiceManager())
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, lambda: service.request_stop(drain=True))
    # A terminal that closes, or a manager that thinks we can reload, must not kill the service.
    loop.add_signal_handler(signal.SIGHUP, lambda: _log.warning("reload-is-not-supported"))
    await service.run()


def _print_checked(plan: ServicePlan) -> None:
    print("The configuration and the model are fine.")
    for value in plan.config.values():
        reason = f"; {value.reason}" if value.reason else ""
        print(f"{value.key} = {value.value}  # {value.origin}{reason}")


def _complain(sentence: str) -> None:
    for line in sentence.splitlines():
        print(f"freetokend: {line}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
