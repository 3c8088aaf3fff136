"""The lifeline ends the engine with control, and carries the pool before that."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freetokend.core.errors import InternalError, UnavailableError
from freetokend.native.lifeline import (
    LIFELINE_EXIT_CODE,
    Lifeline,
    receive_pool,
    send_no_pool,
    send_pool,
)
from tests.native.host_support import DEADLINE_S, start_child, wait_until

# Holds the GIL for good: PyDLL does not release it around the call.
STUCK = """
    import ctypes, sys
    from freetokend.native.lifeline import Lifeline
    Lifeline.start(int(sys.argv[1]))  # the object is dropped at once
    print("ready", flush=True)
    while True:
        ctypes.PyDLL(None).sleep(1000)
"""
SPINNING = """
    import sys
    from freetokend.native.lifeline import Lifeline
    lifeline = Lifeline.start(int(sys.argv[1]))
    print("ready", flush=True)
    while True:
        pass
"""


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Control's and the engine's end."""
    control, engine = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with control, engine:
        yield control, engine


def _start(code: str, engine: socket.socket) -> subprocess.Popen[str]:
    child = start_child(code, fds=[engine.fileno()], arguments=[str(engine.fileno())])
    engine.close()
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    return child


@pytest.mark.parametrize("code", [STUCK, SPINNING], ids=["stuck", "spinning"])
def test_end_of_file_ends_a_process_that_holds_the_gil(
    pair: tuple[socket.socket, socket.socket], code: str
) -> None:
    control, engine = pair
    with _start(code, engine) as child:
        control.send(b"a message changes nothing")
        control.send(b"")
        assert child.poll() is None
        started_s = time.monotonic()
        control.close()
        assert child.wait(DEADLINE_S) == LIFELINE_EXIT_CODE == 3
        assert time.monotonic() - started_s < 1.0


def test_a_control_process_that_stops_sending_is_gone_too(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    control, engine = pair
    with _start(SPINNING, engine) as child:
        control.shutdown(socket.SHUT_WR)
        assert child.wait(DEADLINE_S) == 3


def test_unread_messages_do_not_hide_the_end(pair: tuple[socket.socket, socket.socket]) -> None:
    control, engine = pair
    for _ in range(20):
        control.send(bytes(1000))
    control.close()
    child = start_child(SPINNING, fds=[engine.fileno()], arguments=[str(engine.fileno())])
    engine.close()
    with child:
        assert child.wait(DEADLINE_S) == 3


def test_descriptors_sent_to_a_lifeline_are_not_kept(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    control, engine = pair
    reading, writing = os.pipe()
    lifeline = Lifeline.start(os.dup(engine.fileno()))
    try:
        socket.send_fds(control, [b"x"], [writing])
        os.close(writing)
        os.set_blocking(reading, False)

        def everything_is_closed() -> bool:
            try:
                return os.read(reading, 1) == b""
            except BlockingIOError:
                return False

        wait_until(everything_is_closed, "the lifeline drops the descriptor")
    finally:
        lifeline.stop()
        os.close(reading)


def test_stop_closes_the_descriptor_and_may_come_twice(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    control, engine = pair
    fd = os.dup(engine.fileno())
    lifeline = Lifeline.start(fd)
    lifeline.stop()
    lifeline.stop()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    control.close()  # nobody watches any more


def test_what_is_no_descriptor_is_an_error_at_once() -> None:
    fd = os.open("/dev/null", os.O_RDONLY)
    os.close(fd)
    with pytest.raises(OSError, match="Bad file descriptor"):
        Lifeline.start(fd)


def test_the_pool_arrives_with_name_length_and_the_same_file(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    control, engine = pair
    fd = os.memfd_create("pool")
    send_pool(control, "freetoken-pool-\N{SNOWMAN}", 1 << 40, fd)
    received = receive_pool(engine)
    assert received is not None
    try:
        assert received.name == "freetoken-pool-\N{SNOWMAN}"
        assert received.length_bytes == 1 << 40
        assert received.fd != fd
        assert os.path.sameopenfile(received.fd, fd)
        assert not os.get_inheritable(received.fd)
    finally:
        os.close(received.fd)
        os.close(fd)


def test_no_pool_is_said_too(pair: tuple[socket.socket, socket.socket]) -> None:
    control, engine = pair
    send_no_pool(control)
    assert receive_pool(engine) is None


def test_silence_and_end_are_told_apart(pair: tuple[socket.socket, socket.socket]) -> None:
    control, engine = pair
    engine.settimeout(0.01)
    with pytest.raises(UnavailableError, match="no pool in time"):
        receive_pool(engine)
    control.close()
    with pytest.raises(UnavailableError, match="closed the lifeline"):
        receive_pool(engine)


def _open_fds_count() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize(
    ("message", "fds_count"),
    [
        ({"kind": "pool", "name": "p", "length_bytes": 5}, 0),
        ({"kind": "pool", "name": "p", "length_bytes": 5}, 2),
        ({"kind": "pool", "name": "p", "length_bytes": 0}, 1),
        ({"kind": "pool", "name": "p", "length_bytes": "5"}, 1),
        ({"kind": "pool", "name": 5, "length_bytes": 5}, 1),
        ({"kind": "pool"}, 1),
        ({"kind": "no_pool"}, 1),
        ({"kind": "other"}, 0),
        ([], 0),
        ("x" * 5000, 0),
    ],
)
def test_other_messages_are_refused_and_leak_nothing(
    pair: tuple[socket.socket, socket.socket], message: object, fds_count: int
) -> None:
    control, engine = pair
    fd = os.memfd_create("pool")
    before_count = _open_fds_count()
    socket.send_fds(control, [json.dumps(message).encode()], [fd] * fds_count)
    with pytest.raises(InternalError):
        receive_pool(engine)
    assert _open_fds_count() == before_count
    os.close(fd)


@settings(deadline=None)
@given(st.binary(min_size=1, max_size=200))
def test_no_bytes_crash_the_receiver(data: bytes) -> None:
    control, engine = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with control, engine:
        control.send(data)
        with pytest.raises(InternalError):
            receive_pool(engine)
