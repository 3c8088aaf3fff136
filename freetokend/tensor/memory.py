"""Torch tensors over memory that someone else owns, and addresses of tensors for native calls."""

from __future__ import annotations

import ctypes
import math

import torch

from freetokend.core.errors import InternalError


def tensor_at(address: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor over memory at `address`, not copied.

    The memory must outlive the tensor and everything made from it. It may be mapped read-only:
    the caller does not write to it.
    """
    length_bytes = math.prod(shape) * dtype.itemsize
    buffer = (ctypes.c_char * length_bytes).from_address(address)
    return torch.frombuffer(buffer, dtype=dtype).view(shape)


def address_of(tensor: torch.Tensor, dtype: torch.dtype) -> int:
    """Address of a contiguous CPU tensor of this dtype; InternalError for any other.

    Native code trusts its arguments, so every tensor goes through here on its way there.
    """
    if tensor.dtype is not dtype or not tensor.is_contiguous() or not tensor.is_cpu:
        raise InternalError(
            f"a native call got a {tensor.dtype} tensor of shape {list(tensor.shape)} on "
            f"{tensor.device}; it needs a contiguous {dtype} tensor on the CPU."
        )
    return tensor.data_ptr()
