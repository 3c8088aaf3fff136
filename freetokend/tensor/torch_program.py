"""A step program executed op by op in torch: reference runs, any dtype, on the CPU.

Products of bf16 inputs are summed in fp32, as in the native kernels: torch would round every
result to bf16. Row results may depend on the batch here, because torch chooses its own blocking.
"""

from __future__ import annotations

from typing import Final

import torch

from freetokend.core.rope_config import RopeConfig
from freetokend.tensor.program import StepProgram
from freetokend.tensor.protocols import ExpertDispatch, KvView, Observer, StepInput
from freetokend.tensor.rope import RopeTable
from freetokend.tensor.rowwise import silu_product
from freetokend.tensor.state_dict_weights import StateDictWeights
from freetokend.tensor.torch_ops import OpState, TorchOps


class TorchProgram:
    """A StepRunner. Raises ModelDataError when the weights do not fit the program."""

    def __init__(
        self,
        program: StepProgram,
        weights: StateDictWeights,
        experts: ExpertDispatch,
        *,
        observer: Observer | None = None,
    ) -> None:
        self._program: Final = program
        self._observer = observer
        arithmetic = _WideArithmetic(weights.accumulator_dtype)
        self._ops = TorchOps(program, weights, experts, arithmetic)

    @property
    def vocab_size(self) -> int:
        return self._program.vocab_size

    @torch.inference_mode()
    def forward(self, step: StepInput, kv: KvView) -> torch.Tensor:
        """Logits of the tokens in `step.logits_index`: accumulator dtype [S', vocab]."""
        state = OpState(step=step, kv=kv, rows={})
        for index, op in enumerate(self._program.ops[:-1]):
            self._ops.run(index, state)
            if self._observer is not None:
                self._observer(op, state.rows.__getitem__)
        return state.rows[self._program.sample.logits]

    @torch.inference_mode()
    def execute(
        self, op_index: int, step: StepInput, kv: KvView, rows: dict[int, torch.Tensor]
    ) -> None:
        """One op over `rows` (buffer number -> [rows, width]), where it leaves its results."""
        self._ops.run(op_index, OpState(step=step, kv=kv, rows=rows))


class _WideArithmetic:
    """Products of widened operands, and tables that grow with the positions in use."""

    def __init__(self, accumulator_dtype: torch.dtype) -> None:
        self._dtype = accumulator_dtype

    def product(self, x: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
        return x.to(self._dtype) @ matrix.to(self._dtype).T

    def router_product(self, x: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
        return self.product(x, matrix)

    def silu_product(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return silu_product(gate, up)

    def rotations(self, rope: RopeConfig, head_size: int) -> RopeTable:
        return RopeTable(rope, head_size, self._dtype)
