"""Fills on a GPU: records copied from the pool into slots by one launch that is always the same.

What is copied is a list on the device, and how much of it counts is known there alone, so that the
launch can be captured in a graph. The pool is host memory that is registered with the driver: its
addresses are good on the GPU too, and its threads read it over the link.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Any, Final

import torch

from freetokend.core.errors import InternalError
from freetokend.experts.gpu.triton_moves import copy_records

_PAGE_BYTES: Final = 4096
# Of a record, which a program has in flight: four times 16 bytes to a thread.
_CHUNK_BYTES: Final = 16 << 10
# 2 MiB in flight are more than any link needs; and as many programs fit on every GPU at once.
_PROGRAMS_COUNT: Final = 128
_MOST_CHUNKS: Final = (1 << 31) - 1 - _PROGRAMS_COUNT
FILL_OPTIONS: Final = MappingProxyType({"num_warps": 8, "enable_fp_fusion": False})


@torch.library.custom_op("freetokend::fill_records", mutates_args="unknown")
def fill_records(
    fills: torch.Tensor,
    fills_count: torch.Tensor,
    bank_address: int,
    slots_address: int,
    record_bytes: int,
) -> None:
    """Copy records into slots, without a word to the host.

    fills: int32 [E, 2], (expert_id, slot), contiguous, of which the first fills_count (int32 [1])
    count. bank_address: of record 0, in memory that the device can read; slots_address: of slot 0.
    Records follow one another, and slots too. InternalError for tensors, addresses and sizes that
    do not fit; experts and slots are the planner's, and taken as they are.
    """
    _check(fills, fills_count, bank_address, slots_address, record_bytes)
    kernel: Any = copy_records  # else its arguments would be checked as those of a function
    kernel[(_PROGRAMS_COUNT,)](
        fills,
        fills_count,
        bank_address,
        slots_address,
        fills.shape[0],
        RECORD_BYTES=record_bytes,
        CHUNK=_CHUNK_BYTES,
        **FILL_OPTIONS,
    )


@fill_records.register_fake
def _changes_nothing_that_torch_has(
    fills: torch.Tensor,
    fills_count: torch.Tensor,
    bank_address: int,
    slots_address: int,
    record_bytes: int,
) -> None:
    _check(fills, fills_count, bank_address, slots_address, record_bytes)


def _check(
    fills: torch.Tensor,
    fills_count: torch.Tensor,
    bank_address: int,
    slots_address: int,
    record_bytes: int,
) -> None:
    for name, tensor, dimensions in (("fills", fills, 2), ("fills_count", fills_count, 1)):
        if (
            tensor.dtype is not torch.int32
            or tensor.dim() != dimensions
            or tensor.shape[-1] != dimensions
            or not tensor.is_contiguous()
            or tensor.device != fills.device
        ):
            raise InternalError(
                f"{name} is {tensor.dtype} {list(tensor.shape)} on {tensor.device}; fills are "
                "contiguous int32 [E, 2], and their number int32 [1] beside them"
            )
    if record_bytes <= 0 or record_bytes % _PAGE_BYTES:
        raise InternalError(f"records of {record_bytes} bytes are no multiples of {_PAGE_BYTES}")
    if min(bank_address, slots_address) <= 0 or (bank_address | slots_address) % 16:
        raise InternalError(
            f"records at {bank_address:#x} and slots at {slots_address:#x}: not addresses that are "
            "multiples of 16"
        )
    if fills.shape[0] * -(-record_bytes // _CHUNK_BYTES) > _MOST_CHUNKS:
        raise InternalError(f"{fills.shape[0]} fills of {record_bytes} bytes are too many")
