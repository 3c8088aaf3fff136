"""A step program executed op by op on a GPU, as it is captured into graphs.

Weights and activations are bf16; products of them are summed and kept in fp32, as are the residual
stream and all of the router. No op waits for the device, and every table is as long from the start
as it ever has to be. Row results may depend on the batch: the library that takes the products
chooses its blocking by their shape. They agree with the CPU's within the rounding of bf16.

The last op of a program, which chooses tokens, is not among them: logits are taken to the host and
sampled there in a call of its own (`sampling.sample_logits`), so that all devices give the same
tokens for the same logits.

On the device "cpu" the same ops compute the same values, so that they can be compared.
"""

from __future__ import annotations

from typing import Final

import torch

from freetokend.core.errors import InternalError
from freetokend.core.rope_config import RopeConfig
from freetokend.tensor.program import StepProgram
from freetokend.tensor.protocols import ExpertDispatch, KvView, StepInput
from freetokend.tensor.rope import FixedRopeTable
from freetokend.tensor.state_dict_weights import StateDictWeights
from freetokend.tensor.torch_ops import OpState, TorchOps


class CudaProgram:
    """A StepRunner, also in ranges of ops; buffers keep their contents between two of them.

    Tensors of weights, steps and views all lie on `device`, where the logits are too.
    """

    def __init__(
        self,
        program: StepProgram,
        weights: StateDictWeights,
        experts: ExpertDispatch,
        *,
        positions_count: int,
        device: torch.device,
    ) -> None:
        """positions_count: positions a token can have. ModelDataError when the weights do not fit.

        InternalError for activations that are not bf16, and where torch was told to round the
        router's fp32 products.
        """
        if weights.activation_dtype is not torch.bfloat16:
            raise InternalError(f"a GPU computes with bf16, not {weights.activation_dtype}.")
        if torch.get_float32_matmul_precision() != "highest":
            raise InternalError(
                "torch may round fp32 products (torch.set_float32_matmul_precision), which sends "
                "tokens to other experts; nothing of the engine may set it."
            )
        self._program: Final = program
        self._rows: dict[int, torch.Tensor] = {}
        arithmetic = _DeviceArithmetic(positions_count, device)
        self._ops = TorchOps(program, weights, experts, arithmetic)

    @property
    def program(self) -> StepProgram:
        return self._program

    @property
    def vocab_size(self) -> int:
        return self._program.vocab_size

    @torch.inference_mode()
    def forward(self, step: StepInput, kv: KvView) -> torch.Tensor:
        """Logits of the tokens in `step.logits_index`: fp32 [S', vocab], the caller's own."""
        rows: dict[int, torch.Tensor] = {}
        self._run(OpState(step=step, kv=kv, rows=rows), range(len(self._program.ops) - 1))
        return rows[self._program.sample.logits]

    @torch.inference_mode()
    def execute(self, step: StepInput, kv: KvView, *, first: int = 0, last: int = -1) -> None:
        """Ops [first, last) of the program (-1: to the logits), over the rows of the last call."""
        if first == 0:
            self._rows = {}
        end = len(self._program.ops) - 1 if last < 0 else last
        self._run(OpState(step=step, kv=kv, rows=self._rows), range(first, end))

    def logits(self, step: StepInput) -> torch.Tensor:
        """After `execute` to the logits: fp32 [S', vocab], the caller's own."""
        rows, self._rows = self._rows, {}
        logits = rows[self._program.sample.logits]
        if logits.shape[0] != step.logits_index.shape[0]:
            raise InternalError("logits were asked for of a step that was not executed.")
        return logits

    def _run(self, state: OpState, indices: range) -> None:
        for index in indices:
            self._ops.run(index, state)


class _DeviceArithmetic:
    """bf16 products with fp32 results, in the shapes and layouts that a GPU takes."""

    def __init__(self, positions_count: int, device: torch.device) -> None:
        self._positions_count = positions_count
        self._device = device

    def product(self, x: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
        if x.is_cuda:
            return torch.mm(x, matrix.T, out_dtype=torch.float32)
        return x.to(torch.float32) @ matrix.to(torch.float32).T  # the CPU has no such product

    def router_product(self, x: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
        return x.to(torch.float32) @ matrix.T

    def silu_product(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(gate).mul_(gate).mul_(up)

    def rotations(self, rope: RopeConfig, head_size: int) -> FixedRopeTable:
        return FixedRopeTable(
            rope, head_size, positions_count=self._positions_count, device=self._device
        )
