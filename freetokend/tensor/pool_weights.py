"""Weights used in place in the pool: addresses and formats for the native kernels."""

from __future__ import annotations

from dataclasses import dataclass

from freetokend.core.errors import ModelDataError
from freetokend.ftw.families import HEAD_NAME
from freetokend.ftw.formats import parse_format
from freetokend.ftw.index import FtwIndex, TensorEntry
from freetokend.ftw.layout import EXPERT_RECORDS, ROW_MAJOR, ROWS16
from freetokend.tensor.consumption import Consumption, check_shape
from freetokend.tensor.program import Matrix, Vector


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedMatrix:
    """A rows16 matrix at `address`, in the weight format of that name."""

    address: int
    weight_format: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingTable:
    """A bf16 matrix at `address`, row-major or (a matrix that is also the output's) rows16."""

    address: int
    rows16: bool


class PoolWeights:
    """Over an FTW region mapped at `region_address`; the mapping must outlive what uses it.

    Every tensor is taken once; ModelDataError names one that is missing, of another shape or in a
    form that the kernels do not read, `check_consumed` those left over. Expert records are not
    handed out here.
    """

    def __init__(self, region_address: int, index: FtwIndex) -> None:
        self._region_address = region_address
        self._entries = {
            name: entry for name, entry in index.tensors.items() if entry.layout != EXPERT_RECORDS
        }
        self._consumption = Consumption(self._entries)

    def embedding(self, matrix: Matrix) -> EmbeddingTable:
        entry = self._take(matrix)
        if entry.dtype != "bf16" or entry.layout not in (ROWS16, ROW_MAJOR):
            raise _unreadable(matrix.name, entry, "bf16 in row_major or rows16")
        return EmbeddingTable(address=self._address(entry), rows16=entry.layout == ROWS16)

    def matrix(self, matrix: Matrix) -> PackedMatrix:
        entry = self._take(matrix)
        try:
            parse_format(entry.dtype)
            known = entry.layout == ROWS16
        except ValueError:
            known = False
        if not known:
            raise _unreadable(matrix.name, entry, "a weight format in rows16")
        return PackedMatrix(address=self._address(entry), weight_format=entry.dtype)

    def exact_matrix(self, matrix: Matrix) -> int:
        """Address of a router's matrix, fp32 [out, in]."""
        entry = self._take(matrix)
        if (entry.dtype, entry.layout) != ("f32", ROW_MAJOR):
            raise _unreadable(matrix.name, entry, "f32 in row_major")
        return self._address(entry)

    def vector(self, vector: Vector) -> int:
        """Address of fp32 [size]."""
        self._consumption.take(vector.name)
        entry = self._entries[vector.name]
        check_shape(vector.name, entry.shape, (vector.size,))
        if (entry.dtype, entry.layout) != ("f32", ROW_MAJOR):
            raise _unreadable(vector.name, entry, "f32 in row_major")
        return self._address(entry)

    def check_consumed(self) -> None:
        self._consumption.check_empty()

    def _take(self, matrix: Matrix) -> TensorEntry:
        name = matrix.name
        if matrix.shared:
            self._consumption.require_taken(name)
        if matrix.shared and self._entries[name].layout != ROWS16:
            # A projection in another format than the embedding has a tensor of its own.
            name = HEAD_NAME
        if name != matrix.name or not matrix.shared:
            self._consumption.take(name)
        entry = self._entries[name]
        check_shape(name, entry.shape, (matrix.out_features, matrix.in_features))
        return entry

    def _address(self, entry: TensorEntry) -> int:
        return self._region_address + entry.offset_bytes


def _unreadable(name: str, entry: TensorEntry, needed: str) -> ModelDataError:
    return ModelDataError(
        f"tensor {name!r} is {entry.dtype} in {entry.layout} layout; the CPU kernels need "
        f"{needed}. Convert the checkpoint again."
    )
