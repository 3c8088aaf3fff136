"""A step program bound to the pool and executed in one native call: what serves on a CPU.

Only the routers' matrices are copied: they are tiny, and kept in fp32 in the pool because bf16
scores would send tokens to other experts.
"""

from __future__ import annotations

from typing import Final, Protocol, runtime_checkable

import torch

from freetokend.core.errors import InternalError
from freetokend.core.model_config import RouterScoring
from freetokend.core.rope_config import RopeConfig
from freetokend.native.executor import Executor, Numerics, is_fast
from freetokend.native.program import BufferSpec, KvPages, NativeDispatch, Program, StepInputs
from freetokend.tensor.memory import address_of, tensor_at
from freetokend.tensor.pool_weights import PoolWeights
from freetokend.tensor.program import (
    Add,
    AddRmsNorm,
    Attend,
    Buffer,
    Element,
    Embed,
    Experts,
    Glu,
    HeadNorm,
    Linear,
    Op,
    Rotate,
    Route,
    RouterProduct,
    Rows,
    Sample,
    SelectRows,
    StepProgram,
)
from freetokend.tensor.program_check import check_program
from freetokend.tensor.protocols import KvView, Observer, StepInput
from freetokend.tensor.rope import RopeTable
from freetokend.tensor.sampling import ChosenTokens, sampling_address

_DTYPES: Final = {
    Element.WIDE: torch.float32,
    Element.ACTIVATION: torch.bfloat16,
    Element.INDEX: torch.int32,
}

# Every buffer starts at a cache line.
_LINE_BYTES: Final = 64


@runtime_checkable
class PagedKvView(Protocol):
    """A KvView whose memory native code reads and writes itself.

    page_table: int32 [S, P]; sequence_index, positions: int32 [T].
    """

    @property
    def pages(self) -> KvPages: ...

    @property
    def page_table(self) -> torch.Tensor: ...

    @property
    def sequence_index(self) -> torch.Tensor: ...

    @property
    def positions(self) -> torch.Tensor: ...


class NativeProgram:
    """A StepRunner and a TokenRunner over bf16 pages. With an `observer` the ops run one by one.

    Raises ModelDataError when the weights do not fit the program.
    """

    def __init__(
        self,
        program: StepProgram,
        weights: PoolWeights,
        executor: Executor,
        experts: NativeDispatch | None,
        *,
        numerics: Numerics = "exact",
        observer: Observer | None = None,
    ) -> None:
        check_program(program)
        self._program: Final = program
        self._executor = executor
        self._observer = observer
        self._fast = is_fast(numerics)
        self._ropes: dict[tuple[RopeConfig, int], RopeTable] = {}
        self._native = Program(native_buffers(program), experts)
        for op in program.ops:
            self._add(op, weights)
        weights.check_consumed()

    @property
    def program(self) -> StepProgram:
        return self._program

    @property
    def vocab_size(self) -> int:
        return self._program.vocab_size

    @property
    def finished_ops_count(self) -> int:
        """Grows while a step is in progress; from any thread."""
        return self._native.finished_ops_count

    def forward(self, step: StepInput, kv: KvView) -> torch.Tensor:
        """Logits of the tokens in `step.logits_index`: fp32 [S', vocab], the caller's own."""
        self._run(step, kv, len(self._program.ops) - 1)
        return self.rows(self._program.sample.logits, step).clone()

    def choose(self, step: StepInput, kv: KvView) -> ChosenTokens:
        """As of `TokenRunner`."""
        self._run(step, kv, len(self._program.ops))
        return self.chosen(step)

    def chosen(self, step: StepInput) -> ChosenTokens:
        """After `execute` of the last op."""
        ids, peaks = self._program.sample.ids, self._program.sample.peaks
        return ChosenTokens(
            token_ids=self.rows(ids, step).flatten().clone(),
            peaks=self.rows(peaks, step).flatten().clone(),
        )

    def execute(self, step: StepInput, kv: KvView, *, first: int = 0, last: int = -1) -> None:
        """Ops [first, last) of the program (-1: to the end)."""
        if not isinstance(kv, PagedKvView):
            raise InternalError("a native program needs keys and values in native pages.")
        # Locals, so that what the addresses point at lives until the call returns.
        page_table, sequence_index, positions = kv.page_table, kv.sequence_index, kv.positions
        sequences_count, max_pages = page_table.shape
        end = int(step.positions.max()) + 1
        inputs = StepInputs(
            token_ids=address_of(step.token_ids, torch.int64),
            tokens_count=step.token_ids.shape[0],
            outputs=address_of(step.logits_index, torch.int64),
            outputs_count=step.logits_index.shape[0],
            page_table=address_of(page_table, torch.int32),
            sequence_index=address_of(sequence_index, torch.int32),
            positions=address_of(positions, torch.int32),
            sequences_count=sequences_count,
            max_pages=max_pages,
            rotations=tuple(table.rows(end) for table in self._ropes.values()),
            sampling=sampling_address(step.sampling, step.logits_index.shape[0]),
        )
        self._native.run(self._executor, self._native.prepare(inputs, kv.pages), first, last)

    def rows(self, number: int, step: StepInput) -> torch.Tensor:
        """A buffer's contents after `execute`, not copied: [rows, width]."""
        buffer = self._program.buffers[number]
        rows = step.logits_index if buffer.rows is Rows.OUTPUTS else step.token_ids
        shape = (rows.shape[0], buffer.width)
        if shape[0] == 0:
            return torch.empty(shape, dtype=_DTYPES[buffer.element])
        return tensor_at(self._native.buffer(number), shape, _DTYPES[buffer.element])

    @torch.inference_mode()
    def _run(self, step: StepInput, kv: KvView, last: int) -> None:
        if self._observer is None:
            self.execute(step, kv, last=last)
            return
        for index, op in enumerate(self._program.ops[:last]):
            self.execute(step, kv, first=index, last=index + 1)
            self._observer(op, lambda number: self.rows(number, step))

    def _add(self, op: Op, weights: PoolWeights) -> None:
        with self._native.adding() as native:
            match op:
                case Embed():
                    table = weights.embedding(op.table)
                    native.add_embed(
                        table=table.address,
                        rows16=table.rows16,
                        vocab_size=op.table.out_features,
                        features=op.table.in_features,
                        out=op.out,
                    )
                case Add():
                    size = self._width(op.residual)
                    native.add_add(residual=op.residual, delta=op.delta, size=size)
                case AddRmsNorm():
                    native.add_add_rms_norm(
                        residual=op.residual,
                        delta=op.delta,
                        weight=weights.vector(op.weight),
                        eps=op.eps,
                        size=op.weight.size,
                        out=op.out,
                    )
                case Glu():
                    native.add_glu(gate=op.gate, up=op.up, size=self._width(op.out), out=op.out)
                case SelectRows():
                    native.add_select_rows(x=op.x, size=self._width(op.x), out=op.out)
                case Sample():
                    native.add_sample(
                        logits=op.logits,
                        vocab_size=self._width(op.logits),
                        ids=op.ids,
                        peaks=op.peaks,
                    )
                case Linear():
                    self._add_linear(op, weights)
                case HeadNorm() | Rotate() | Attend():
                    self._add_attention(op, weights)
                case RouterProduct() | Route() | Experts():
                    self._add_experts(op, weights)

    def _add_linear(self, op: Linear, weights: PoolWeights) -> None:
        products = []
        for one in op.products:
            packed = weights.matrix(one.weight)
            bias = 0 if one.bias is None else weights.vector(one.bias)
            products.append(
                (packed.address, packed.weight_format, bias, one.weight.out_features, one.out)
            )
        with self._native.adding() as native:
            native.add_linear(
                x=op.x, in_features=self._width(op.x), products=products, fast=self._fast
            )

    def _add_attention(self, op: HeadNorm | Rotate | Attend, weights: PoolWeights) -> None:
        with self._native.adding() as native:
            match op:
                case HeadNorm():
                    native.add_head_norm(
                        x=op.x,
                        heads=self._width(op.x) // op.weight.size,
                        head_size=op.weight.size,
                        weight=weights.vector(op.weight),
                        eps=op.eps,
                    )
                case Rotate():
                    key = (op.rope, op.head_size)
                    self._ropes.setdefault(key, RopeTable(*key, torch.float32))
                    native.add_rotate(
                        x=op.x,
                        heads=self._width(op.x) // op.head_size,
                        head_size=op.head_size,
                        table=list(self._ropes).index(key),
                    )
                case Attend():
                    native.add_attend(
                        layer_index=op.layer_index,
                        q=op.q,
                        k=op.k,
                        v=op.v,
                        out=op.out,
                        q_heads=self._width(op.q) // op.head_size,
                        kv_heads=self._width(op.k) // op.head_size,
                        head_size=op.head_size,
                        scale=op.scale,
                    )

    def _add_experts(self, op: RouterProduct | Route | Experts, weights: PoolWeights) -> None:
        with self._native.adding() as native:
            match op:
                case RouterProduct():
                    native.add_router(
                        x=op.x,
                        hidden_size=op.weight.in_features,
                        experts_count=op.weight.out_features,
                        weights=weights.exact_matrix(op.weight),
                        out=op.out,
                    )
                case Route():
                    if op.router.scoring is not RouterScoring.SOFTMAX:
                        raise InternalError(f"no native scoring {op.router.scoring}.")
                    native.add_route(
                        logits=op.logits,
                        experts_count=self._width(op.logits),
                        top_k=op.router.top_k,
                        renormalise=op.router.renormalise,
                        ids=op.ids,
                        weights=op.weights,
                    )
                case Experts():
                    native.add_experts(
                        moe_layer_index=op.moe_layer_index,
                        x=op.x,
                        ids=op.ids,
                        weights=op.weights,
                        top_k=self._width(op.ids),
                        hidden_size=self._width(op.x),
                        out=op.out,
                    )

    def _width(self, buffer: int) -> int:
        return self._program.buffers[buffer].width


def buffer_row_bytes(program: StepProgram, rows: Rows) -> int:
    """Upper bound of what a native program's buffers with these rows take for each of them."""
    return sum(
        -(-_buffer_spec(one).row_bytes // _LINE_BYTES) * _LINE_BYTES
        for one in program.buffers
        if one.rows is rows
    )


def native_buffers(program: StepProgram) -> list[BufferSpec]:
    """What the native program's memory is made for."""
    return [_buffer_spec(one) for one in program.buffers]


def _buffer_spec(buffer: Buffer) -> BufferSpec:
    return BufferSpec(
        row_bytes=buffer.width * _DTYPES[buffer.element].itemsize,
        per_output=buffer.rows is Rows.OUTPUTS,
    )
