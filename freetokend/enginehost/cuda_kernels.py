"""Which kernels execute the experts in slots of a GPU, and why, in words for status."""

from __future__ import annotations

from dataclasses import dataclass

from freetokend.enginehost.cuda_platform import DECODE_ROWS
from freetokend.policy.kernel_choice import Capability, Phase, choose_kernel


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotKernels:
    """names: of both; reason: which is for what, and why it is that one."""

    names: str
    reason: str


def slot_kernels(weight_format: str, capability: Capability) -> SlotKernels:
    """ResourceError for a GPU that has none, ValueError for a name that is no format."""
    decode = choose_kernel(weight_format, capability, Phase.DECODE)
    prefill = choose_kernel(weight_format, capability, Phase.PREFILL)
    return SlotKernels(
        names=f"{decode.kernel} and {prefill.kernel}",
        reason=(
            f"{decode.kernel} up to {DECODE_ROWS} tokens ({decode.reason}), by {prefill.kernel} "
            f"beyond ({prefill.reason})"
        ),
    )
