"""The executor against the torch oracle in every weight format and with every activation."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from freetokend.experts.bank import MappedBank
from freetokend.experts.cpu import CpuExpertDispatch
from freetokend.experts.reference import TorchExpertDispatch, activate
from freetokend.ftw.formats import parse_format, record_layout
from freetokend.ftw.layout import ExpertBank
from freetokend.ftw.packing_record import ExpertMatrices, pack_record
from freetokend.ftw.quantise import nvfp4_global, quantise
from freetokend.native.executor import Executor

EXPERTS = 3
# Hidden and expert size of each format: odd, or a number of groups that leaves a short header.
SIZES = {
    "bf16": (70, 37),
    "fp8_block": (150, 37),
    "mxfp4": (160, 96),
    "nvfp4": (144, 48),
    "int4_g32_f16": (96, 160),
    "int4_g64_bf16_zp": (192, 64),
    "int4_g128_f16": (128, 256),
    "int8_g32_f16_zp": (96, 64),
    "int8_g64_bf16": (64, 192),
    "q4_K": (512, 256),
    "q6_K": (256, 512),
}


class Bank:
    """A bank of one layer in memory, in page-aligned records."""

    def __init__(
        self, name: str, *, has_bias: bool, activation: str = "silu", limit: float = 0.0
    ) -> None:
        hidden, inner = SIZES[name]
        layout = record_layout(parse_format(name), hidden, inner, has_bias=has_bias)
        bank = ExpertBank(
            format=name,
            offset_bytes=0,
            record_bytes=layout.record_bytes,
            moe_layers_count=1,
            experts_per_layer_count=EXPERTS,
            hidden_size=hidden,
            intermediate_size=inner,
            moe_layer_indices=(0,),
            activation=activation,
            activation_limit=limit,
            has_bias=has_bias,
        )
        self._memory = mmap.mmap(-1, bank.length_bytes)
        random = np.random.default_rng(len(name))
        for expert in range(EXPERTS):
            start = expert * bank.record_bytes
            record = pack_record(random_expert(name, random, has_bias=has_bias))
            self._memory[start : start + bank.record_bytes] = record.tobytes()
        address = np.frombuffer(self._memory, dtype=np.uint8).ctypes.data
        self.mapped = MappedBank(bank=bank, region_address=address)


def random_expert(name: str, random: np.random.Generator, *, has_bias: bool) -> ExpertMatrices:
    hidden, inner = SIZES[name]
    weight_format = parse_format(name)
    matrices = []
    for rows, columns in ((inner, hidden), (inner, hidden), (hidden, inner)):
        values = random.standard_normal((rows, columns), dtype=np.float32)
        values *= np.float32(random.uniform(0.5, 2.0) * columns**-0.5)
        factor = nvfp4_global(float(np.abs(values).max())) if weight_format.has_global else 1.0
        matrices.append(quantise(values, weight_format, global_scale=factor))
    biases = None
    if has_bias:
        of_gate, of_up, of_down = (
            random.standard_normal(size, dtype=np.float32) for size in (inner, inner, hidden)
        )
        biases = (of_gate, of_up, of_down)
    gate, up, down = matrices
    return ExpertMatrices(gate=gate, up=up, down=down, biases=biases)


@pytest.fixture(scope="module")
def executor() -> Iterator[Executor]:
    with Executor(sorted(os.sched_getaffinity(0))[:2]) as executor:
        yield executor


def difference(bank: Bank, executor: Executor) -> float:
    """The executor's result against that of fp64, as a share of its norm, worst of all tokens."""
    generator = torch.Generator().manual_seed(1)
    hidden = bank.mapped.bank.hidden_size
    x = torch.randn(5, hidden, generator=generator).bfloat16()
    ids = torch.tensor([[0, 1], [2, 0], [1, 2], [2, 1], [0, 2]], dtype=torch.int32)
    weights = torch.rand(5, 2, generator=generator) + 0.1
    got = CpuExpertDispatch(executor, bank.mapped).dispatch(0, x, ids, weights).double()
    exact = TorchExpertDispatch(bank.mapped, torch.float64).dispatch(0, x, ids, weights)
    return float(((got - exact).norm(dim=1) / exact.norm(dim=1)).max())


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("name", SIZES)
def test_executor_and_oracle_read_the_same_records(
    name: str, has_bias: bool, executor: Executor
) -> None:
    # The inner activations are rounded to bf16, nothing else is.
    assert difference(Bank(name, has_bias=has_bias), executor) < 4e-3


@pytest.mark.parametrize("limit", [0.0, 0.75])
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "swiglu_oai"])
def test_executor_and_oracle_activate_alike(
    activation: str, limit: float, executor: Executor
) -> None:
    bank = Bank("mxfp4", has_bias=True, activation=activation, limit=limit)
    assert difference(bank, executor) < 4e-3


def test_activations_are_their_formulas() -> None:
    gate, up = torch.tensor([-2.0, 0.5, 9.0]).double(), torch.tensor([3.0, -8.0, 0.25]).double()
    bank = Bank("mxfp4", has_bias=False, activation="swiglu_oai", limit=7.0).mapped.bank
    held, linear = torch.tensor([-2.0, 0.5, 7.0]).double(), torch.tensor([3.0, -7.0, 0.25]).double()
    wanted = (linear + 1) * held / (1 + torch.exp(-1.702 * held))
    assert torch.allclose(activate(gate, up, bank), wanted, rtol=1e-12)
