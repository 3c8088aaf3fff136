"""Banks of random bf16 experts in page-aligned memory."""

from __future__ import annotations

import mmap

import numpy as np
import numpy.typing as npt
import torch

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
    return _bank(data, record_bytes, (layers, experts), (hidden, inter))


def drawn_bank(*, layers: int, experts: int, hidden: int, inter: int, seed: int = 0) -> RandomBank:
    """The same of many large experts, in seconds: how a record orders its numbers does not matter
    where each of them is drawn like the others. hidden and inter: whole blocks of 16 rows."""
    record_bytes = bf16_record_bytes(hidden, inter)
    assert record_bytes == 2 * 3 * hidden * inter, "a record with padding cannot be drawn at once"
    data = np.frombuffer(mmap.mmap(-1, layers * experts * record_bytes), dtype=np.uint8)
    random = torch.Generator().manual_seed(seed)
    for record in torch.from_numpy(data).view(torch.bfloat16).view(-1, 3 * hidden * inter):
        record.normal_(generator=random)
        record[: 2 * hidden * inter] *= hidden**-0.5
        record[2 * hidden * inter :] *= inter**-0.5
    return _bank(data, record_bytes, (layers, experts), (hidden, inter))


def _bank(
    data: npt.NDArray[np.uint8], record_bytes: int, counts: tuple[int, int], sizes: tuple[int, int]
) -> RandomBank:
    """counts: layers, experts of each; sizes: hidden, inter."""
    (layers, experts), (hidden, inter) = counts, sizes
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
