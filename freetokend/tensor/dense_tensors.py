"""Weights outside the experts, from the pool into tensors of a device."""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

import numpy as np
import torch

from freetokend.core.errors import ModelDataError
from freetokend.ftw.families import HEAD_NAME
from freetokend.ftw.formats import parse_format
from freetokend.ftw.index import FtwIndex
from freetokend.ftw.layout import EXPERT_RECORDS, ROW_MAJOR, ROWS16, TensorEntry
from freetokend.ftw.matrix import dequantise
from freetokend.ftw.packing_blocks import unpack_matrix
from freetokend.tensor.memory import tensor_at
from freetokend.tensor.program import Linear, StepProgram

_ROW_MAJOR_DTYPES: Final = MappingProxyType({"bf16": torch.bfloat16, "f32": torch.float32})


def dense_tensors(
    region_address: int, index: FtwIndex, program: StepProgram, device: torch.device
) -> dict[str, torch.Tensor]:
    """Every tensor but the experts' records, by name: bf16 matrices, fp32 routers and vectors.

    Quantised matrices become the bf16 numbers next to what they mean. Of an embedding whose
    projection has a tensor in a form of its own, the embedding serves for both. ModelDataError for
    a form that is not known. One tensor at a time has a copy on the host.
    """
    entries = {
        name: entry for name, entry in index.tensors.items() if entry.layout != EXPERT_RECORDS
    }
    if _is_tied(program):
        entries.pop(HEAD_NAME, None)
    return {
        name: _tensor(name, region_address + entry.offset_bytes, entry).to(device, copy=True)
        for name, entry in entries.items()
    }


def dense_bytes(index: FtwIndex) -> int:
    """At most what `dense_tensors` takes on the device."""
    return sum(
        int(np.prod(entry.shape)) * (4 if entry.dtype == "f32" else 2)
        for entry in index.tensors.values()
        if entry.layout != EXPERT_RECORDS
    )


def _is_tied(program: StepProgram) -> bool:
    """Whether the output's matrix is that of the embedding."""
    linears = (op for op in program.ops if isinstance(op, Linear))
    return any(product.weight.shared for op in linears for product in op.products)


def _tensor(name: str, address: int, entry: TensorEntry) -> torch.Tensor:
    shape = tuple(entry.shape)
    if entry.layout == ROW_MAJOR and entry.dtype in _ROW_MAJOR_DTYPES:
        return tensor_at(address, shape, _ROW_MAJOR_DTYPES[entry.dtype])
    try:
        weight_format = parse_format(entry.dtype)
        known = entry.layout == ROWS16
    except ValueError:
        known = False
    if not known:
        raise ModelDataError(
            f"tensor {name!r} is {entry.dtype} in {entry.layout} layout, which cannot be brought "
            "to a GPU. Convert the checkpoint again."
        )
    packed = tensor_at(address, (entry.length_bytes,), torch.uint8).numpy()
    rows, columns = shape
    matrix = unpack_matrix(packed, weight_format, rows, columns)
    values = dequantise(matrix, np.float32)
    return torch.from_numpy(values).to(torch.bfloat16)
