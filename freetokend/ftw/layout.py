"""Where everything lies in the region: sizes of packed forms and the layout planner.

Pure arithmetic on Python integers, so it holds for regions far beyond 4 GiB. The packed forms are
described in docs/ftw.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

PAGE_BYTES: Final = 4096
BLOCK_BYTES: Final = 64 * 1024 * 1024
ROWS_PER_BLOCK: Final = 16
EXPERTS_TENSOR: Final = "experts"

ROWS16: Final = "rows16"
ROW_MAJOR: Final = "row_major"
EXPERT_RECORDS: Final = "expert_records"

DTYPE_BYTES: Final = {"bf16": 2, "f32": 4, "u8": 1}


def round_up(value: int, step: int) -> int:
    """The smallest multiple of `step` that is not below `value`."""
    return -(-value // step) * step


def rows16_bytes(rows: int, columns: int) -> int:
    """Bytes of a bf16 matrix [rows, columns] in the rows16 layout."""
    return round_up(rows, ROWS_PER_BLOCK) * round_up(columns, 2) * 2


def gate_up_bytes(hidden_size: int, intermediate_size: int) -> int:
    """Bytes of the interleaved gate and up blocks at the head of a bf16 expert record."""
    return 2 * rows16_bytes(intermediate_size, hidden_size)


def bf16_record_bytes(hidden_size: int, intermediate_size: int) -> int:
    """Bytes of one bf16 expert record, padded to a page.

    The down matrix [hidden, intermediate] is as wide as the activations it meets, which are padded
    to whole row blocks of gate and up.
    """
    padded = round_up(intermediate_size, ROWS_PER_BLOCK)
    payload = gate_up_bytes(hidden_size, intermediate_size) + rows16_bytes(hidden_size, padded)
    return round_up(payload, PAGE_BYTES)


def tensor_bytes(dtype: str, shape: Sequence[int], layout: str) -> int:
    """Bytes that a tensor of this description occupies, without padding to the next page."""
    if layout == ROWS16:
        rows, columns = shape
        return rows16_bytes(rows, columns)
    count = DTYPE_BYTES[dtype]
    for size in shape:
        count *= size
    return count


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """One tensor of the region.

    dtype: "bf16", "f32" or "u8"; shape: logical sizes, without padding; layout: "rows16",
    "row_major" or "expert_records" (then u8 [MoE layers, experts per layer, record bytes]).
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

    `moe_layer_indices[i]` is the model's layer index of MoE layer i; dense layers take no rows.
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
