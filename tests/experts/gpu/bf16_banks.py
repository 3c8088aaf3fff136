"""Banks of random bf16 experts in page-aligned memory."""

from __future__ import annotations

import mmap

import numpy as np

from freetokend.experts.bank import MappedBank
from freetokend.ftw.layout import ExpertBank, bf16_record_bytes
from tests.experts.records import packed, random_expert
from tests.experts.slot_support import RandomBank


def bf16_bank(*, layers: int, experts: int, hidden: int, inter: int, seed: int = 0) -> RandomBank:
    """`layers` * `experts` records with weights of real magnitudes."""
    record_bytes = bf16_record_bytes(hidden, inter)
    total = layers * experts
    data = np.frombuffer(mmap.mmap(-1, total * record_bytes), dtype=np.uint8)
    for number in range(total):
        record = packed(random_expert(hidden, inter, 1000 * seed + number), record_bytes)
        data[number * record_bytes : (number + 1) * record_bytes] = np.frombuffer(record, np.uint8)
    bank = ExpertBank(
        format="bf16",
        offset_bytes=0,
        record_bytes=record_bytes,
        moe_layers_count=layers,
        experts_per_layer_count=experts,
        hidden_size=hidden,
        intermediate_size=inter,
        moe_layer_indices=tuple(range(layers)),
        activation="silu",
    )
    return RandomBank(mapped=MappedBank(bank=bank, region_address=data.ctypes.data), bytes=data)
