"""The ops of a step program as functions over torch tensors: what all runners in torch share.

What differs between them is their `Arithmetic`: how a device takes a product, an activation and a
rotation. Everything else is the same sequence of torch operations on any device, none of which
waits for the device or asks it for a number.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from freetokend.core.errors import InternalError
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
    Sample,
    SelectRows,
    StepProgram,
)
from freetokend.tensor.program_check import check_program
from freetokend.tensor.protocols import ExpertDispatch, KvView, StepInput
from freetokend.tensor.rope import Rotations, rotate
from freetokend.tensor.router import route
from freetokend.tensor.sampling_reference import choose
from freetokend.tensor.state_dict_weights import StateDictWeights


class Arithmetic(Protocol):
    """What a device decides. "Wide" is the accumulator dtype."""

    def product(self, x: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
        """x W^T of an activation [T, in] and a matrix [out, in] of its dtype; wide."""
        ...

    def router_product(self, x: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
        """x W^T of an activation and a wide matrix; wide, nothing rounded below it."""
        ...

    def silu_product(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """silu(gate) * up, wide [T, N]."""
        ...

    def rotations(self, rope: RopeConfig, head_size: int) -> Rotations:
        """The table of one kind of rotary embedding; asked for once."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class OpState:
    """What the ops of one step share; `rows`: the buffers' contents by number."""

    step: StepInput
    kv: KvView
    rows: dict[int, torch.Tensor]


Run = Callable[[OpState], None]


class TorchOps:
    """The ops of a program, bound to weights.

    Raises ModelDataError when the weights do not fit the program.
    """

    def __init__(
        self,
        program: StepProgram,
        weights: StateDictWeights,
        experts: ExpertDispatch,
        arithmetic: Arithmetic,
    ) -> None:
        check_program(program)
        self._experts = experts
        self._arithmetic = arithmetic
        self._activation_dtype = weights.activation_dtype
        self._accumulator_dtype = weights.accumulator_dtype
        self._ropes: dict[tuple[RopeConfig, int], Rotations] = {}
        self._runs = [self._bind(op, weights) for op in program.ops]
        weights.check_consumed()

    def run(self, op_index: int, state: OpState) -> None:
        """One op over the state's rows, where it leaves its results."""
        self._runs[op_index](state)

    def _bind(self, op: Op, weights: StateDictWeights) -> Run:
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
                return lambda state: self._router_product(op, matrix, state.rows)
            case Route():
                return lambda state: _route(op, state.rows)
            case Experts():
                return lambda state: self._dispatch(op, state.rows)
            case Glu():
                return lambda state: self._glu(op, state.rows)
            case SelectRows():
                return lambda state: _select(op, state)
            case Sample():
                return lambda state: _sample(op, state)

    def _embed(self, op: Embed, weights: StateDictWeights) -> Run:
        table = weights.matrix(op.table)

        def run(state: OpState) -> None:
            chosen = table.index_select(0, state.step.token_ids)
            state.rows[op.out] = chosen.to(self._accumulator_dtype)

        return run

    def _add_rms_norm(self, op: AddRmsNorm, weights: StateDictWeights) -> Run:
        weight = weights.vector(op.weight)

        def run(state: OpState) -> None:
            if op.delta is not None:
                _add(state.rows, op.residual, op.delta)
            normed = _rms_norm(state.rows[op.residual], weight, op.eps)
            state.rows[op.out] = normed.to(self._activation_dtype)

        return run

    def _linear(self, op: Linear, weights: StateDictWeights) -> Run:
        matrices = [
            (
                one.out,
                weights.matrix(one.weight),
                None if one.bias is None else weights.vector(one.bias),
            )
            for one in op.products
        ]

        def run(state: OpState) -> None:
            for out, matrix, bias in matrices:
                wide = self._arithmetic.product(state.rows[op.x], matrix)
                state.rows[out] = wide if bias is None else wide + bias

        return run

    def _head_norm(self, op: HeadNorm, weights: StateDictWeights) -> Run:
        weight = weights.vector(op.weight)

        def run(state: OpState) -> None:
            x = state.rows[op.x]
            normed = _rms_norm(x.view(x.shape[0], -1, op.weight.size), weight, op.eps)
            rounded = normed.to(self._activation_dtype).to(self._accumulator_dtype)
            state.rows[op.x] = rounded.view(x.shape)

        return run

    def _rotate(self, op: Rotate) -> Run:
        key = (op.rope, op.head_size)
        if key not in self._ropes:
            self._ropes[key] = self._arithmetic.rotations(*key)
        table = self._ropes[key]

        def run(state: OpState) -> None:
            x = state.rows[op.x]
            cosines, signed_sines = table.rotations(state.step.positions)
            heads = x.view(x.shape[0], -1, op.head_size)
            state.rows[op.x] = rotate(heads, cosines, signed_sines).view(x.shape)

        return run

    def _router_product(
        self, op: RouterProduct, matrix: torch.Tensor, rows: dict[int, torch.Tensor]
    ) -> None:
        rows[op.out] = self._arithmetic.router_product(rows[op.x], matrix)

    def _dispatch(self, op: Experts, rows: dict[int, torch.Tensor]) -> None:
        rows[op.out] = self._experts.dispatch(
            op.moe_layer_index, rows[op.x], rows[op.ids], rows[op.weights]
        )

    def _glu(self, op: Glu, rows: dict[int, torch.Tensor]) -> None:
        wide = self._arithmetic.silu_product(rows[op.gate], rows[op.up])
        rows[op.out] = wide.to(self._activation_dtype)


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    scale = torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps)
    return x * scale * weight


def _add(rows: dict[int, torch.Tensor], residual: int, delta: int) -> None:
    rows[residual] = rows[residual] + rows[delta]


def _attend(op: Attend, state: OpState) -> None:
    q, k, v = (
        rows.view(rows.shape[0], -1, op.head_size)
        for rows in (state.rows[op.q], state.rows[op.k], state.rows[op.v])
    )
    state.rows[op.out] = state.kv.attend(op.layer_index, q, k, v, op.scale)


def _route(op: Route, rows: dict[int, torch.Tensor]) -> None:
    rows[op.ids], rows[op.weights] = route(rows[op.logits], op.router)


def _select(op: SelectRows, state: OpState) -> None:
    state.rows[op.out] = state.rows[op.x].index_select(0, state.step.logits_index)


def _sample(op: Sample, state: OpState) -> None:
    logits = state.rows[op.logits]
    if state.step.sampling is None:
        raise InternalError("tokens are to be chosen, and the step does not say how.")
    chosen = [
        choose(row, params)
        for row, params in zip(logits.float().numpy(), state.step.sampling, strict=True)
    ]
    ids = torch.tensor([one.token_id for one in chosen], dtype=torch.int32)
    peaks = torch.tensor([one.peak for one in chosen], dtype=logits.dtype)
    state.rows[op.ids], state.rows[op.peaks] = ids.unsqueeze(1), peaks.unsqueeze(1)
