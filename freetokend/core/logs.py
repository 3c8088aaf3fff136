"""Logging to standard error: constant event names with key=value fields, never user text.

    log = logs.logger("freetokend.link")
    log.warning("engine-died", pid=4711, cause="killed by signal 9")

gives `warning link engine-died pid=4711 cause="killed by signal 9"`. Under the journal each line
starts with its priority instead (`<4>`), which the journal takes off and keeps. Prompts and
completions are never passed to a logger.
"""

from __future__ import annotations

import logging
import os
import re
import sys
import time
from typing import Final, TextIO

from freetokend.core.errors import InvalidInputError

ROOT: Final = "freetokend"

_LEVELS: Final = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}
_FIELDS: Final = "freetokend_fields"
_ROUTINE: Final = re.compile(r"<[5-7]>|\d\d:\d\d:\d\d (?:debug|info) ")
# What every record has; the rest of its attributes came in through `extra`.
_RECORD_KEYS: Final = frozenset(vars(logging.makeLogRecord({}))) | {
    "message",
    "asctime",
    "taskName",
}

FieldValue = str | int | float | bool | None


class EventLogger:
    """A named logger whose calls are an event name and typed fields."""

    __slots__ = ("_logger",)

    def __init__(self, name: str) -> None:
        self._logger = logging.getLogger(name)

    def debug(self, event: str, **fields: FieldValue) -> None:
        """What only a developer wants to see."""
        self._log(logging.DEBUG, event, fields)

    def info(self, event: str, **fields: FieldValue) -> None:
        """Something that happened as it should."""
        self._log(logging.INFO, event, fields)

    def warning(self, event: str, **fields: FieldValue) -> None:
        """Degraded: the service goes on with less."""
        self._log(logging.WARNING, event, fields)

    def error(self, event: str, **fields: FieldValue) -> None:
        """Something was lost: a request, the engine, a promise."""
        self._log(logging.ERROR, event, fields)

    def exception(self, event: str, **fields: FieldValue) -> None:
        """An error with the traceback of the exception being handled."""
        self._log(logging.ERROR, event, fields, exc_info=True)

    def _log(
        self, level: int, event: str, fields: dict[str, FieldValue], *, exc_info: bool = False
    ) -> None:
        if self._logger.isEnabledFor(level):
            self._logger.log(level, event, extra={_FIELDS: fields}, exc_info=exc_info)


def logger(name: str) -> EventLogger:
    """The event logger of a module; pass `__name__`."""
    return EventLogger(name)


def stderr_is_journal(journal_stream: str, stream: TextIO) -> bool:
    """Whether `stream` is the very socket that JOURNAL_STREAM ("device:inode") names."""
    device, _, inode = journal_stream.partition(":")
    if not (device.isdecimal() and inode.isdecimal()):
        return False
    try:
        status = os.fstat(stream.fileno())
    except (OSError, ValueError):
        return False
    return (status.st_dev, status.st_ino) == (int(device), int(inode))


def set_up_logging(level: str, format: str, stream: TextIO | None = None) -> None:
    """Sends every log line of the process to `stream` (standard error).

    `level` is a name of core.config's LOG_LEVELS, `format` "text" or "journal". Calling it again
    replaces the former set-up.
    """
    handler = logging.StreamHandler(sys.stderr if stream is None else stream)
    handler.setFormatter(_JournalFormatter() if format == "journal" else _TextFormatter())
    root = logging.getLogger()
    for former in list(root.handlers):
        root.removeHandler(former)
    root.addHandler(handler)
    # Libraries log through the same stream, but their chatter below warnings is not ours.
    root.setLevel(logging.WARNING)
    set_log_level(level)


def set_log_level(level: str) -> str:
    """Changes the level of the running process; returns the former one.

    Raises `InvalidInputError` when `level` is none of debug, info, warning, error.
    """
    if level not in _LEVELS:
        raise InvalidInputError(
            f'"{level}" is no log level; use one of {", ".join(_LEVELS)}', param="level"
        )
    former = log_level()
    logging.getLogger(ROOT).setLevel(_LEVELS[level])
    return former


def is_routine(line: str) -> bool:
    """Whether `line` is one of ours below warning, in either format. What has no level (a crash
    report of the interpreter or of a library) is not."""
    return _ROUTINE.match(line) is not None


def log_level() -> str:
    """The present level of our own loggers."""
    effective = logging.getLogger(ROOT).getEffectiveLevel()
    names = [name for name, number in _LEVELS.items() if number >= effective]
    return names[0] if names else "error"


class _EventFormatter(logging.Formatter):
    def event_text(self, record: logging.LogRecord) -> str:
        """Source, event, fields; one line, but for a traceback."""
        source = record.name.removeprefix(f"{ROOT}.")
        fields = _fields_of(record)
        # The message of a library is free text and may hold line breaks.
        event = record.getMessage()
        event = event if event.isprintable() else _quoted(event)
        text = " ".join([source, event, *(f"{k}={_value_text(v)}" for k, v in fields.items())])
        if record.exc_info:
            text += "\n" + self.formatException(record.exc_info)
        return text


class _TextFormatter(_EventFormatter):
    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        return f"{clock} {record.levelname.lower():7} {self.event_text(record)}"


class _JournalFormatter(_EventFormatter):
    def format(self, record: logging.LogRecord) -> str:
        prefix = f"<{_priority(record.levelno)}>"
        # The journal reads a prefix per line, so that each line of a traceback needs one.
        return "\n".join(prefix + line for line in self.event_text(record).split("\n"))


def _fields_of(record: logging.LogRecord) -> dict[str, FieldValue]:
    """The fields of an `EventLogger`, or what a plain logger was given as `extra`."""
    given: dict[str, FieldValue] | None = getattr(record, _FIELDS, None)
    if given is not None:
        return given
    extra = {key: value for key, value in vars(record).items() if key not in _RECORD_KEYS}
    return {
        key: v if isinstance(v, str | int | float | None) else str(v) for key, v in extra.items()
    }


def _priority(level: int) -> int:
    """syslog(3) priorities: 3 error, 4 warning, 6 informational, 7 debug."""
    if level >= logging.ERROR:
        return 3
    if level >= logging.WARNING:
        return 4
    return 6 if level >= logging.INFO else 7


def _value_text(value: FieldValue) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case float():
            return f"{value:.6g}"
        case None:
            return "none"
        case int():
            return str(value)
        case _:
            plain = value.isprintable() and value and not set(value) & set(' "=')
            return value if plain else _quoted(value)


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + "".join(c if c.isprintable() else repr(c)[1:-1] for c in escaped) + '"'
