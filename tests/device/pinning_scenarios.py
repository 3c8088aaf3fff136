"""Host registration over the fake driver: in steps, partly, and with a dying context."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from typing import Final

import pytest

from freetokend.core.errors import InternalError
from freetokend.device.cuda_driver import CudaDriver, CudaError
from freetokend.device.cuda_pinning import HostRegistration
from tests.fakes.libcuda import FakeLibcuda

MIB: Final = 1 << 20
ADDRESS: Final = 1 << 40  # the fake does not look at host memory that it registers


def new_device() -> tuple[FakeLibcuda, CudaDriver]:
    """A fresh fake, and the driver over it."""
    fake = FakeLibcuda()
    fake.reset()
    return fake, CudaDriver()


def the_pool_is_registered_in_steps() -> None:
    fake, driver = new_device()
    pinning = HostRegistration(driver, ADDRESS, 20 * MIB + 4096, step_bytes=8 * MIB)
    seen = []
    while pinning.step():
        seen.append(pinning.registered_bytes)
    assert seen == [8 * MIB, 16 * MIB]
    assert pinning.done
    assert pinning.note == ""
    assert pinning.registered_bytes == fake.registered_bytes == 20 * MIB + 4096
    assert not pinning.step()
    with fake.recording() as calls:
        pinning.close()
        pinning.close()
    assert sum(call.startswith("cuMemHostUnregister") for call in calls) == 3
    assert fake.registered_bytes == 0


def a_limit_leaves_a_prefix_and_says_so() -> None:
    fake, driver = new_device()
    fake.set_register_limit(45 * MIB)
    pinning = HostRegistration(driver, ADDRESS, 100 * MIB, step_bytes=32 * MIB)
    while pinning.step():
        pass
    assert pinning.done
    assert 43 * MIB <= pinning.registered_bytes <= 45 * MIB
    assert pinning.registered_bytes == fake.registered_bytes
    assert str(pinning.registered_bytes) in pinning.note
    assert str(100 * MIB) in pinning.note
    assert "pageable" in pinning.note
    assert driver.memory().total_bytes > 0
    pinning.close()
    assert fake.registered_bytes == 0


def another_refusal_is_not_tried_again() -> None:
    fake, driver = new_device()
    pinning = HostRegistration(driver, ADDRESS, 64 * MIB, step_bytes=32 * MIB)
    assert pinning.step()
    with fake.failing("cuMemHostRegister_v2", code=801), fake.recording() as calls:
        assert not pinning.step()
    assert sum(call.startswith("cuMemHostRegister") for call in calls) == 1
    assert pinning.done
    assert "801" in pinning.note
    assert pinning.registered_bytes == 32 * MIB


def a_refusal_that_kills_the_context_is_an_error() -> None:
    fake, driver = new_device()
    pinning = HostRegistration(driver, ADDRESS, 64 * MIB, step_bytes=32 * MIB)
    assert pinning.step()
    fake.poison(700)
    with pytest.raises(CudaError, match="700"):
        pinning.step()
    fake.poison(0)


def an_empty_range_is_done_and_a_crooked_one_refused() -> None:
    fake, driver = new_device()
    with fake.recording() as calls:
        assert HostRegistration(driver, ADDRESS, 0).done
        assert not HostRegistration(driver, ADDRESS, 0).step()
    assert calls == []
    with pytest.raises(InternalError):
        HostRegistration(driver, ADDRESS + 1, mmap.PAGESIZE)
    with pytest.raises(InternalError):
        HostRegistration(driver, ADDRESS, mmap.PAGESIZE, step_bytes=100)


PINNING_SCENARIOS: Final[tuple[Callable[[], None], ...]] = (
    the_pool_is_registered_in_steps,
    a_limit_leaves_a_prefix_and_says_so,
    another_refusal_is_not_tried_again,
    a_refusal_that_kills_the_context_is_an_error,
    an_empty_range_is_done_and_a_crooked_one_refused,
)
