"""Where a daemon puts its sockets, and where a client looks for them: one rule for both.

Kept free of heavy imports: `freetokenctl` reads it on every call.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

SYSTEM_RUNTIME_DIR: Final = "/run/freetokend"
ADMIN_SOCKET_NAME: Final = "admin.sock"
MONITOR_SOCKET_NAME: Final = "monitor.sock"
SOCKET_VARIABLE: Final = "FREETOKEN_SOCKET"


def default_runtime_dir(environ: Mapping[str, str], uid: int) -> tuple[str, str]:
    """The runtime directory of a daemon started with this environment, and the reason for it.

    Under systemd RuntimeDirectory= decides; else the user's own runtime directory, the system's
    for root, and at last a directory of the user's own among the temporary ones.
    """
    given = environ.get("RUNTIME_DIRECTORY", "").split(":")[0]
    if given:
        return given, "RUNTIME_DIRECTORY of the service manager"
    xdg = environ.get("XDG_RUNTIME_DIR", "")
    if xdg.startswith("/"):
        return f"{xdg.rstrip('/')}/freetokend", "XDG_RUNTIME_DIR of this user"
    if uid == 0:
        return SYSTEM_RUNTIME_DIR, "started by root"
    return _private_dir(environ, uid), "not root, and XDG_RUNTIME_DIR is not set"


def client_runtime_dirs(environ: Mapping[str, str], uid: int) -> tuple[str, ...]:
    """The directories in which a client looks for a daemon's sockets, its own daemon first."""
    own, _ = default_runtime_dir(environ, uid)
    return tuple(dict.fromkeys((own, SYSTEM_RUNTIME_DIR, _private_dir(environ, uid))))


def _private_dir(environ: Mapping[str, str], uid: int) -> str:
    # Not tempfile.gettempdir(): it tries what is writable, and its module imports many others.
    temp_dir = environ.get("TMPDIR", "")
    if not temp_dir.startswith("/"):
        temp_dir = "/tmp"
    return f"{temp_dir.rstrip('/')}/freetokend-{uid}"
