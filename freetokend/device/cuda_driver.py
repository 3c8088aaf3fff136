"""The CUDA driver API behind typed calls: virtual memory, copies, host registration.

The package `cuda-bindings` and the driver are looked for when a driver is opened, not on import:
nothing here is needed on a machine without a GPU. Every refusal becomes a `CudaError`.
"""

from __future__ import annotations

import ctypes
import importlib
from dataclasses import dataclass
from typing import Any, Final

from freetokend.core.errors import Reason, ResourceError

_OUT_OF_MEMORY: Final = 2
_STREAM_NON_BLOCKING: Final = 1
# A wait on the host sleeps: the threads that execute experts have better use for the core.
_EVENT_FLAGS: Final = 1 | 2  # blocking sync, no timing
_NOT_READY: Final = 600
_LIBRARY: Final = "libcuda.so.1"


class CudaError(ResourceError):
    """A call of the driver failed. `call`: its name; `code`: the CUresult."""

    default_reason = Reason.DEVICE_UNUSABLE

    def __init__(self, call: str, code: int, name: str) -> None:
        out_of_memory = code == _OUT_OF_MEMORY
        super().__init__(
            f"the GPU's driver refused {call}: {name} ({code})",
            reason=Reason.DEVICE_MEMORY if out_of_memory else Reason.DEVICE_UNUSABLE,
        )
        self.call = call
        self.code = code

    @property
    def out_of_memory(self) -> bool:
        """Whether memory was short; otherwise the call or the device is at fault."""
        return self.code == _OUT_OF_MEMORY


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """Memory of a GPU as the driver shows it now, all programs together."""

    free_bytes: int
    total_bytes: int


class CudaDriver:
    """One GPU, in the primary context, which torch uses too: addresses are good in both.

    `device_index`: as CUDA counts. Every call makes the context current in the calling thread.
    """

    def __init__(self, device_index: int = 0) -> None:
        """Raises `ResourceError` when the package or the driver is missing, `CudaError` when the
        driver has no such device or no virtual memory.
        """
        self.device_index: Final = device_index
        self._api: Any = _load_api()
        self._call("cuInit", 0)
        device = self._call("cuDeviceGet", device_index)
        self._require_virtual_memory(device)
        self._device = device
        self._context = self._call("cuDevicePrimaryCtxRetain", device)
        self._call("cuCtxSetCurrent", self._context)
        self._properties = self._allocation_properties()
        flags = self._api.CUmemAllocationGranularity_flags
        self.granularity_bytes: Final = int(
            self._call(
                "cuMemGetAllocationGranularity",
                self._properties,
                flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM,
            )
        )

    def close(self) -> None:
        """Let the context go; arenas and streams must be closed before."""
        self._call("cuDevicePrimaryCtxRelease", self._device)

    def memory(self) -> DeviceMemory:
        """Free and total memory now."""
        self._enter()
        free_bytes, total_bytes = self._call("cuMemGetInfo")
        return DeviceMemory(free_bytes=int(free_bytes), total_bytes=int(total_bytes))

    # ---- virtual memory

    def reserve(self, length_bytes: int, alignment_bytes: int) -> int:
        """Address space of this length; its address."""
        self._enter()
        return int(self._call("cuMemAddressReserve", length_bytes, alignment_bytes, 0, 0))

    def free_reserved(self, address: int, length_bytes: int) -> None:
        """Give address space back; nothing may be mapped in it."""
        self._enter()
        self._call("cuMemAddressFree", address, length_bytes)

    def map_new(self, address: int, length_bytes: int) -> None:
        """New memory at a reserved address, not accessible yet; it lives until `unmap`."""
        self._enter()
        handle = self._call("cuMemCreate", length_bytes, self._properties, 0)
        try:
            self._call("cuMemMap", address, length_bytes, 0, handle, 0)
        except CudaError:
            self._call("cuMemRelease", handle)
            raise
        # From here on the mapping alone keeps the memory, so that its end frees it.
        try:
            self._call("cuMemRelease", handle)
        except CudaError:
            self._call("cuMemUnmap", address, length_bytes)
            raise

    def allow_access(self, address: int, length_bytes: int) -> None:
        """Let the device read and write whole mappings without a gap."""
        self._enter()
        access = self._api.CUmemAccessDesc()
        access.location.type = self._api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        access.location.id = self.device_index
        access.flags = self._api.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        self._call("cuMemSetAccess", address, length_bytes, [access], 1)

    def unmap(self, address: int, length_bytes: int) -> None:
        """End one mapping, of exactly this address and length, and free its memory."""
        self._enter()
        self._call("cuMemUnmap", address, length_bytes)

    def is_mapped(self, address: int) -> bool:
        """Whether the driver has memory at this address."""
        self._enter()
        result, handle = self._api.cuMemRetainAllocationHandle(address)
        if int(result) != 0:
            return False
        self._call("cuMemRelease", handle)
        return True

    # ---- copies

    def new_stream(self) -> Any:
        """A stream that does not wait for the default one."""
        self._enter()
        return self._call("cuStreamCreate", _STREAM_NON_BLOCKING)

    def destroy_stream(self, stream: Any) -> None:
        """End a stream."""
        self._enter()
        self._call("cuStreamDestroy", stream)

    def copy_on_device(
        self, to_address: int, from_address: int, length_bytes: int, stream: Any
    ) -> None:
        """Queue a copy within device memory."""
        self._enter()
        self._call("cuMemcpyDtoDAsync", to_address, from_address, length_bytes, stream)

    def copy_to_host(self, host_address: int, device_address: int, length_bytes: int) -> None:
        """Copy to the host; complete at return."""
        self._enter()
        self._call("cuMemcpyDtoH", host_address, device_address, length_bytes)

    def synchronize(self, stream: Any) -> None:
        """Wait until a stream's work is done."""
        self._enter()
        self._call("cuStreamSynchronize", stream)

    # ---- what a graph can hold

    def new_event(self) -> Any:
        """An event that only orders, and keeps no time."""
        self._enter()
        return self._call("cuEventCreate", _EVENT_FLAGS)

    def destroy_event(self, event: Any) -> None:
        """End an event."""
        self._enter()
        self._call("cuEventDestroy", event)

    def record(self, event: Any, stream: Any) -> None:
        """Have the event stand for all that was queued in the stream so far."""
        self._enter()
        self._call("cuEventRecord", event, stream)

    def wait(self, stream: Any, event: Any) -> None:
        """What is queued in the stream from now on runs after what the event stands for.

        Where that is being captured, the stream joins the capture.
        """
        self._enter()
        self._call("cuStreamWaitEvent", stream, event, 0)

    def is_done(self, event: Any) -> bool:
        """Whether everything that the event stands for is done."""
        self._enter()
        result, *_ = self._api.cuEventQuery(event)
        if int(result) == _NOT_READY:
            return False
        if int(result) != 0:
            raise CudaError("cuEventQuery", int(result), str(result.name))
        return True

    def wait_on_host(self, event: Any) -> None:
        """Return when everything that the event stands for is done."""
        self._enter()
        self._call("cuEventSynchronize", event)

    def copy_to_host_async(
        self, host_address: int, device_address: int, length_bytes: int, stream: Any
    ) -> None:
        """Queue a copy into pinned host memory."""
        self._enter()
        self._call("cuMemcpyDtoHAsync", host_address, device_address, length_bytes, stream)

    def copy_to_device_async(
        self, device_address: int, host_address: int, length_bytes: int, stream: Any
    ) -> None:
        """Queue a copy from pinned host memory."""
        self._enter()
        self._call("cuMemcpyHtoDAsync", device_address, host_address, length_bytes, stream)

    def launch_host_function(self, function_address: int, argument: int, stream: Any) -> None:
        """Queue a call of `void function(void *argument)` by a thread of the driver.

        Not through the package: versions of it wrap the function in one that takes Python's lock,
        which a thread that waits for the GPU may hold, and frees itself after the first call.
        """
        self._enter()
        library = ctypes.CDLL(_LIBRARY)
        code = library.cuLaunchHostFunc(
            ctypes.c_void_p(int(stream)),
            ctypes.c_void_p(function_address),
            ctypes.c_void_p(argument),
        )
        if code != 0:
            raise CudaError("cuLaunchHostFunc", code, str(self._api.CUresult(code).name))

    # ---- host memory

    def register_host(self, address: int, length_bytes: int) -> None:
        """Pin host memory for transfers."""
        self._enter()
        self._call("cuMemHostRegister", address, length_bytes, 0)

    def unregister_host(self, address: int) -> None:
        """End a registration, named by its first address."""
        self._enter()
        self._call("cuMemHostUnregister", address)

    # ---- below the calls

    def _enter(self) -> None:
        self._call("cuCtxSetCurrent", self._context)

    def _call(self, name: str, *arguments: object) -> Any:
        """What the call returns beside its result: nothing, one value, or a tuple of them."""
        result, *values = getattr(self._api, name)(*arguments)
        code = int(result)
        if code != 0:
            raise CudaError(name, code, str(result.name))
        return values[0] if len(values) == 1 else tuple(values)

    def _allocation_properties(self) -> Any:
        properties = self._api.CUmemAllocationProp()
        properties.type = self._api.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.location.type = self._api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        properties.location.id = self.device_index
        return properties

    def _require_virtual_memory(self, device: object) -> None:
        attributes = self._api.CUdevice_attribute
        supported = self._call(
            "cuDeviceGetAttribute",
            attributes.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED,
            device,
        )
        if not supported:
            raise ResourceError(
                f"GPU {self.device_index} has no virtual memory management, without which the "
                "expert cache cannot change its size: use another GPU, or the cpu backend.",
                reason=Reason.DEVICE_UNUSABLE,
            )


def _load_api() -> Any:
    try:
        api = importlib.import_module("cuda.bindings.driver")
    except ImportError as error:
        raise ResourceError(
            f"the Python package cuda-bindings cannot be used ({error}): install freetokend with "
            "its extra [gpu].",
            reason=Reason.DEVICE_UNUSABLE,
        ) from error
    try:
        api.cuDriverGetVersion()
    except Exception as error:
        # What the package raises for a missing library differs from version to version.
        raise ResourceError(
            f"the NVIDIA driver's libcuda.so.1 cannot be loaded ({error}): install the driver, or "
            "choose the cpu backend.",
            reason=Reason.DEVICE_UNUSABLE,
        ) from error
    return api
