"""Control's side of the socketpair that each engine inherits: the pool's way in, then the lifeline.

Control keeps its end open for as long as it lives; the engine's native lifeline thread exits on
end of file (`freetokend.native.lifeline` has the messages and the thread).
"""

from __future__ import annotations

import socket
from dataclasses import dataclass

from freetokend.native.lifeline import send_no_pool, send_pool


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolHandover:
    """The pool file as it is given to every engine; the fd stays open in control."""

    name: str
    length_bytes: int
    fd: int


def make_lifeline() -> tuple[socket.socket, socket.socket]:
    """(control's end, the engine's end); message boundaries kept, neither inherited by default."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def hand_over(lifeline: socket.socket, pool: PoolHandover | None) -> None:
    """The one message after the spawn. Raises `OSError` when the engine is gone already."""
    if pool is None:
        send_no_pool(lifeline)
    else:
        send_pool(lifeline, pool.name, pool.length_bytes, pool.fd)
