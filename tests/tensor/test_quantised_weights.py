"""Linear layers in place in the region, in every weight format they may have."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from freetokend.core.errors import ModelDataError
from freetokend.ftw.formats import parse_format
from freetokend.ftw.layout import ROW_MAJOR, ROWS16, BankSpec, TensorSpec, plan_region
from freetokend.ftw.matrix import dequantise
from freetokend.ftw.packing import bf16_to_f32, f32_to_bf16
from freetokend.ftw.packing_blocks import pack_matrix
from freetokend.ftw.quantise import quantise
from freetokend.native.executor import Executor
from freetokend.tensor.native_program import NativeProgram
from freetokend.tensor.pool_weights import PoolWeights
from freetokend.tensor.program import (
    AddRmsNorm,
    Embed,
    Linear,
    Matrix,
    Product,
    ProgramBuilder,
    Rows,
    SelectRows,
    StepProgram,
    Vector,
)
from freetokend.tensor.protocols import StepInput
from tests.tensor.region import IdleView

ROWS, COLUMNS = 37, 256
FACTOR = 0.0017  # over all of an nvfp4 matrix; no power of two
FORMATS = (
    "fp8_block",
    "mxfp4",
    "nvfp4",
    "int4_g32_f16",
    "int4_g128_bf16_zp",
    "int8_g64_bf16",
    "q4_K",
    "q6_K",
)
BANK = BankSpec(
    format="bf16",
    record_bytes=4096,
    experts_per_layer_count=1,
    hidden_size=10,
    intermediate_size=16,
    moe_layer_indices=(0,),
    activation="silu",
)


def spec(name: str, dtype: str, layout: str) -> TensorSpec:
    return TensorSpec(name=name, dtype=dtype, shape=(ROWS, COLUMNS), layout=layout)


def vector(name: str, size: int) -> TensorSpec:
    return TensorSpec(name=name, dtype="f32", shape=(size,), layout=ROW_MAJOR)


class Region:
    """A tied embedding in bf16, its projection `head` and a layer `up`, both in `name`."""

    def __init__(self, name: str) -> None:
        specs = [
            spec("embed.weight", "bf16", ROW_MAJOR),
            spec("lm_head.weight", name, ROWS16),
            spec("up.weight", name, ROWS16),
            vector("up.bias", ROWS),
            vector("norm.weight", COLUMNS),
            vector("end.weight", COLUMNS),
        ]
        plan = plan_region(specs, BANK, max_shard_bytes=1 << 26)
        raw = np.zeros(plan.region_bytes + 4096, dtype=np.uint8)
        start = -raw.ctypes.data % 4096
        self._bytes = raw[start : start + plan.region_bytes]
        self.values: dict[str, torch.Tensor] = {}
        random = np.random.default_rng(2)
        for tensor in specs:
            values = random.standard_normal(tensor.shape, dtype=np.float32)
            packed: np.ndarray[Any, Any] = values
            if tensor.layout == ROWS16:
                weight_format = parse_format(name)
                factor = FACTOR if weight_format.has_global else 1.0
                matrix = quantise(values, weight_format, global_scale=factor)
                packed, values = pack_matrix(matrix), dequantise(matrix)
            elif tensor.dtype == "bf16":
                packed = f32_to_bf16(values)
                values = bf16_to_f32(packed)
            entry = plan.tensors[tensor.name]
            self._bytes[entry.offset_bytes : entry.end_bytes] = packed.reshape(-1).view(np.uint8)
            self.values[tensor.name] = torch.from_numpy(values).double()
        self.index: Any = SimpleNamespace(tensors=plan.tensors)
        self.address = self._bytes.ctypes.data
        self.weights = PoolWeights(self.address, self.index)


def program() -> StepProgram:
    """Embed, norm, the layer for every token, the tied projection for the outputs."""
    new = ProgramBuilder()
    residual, normed, up = new.wide(COLUMNS), new.activation(COLUMNS), new.wide(ROWS)
    last, last_normed = new.wide(COLUMNS, Rows.OUTPUTS), new.activation(COLUMNS, Rows.OUTPUTS)
    logits = new.wide(ROWS, Rows.OUTPUTS)
    norm = Vector(name="norm.weight", size=COLUMNS)
    end = Vector(name="end.weight", size=COLUMNS)
    bias = Vector(name="up.bias", size=ROWS)
    new.append(
        Embed(table=matrix("embed"), out=residual),
        AddRmsNorm(residual=residual, delta=None, weight=norm, eps=1e-6, out=normed),
        Linear(x=normed, products=(Product(weight=matrix("up"), bias=bias, out=up),)),
        SelectRows(x=residual, out=last),
        AddRmsNorm(residual=last, delta=None, weight=end, eps=1e-6, out=last_normed),
        Linear(
            x=last_normed,
            products=(Product(weight=matrix("embed", shared=True), bias=None, out=logits),),
        ),
    )
    return new.build(logits)


def matrix(name: str, *, shared: bool = False) -> Matrix:
    return Matrix(name=f"{name}.weight", out_features=ROWS, in_features=COLUMNS, shared=shared)


# Buffers of the program.
NORMED, UP, LAST_NORMED = 1, 2, 4


@pytest.mark.parametrize("name", FORMATS)
def test_linear_layers_compute_with_what_the_format_means(name: str) -> None:
    region = Region(name)
    ids = torch.tensor([36, 0, 7, 7, 20])
    step = StepInput(token_ids=ids, positions=torch.arange(5), logits_index=torch.tensor([4, 0, 2]))
    with Executor([0]) as executor:
        native = NativeProgram(program(), region.weights, executor, None)
        logits = native.forward(step, IdleView(tokens_count=5))
        x = native.rows(NORMED, step).double()
        values = region.values
        plain = torch.nn.functional.rms_norm(
            values["embed.weight"][ids], (COLUMNS,), values["norm.weight"], eps=1e-6
        )
        assert ((x - plain).abs() <= 2**-8 * plain.abs()).all()
        exact = torch.addmm(values["up.bias"], x, values["up.weight"].T)
        assert (native.rows(UP, step) - exact).norm() <= 2e-6 * exact.norm()
        exact = native.rows(LAST_NORMED, step).double() @ values["lm_head.weight"].T
        assert (logits - exact).norm() <= 2e-6 * exact.norm()


def test_a_projection_that_nobody_asked_for_is_left_over() -> None:
    weights = Region("mxfp4").weights
    weights.matrix(matrix("up"))
    for name, size in (("up.bias", ROWS), ("norm.weight", COLUMNS), ("end.weight", COLUMNS)):
        weights.vector(Vector(name=name, size=size))
    weights.embedding(matrix("embed"))
    with pytest.raises(ModelDataError, match=r"does not use: lm_head\.weight"):
        weights.check_consumed()
