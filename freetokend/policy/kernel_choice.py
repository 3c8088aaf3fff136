"""Which kernels execute experts on a GPU: weight format x compute capability -> kernel and reason.

A total table, decided once at load: a kernel of one family serves a tensor for as long as the
process lives, so that results do not change while it runs. Nothing here asks a driver.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Final

from freetokend.core.errors import Reason, ResourceError

# As CUDA counts them: (major, minor).
Capability = tuple[int, int]


class Phase(StrEnum):
    """Few tokens per expert, or many."""

    DECODE = "decode"
    PREFILL = "prefill"


class Kernel(StrEnum):
    """`rows`: rows of weights with one token at a time in fp32. `tiles`: tiles of tokens on the
    tensor cores."""

    ROWS = "triton_rows"
    TILES = "triton_tiles"


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelChoice:
    """The kernel of one format, phase and GPU, and why it is that."""

    kernel: Kernel
    reason: str


# Those that kernels are compiled and checked for.
CAPABILITIES: Final = ((8, 6), (8, 9), (9, 0), (10, 0), (12, 0))
# bf16 products on tensor cores, and asynchronous copies.
LEAST_CAPABILITY: Final = (8, 0)

_PRODUCTS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "bf16": "bf16 as it is",
        "fp8_block": "e4m3 codes are exact in bf16, scaled in fp32 per 128 columns",
        "mxfp4": "e2m1 codes are exact in bf16, scaled in fp32 per 32 columns",
        "nvfp4": "e2m1 codes are exact in bf16, scaled in fp32 per 16 columns and once per matrix",
        "q4_K": "integers are exact in bf16, scaled and shifted in fp32 per 32 columns",
        "q6_K": "integers are exact in bf16, scaled in fp32 per 16 columns",
    }
)
_INTEGER: Final = re.compile(r"int[48]_g(32|64|128)_b?f16(_zp)?")
_INTEGER_PRODUCTS: Final = "integers are exact in bf16, scaled in fp32 per group"
_TENSOR_CORES: Final[Mapping[Capability, str]] = MappingProxyType(
    {
        (8, 6): "mma of warps",
        (8, 9): "mma of warps; its fp8 products would round the activations",
        (9, 0): "wgmma; its fp8 products would round the activations",
        (10, 0): "tcgen05; its products of blocks of fp4 and fp8 would round the activations",
        (12, 0): "mma of warps; its products of blocks of fp4 and fp8 would round the activations",
    }
)
_ROWS_REASON: Final = (
    "few tokens per expert: the time is that of reading the weights, and no product is wasted on "
    "the empty part of a tile"
)


def choose_kernel(weight_format: str, capability: Capability, phase: Phase) -> KernelChoice:
    """weight_format: canonical name. ResourceError below compute capability 8.0, ValueError for a
    name that is no format.

    Other capabilities than `CAPABILITIES` are taken as the closest one below, else the first.
    """
    products = _PRODUCTS.get(weight_format)
    if products is None and _INTEGER.fullmatch(weight_format):
        products = _INTEGER_PRODUCTS
    if products is None:
        raise ValueError(f"there is no kernel for {weight_format!r}, which is no weight format")
    served, mapped = _served(capability)
    if phase is Phase.DECODE:
        return KernelChoice(kernel=Kernel.ROWS, reason=f"{_ROWS_REASON}; {products}{mapped}")
    return KernelChoice(
        kernel=Kernel.TILES,
        reason=f"many tokens per expert: {_TENSOR_CORES[served]}; {products}{mapped}",
    )


def kernel_table(weight_format: str) -> dict[tuple[Capability, Phase], KernelChoice]:
    """The choices for a format on all GPUs that kernels are checked for."""
    return {
        (capability, phase): choose_kernel(weight_format, capability, phase)
        for capability in CAPABILITIES
        for phase in Phase
    }


def _served(capability: Capability) -> tuple[Capability, str]:
    """The capability whose kernels are taken, and why if it is another one."""
    if capability < LEAST_CAPABILITY:
        raise ResourceError(
            f"A GPU of compute capability {_shown(capability)} cannot execute experts: kernels "
            f"need bf16 products on tensor cores, which begin with {_shown(LEAST_CAPABILITY)}. Use "
            'engine.backend = "cpu".',
            reason=Reason.DEVICE_UNUSABLE,
        )
    below = [known for known in CAPABILITIES if known <= capability]
    served = below[-1] if below else CAPABILITIES[0]
    if served == capability:
        return served, ""
    return served, (
        f"; {_shown(capability)} is compiled as it runs and not checked, {_shown(served)} is the "
        "closest that is"
    )


def _shown(capability: Capability) -> str:
    return f"{capability[0]}.{capability[1]}"
