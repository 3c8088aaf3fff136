"""Random experts in slots that lie apart, and what they compute in float64."""

from __future__ import annotations

import mmap
from dataclasses import dataclass

import numpy as np
import torch

from freetokend.experts.bank import MappedBank
from freetokend.experts.gpu.shapes import Shapes, shapes_of
from freetokend.experts.gpu.slot_experts import SlotExperts
from freetokend.experts.reference import activate
from freetokend.ftw.formats import parse_format, record_layout
from freetokend.ftw.layout import ExpertBank
from freetokend.ftw.matrix import dequantise
from freetokend.ftw.packing_record import ExpertMatrices, pack_record
from freetokend.ftw.quantise import nvfp4_global, quantise

EXPERTS = 3


@dataclass
class Slots:
    """A bank of one layer in memory, and slots: `slot_of[expert]` holds a copy of its record."""

    bank: ExpertBank
    mapped: MappedBank
    experts: list[ExpertMatrices]
    slot_of: list[int]
    slot_bytes: int
    base_address: int
    memory: tuple[mmap.mmap, mmap.mmap]

    def kernels(self, *, top_k: int, tokens: int, shapes: Shapes | None = None) -> SlotExperts:
        slots_count = torch.tensor([max(self.slot_of) + 1], dtype=torch.int32)
        return SlotExperts(
            self.bank,
            base_address=self.base_address,
            slot_bytes=self.slot_bytes,
            slots_count=slots_count,
            tokens_capacity=tokens,
            top_k=top_k,
            shapes=shapes or small_shapes(self.bank.format),
            interpreted=True,
        )

    def physical(self, ids: torch.Tensor) -> torch.Tensor:
        """int32 expert of each pair -> its slot; what is below 0 stays."""
        slots = torch.tensor(self.slot_of, dtype=torch.int32)
        return torch.where(ids < 0, ids, slots[ids.clamp(min=0).long()])

    def middle(self, expert: int, x: torch.Tensor) -> torch.Tensor:
        """act(gate x) * up x in float64, not rounded. x: [H]."""
        found = self.experts[expert]
        gate = torch.from_numpy(dequantise(found.gate)) @ x.double()
        up = torch.from_numpy(dequantise(found.up)) @ x.double()
        if found.biases is not None:
            gate = gate + torch.from_numpy(found.biases[0]).double()
            up = up + torch.from_numpy(found.biases[1]).double()
        return activate(gate, up, self.bank)

    def down(self, expert: int, middle: torch.Tensor) -> torch.Tensor:
        """The second product in float64. middle: [I]."""
        found = self.experts[expert]
        down = torch.from_numpy(dequantise(found.down)) @ middle.double()
        return down if found.biases is None else down + torch.from_numpy(found.biases[2]).double()


def small_shapes(name: str) -> Shapes:
    """As on a GPU, of tiles that an interpreter can afford: it pays by the operation."""
    if name.endswith("_K"):
        return shapes_of(parse_format(name))._replace(steps=32, tokens=16, rows=256)
    return shapes_of(parse_format(name))._replace(steps=16, tokens=16, rows=32)


def random_slots(
    name: str,
    size: tuple[int, int],
    seed: int,
    *,
    has_bias: bool = True,
    activation: str = "silu",
    limit: float = 0.0,
    slot_of: tuple[int, ...] = (4, 0, 2),
    gap_bytes: int = 4096,
) -> Slots:
    """size: hidden and intermediate. gap_bytes: behind every slot."""
    layout = record_layout(parse_format(name), *size, has_bias=has_bias)
    bank = ExpertBank(
        format=name,
        offset_bytes=0,
        record_bytes=layout.record_bytes,
        moe_layers_count=1,
        experts_per_layer_count=EXPERTS,
        hidden_size=size[0],
        intermediate_size=size[1],
        moe_layer_indices=(0,),
        activation=activation,
        activation_limit=limit,
        has_bias=has_bias,
    )
    random = np.random.default_rng(seed)
    experts = [_random_expert(name, size, random, has_bias=has_bias) for _ in range(EXPERTS)]
    slot_bytes = bank.record_bytes + gap_bytes
    records = mmap.mmap(-1, bank.length_bytes)
    # Pages that nobody touches take no memory.
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    slots = mmap.mmap(-1, slot_bytes * (max(slot_of) + 1), flags=flags)
    for expert, matrices in enumerate(experts):
        record = pack_record(matrices).tobytes()
        for memory, start in (
            (records, expert * bank.record_bytes),
            (slots, slot_of[expert] * slot_bytes),
        ):
            memory[start : start + bank.record_bytes] = record
    return Slots(
        bank=bank,
        mapped=MappedBank(bank=bank, region_address=_address(records)),
        experts=experts,
        slot_of=list(slot_of),
        slot_bytes=slot_bytes,
        base_address=_address(slots),
        memory=(records, slots),
    )


def _address(memory: mmap.mmap) -> int:
    return int(np.frombuffer(memory, dtype=np.uint8).ctypes.data)


def _random_expert(
    name: str, size: tuple[int, int], random: np.random.Generator, *, has_bias: bool
) -> ExpertMatrices:
    hidden, inner = size
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
            random.standard_normal(count, dtype=np.float32) for count in (inner, inner, hidden)
        )
        biases = (of_gate, of_up, of_down)
    gate, up, down = matrices
    return ExpertMatrices(gate=gate, up=up, down=down, biases=biases)
