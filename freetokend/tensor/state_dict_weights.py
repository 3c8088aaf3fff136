"""Weights as plain torch tensors, computed by torch: reference runs, any dtype and device.

Products of bf16 inputs are summed in fp32, as in the native kernels: torch would round every
result to bf16. Row results may depend on the batch here, because torch chooses its own blocking.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from freetokend.core.errors import InternalError
from freetokend.tensor.consumption import Consumption, check_shape


class StateDictWeights:
    """WeightSource over a mapping of tensor name (with `.weight` / `.bias`) to tensor.

    The mapping holds the non-expert tensors only, all of one floating dtype, which becomes the
    activation dtype: float32, float64 or bfloat16.
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
        return self._accumulator_dtype

    def linear(
        self, name: str, *, in_features: int, out_features: int, bias: bool = False
    ) -> TorchLinear:
        weight = self._take(f"{name}.weight", (out_features, in_features))
        offset = self._take(f"{name}.bias", (out_features,)) if bias else None
        return TorchLinear(weight, offset, self._accumulator_dtype)

    def embedding(self, name: str, *, rows: int, features: int) -> TorchEmbedding:
        weight = self._take(f"{name}.weight", (rows, features))
        return TorchEmbedding(weight, self._accumulator_dtype)

    def tied_linear(self, name: str, *, in_features: int, out_features: int) -> TorchLinear:
        self._consumption.require_taken(f"{name}.weight")
        weight = self._tensors[f"{name}.weight"]
        check_shape(f"{name}.weight", weight.shape, (out_features, in_features))
        return TorchLinear(weight.to(self._activation_dtype), None, self._accumulator_dtype)

    def norm(self, name: str, *, size: int, eps: float) -> TorchNorm:
        weight = self._take(f"{name}.weight", (size,))
        return TorchNorm(
            weight.to(self._accumulator_dtype), eps, self._activation_dtype, self._accumulator_dtype
        )

    def router(self, name: str, *, in_features: int, experts_count: int) -> TorchLinear:
        name = f"{name}.weight"
        self._consumption.take(name)
        weight = self._tensors[name]
        check_shape(name, weight.shape, (experts_count, in_features))
        return TorchLinear(weight, None, self._accumulator_dtype)

    def check_consumed(self) -> None:
        self._consumption.check_empty()

    def _take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        self._consumption.take(name)
        tensor = self._tensors[name]
        check_shape(name, tensor.shape, shape)
        return tensor.to(self._activation_dtype)


class TorchLinear:
    """A Linear by torch, summed in the accumulator dtype."""

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None, accumulator_dtype: torch.dtype
    ) -> None:
        self._weight = weight
        self._bias = bias
        self._accumulator_dtype = accumulator_dtype

    @property
    def in_features(self) -> int:
        return self._weight.shape[1]

    @property
    def out_features(self) -> int:
        return self._weight.shape[0]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        dtype = self._accumulator_dtype
        y = x.to(dtype) @ self._weight.to(dtype).T
        return y if self._bias is None else y + self._bias.to(dtype)


class TorchEmbedding:
    """Row look-up by torch."""

    def __init__(self, weight: torch.Tensor, accumulator_dtype: torch.dtype) -> None:
        self._weight = weight
        self._accumulator_dtype = accumulator_dtype

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        return self._weight[token_ids].to(self._accumulator_dtype)


class TorchNorm:
    """Root mean square normalisation by torch, in the accumulator dtype."""

    def __init__(
        self,
        weight: torch.Tensor,
        eps: float,
        activation_dtype: torch.dtype,
        accumulator_dtype: torch.dtype,
    ) -> None:
        self._weight = weight
        self._eps = eps
        self._activation_dtype = activation_dtype
        self._accumulator_dtype = accumulator_dtype

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.to(self._accumulator_dtype)
        scale = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + self._eps)
        return (wide * scale * self._weight).to(self._activation_dtype)
