"""Says in one sentence whether the installed torch can use the GPU; exit status 1: it cannot."""

from __future__ import annotations

import glob
import os
import sys
import warnings
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What decides whether torch can use a GPU.

    torch_cuda: the CUDA version torch is built for, "" for a CPU build. driver_cuda: the newest
    CUDA version that the driver serves, as (major, minor); None when it does not answer, and then
    driver_problem says why. device_nodes: path and whether this user may read and write it.
    """

    torch_version: str
    torch_cuda: str
    driver_cuda: tuple[int, int] | None
    driver_problem: str
    device_nodes: tuple[tuple[str, bool], ...]


def why_unusable(seen: Seen) -> str:
    """The first true reason, and what to do, as the rest of a sentence."""
    if not seen.torch_cuda:
        return f"torch {seen.torch_version} is a CPU build: install a CUDA build of torch"
    if seen.driver_cuda is None:
        return (
            f"the NVIDIA driver does not answer ({seen.driver_problem}): install it, or restart "
            "after an upgrade"
        )
    needed = _numbers(seen.torch_cuda)
    # Within a major version an older driver serves programs of a newer minor version.
    if seen.driver_cuda[0] < needed[0]:
        return (
            f"torch {seen.torch_version} is built for CUDA {seen.torch_cuda} and the driver "
            f"serves CUDA {seen.driver_cuda[0]}.{seen.driver_cuda[1]} at most: upgrade the NVIDIA "
            "driver, or take a torch build for that CUDA with FREETOKEND_TORCH_INDEX"
        )
    nodes = dict(seen.device_nodes)
    missing = [path for path in ("/dev/nvidiactl", "/dev/nvidia-uvm") if path not in nodes]
    if not any(path[len("/dev/nvidia") :].isdecimal() for path in nodes):
        missing.append("/dev/nvidia0")
    if missing:
        return (
            f"{_listed(missing)} missing: load the kernel module with `sudo nvidia-modprobe -u "
            "-c 0`, or hand the device to this container"
        )
    denied = [path for path, allowed in seen.device_nodes if not allowed]
    if denied:
        return (
            f"{_listed(denied)} not accessible to this user: join the group that owns it, or "
            "start as a user who may"
        )
    return (
        f"CUDA does not start although driver (CUDA {seen.driver_cuda[0]}.{seen.driver_cuda[1]}) "
        f"and torch {seen.torch_version} (CUDA {seen.torch_cuda}) fit: look into the kernel's log "
        "for NVRM or Xid, and at CUDA_VISIBLE_DEVICES"
    )


def look() -> Seen:
    """What there is on this machine."""
    import torch  # noqa: PLC0415  (slow; this script is the only thing that pays)

    driver_cuda, problem = _driver_cuda()
    nodes = [
        path
        for path in sorted(glob.glob("/dev/nvidia*"))
        if path in ("/dev/nvidiactl", "/dev/nvidia-uvm") or path[len("/dev/nvidia") :].isdecimal()
    ]
    return Seen(
        torch_version=torch.__version__,
        torch_cuda=torch.version.cuda or "",
        driver_cuda=driver_cuda,
        driver_problem=problem,
        device_nodes=tuple((path, os.access(path, os.R_OK | os.W_OK)) for path in nodes),
    )


def main() -> int:
    """Print the verdict."""
    import torch  # noqa: PLC0415

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        usable = torch.cuda.is_available()
    if usable:
        print(f"   GPU: {torch.cuda.get_device_name(0)}", file=sys.stderr)
        return 0
    print(f"   The NVIDIA GPU is present but unusable: {why_unusable(look())}.", file=sys.stderr)
    return 1


def _driver_cuda() -> tuple[tuple[int, int] | None, str]:
    import pynvml  # noqa: PLC0415

    try:
        pynvml.nvmlInit()
        try:
            number = int(pynvml.nvmlSystemGetCudaDriverVersion_v2())
        finally:
            pynvml.nvmlShutdown()
    except Exception as error:  # every way a driver can fail is the answer here
        return None, f"{type(error).__name__}: {error}"
    return (number // 1000, number % 1000 // 10), ""


def _numbers(version: str) -> tuple[int, int]:
    major, _, minor = version.partition(".")
    return int(major), int(minor.partition(".")[0] or 0)


def _listed(paths: list[str]) -> str:
    return f"{', '.join(paths)} {'is' if len(paths) == 1 else 'are'}"


if __name__ == "__main__":
    sys.exit(main())
