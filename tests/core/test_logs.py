"""How log lines look, for people and for the journal."""

from __future__ import annotations

import io
import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest

from freetokend.core import logs
from freetokend.core.errors import InvalidInputError


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    root, own = logging.getLogger(), logging.getLogger(logs.ROOT)
    handlers, root_level, own_level = list(root.handlers), root.level, own.level
    yield
    root.handlers[:] = handlers
    root.setLevel(root_level)
    own.setLevel(own_level)


def lines(format: str, level: str = "debug") -> tuple[logs.EventLogger, io.StringIO]:
    stream = io.StringIO()
    logs.set_up_logging(level, format, stream)
    return logs.logger("freetokend.link.server"), stream


def test_text_lines_carry_event_and_fields() -> None:
    log, stream = lines("text")
    log.warning("engine-died", pid=12, cause="killed by signal 9", code=None, ok=False, age_s=1.5)
    assert re.fullmatch(
        r"\d\d:\d\d:\d\d warning link\.server engine-died pid=12 "
        r'cause="killed by signal 9" code=none ok=false age_s=1\.5\n',
        stream.getvalue(),
    )


@pytest.mark.parametrize(
    ("level", "priority"), [("debug", 7), ("info", 6), ("warning", 4), ("error", 3)]
)
def test_journal_lines_carry_priorities(level: str, priority: int) -> None:
    log, stream = lines("journal")
    getattr(log, level)("event", n=1)
    assert stream.getvalue() == f"<{priority}>link.server event n=1\n"


def test_every_line_of_a_traceback_has_its_priority() -> None:
    log, stream = lines("journal")
    try:
        raise ValueError("two\nlines")
    except ValueError:
        log.exception("step-failed")
    written = stream.getvalue().splitlines()
    assert len(written) > 3
    assert all(line.startswith("<3>") for line in written)


def test_a_value_cannot_forge_a_line_or_a_field() -> None:
    log, stream = lines("journal")
    log.info("event", name='a"\n<0>link.server forged', other="x=1")
    assert stream.getvalue() == (
        '<6>link.server event name="a\\"\\n<0>link.server forged" other="x=1"\n'
    )
    logging.getLogger("foreign").warning("two\nlines")
    assert stream.getvalue().count("\n") == 2


def test_plain_loggers_of_ours_may_give_fields_as_extra() -> None:
    _, stream = lines("journal")
    logging.getLogger("freetokend.x").error("engine-died", extra={"cause": "oom", "reason": "a b"})
    assert stream.getvalue() == '<3>x engine-died cause=oom reason="a b"\n'


def test_the_level_filters_our_lines_and_libraries_stay_quiet() -> None:
    log, stream = lines("text", level="warning")
    log.info("hidden")
    logging.getLogger("uvicorn").info("hidden")
    assert stream.getvalue() == ""
    assert logs.set_log_level("debug") == "warning"
    assert logs.log_level() == "debug"
    log.debug("shown")
    logging.getLogger("uvicorn").info("hidden")
    assert stream.getvalue().count("\n") == 1


@pytest.mark.parametrize("log_format", ["text", "journal"])
def test_routine_lines_are_told_from_those_that_may_explain_an_end(log_format: str) -> None:
    log, stream = lines(log_format, level="debug")
    for tell in (log.debug, log.info, log.warning, log.error):
        tell("event", field=1)
    assert [logs.is_routine(line) for line in stream.getvalue().splitlines()] == [
        *(True, True),
        *(False, False),
    ]
    assert not logs.is_routine("Fatal Python error: Segmentation fault")
    assert not logs.is_routine("free(): invalid pointer")


def test_unknown_levels_are_refused_with_the_known_ones() -> None:
    with pytest.raises(InvalidInputError, match="debug, info, warning, error") as caught:
        logs.set_log_level("loud")
    assert caught.value.param == "level"


def test_the_journal_is_recognised_by_device_and_inode() -> None:
    script = (
        "import os, sys; from freetokend.core.logs import stderr_is_journal as j;"
        "s = os.fstat(2); own = f'{s.st_dev}:{s.st_ino}';"
        "print(j(own, sys.stderr), j(f'{s.st_dev}:{s.st_ino + 1}', sys.stderr),"
        " j('', sys.stderr), j('a:b', sys.stderr))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, env=os.environ
    )
    assert done.stdout.split() == ["True", "False", "False", "False"]
