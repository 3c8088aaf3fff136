"""One sum in routed order over what the slots and the CPU computed of each token."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any, Final

import torch

from freetokend.core.errors import InternalError
from freetokend.experts.gpu.triton_moves import merge_rows
from freetokend.experts.plan.contract import CPU

# 16 bytes to a thread, and several programs for a single token.
_BLOCK: Final = 256
MERGE_OPTIONS: Final = MappingProxyType({"num_warps": 2, "enable_fp_fusion": False})


@torch.library.custom_op("freetokend::merge_branches", mutates_args=())
def merge_branches(
    y_gpu: torch.Tensor, y_cpu: torch.Tensor, physical: torch.Tensor
) -> torch.Tensor:
    """y_*: fp32 [T, k, H], weighted; physical: int32 [T, k] -> fp32 [T, H].

    Of each pair the row of its branch: y_gpu's where physical is a slot, y_cpu's where it is CPU,
    and nothing elsewhere, whatever lies there. The same bits whatever else is in the call.
    InternalError for tensors that are not so.
    """
    out: torch.Tensor = _empty_sum(y_gpu, y_cpu, physical)
    tokens, top_k, hidden = y_gpu.shape
    if tokens:
        kernel: Any = merge_rows  # else its arguments would be checked as those of a function
        kernel[(tokens, -(-hidden // _BLOCK))](
            y_gpu,
            y_cpu,
            physical,
            out,
            HIDDEN=hidden,
            TOP_K=top_k,
            CPU=CPU,
            BLOCK=_BLOCK,
            **MERGE_OPTIONS,
        )
    return out


@merge_branches.register_fake
def _empty_sum(y_gpu: torch.Tensor, y_cpu: torch.Tensor, physical: torch.Tensor) -> torch.Tensor:
    for name, tensor, dtype, shape in (
        ("y_gpu", y_gpu, torch.float32, (*physical.shape, y_gpu.shape[-1])),
        ("y_cpu", y_cpu, torch.float32, y_gpu.shape),
        ("physical", physical, torch.int32, y_gpu.shape[:2]),
    ):
        if (
            tensor.dtype is not dtype
            or tuple(tensor.shape) != tuple(shape)
            or tensor.device != y_gpu.device
            or not tensor.is_contiguous()
        ):
            raise InternalError(
                f"{name} is {tensor.dtype} {list(tensor.shape)} on {tensor.device}; a merge needs "
                f"contiguous {dtype} {list(shape)} on {y_gpu.device}"
            )
    return y_gpu.new_empty((y_gpu.shape[0], y_gpu.shape[2]))
