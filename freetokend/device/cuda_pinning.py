"""Registering the pool with a GPU's driver: late, in steps, keeping what succeeded."""

from __future__ import annotations

from typing import Final

from freetokend.core.errors import InternalError
from freetokend.device.cuda_driver import CudaDriver, CudaError

DEFAULT_STEP_BYTES: Final = 256 << 20
# Below this a step only costs time: the limit is reached, or memory is gone.
_SMALLEST_STEP_BYTES: Final = 2 << 20
_PAGE_BYTES: Final = 4096


class HostRegistration:
    """Host memory that the GPU may read, from its beginning up to `registered_bytes`.

    The owner calls `step` between steps of the engine until `done`. What cannot be registered
    stays pageable: layers in it are executed on the CPU. One thread uses it.
    """

    def __init__(
        self,
        driver: CudaDriver,
        address: int,
        length_bytes: int,
        *,
        step_bytes: int = DEFAULT_STEP_BYTES,
    ) -> None:
        """Registers nothing yet. An empty range is done at once."""
        if address % _PAGE_BYTES or step_bytes < _PAGE_BYTES or step_bytes % _PAGE_BYTES:
            raise InternalError(
                f"memory at {address:#x} cannot be registered in steps of {step_bytes} bytes: "
                f"both must be multiples of {_PAGE_BYTES}"
            )
        self._driver = driver
        self._address = address
        self._length_bytes = length_bytes
        self._step_bytes = step_bytes
        self._starts: list[int] = []
        self._registered_bytes = 0
        self._note = ""

    @property
    def registered_bytes(self) -> int:
        """A prefix of the range."""
        return self._registered_bytes

    @property
    def done(self) -> bool:
        """No more will be registered: all is, or the driver refused (`note` says why)."""
        return bool(self._note) or self._registered_bytes >= self._length_bytes

    @property
    def note(self) -> str:
        """One sentence about what stays pageable; empty while all is well."""
        return self._note

    def step(self) -> bool:
        """Register the next part; False when there is nothing left to do.

        A part that the driver has no memory for is tried again by halves. Raises `CudaError` when
        a refusal has taken the context along: then nothing on the GPU works any more.
        """
        if self.done:
            return False
        start = self._address + self._registered_bytes
        part_bytes = min(self._step_bytes, self._length_bytes - self._registered_bytes)
        try:
            self._driver.register_host(start, part_bytes)
        except CudaError as error:
            self._driver.memory()  # the context, put to the proof
            if error.out_of_memory and part_bytes > _SMALLEST_STEP_BYTES:
                half_bytes = part_bytes // 2 // _PAGE_BYTES * _PAGE_BYTES
                self._step_bytes = max(half_bytes, _SMALLEST_STEP_BYTES)
                return True
            self._note = (
                f"{self._registered_bytes} of {self._length_bytes} bytes of the pool are "
                f"registered with GPU {self._driver.device_index}; the rest stays pageable, and "
                f"its layers run on the CPU, because {error}"
            )
            return False
        self._starts.append(start)
        self._registered_bytes += part_bytes
        return not self.done

    def close(self) -> None:
        """End every registration; transfers must be over. May be called twice."""
        while self._starts:
            self._driver.unregister_host(self._starts[-1])
            self._starts.pop()
        self._registered_bytes = 0
        self._note = self._note or "the registration has ended"
