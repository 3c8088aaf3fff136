"""Weights as plain torch tensors, in the dtypes that a run computes in."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from freetokend.core.errors import InternalError
from freetokend.tensor.consumption import Consumption, check_shape
from freetokend.tensor.program import Matrix, Vector


class StateDictWeights:
    """Over a mapping of tensor name to tensor, which holds the non-expert tensors only.

    `dtype` becomes the activation dtype: float32, float64 or bfloat16. Every tensor is taken once,
    ModelDataError names one that is missing or of another shape; `check_consumed` those left over.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype) -> None:
        if dtype not in (torch.float32, torch.float64, torch.bfloat16):
            raise InternalError(f"no reference computation in {dtype}.")
        self._tensors = tensors
        self._consumption = Consumption(tensors)
        self._activation_dtype = dtype
        self._accumulator_dtype = torch.float64 if dtype is torch.float64 else torch.float32

    @property
    def activation_dtype(self) -> torch.dtype:
        return self._activation_dtype

    @property
    def accumulator_dtype(self) -> torch.dtype:
        """Dtype of sums and of the residual stream: fp32, in a fp64 run fp64."""
        return self._accumulator_dtype

    def matrix(self, matrix: Matrix) -> torch.Tensor:
        """[out, in] with the precision of the activation dtype."""
        return self._matrix(matrix).to(self._activation_dtype)

    def exact_matrix(self, matrix: Matrix) -> torch.Tensor:
        """[out, in] in the accumulator dtype, as the checkpoint has it: a router's."""
        return self._matrix(matrix).to(self._accumulator_dtype)

    def vector(self, vector: Vector) -> torch.Tensor:
        """[size] in the accumulator dtype, with the precision of the activation dtype."""
        self._consumption.take(vector.name)
        found = self._tensors[vector.name]
        check_shape(vector.name, found.shape, (vector.size,))
        return found.to(self._activation_dtype).to(self._accumulator_dtype)

    def check_consumed(self) -> None:
        self._consumption.check_empty()

    def _matrix(self, matrix: Matrix) -> torch.Tensor:
        if matrix.shared:
            self._consumption.require_taken(matrix.name)
        else:
            self._consumption.take(matrix.name)
        found = self._tensors[matrix.name]
        check_shape(matrix.name, found.shape, (matrix.out_features, matrix.in_features))
        return found
