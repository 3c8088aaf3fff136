"""sd_notify(3): what the service manager hears of us. Without one, every call does nothing."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Final

import sdnotify

_MICROSECONDS: Final = 1_000_000


class ServiceManager:
    """The notification socket of this process, if a service manager gave it one."""

    def __init__(self) -> None:
        self._notifier = sdnotify.SystemdNotifier()

    def ready(self) -> None:
        """Start-up is over."""
        self._send("READY=1")

    def stopping(self, text: str, *, timeout_s: float) -> None:
        """The stop has begun and will take at most `timeout_s`."""
        self._send(f"STOPPING=1\nSTATUS={_one_line(text)}\n{_extension(timeout_s)}")

    def status(self, text: str) -> None:
        """One line for `systemctl status`."""
        self._send(f"STATUS={_one_line(text)}")

    def extend_timeout(self, timeout_s: float) -> None:
        """Start-up advances: give it this much more time from now."""
        self._send(_extension(timeout_s))

    def watchdog(self) -> None:
        """The service is well."""
        self._send("WATCHDOG=1")

    def _send(self, text: str) -> None:
        # The client encodes Latin-1 and swallows what does not fit: a model's name may not.
        self._notifier.notify(text.encode("ascii", errors="replace").decode("ascii"))


def _one_line(text: str) -> str:
    """A cause may hold line breaks, and a line of its own is an assignment to the manager."""
    return " ".join(text.split())


def _extension(timeout_s: float) -> str:
    return f"EXTEND_TIMEOUT_USEC={round(timeout_s * _MICROSECONDS)}"


def watchdog_s(environ: Mapping[str, str], pid: int) -> float | None:
    """WatchdogSec of this process, None when the manager watches nothing (or somebody else)."""
    text = environ.get("WATCHDOG_USEC", "")
    owner = environ.get("WATCHDOG_PID", str(pid))
    if not text.isdecimal() or int(text) == 0 or owner != str(pid):
        return None
    return int(text) / _MICROSECONDS


def own_watchdog_s() -> float | None:
    """`watchdog_s` of the running process."""
    return watchdog_s(os.environ, os.getpid())
