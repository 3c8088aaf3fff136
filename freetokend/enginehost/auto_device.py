"""A GPU that nobody insists on: used where it works, and else the CPU serves and says why."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from freetokend.core.errors import FreetokenError
from freetokend.core.logs import logger
from freetokend.enginehost.backend import (
    GPU_BACKENDS,
    BackendChoice,
    GpuPresence,
    cpu_beside,
    uses_cuda,
)
from freetokend.enginehost.built import BuiltEngine
from freetokend.enginehost.cuda_platform import CudaPlatform
from freetokend.link.messages import EngineSettings


def needs_gpu(settings: EngineSettings) -> bool:
    """Whether the CPU cannot give what was asked for: the device, or a backend with slots."""
    return uses_cuda(settings) or settings.backend in GPU_BACKENDS


def try_gpu(
    build_on: Callable[[CudaPlatform], BuiltEngine],
    new_platform: Callable[[], CudaPlatform],
    settings: EngineSettings,
    gpus: GpuPresence,
) -> BuiltEngine | BackendChoice:
    """The engine of the GPU; or, whatever failed, the CPU and why, when nothing is held of the GPU
    any more. It also is told to the journal.

    What fails closes what it has taken; memory that is kept to be used again is given back here.
    """
    platform: CudaPlatform | None = None
    try:
        platform = new_platform()
        return build_on(platform)
    except Exception as error:  # a driver raises anything, and the CPU serves all the same
        cause = _cause(error)
    # Not before: what was raised refers to what it was raised in.
    if platform is not None:
        with suppress(Exception):  # a device that has failed fails here again
            platform.release()
    why = f"the GPU cannot be used: {cause}"
    if gpus.names:
        why += f"; {gpus.describe()}"
    logger(__name__).warning("gpu-not-used", cause=why)
    return cpu_beside(settings, gpus, why)


def _cause(error: Exception) -> str:
    """As a part of a sentence."""
    known = isinstance(error, FreetokenError)
    said = str(error) if known else f"{type(error).__name__}: {error}"
    return "; ".join(text.rstrip(". \n") for text in (said, *getattr(error, "__notes__", ())))
