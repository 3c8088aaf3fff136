"""The tensors that make up quantised matrices: found, checked, counted, and read in rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from freetokend.core.errors import ModelDataError, Reason
from freetokend.ftw.checkpoint import Checkpoint
from freetokend.ftw.formats import WeightFormat
from freetokend.ftw.matrix import F32, U8
from freetokend.ftw.numbers import e8m0_values
from freetokend.ftw.packing import as_f32
from freetokend.ftw.safetensors import DTYPE_BITS, SourceTensor

WEIGHT: Final = ".weight"
HALVES: Final = {"F16": "f16", "BF16": "bf16"}
FLOATS: Final = ("F32", "BF16", "F16")

# Reading a part of each row costs a call for each, about 6 us: what reading this much more costs.
_ROW_OVERHEAD_BYTES: Final = 32 * 1024


class Parts:
    """The tensors of a checkpoint, with an account of those that were used."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self.consumed: set[str] = set()

    def has(self, name: str) -> bool:
        """Whether there is such a tensor."""
        return name in self._checkpoint.tensors

    def find(self, name: str) -> SourceTensor | None:
        """The tensor, unchecked and not yet counted."""
        return self._checkpoint.tensors.get(name)

    def need(
        self, name: str, shapes: Sequence[tuple[int, ...]], dtypes: Sequence[str], *, of: str
    ) -> SourceTensor:
        """The tensor of one of these shapes and types, counted as used. of: whose part it is.

        ModelDataError when it is missing, of another shape, or of another type.
        """
        tensor = self.find(name)
        if tensor is None:
            raise ModelDataError(
                f"the checkpoint lacks the tensor {name}, without which {of} has no meaning. "
                f"Download it again."
            )
        if tensor.dtype not in dtypes:
            raise ModelDataError(
                f"{tensor.file}: tensor {name} is {tensor.dtype}; as a part of {of} it should be "
                f"{' or '.join(dtypes)}.",
                reason=Reason.MODEL_UNSUPPORTED,
            )
        if tensor.shape not in shapes:
            raise ModelDataError(
                f"{tensor.file}: tensor {name} has the shape {list(tensor.shape)}; as a part of "
                f"{of} it should have {' or '.join(str(list(shape)) for shape in shapes)}."
            )
        self.consumed.add(name)
        return tensor

    def drop(self, *names: str) -> None:
        """Count tensors that serve another execution (scales of activations) as used."""
        self.consumed.update(name for name in names if self.has(name))

    def rows(self, tensor: SourceTensor, first_row: int, count: int) -> U8:
        """Bytes of rows of a tensor seen as a matrix of rows along its last axis: u8 [count, b]."""
        row_bytes = tensor.shape[-1] * DTYPE_BITS[tensor.dtype] // 8
        raw = self._checkpoint.read(tensor, first_row * row_bytes, count * row_bytes)
        return raw.reshape(count, row_bytes)

    def whole(self, tensor: SourceTensor) -> U8:
        """All bytes of a tensor, in one dimension."""
        return self._checkpoint.read(tensor, 0, tensor.length_bytes)

    def window(self, tensor: SourceTensor, start_bytes: int, end_bytes: int) -> U8:
        """Bytes [start, end) of every row of a matrix: u8 [rows, end - start]."""
        rows = tensor.shape[0]
        row_bytes = tensor.length_bytes // rows
        if row_bytes - (end_bytes - start_bytes) < _ROW_OVERHEAD_BYTES:
            whole = self.whole(tensor).reshape(rows, row_bytes)
            return np.ascontiguousarray(whole[:, start_bytes:end_bytes])
        out = np.empty((rows, end_bytes - start_bytes), np.uint8)
        for row in range(rows):
            start = row * row_bytes + start_bytes
            out[row] = self._checkpoint.read(tensor, start, end_bytes - start_bytes)
        return out

    def scalar(self, tensor: SourceTensor) -> float:
        """The one fp32 number in `tensor`. ModelDataError when it is not finite and positive."""
        value = float(self.whole(tensor).view(np.float32)[0])
        if not np.isfinite(value) or value <= 0.0:
            raise ModelDataError(
                f"{tensor.file}: tensor {tensor.name} is {value}; a scale is a positive number."
            )
        return value


def check_width(name: str, weight_format: WeightFormat, columns: int) -> None:
    """ModelDataError when a matrix of this width cannot have the format."""
    if columns % weight_format.column_multiple:
        raise ModelDataError(
            f"tensor {name}: {columns} columns are not a multiple of "
            f"{weight_format.column_multiple}, which {weight_format} needs.",
            reason=Reason.MODEL_UNSUPPORTED,
        )


def scale_values(raw: U8, dtype: str) -> F32:
    """Bytes of "F32", "BF16", "F16", "F8_E8M0" or (the same as) "U8" scales, exact in fp32."""
    if dtype in ("F8_E8M0", "U8"):
        return e8m0_values()[raw]
    return as_f32(raw, dtype)


def nibbles(packed: U8) -> U8:
    """u8 [n, b] -> u8 [n, 2 b]: of each byte the low half, then the high half."""
    out = np.empty((packed.shape[0], 2 * packed.shape[1]), np.uint8)
    out[:, 0::2] = packed & 15
    out[:, 1::2] = packed >> 4
    return out


def split_words(words: U8, bits: int) -> U8:
    """The 4- or 8-bit elements of little-endian int32 words, lowest bits first.

    words: their bytes, u8 [n, 4 w] -> u8 [n, 8 w] (4 bits) or [n, 4 w] (8 bits).
    """
    return nibbles(words) if bits == 4 else words


def halves(raw: U8) -> NDArray[np.uint16]:
    """Bytes u8 [n, 2 m] of 16-bit numbers as their bits, u16 [n, m]."""
    return np.ascontiguousarray(raw).view(np.uint16)
