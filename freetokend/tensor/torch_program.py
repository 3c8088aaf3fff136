"""A step program executed op by op in torch: reference runs, any dtype and device.

Products of bf16 inputs are summed in fp32, as in the native kernels: torch would round every
result to bf16. Row results may depend on the batch here, because torch chooses its own blocking.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch

from freetokend.core.rope_config import RopeConfig
from freetokend.tensor.program import (
    Add,
    AddRmsNorm,
    Attend,
    Embed,
    Experts,
    Glu,
    HeadNorm,
    Linear,
    Op,
    Rotate,
    Route,
    RouterProduct,
    SelectRows,
    StepProgram,
)
from freetokend.tensor.program_check import check_program
from freetokend.tensor.protocols import ExpertDispatch, KvView, Observer, StepInput
from freetokend.tensor.rope import RopeTable, rotate
from freetokend.tensor.router import route
from freetokend.tensor.rowwise import silu_product
from freetokend.tensor.state_dict_weights import StateDictWeights


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    """What the ops of one step share; `rows`: the buffers' contents by number."""

    step: StepInput
    kv: KvView
    rows: dict[int, torch.Tensor]


_Run = Callable[[_Step], None]


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
        check_program(program)
        self._program: Final = program
        self._experts = experts
        self._observer = observer
        self._activation_dtype = weights.activation_dtype
        self._accumulator_dtype = weights.accumulator_dtype
        self._ropes: dict[tuple[RopeConfig, int], RopeTable] = {}
        self._runs = [self._bind(op, weights) for op in program.ops]
        weights.check_consumed()

    @property
    def vocab_size(self) -> int:
        return self._program.vocab_size

    @torch.inference_mode()
    def forward(self, step: StepInput, kv: KvView) -> torch.Tensor:
        """Logits of the tokens in `step.logits_index`: accumulator dtype [S', vocab]."""
        state = _Step(step=step, kv=kv, rows={})
        for op, run in zip(self._program.ops, self._runs, strict=True):
            run(state)
            if self._observer is not None:
                self._observer(op, state.rows.__getitem__)
        return state.rows[self._program.logits]

    @torch.inference_mode()
    def execute(
        self, op_index: int, step: StepInput, kv: KvView, rows: dict[int, torch.Tensor]
    ) -> None:
        """One op over `rows` (buffer number -> [rows, width]), where it leaves its results."""
        self._runs[op_index](_Step(step=step, kv=kv, rows=rows))

    def _bind(self, op: Op, weights: StateDictWeights) -> _Run:
        match op:
            case Embed():
                return self._embed(op, weights)
            case Add():
                return lambda state: _add(state.rows, op.residual, op.delta)
            case AddRmsNorm():
                return self._add_rms_norm(op, weights)
            case Linear():
                return self._linear(op, weights)
            case HeadNorm():
                return self._head_norm(op, weights)
            case Rotate():
                return self._rotate(op)
            case Attend():
                return lambda state: _attend(op, state)
            case RouterProduct():
                matrix = weights.exact_matrix(op.weight)
                return lambda state: _product(state.rows, op.x, matrix, op.out)
            case Route():
                return lambda state: _route(op, state.rows)
            case Experts():
                return lambda state: self._dispatch(op, state.rows)
            case Glu():
                return lambda state: self._glu(op, state.rows)
            case SelectRows():
                return lambda state: _select(op, state)

    def _embed(self, op: Embed, weights: StateDictWeights) -> _Run:
        table = weights.matrix(op.table)

        def run(state: _Step) -> None:
            state.rows[op.out] = table[state.step.token_ids].to(self._accumulator_dtype)

        return run

    def _add_rms_norm(self, op: AddRmsNorm, weights: StateDictWeights) -> _Run:
        weight = weights.vector(op.weight)

        def run(state: _Step) -> None:
            if op.delta is not None:
                _add(state.rows, op.residual, op.delta)
            normed = _rms_norm(state.rows[op.residual], weight, op.eps)
            state.rows[op.out] = normed.to(self._activation_dtype)

        return run

    def _linear(self, op: Linear, weights: StateDictWeights) -> _Run:
        matrices = [
            (
                one.out,
                weights.matrix(one.weight),
                None if one.bias is None else weights.vector(one.bias),
            )
            for one in op.products
        ]

        def run(state: _Step) -> None:
            for out, matrix, bias in matrices:
                _product(state.rows, op.x, matrix.to(self._accumulator_dtype), out)
                if bias is not None:
                    state.rows[out] = state.rows[out] + bias

        return run

    def _head_norm(self, op: HeadNorm, weights: StateDictWeights) -> _Run:
        weight = weights.vector(op.weight)

        def run(state: _Step) -> None:
            x = state.rows[op.x]
            normed = _rms_norm(x.view(x.shape[0], -1, op.weight.size), weight, op.eps)
            rounded = normed.to(self._activation_dtype).to(self._accumulator_dtype)
            state.rows[op.x] = rounded.view(x.shape)

        return run

    def _rotate(self, op: Rotate) -> _Run:
        key = (op.rope, op.head_size)
        table = self._ropes.setdefault(key, RopeTable(*key, self._accumulator_dtype))

        def run(state: _Step) -> None:
            x = state.rows[op.x]
            cosines, signed_sines = table.rotations(state.step.positions)
            heads = x.view(x.shape[0], -1, op.head_size)
            state.rows[op.x] = rotate(heads, cosines, signed_sines).view(x.shape)

        return run

    def _dispatch(self, op: Experts, rows: dict[int, torch.Tensor]) -> None:
        rows[op.out] = self._experts.dispatch(
            op.moe_layer_index, rows[op.x], rows[op.ids], rows[op.weights]
        )

    def _glu(self, op: Glu, rows: dict[int, torch.Tensor]) -> None:
        rows[op.out] = silu_product(rows[op.gate], rows[op.up]).to(self._activation_dtype)


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    scale = torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps)
    return x * scale * weight


def _add(rows: dict[int, torch.Tensor], residual: int, delta: int) -> None:
    rows[residual] = rows[residual] + rows[delta]


def _product(rows: dict[int, torch.Tensor], x: int, matrix: torch.Tensor, out: int) -> None:
    rows[out] = rows[x].to(matrix.dtype) @ matrix.T


def _attend(op: Attend, state: _Step) -> None:
    q, k, v = (
        rows.view(rows.shape[0], -1, op.head_size)
        for rows in (state.rows[op.q], state.rows[op.k], state.rows[op.v])
    )
    state.rows[op.out] = state.kv.attend(op.layer_index, q, k, v, op.scale)


def _route(op: Route, rows: dict[int, torch.Tensor]) -> None:
    rows[op.ids], rows[op.weights] = route(rows[op.logits], op.router)


def _select(op: SelectRows, state: _Step) -> None:
    state.rows[op.out] = state.rows[op.x][state.step.logits_index]
