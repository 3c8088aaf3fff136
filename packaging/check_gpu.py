"""Says in one sentence whether the installed torch can use the GPU; exit status 1: it cannot."""

from __future__ import annotations

import sys
import warnings


def main() -> int:
    """Print the verdict; a driver older than torch's CUDA build is the usual reason to fail."""
    import torch  # noqa: PLC0415  (slow; this script is the only thing that pays)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        usable = torch.cuda.is_available()
    if usable:
        print(f"   GPU: {torch.cuda.get_device_name(0)}", file=sys.stderr)
        return 0
    built_for = torch.version.cuda
    if built_for is None:
        why = f"torch {torch.__version__} is a CPU build: install a CUDA build of torch"
    else:
        why = (
            f"torch {torch.__version__} is built for CUDA {built_for} and the driver is older or "
            "does not answer: upgrade the NVIDIA driver, or take a torch build for an older CUDA "
            "with FREETOKEND_TORCH_INDEX"
        )
    print(f"   The NVIDIA GPU is present but unusable: {why}.", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
