"""Places for Unix sockets: the directory, the file's mode, and what an earlier daemon left."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import grp
import os
import socket
import stat
from collections.abc import Callable
from typing import Final

from freetokend.core.errors import ConfigError, Reason, UnavailableError

_PROBE_TIMEOUT_S: Final = 1.0


def prepare_directory(path: str) -> None:
    """Make `path` if it is missing, and refuse one in which somebody else could put sockets.

    Below a directory that everybody may write to (/tmp) it is made for its owner alone; elsewhere
    others may enter, since the monitor socket is for them too.
    """
    parent = os.path.dirname(path) or "/"
    try:
        os.makedirs(parent, exist_ok=True)
        shared = bool(os.stat(parent).st_mode & stat.S_IWOTH)
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, mode=0o700 if shared else 0o755)
        status = os.lstat(path)
    except OSError as error:
        raise ConfigError(
            f"the directory {path} cannot be made: {error.filename}: {error.strerror}; give uid "
            f"{os.geteuid()} access or set service.runtime_dir",
            param="service.runtime_dir",
        ) from error
    if not stat.S_ISDIR(status.st_mode):
        _refuse(path, "it is not a directory")
    if status.st_uid not in (0, os.geteuid()):
        _refuse(path, f"it belongs to uid {status.st_uid}, not to uid {os.geteuid()} or root")
    if status.st_mode & stat.S_IWOTH:
        _refuse(path, "everybody may write to it")


def _refuse(path: str, why: str) -> None:
    raise ConfigError(
        f"{path} cannot hold the control sockets: {why}; set service.runtime_dir to another one",
        param="service.runtime_dir",
    )


class SocketPlace:
    """One path for one listening socket, held by a lock so that two daemons never share it.

    A lock file lies beside the socket for as long as the place is held.
    """

    def __init__(self, path: str, *, mode: int, group: str = "") -> None:
        self.path = path
        self._mode = mode
        self._group = group
        self._lock_fd = -1
        self._bound = False

    def check(self) -> None:
        """Raises what `claim` and `bind` would of a directory that denies us or a group that does
        not exist; takes nothing, so a daemon that listens here is not in the way."""
        if not os.access(os.path.dirname(self.path), os.W_OK | os.X_OK, effective_ids=True):
            raise self._denied(os.strerror(errno.EACCES))
        self._group_id()

    def claim(self) -> None:
        """Take the place; removes a socket on which nobody listens any more.

        Raises `UnavailableError` when another daemon listens, `ConfigError` when something else
        than a socket lies there or its directory denies us.
        """
        self._lock()
        try:
            self._clear()
        except BaseException:
            self.release()
            raise

    def bind(self, bind: Callable[[], None]) -> None:
        """Run `bind`, which makes the socket; nobody gets in before its group and mode are right.

        Raises `ConfigError` when the group does not exist or may not be given.
        """
        # bind(2) takes the umask off 0777: closed to all but us until `_open`.
        former = os.umask(0o177)
        try:
            bind()
            self._bound = True
        finally:
            os.umask(former)
        self._open()

    def release(self) -> None:
        """Give the place back and remove the socket, if it is ours; idempotent."""
        if self._bound:
            self._bound = False
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.path)
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1

    def _lock(self) -> None:
        try:
            fd = os.open(
                f"{self.path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600
            )
        except OSError as error:
            raise self._denied(error.strerror) from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            raise _occupied(self.path) from None
        self._lock_fd = fd

    def _denied(self, why: str | None) -> ConfigError:
        return ConfigError(
            f"{self.path}.lock cannot be made: {why}; give uid {os.geteuid()} "
            "access or set service.runtime_dir",
            param="service.runtime_dir",
        )

    def _clear(self) -> None:
        try:
            status = os.lstat(self.path)
        except FileNotFoundError:
            return
        if not stat.S_ISSOCK(status.st_mode):
            raise ConfigError(
                f"{self.path} is in the way: it is not a socket; remove it or set another path",
                param="control",
            )
        if is_listened_on(self.path):
            raise _occupied(self.path)
        os.unlink(self.path)

    def _open(self) -> None:
        group_id = self._group_id()
        if group_id is not None:
            try:
                os.chown(self.path, -1, group_id)
            except PermissionError:
                raise ConfigError(
                    f'uid {os.geteuid()} may not give {self.path} to the group "{self._group}"; '
                    "make the daemon's user a member, or change control.admin_group",
                    param="control.admin_group",
                ) from None
        os.chmod(self.path, self._mode)

    def _group_id(self) -> int | None:
        if not self._group:
            return None
        try:
            return grp.getgrnam(self._group).gr_gid
        except KeyError:
            raise ConfigError(
                f'the group "{self._group}" does not exist; make it (systemd-sysusers) or '
                "change control.admin_group",
                param="control.admin_group",
            ) from None


def is_listened_on(path: str) -> bool:
    """Whether somebody accepts connections on the Unix socket at `path`."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(_PROBE_TIMEOUT_S)
        try:
            probe.connect(path)
        except TimeoutError:
            return True  # a full backlog is a listener
        except OSError as error:
            return error.errno not in (errno.ECONNREFUSED, errno.ENOENT)
    return True


def _occupied(path: str) -> UnavailableError:
    """Not an error of the configuration: the other one may just be stopping."""
    return UnavailableError(
        f"another freetokend is running: it listens on {path}. Stop it first "
        "(`freetokenctl stop`), or give this one its own service.runtime_dir and http.port",
        reason=Reason.ADDRESS_IN_USE,
        param="service.runtime_dir",
    )
