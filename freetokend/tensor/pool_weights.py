"""Weights used in place in the pool, computed by the native executor: what serves on a CPU.

Linear layers may be in any dense weight format; the executor dequantises as it multiplies.

Only the router's matrix is copied: it is tiny, and kept in fp32 in the pool because bf16 scores
would send tokens to other experts.
"""

from __future__ import annotations

import torch

from freetokend.core.errors import InternalError, ModelDataError
from freetokend.ftw.families import HEAD_NAME
from freetokend.ftw.formats import round_up
from freetokend.ftw.index import FtwIndex, TensorEntry
from freetokend.ftw.layout import EXPERT_RECORDS, ROW_MAJOR, ROWS16
from freetokend.ftw.packing import pack_rows16
from freetokend.native.executor import Executor, Numerics
from freetokend.tensor.consumption import Consumption, check_shape
from freetokend.tensor.memory import address_of, tensor_at


class PoolWeights:
    """WeightSource over an FTW region mapped at `region_address`.

    The mapping must outlive this object and the model built from it. Expert records are not
    handed out here: they belong to the ExpertDispatch.
    """

    def __init__(
        self,
        region_address: int,
        index: FtwIndex,
        executor: Executor,
        *,
        numerics: Numerics = "exact",
    ) -> None:
        """numerics: "fast" lets the executor round activations to int8 where a format allows it."""
        self._numerics: Numerics = numerics
        self._region_address = region_address
        self._entries = {
            name: entry for name, entry in index.tensors.items() if entry.layout != EXPERT_RECORDS
        }
        self._consumption = Consumption(self._entries)
        self._executor = executor

    @property
    def activation_dtype(self) -> torch.dtype:
        return torch.bfloat16

    @property
    def accumulator_dtype(self) -> torch.dtype:
        return torch.float32

    def linear(
        self, name: str, *, in_features: int, out_features: int, bias: bool = False
    ) -> NativeLinear:
        self._consumption.take(f"{name}.weight")
        offset = self._take(f"{name}.bias", (out_features,), "f32", ROW_MAJOR) if bias else 0
        return self._product(f"{name}.weight", (out_features, in_features), offset)

    def embedding(
        self, name: str, *, rows: int, features: int
    ) -> NativeEmbedding | RowMajorEmbedding:
        name = f"{name}.weight"
        # A matrix that is also the output projection is packed for it.
        entry = self._entries.get(name)
        if entry is not None and entry.layout == ROWS16:
            weight = self._take(name, (rows, features), "bf16", ROWS16)
            return NativeEmbedding(self._executor, weight=weight, rows=rows, features=features)
        weight = self._take(name, (rows, features), "bf16", ROW_MAJOR)
        return RowMajorEmbedding(tensor_at(weight, (rows, features), torch.bfloat16))

    def tied_linear(self, name: str, *, in_features: int, out_features: int) -> NativeLinear:
        name = f"{name}.weight"
        self._consumption.require_taken(name)
        if self._entries[name].layout != ROWS16:
            # A projection in another format than the embedding has a tensor of its own.
            name = HEAD_NAME
            self._consumption.take(name)
        return self._product(name, (out_features, in_features), 0)

    def norm(self, name: str, *, size: int, eps: float) -> NativeNorm:
        weight = self._take(f"{name}.weight", (size,), "f32", ROW_MAJOR)
        return NativeNorm(self._executor, weight=weight, size=size, eps=eps)

    def router(self, name: str, *, in_features: int, experts_count: int) -> ExactLinear:
        shape = (experts_count, in_features)
        weight = self._take(f"{name}.weight", shape, "f32", ROW_MAJOR)
        return ExactLinear(self._executor, tensor_at(weight, shape, torch.float32))

    def check_consumed(self) -> None:
        self._consumption.check_empty()

    def _product(self, name: str, shape: tuple[int, int], bias: int) -> NativeLinear:
        """The matrix `name` [out, in] in whatever weight format it has, already taken."""
        weight_format = self._entries[name].dtype
        out_features, in_features = shape
        return NativeLinear(
            self._executor,
            weight=self._address(name, shape, weight_format, ROWS16),
            bias=bias,
            in_features=in_features,
            out_features=out_features,
            weight_format=weight_format,
            numerics=self._numerics,
        )

    def _take(self, name: str, shape: tuple[int, ...], dtype: str, layout: str) -> int:
        self._consumption.take(name)
        return self._address(name, shape, dtype, layout)

    def _address(self, name: str, shape: tuple[int, ...], dtype: str, layout: str) -> int:
        entry: TensorEntry = self._entries[name]
        check_shape(name, entry.shape, shape)
        if (entry.dtype, entry.layout) != (dtype, layout):
            raise ModelDataError(
                f"tensor {name!r} is {entry.dtype} in {entry.layout} layout; the CPU kernels need "
                f"{dtype} in {layout}. Convert the checkpoint again."
            )
        return self._region_address + entry.offset_bytes


class NativeLinear:
    """A Linear over a rows16 matrix in the pool (`weight`, `bias`: addresses; bias 0 = none)."""

    def __init__(
        self,
        executor: Executor,
        *,
        weight: int,
        bias: int,
        in_features: int,
        out_features: int,
        weight_format: str = "bf16",
        numerics: Numerics = "exact",
    ) -> None:
        self._weight_format = weight_format
        self._numerics: Numerics = numerics
        self._executor = executor
        self._weight = weight
        self._bias = bias
        self._in_features = in_features
        self._out_features = out_features

    @property
    def in_features(self) -> int:
        return self._in_features

    @property
    def out_features(self) -> int:
        return self._out_features

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        tokens = _rows(x, self._in_features)
        y = torch.empty(tokens, self._out_features, dtype=torch.float32)
        self._executor.linear(
            address_of(x, torch.bfloat16),
            self._weight,
            y.data_ptr(),
            tokens=tokens,
            in_features=self._in_features,
            out_features=self._out_features,
            bias=self._bias,
            weight_format=self._weight_format,
            numerics=self._numerics,
        )
        return y


class ExactLinear:
    """A Linear with fp32 weights and bf16 inputs, on the bf16 kernel.

    An fp32 number is exactly the sum of three bf16 numbers, so the matrix becomes up to three bf16
    matrices (one when it came from bf16) whose results are added. The kernel's fixed order of
    summing is kept, which torch's matrix products do not have.
    """

    def __init__(self, executor: Executor, weight: torch.Tensor) -> None:
        self._out_features, self._in_features = weight.shape
        self._padded = round_up(self._out_features, 16)
        parts: list[torch.Tensor] = []
        rest = weight
        while not parts or (rest.any() and len(parts) < 3):
            parts.append(rest.to(torch.bfloat16))
            rest = rest - parts[-1].to(torch.float32)
        self._packed = torch.cat([_pack(part) for part in parts])
        self._parts_count = len(parts)
        self._stacked = NativeLinear(
            executor,
            weight=address_of(self._packed, torch.bfloat16),
            bias=0,
            in_features=self._in_features,
            out_features=len(parts) * self._padded,
        )

    @property
    def in_features(self) -> int:
        return self._in_features

    @property
    def out_features(self) -> int:
        return self._out_features

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        stacked = self._stacked(x).view(x.shape[0], self._parts_count, self._padded)
        # Smallest first loses least.
        y = stacked[:, -1]
        for part in range(self._parts_count - 2, -1, -1):
            y = y + stacked[:, part]
        return y[:, : self._out_features].contiguous()


class NativeEmbedding:
    """Row look-up in a rows16 matrix."""

    def __init__(self, executor: Executor, *, weight: int, rows: int, features: int) -> None:
        self._executor = executor
        self._weight = weight
        self._rows = rows
        self._features = features

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        _check_ids(token_ids, self._rows)
        out = torch.empty(token_ids.shape[0], self._features, dtype=torch.float32)
        self._executor.embed_rows16(
            self._weight,
            address_of(token_ids, torch.int64),
            out.data_ptr(),
            tokens=token_ids.shape[0],
            features=self._features,
        )
        return out


class RowMajorEmbedding:
    """Row look-up in a plain bf16 matrix in the pool."""

    def __init__(self, weight: torch.Tensor) -> None:
        self._weight = weight

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        _check_ids(token_ids, self._weight.shape[0])
        return self._weight[token_ids].to(torch.float32)


class NativeNorm:
    """A Norm with fp32 weights in the pool."""

    def __init__(self, executor: Executor, *, weight: int, size: int, eps: float) -> None:
        self._executor = executor
        self._weight = weight
        self._size = size
        self._eps = eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.empty(x.shape, dtype=torch.bfloat16)
        self._executor.rms_norm(
            address_of(x, torch.float32),
            self._weight,
            y.data_ptr(),
            rows=_rows(x, self._size),
            size=self._size,
            eps=self._eps,
        )
        return y


def _pack(matrix: torch.Tensor) -> torch.Tensor:
    """bf16 [N, K] -> flat rows16 copy."""
    bits = pack_rows16(matrix.view(torch.uint16).numpy())
    return torch.from_numpy(bits.reshape(-1)).view(torch.bfloat16)


def _rows(x: torch.Tensor, size: int) -> int:
    if x.shape[-1] != size:
        raise InternalError(f"a native call got rows of {x.shape[-1]}, made for {size}.")
    return x.numel() // size


def _check_ids(token_ids: torch.Tensor, rows: int) -> None:
    low, high = torch.aminmax(token_ids)
    if int(low) < 0 or int(high) >= rows:
        raise InternalError(f"a token id is outside the vocabulary of {rows}.")
