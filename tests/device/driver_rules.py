"""The rules that the fake driver keeps: memory, streams, events and graphs, through the bindings.

What captures rely on: work of a capture does not run before the launch, forks must join, waiting
is an error, and a graph over an arena's addresses stays good while the arena changes its size.
"""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Callable
from typing import Any, Final

import pytest

from freetokend.device.cuda_arena import CudaArena
from freetokend.device.cuda_driver import CudaDriver, CudaError
from tests.device.arena_contract import at, put
from tests.fakes.libcuda import FakeLibcuda

CHUNK: Final = 2 << 20
MODE_GLOBAL: Final = 0


class Bench:
    """A device with two filled slots, and the bindings themselves."""

    def __init__(self) -> None:
        self.fake = FakeLibcuda()
        self.fake.reset()
        self.driver = CudaDriver()
        self.api: Any = importlib.import_module("cuda.bindings.driver")
        self.arena = CudaArena(self.driver, 20 << 20, chunk_bytes=CHUNK)
        self.arena.grow_to(2 * CHUNK)
        self.first, self.second = self.arena.base_address, self.arena.base_address + CHUNK
        put(self.first, b"old")
        put(self.second, b"....")

    def call(self, name: str, *arguments: object) -> Any:
        """The value of a call that must work."""
        result, *values = getattr(self.api, name)(*arguments)
        assert int(result) == 0, f"{name}: {result}"
        return values[0] if values else None

    def code(self, name: str, *arguments: object) -> int:
        """The result of a call that may be refused."""
        return int(getattr(self.api, name)(*arguments)[0])

    def begin(self, stream: Any) -> None:
        """Start a capture."""
        mode = self.api.CUstreamCaptureMode(MODE_GLOBAL)
        self.call("cuStreamBeginCapture", stream, mode)


def what_the_driver_forbids_is_refused() -> None:
    bench = Bench()
    properties = bench.driver._allocation_properties()
    for size in (0, 4096, CHUNK + 4096):
        assert bench.code("cuMemCreate", size, properties, 0) == 1
        assert bench.code("cuMemAddressReserve", size, 0, 0, 0) == 1
    handle = bench.call("cuMemCreate", 2 * CHUNK, properties, 0)
    third = bench.second + CHUNK
    assert bench.code("cuMemMap", third, CHUNK, 0, handle, 0) == 1
    assert bench.code("cuMemMap", bench.second, 2 * CHUNK, 0, handle, 0) == 1
    assert bench.code("cuMemMap", bench.first + (19 << 20), 2 * CHUNK, 0, handle, 0) == 1
    bench.call("cuMemMap", third, 2 * CHUNK, 0, handle, 0)
    assert bench.code("cuMemUnmap", third, CHUNK) == 1
    assert bench.code("cuMemUnmap", bench.second, 3 * CHUNK) == 1
    assert bench.code("cuMemAddressFree", bench.first, bench.arena.reserved_bytes) == 1
    stream = bench.driver.new_stream()
    with pytest.raises(CudaError):  # mapped, and nobody may touch it yet
        bench.driver.copy_on_device(third, bench.first, 8, stream)
    bench.driver.allow_access(third, 2 * CHUNK)
    bench.driver.copy_on_device(third, bench.first, 8, stream)
    bench.call("cuMemUnmap", third, 2 * CHUNK)
    assert bench.fake.used_bytes == 4 * CHUNK  # the handle keeps it
    bench.call("cuMemRelease", handle)
    assert bench.code("cuMemRelease", handle) == 1
    assert bench.fake.used_bytes == 2 * CHUNK


def a_captured_copy_runs_at_the_launch_and_survives_a_resize() -> None:
    bench = Bench()
    stream = bench.driver.new_stream()
    bench.begin(stream)
    bench.driver.copy_on_device(bench.second, bench.first, 3, stream)
    graph = bench.call("cuStreamEndCapture", stream)
    assert at(bench.second, 3) == b"..."
    executable = bench.call("cuGraphInstantiate", graph, 0)
    bench.call("cuGraphLaunch", executable, stream)
    assert at(bench.second, 3) == b"old"
    put(bench.first, b"new")
    bench.arena.grow_to(9 * CHUNK)
    bench.arena.shrink_to(2 * CHUNK)
    bench.call("cuGraphLaunch", executable, stream)
    assert at(bench.second, 3) == b"new"
    bench.arena.shrink_to(CHUNK)
    assert bench.code("cuGraphLaunch", executable, stream) == 1


def host_functions_run_in_the_order_of_their_stream() -> None:
    bench = Bench()
    seen: list[bytes] = []
    function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: seen.append(at(bench.second, 3)))
    launch = bench.api.CUhostFn(ctypes.cast(function, ctypes.c_void_p).value)
    stream = bench.driver.new_stream()
    bench.begin(stream)
    bench.call("cuLaunchHostFunc", stream, launch, 0)
    bench.driver.copy_on_device(bench.second, bench.first, 3, stream)
    bench.call("cuLaunchHostFunc", stream, launch, 0)
    graph = bench.call("cuStreamEndCapture", stream)
    assert seen == []
    executable = bench.call("cuGraphInstantiate", graph, 0)
    bench.call("cuGraphLaunch", executable, stream)
    assert seen == [b"...", b"old"]
    bench.call("cuLaunchHostFunc", stream, launch, 0)
    assert len(seen) == 3


def a_fork_of_a_capture_must_join() -> None:
    bench = Bench()
    for joins in (True, False):
        main, side = bench.driver.new_stream(), bench.driver.new_stream()
        fork, join = (bench.call("cuEventCreate", 2) for _ in range(2))
        bench.begin(main)
        bench.call("cuEventRecord", fork, main)
        bench.call("cuStreamWaitEvent", side, fork, 0)
        bench.driver.copy_on_device(bench.second, bench.first, 3, side)
        bench.call("cuEventRecord", join, side)
        if joins:
            bench.call("cuStreamWaitEvent", main, join, 0)
        assert bench.code("cuStreamEndCapture", main) == (0 if joins else 904)


def waiting_inside_a_capture_breaks_it() -> None:
    bench = Bench()
    buffer = ctypes.create_string_buffer(1)
    for wait in (
        bench.driver.synchronize,
        lambda _: bench.driver.copy_to_host(ctypes.addressof(buffer), bench.first, 1),
    ):
        stream = bench.driver.new_stream()
        bench.begin(stream)
        with pytest.raises(CudaError, match="900"):
            wait(stream)
        with pytest.raises(CudaError, match="901"):
            bench.driver.copy_on_device(bench.second, bench.first, 3, stream)
        assert bench.code("cuStreamEndCapture", stream) == 901
        bench.driver.synchronize(stream)


def captures_do_not_mix() -> None:
    bench = Bench()
    one, other = bench.driver.new_stream(), bench.driver.new_stream()
    event = bench.call("cuEventCreate", 2)
    bench.begin(one)
    bench.begin(other)
    bench.call("cuEventRecord", event, one)
    assert bench.code("cuEventQuery", event) == 600
    assert bench.code("cuStreamWaitEvent", other, event, 0) == 903
    assert bench.code("cuStreamEndCapture", one) == 0
    assert bench.code("cuStreamEndCapture", one) == 903
    assert bench.code("cuStreamEndCapture", other) == 0


def handles_that_are_gone_are_refused() -> None:
    bench = Bench()
    stream = bench.driver.new_stream()
    event = bench.call("cuEventCreate", 2)
    bench.driver.destroy_stream(stream)
    bench.call("cuEventDestroy", event)
    with pytest.raises(CudaError, match="400"):
        bench.driver.synchronize(stream)
    assert bench.code("cuEventQuery", event) == 400


RULE_SCENARIOS: Final[tuple[Callable[[], None], ...]] = (
    what_the_driver_forbids_is_refused,
    a_captured_copy_runs_at_the_launch_and_survives_a_resize,
    host_functions_run_in_the_order_of_their_stream,
    a_fork_of_a_capture_must_join,
    waiting_inside_a_capture_breaks_it,
    captures_do_not_mix,
    handles_that_are_gone_are_refused,
)
