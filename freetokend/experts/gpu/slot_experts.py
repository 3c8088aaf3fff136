"""The slot branch on a GPU: routed experts executed in place from their slots.

Nothing waits for the host: slots, pairs and the number of slots are read on the device, so that
calls can be captured in a graph and a resize needs no new one.

Numerics: activations are bf16, sums fp32, the middle is rounded to bf16 once. Within a path
(`decode` or `prefill`) an element depends on its row and its token only: not on the batch, the
slot, or other pairs. The two paths add the same exact products in different orders, on the tensor
cores in one that the hardware defines, so between them, and from one GPU to another, a product of K
columns differs by at most about K * 2^-23 of the sum of |w x|, typically by 1e-7 of the row's norm;
a number of the middle next to a boundary may then be rounded to the other side, 2^-8 of it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import torch
import triton.language as tl

from freetokend.core.errors import InternalError
from freetokend.experts.gpu.pair_tiles import pair_tiles
from freetokend.experts.gpu.shapes import Shapes, codes_of, record_of, shapes_of
from freetokend.experts.gpu.triton_codes import Codes
from freetokend.experts.gpu.triton_experts import (
    Pairs,
    Record,
    Tiles,
    down_rows,
    down_tiles,
    gate_up_rows,
    gate_up_tiles,
)
from freetokend.ftw.formats import LINE_BYTES, ROWS_PER_BLOCK, parse_format
from freetokend.ftw.layout import ExpertBank

# A product and a sum in one rounding, as the CPU does it.
ROWS_OPTIONS: Final = MappingProxyType({"num_warps": 4, "enable_fp_fusion": True})
# Twice the warps for the same tile: with four the accumulators leave no registers for decoding.
TILES_OPTIONS: Final = MappingProxyType({"num_warps": 8, "enable_fp_fusion": True})
# CUDA's limit on the second dimension of a grid.
_MOST_PARTS: Final = 65535


class SlotExperts:
    """Executes pairs whose experts are in slots; of a bank, at a base address that never changes.

    One call at a time on a device: the middle between the two products is one buffer.
    """

    def __init__(
        self,
        bank: ExpertBank,
        *,
        base_address: int,
        slot_bytes: int,
        slots_count: torch.Tensor,
        tokens_capacity: int,
        top_k: int,
        shapes: Shapes | None = None,
        interpreted: bool = False,
    ) -> None:
        """slots_count: int32 [1] on the device, slots that exist; slot_bytes: from one to the next.

        tokens_capacity: of one call. interpreted: under Triton's interpreter, which has no bf16
        products. InternalError for addresses that are not aligned and slots shorter than a record.
        """
        weight_format = parse_format(bank.format)
        if base_address <= 0 or base_address % LINE_BYTES or slot_bytes % LINE_BYTES:
            raise InternalError(
                f"slots of {slot_bytes} bytes from {base_address} on: not multiples of {LINE_BYTES}"
            )
        if slot_bytes < bank.record_bytes:
            raise InternalError(
                f"a slot of {slot_bytes} bytes does not hold a record of {bank.record_bytes}"
            )
        _require("slots_count", slots_count, torch.int32, (1,), slots_count.device)
        self._bank = bank
        self._base_address = base_address
        self._slots_count = slots_count
        self._tokens_capacity = tokens_capacity
        self._top_k = top_k
        self._record = record_of(bank, slot_bytes=slot_bytes, top_k=top_k)
        self._codes = codes_of(weight_format)
        self._shapes = shapes or shapes_of(weight_format)
        if max(self._record.hidden, self._record.inner) > _MOST_PARTS * ROWS_PER_BLOCK:
            raise InternalError(
                f"experts of {bank.hidden_size} x {bank.intermediate_size}: too big"
            )
        self._middle = torch.empty(
            (tokens_capacity, top_k, self._record.inner),
            dtype=torch.bfloat16,
            device=slots_count.device,
        )
        self._made_for = json.dumps((self._record, self._codes, self._shapes, interpreted))

    @property
    def middle(self) -> torch.Tensor:
        """act(gate x) * up x of the last call, bf16 [tokens_capacity, k, I rounded up to 16]."""
        return self._middle

    def decode(
        self,
        x: torch.Tensor,
        physical: torch.Tensor,
        weights: torch.Tensor,
        y: torch.Tensor,
        *,
        keep_others: bool = False,
    ) -> None:
        """For few tokens per expert: every pair reads its expert's weights.

        x: bf16 [T, H]; physical: int32 [T, k], slot of each pair, below 0 for none; weights: fp32
        [T, k] -> y: fp32 [T, k, H], already weighted; zeros for pairs without a slot, untouched
        with `keep_others`. A slot that does not exist gives NaN on a GPU, where the host cannot
        see it, and InternalError on the CPU.
        """
        self._check(x, physical, weights, y)
        if physical.numel():
            launch_rows(
                [x, physical, weights, self._slots_count],
                [self._middle, y],
                self._base_address,
                self._made_for,
                keep_others,
            )

    def prefill(
        self,
        x: torch.Tensor,
        physical: torch.Tensor,
        weights: torch.Tensor,
        y: torch.Tensor,
        *,
        keep_others: bool = False,
    ) -> None:
        """For many tokens per expert: tiles of pairs with one slot, on the tensor cores.

        As `decode`. The pairs are those of one layer: they have at most as many distinct slots as
        the layer has experts.
        """
        self._check(x, physical, weights, y)
        if physical.numel() == 0:
            return
        if not keep_others:
            y.zero_()
        tiles = pair_tiles(
            physical, slots_count=self._bank.experts_per_layer_count, tokens=self._shapes.tokens
        )
        launch_tiles(
            [x, physical, weights, self._slots_count, tiles.order, tiles.start],
            [self._middle, y],
            self._base_address,
            self._made_for,
        )

    def _check(
        self, x: torch.Tensor, physical: torch.Tensor, weights: torch.Tensor, y: torch.Tensor
    ) -> None:
        tokens = x.shape[0]
        routed, device = (tokens, self._top_k), self._middle.device
        hidden = self._record.hidden
        _require("x", x, torch.bfloat16, (tokens, hidden), device)
        _require("physical", physical, torch.int32, routed, device)
        _require("weights", weights, torch.float32, routed, device)
        _require("y", y, torch.float32, (*routed, hidden), device)
        if tokens > self._tokens_capacity:
            raise InternalError(
                f"{tokens} tokens in a call that is made for {self._tokens_capacity}"
            )
        if physical.is_cpu and tokens:
            self._check_slots(physical)

    def _check_slots(self, physical: torch.Tensor) -> None:
        slots_count = int(self._slots_count.item())
        highest = int(physical.max())
        if highest >= slots_count:
            raise InternalError(f"slot {highest} is outside the {slots_count} that exist")
        distinct = len(set(physical[physical >= 0].tolist()))
        if distinct > self._bank.experts_per_layer_count:
            raise InternalError(
                f"pairs of {distinct} experts in a call; a layer has "
                f"{self._bank.experts_per_layer_count}"
            )


@torch.library.custom_op("freetokend::slot_experts_rows", mutates_args=("outputs",))
def launch_rows(
    inputs: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
    base_address: int,
    made_for: str,
    keep_others: bool,
) -> None:
    """Both products of every pair by itself. inputs: x, physical, weights, slots_count; outputs:
    middle, y; made_for: `_MadeFor` in JSON."""
    kind = _MadeFor.parse(made_for)
    count = inputs[1].numel()
    pairs = _pairs(inputs, outputs, base_address)
    given = {"RECORD": kind.record, "CODES": kind.codes, "STEPS": kind.shapes.steps}
    _kernel(gate_up_rows)[(count, kind.record.inner // ROWS_PER_BLOCK)](
        pairs, **given, **ROWS_OPTIONS
    )
    _kernel(down_rows)[(count, -(-kind.record.hidden // ROWS_PER_BLOCK))](
        pairs, **given, KEEP=keep_others, **ROWS_OPTIONS
    )


@torch.library.custom_op("freetokend::slot_experts_tiles", mutates_args=("outputs",))
def launch_tiles(
    inputs: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
    base_address: int,
    made_for: str,
) -> None:
    """Both products of tiles of pairs. inputs: as of `launch_rows`, then order and start of
    `PairTiles`."""
    kind = _MadeFor.parse(made_for)
    *of_pairs, order, start = inputs
    pairs, tiles = _pairs(of_pairs, outputs, base_address), Tiles(order=order, start=start)
    shapes = kind.shapes
    for kernel, rows in (
        (gate_up_tiles, 2 * kind.record.inner),
        (down_tiles, kind.record.hidden),
    ):
        _kernel(kernel)[(start.shape[0], -(-rows // shapes.rows))](
            pairs,
            tiles,
            RECORD=kind.record,
            CODES=kind.codes,
            TOKENS=shapes.tokens,
            ROWS=shapes.rows,
            COLUMNS=shapes.columns,
            DOT=tl.float32 if kind.interpreted else tl.bfloat16,
            **TILES_OPTIONS,
        )


@launch_rows.register_fake
@launch_tiles.register_fake
def _changes_what_it_is_given(*_: object) -> None:
    return None


class _MadeFor(NamedTuple):
    """What kernels are compiled for, as an operation of torch can be given it: in JSON."""

    record: Record
    codes: Codes
    shapes: Shapes
    interpreted: bool

    @classmethod
    def parse(cls, text: str) -> _MadeFor:
        record, codes, shapes, interpreted = json.loads(text)
        return cls(Record(*record), Codes(*codes), Shapes(*shapes), interpreted)


def _pairs(
    inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], base_address: int
) -> Pairs:
    x, physical, weights, slots_count = inputs
    middle, y = outputs
    return Pairs(
        slots=base_address,
        slots_count=slots_count,
        physical=physical,
        weights=weights,
        x=x,
        middle=middle,
        y=y,
    )


def _kernel(kernel: object) -> Any:
    """A type checker would take what a launch is given for the arguments of a function."""
    return kernel


def _require(
    name: str,
    tensor: torch.Tensor,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    device: torch.device,
) -> None:
    """InternalError unless a kernel can take the tensor as it is."""
    if (
        tensor.dtype is not dtype
        or tuple(tensor.shape) != shape
        or tensor.device != device
        or not tensor.is_contiguous()
    ):
        raise InternalError(
            f"{name} is {tensor.dtype} {list(tensor.shape)} on {tensor.device}; experts in slots "
            f"need contiguous {dtype} {list(shape)} on {device}"
        )
