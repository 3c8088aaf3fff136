"""Where the rows of a matrix come from: a plain tensor, or another matrix brought into a format."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from freetokend.core.errors import ModelDataError
from freetokend.ftw.checkpoint import Checkpoint
from freetokend.ftw.formats import (
    BF16,
    FP8_BLOCK_ROWS,
    ROWS_PER_BLOCK,
    Kind,
    WeightFormat,
    round_up,
)
from freetokend.ftw.matrix import MatrixSource, QuantMatrix, dequantise
from freetokend.ftw.packing import as_bf16, as_f32
from freetokend.ftw.quantise import nvfp4_global, quantise
from freetokend.ftw.safetensors import SourceTensor

F32 = NDArray[np.float32]
U8 = NDArray[np.uint8]

# Elements that are looked at together where only a sum is wanted.
_SUM_COUNT: Final = 256 * 1024
_INTEGERS: Final = {"I32": np.int32, "I64": np.int64}
ID_DTYPES: Final = tuple(_INTEGERS)


class ValueSource(Protocol):
    """A matrix that can be read as numbers, whatever it is stored as."""

    @property
    def name(self) -> str: ...

    @property
    def rows_count(self) -> int: ...

    @property
    def columns_count(self) -> int: ...

    def read_values(self, first_row: int, count: int) -> F32:
        """fp32 [count, columns]; `first_row` is a multiple of 16. Safe from several threads."""
        ...


class VectorSource(Protocol):
    """A vector of a checkpoint."""

    def read(self) -> F32:
        """All values, exact, fp32 [n]."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainMatrix:
    """Rows first_row.. of a plain tensor seen as [.., columns]: a `MatrixSource` of bf16.

    Sources of fp16 and fp32 are rounded to bf16 as they are read, except by `read_values`.
    """

    checkpoint: Checkpoint
    tensor: SourceTensor
    first_row: int
    rows_count: int
    columns_count: int

    @property
    def name(self) -> str:
        """See `MatrixSource`."""
        return self.tensor.name

    @property
    def format(self) -> WeightFormat:
        """bf16."""
        return BF16

    def part(self, first_row: int, rows_count: int) -> PlainMatrix:
        """Rows first_row.. of this matrix as one of its own."""
        return PlainMatrix(
            checkpoint=self.checkpoint,
            tensor=self.tensor,
            first_row=self.first_row + first_row,
            rows_count=rows_count,
            columns_count=self.columns_count,
        )

    def read_rows(self, first_row: int, count: int) -> QuantMatrix:
        """See `MatrixSource`."""
        bits = as_bf16(self._bytes(first_row, count), self.tensor.dtype)
        return QuantMatrix(
            format=BF16,
            rows_count=count,
            columns_count=self.columns_count,
            codes=bits.reshape(count, self.columns_count),
        )

    def read_values(self, first_row: int, count: int) -> F32:
        """See `ValueSource`; exact."""
        values = as_f32(self._bytes(first_row, count), self.tensor.dtype)
        return values.reshape(count, self.columns_count)

    def _bytes(self, first_row: int, count: int) -> U8:
        row_bytes = self.columns_count * (4 if self.tensor.dtype == "F32" else 2)
        start_bytes = (self.first_row + first_row) * row_bytes
        return self.checkpoint.read(self.tensor, start_bytes, count * row_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class TransposedMatrix:
    """Columns first, first + step, .. of a plain matrix as rows: a `MatrixSource` of bf16.

    Every reading reads all of `matrix`: of a file's rows only a part is of use.
    """

    matrix: PlainMatrix
    first: int
    step: int
    rows_count: int

    @property
    def name(self) -> str:
        """See `MatrixSource`."""
        return self.matrix.name

    @property
    def format(self) -> WeightFormat:
        """bf16."""
        return BF16

    @property
    def columns_count(self) -> int:
        """See `MatrixSource`."""
        return self.matrix.rows_count

    def read_rows(self, first_row: int, count: int) -> QuantMatrix:
        """See `MatrixSource`."""
        whole = self.matrix.read_rows(0, self.matrix.rows_count)
        codes = whole.codes[:, self._columns(first_row, count)].T.astype(np.uint16, order="C")
        return QuantMatrix(
            format=BF16, rows_count=count, columns_count=self.columns_count, codes=codes
        )

    def read_values(self, first_row: int, count: int) -> F32:
        """See `ValueSource`; exact."""
        whole = self.matrix.read_values(0, self.matrix.rows_count)
        return np.ascontiguousarray(whole[:, self._columns(first_row, count)].T)

    def _columns(self, first_row: int, count: int) -> slice:
        start = self.first + first_row * self.step
        return slice(start, start + count * self.step, self.step)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainVector:
    """Elements first, first + step, .. of a plain matrix of one row: a `VectorSource`."""

    matrix: PlainMatrix
    first: int = 0
    step: int = 1

    def read(self) -> F32:
        """See `VectorSource`; ModelDataError when an element is not finite."""
        values = self.matrix.read_values(0, 1)[0, self.first :: self.step].copy()
        if not np.isfinite(values).all():
            raise ModelDataError(
                f"{self.matrix.tensor.file}: tensor {self.matrix.name} holds a bias that is not "
                f"finite."
            )
        return values


@dataclass(frozen=True, slots=True, kw_only=True)
class IdTable:
    """A plain table of integers from 0 to ids_count - 1: of experts, by token."""

    checkpoint: Checkpoint
    tensor: SourceTensor
    ids_count: int

    def read_ids(self, first_row: int, count: int) -> NDArray[np.int32]:
        """int32 [count, columns]. ModelDataError when one is out of range."""
        columns = self.tensor.shape[1]
        kind = np.dtype(_INTEGERS[self.tensor.dtype])
        row_bytes = columns * kind.itemsize
        raw = self.checkpoint.read(self.tensor, first_row * row_bytes, count * row_bytes)
        ids = raw.view(kind).reshape(count, columns)
        wrong = ids[(ids < 0) | (ids >= self.ids_count)]
        if wrong.size:
            raise ModelDataError(
                f"{self.tensor.file}: tensor {self.tensor.name} holds the expert {wrong[0]}; there "
                f"are {self.ids_count}. Download it again."
            )
        return ids.astype(np.int32)


@dataclass(frozen=True, slots=True, kw_only=True)
class DequantisedMatrix:
    """A `ValueSource` over a matrix in any format."""

    matrix: MatrixSource

    @property
    def name(self) -> str:
        """See `ValueSource`."""
        return self.matrix.name

    @property
    def rows_count(self) -> int:
        """See `ValueSource`."""
        return self.matrix.rows_count

    @property
    def columns_count(self) -> int:
        """See `ValueSource`."""
        return self.matrix.columns_count

    def read_values(self, first_row: int, count: int) -> F32:
        """See `ValueSource`."""
        values: F32 = dequantise(self.matrix.read_rows(first_row, count), np.float32)
        return values


@dataclass(frozen=True, slots=True, kw_only=True)
class SquaredError:
    """Sums over elements: of squared differences from the source, and of squared source values."""

    error: float
    values: float


class QuantisedMatrix:
    """A `MatrixSource` that quantises what another source holds, while it is read."""

    def __init__(self, values: ValueSource, weight_format: WeightFormat) -> None:
        self._values = values
        self.format = weight_format
        self._lock = threading.Lock()
        self._global_scale: float | None = None if weight_format.has_global else 1.0

    @property
    def name(self) -> str:
        """See `MatrixSource`."""
        return self._values.name

    @property
    def rows_count(self) -> int:
        """See `MatrixSource`."""
        return self._values.rows_count

    @property
    def columns_count(self) -> int:
        """See `MatrixSource`."""
        return self._values.columns_count

    def read_rows(self, first_row: int, count: int) -> QuantMatrix:
        """See `MatrixSource`; ModelDataError when the source holds a number that is not finite."""
        return self.read_both(first_row, count)[0]

    def read_both(self, first_row: int, count: int) -> tuple[QuantMatrix, F32]:
        """As `read_rows`, with the numbers that went in."""
        if self.format.kind is not Kind.FP8_BLOCK:
            values = self._finite(first_row, count)
            return quantise(values, self.format, global_scale=self._factor()), values
        # Scales belong to blocks of 128 rows, of which a piece may want a part.
        start = first_row // FP8_BLOCK_ROWS * FP8_BLOCK_ROWS
        end = min(round_up(first_row + count, FP8_BLOCK_ROWS), self.rows_count)
        values = self._finite(start, end - start)
        whole = quantise(values, self.format)
        first, last = first_row - start, first_row - start + count
        scales = whole.scales
        if scales is not None:
            scales = scales[first // ROWS_PER_BLOCK : -(-last // ROWS_PER_BLOCK)]
        part = QuantMatrix(
            format=self.format,
            rows_count=count,
            columns_count=self.columns_count,
            codes=whole.codes[first:last],
            scales=scales,
        )
        return part, values[first:last]

    def _factor(self) -> float:
        with self._lock:
            if self._global_scale is None:
                self._global_scale = nvfp4_global(self._largest())
            return self._global_scale

    def _largest(self) -> float:
        step = max(_SUM_COUNT // self.columns_count, 1) * ROWS_PER_BLOCK
        return max(
            float(np.abs(self._finite(first, min(step, self.rows_count - first))).max())
            for first in range(0, self.rows_count, step)
        )

    def _finite(self, first_row: int, count: int) -> F32:
        values = self._values.read_values(first_row, count)
        if not np.isfinite(values).all():
            raise ModelDataError(
                f"tensor {self.name} holds numbers that are not finite; {self.format} has none "
                f"for them. Check where the checkpoint comes from."
            )
        return values


def squared_error(matrix: QuantMatrix, values: F32) -> SquaredError:
    """What `matrix` loses of `values`.

    In fp64 and in a fixed order, so that a conversion always tells the same.
    """
    error = total = 0.0
    exact = values.reshape(-1)
    found = dequantise(matrix, np.float32).reshape(-1)
    for first in range(0, exact.size, _SUM_COUNT):
        wanted = exact[first : first + _SUM_COUNT].astype(np.float64)
        off = found[first : first + _SUM_COUNT] - wanted
        error += float(np.sum(off * off))
        total += float(np.sum(wanted * wanted))
    return SquaredError(error=error, values=total)
