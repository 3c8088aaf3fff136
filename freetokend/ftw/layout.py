"""Where everything lies in the region: sizes of packed forms and the layout planner.

Pure arithmetic on Python integers, so it holds for regions far beyond 4 GiB. The packed forms are
described in docs/ftw.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from freetokend.ftw.formats import (
    BF16,
    PAGE_BYTES,
    parse_format,
    record_layout,
    round_up,
    rows16_bytes,
)

BLOCK_BYTES: Final = 64 * 1024 * 1024
EXPERTS_TENSOR: Final = "experts"

ROWS16: Final = "rows16"
ROW_MAJOR: Final = "row_major"
EXPERT_RECORDS: Final = "expert_records"

DTYPE_BYTES: Final = {"bf16": 2, "f32": 4, "i32": 4, "u8": 1}

# Slope of the sigmoid in swiglu_oai; other activations have none.
DEFAULT_ACTIVATION_ALPHA: Final = 1.702


def bf16_record_bytes(hidden_size: int, intermediate_size: int) -> int:
    """Bytes of one bf16 expert record without biases, padded to a page."""
    return record_layout(BF16, hidden_size, intermediate_size).record_bytes


def tensor_bytes(dtype: str, shape: Sequence[int], layout: str) -> int:
    """Bytes that a tensor of this description occupies, without padding to the next page.

    ValueError when a weight format does not have such a shape.
    """
    if layout == ROWS16:
        rows, columns = shape
        return rows16_bytes(parse_format(dtype), rows, columns)
    count = DTYPE_BYTES[dtype]
    for size in shape:
        count *= size
    return count


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """One tensor of the region.

    dtype: "bf16", "f32", "i32" or "u8", with the layout "rows16" a weight format; shape: logical
    sizes, without padding; layout: "rows16", "row_major" or "expert_records" (then u8 [MoE layers,
    experts per layer, record bytes]).
    """

    dtype: str
    shape: tuple[int, ...]
    layout: str
    offset_bytes: int
    length_bytes: int

    @property
    def end_bytes(self) -> int:
        """Region offset just behind the tensor."""
        return self.offset_bytes + self.length_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertBank:
    """The routed experts: equal records, ordered by MoE layer, then expert.

    format: canonical name of a weight format; `moe_layer_indices[i]`: the model's layer index of
    MoE layer i (dense layers take no rows); activation: "silu", "gelu", "gelu_tanh" or
    "swiglu_oai"; activation_limit: gate is clamped to at most it and up to +- it, 0 for none;
    activation_alpha: slope of the sigmoid of swiglu_oai; has_bias: whether records hold biases.
    """

    format: str
    offset_bytes: int
    record_bytes: int
    moe_layers_count: int
    experts_per_layer_count: int
    hidden_size: int
    intermediate_size: int
    moe_layer_indices: tuple[int, ...]
    activation: str
    activation_limit: float = 0.0
    activation_alpha: float = DEFAULT_ACTIVATION_ALPHA
    has_bias: bool = False

    @property
    def experts_count(self) -> int:
        """Records in the bank."""
        return self.moe_layers_count * self.experts_per_layer_count

    @property
    def length_bytes(self) -> int:
        """Bytes of all records."""
        return self.experts_count * self.record_bytes

    def expert_id(self, moe_layer_index: int, expert: int) -> int:
        """The row of `expert` (0-based within its layer) in the bank."""
        return moe_layer_index * self.experts_per_layer_count + expert

    def record_offset_bytes(self, expert_id: int) -> int:
        """Region offset of a record."""
        return self.offset_bytes + expert_id * self.record_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """A tensor that wants a place."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    layout: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BankSpec:
    """An expert bank that wants a place."""

    format: str
    record_bytes: int
    experts_per_layer_count: int
    hidden_size: int
    intermediate_size: int
    moe_layer_indices: tuple[int, ...]
    activation: str
    activation_limit: float = 0.0
    activation_alpha: float = DEFAULT_ACTIVATION_ALPHA
    has_bias: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardPlan:
    """One file of the region."""

    file: str
    offset_bytes: int
    length_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionPlan:
    """The whole region: tensors in order, the bank last (it is also the tensor "experts")."""

    tensors: dict[str, TensorEntry]
    bank: ExpertBank
    region_bytes: int
    shards: tuple[ShardPlan, ...]


def plan_region(
    tensors: Sequence[TensorSpec], bank: BankSpec, *, max_shard_bytes: int
) -> RegionPlan:
    """Give every tensor a page-aligned place, then the bank, and cut the region into shards.

    `max_shard_bytes` is rounded down to whole checksum blocks. ValueError when it is below one
    block or a name appears twice.
    """
    placed: dict[str, TensorEntry] = {}
    offset_bytes = 0
    for spec in tensors:
        if spec.name in placed or spec.name == EXPERTS_TENSOR:
            raise ValueError(f"two tensors are called {spec.name}")
        length_bytes = tensor_bytes(spec.dtype, spec.shape, spec.layout)
        placed[spec.name] = TensorEntry(
            dtype=spec.dtype,
            shape=spec.shape,
            layout=spec.layout,
            offset_bytes=offset_bytes,
            length_bytes=length_bytes,
        )
        offset_bytes = round_up(offset_bytes + length_bytes, PAGE_BYTES)
    placed_bank = ExpertBank(
        format=bank.format,
        offset_bytes=offset_bytes,
        record_bytes=bank.record_bytes,
        moe_layers_count=len(bank.moe_layer_indices),
        experts_per_layer_count=bank.experts_per_layer_count,
        hidden_size=bank.hidden_size,
        intermediate_size=bank.intermediate_size,
        moe_layer_indices=bank.moe_layer_indices,
        activation=bank.activation,
        activation_limit=bank.activation_limit,
        activation_alpha=bank.activation_alpha,
        has_bias=bank.has_bias,
    )
    placed[EXPERTS_TENSOR] = bank_tensor(placed_bank)
    region_bytes = offset_bytes + placed_bank.length_bytes
    return RegionPlan(
        tensors=placed,
        bank=placed_bank,
        region_bytes=region_bytes,
        shards=plan_shards(region_bytes, max_shard_bytes),
    )


def bank_tensor(bank: ExpertBank) -> TensorEntry:
    """The bank as an entry of the tensor table."""
    return TensorEntry(
        dtype="u8",
        shape=(bank.moe_layers_count, bank.experts_per_layer_count, bank.record_bytes),
        layout=EXPERT_RECORDS,
        offset_bytes=bank.offset_bytes,
        length_bytes=bank.length_bytes,
    )


def plan_shards(region_bytes: int, max_shard_bytes: int) -> tuple[ShardPlan, ...]:
    """Cut [0, region_bytes) into files of at most `max_shard_bytes`, at block boundaries."""
    shard_bytes = max_shard_bytes // BLOCK_BYTES * BLOCK_BYTES
    if shard_bytes == 0:
        raise ValueError(f"a shard must hold at least one block of {BLOCK_BYTES} bytes")
    return tuple(
        ShardPlan(
            file=shard_name(index),
            offset_bytes=start_bytes,
            length_bytes=min(shard_bytes, region_bytes - start_bytes),
        )
        for index, start_bytes in enumerate(range(0, region_bytes, shard_bytes))
    )


def shard_name(index: int) -> str:
    """File name of shard `index`."""
    return f"{index:05d}.ftw"


def blocks_count(length_bytes: int) -> int:
    """Checksum blocks of a shard of this length."""
    return -(-length_bytes // BLOCK_BYTES)
