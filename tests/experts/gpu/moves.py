"""Fills and merges beside what they must do; run with TRITON_INTERPRET=1, says "moved" at the end.

python -m tests.experts.gpu.moves SEED
"""

from __future__ import annotations

import mmap
import random
import sys
from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from freetokend.core.errors import InternalError
from freetokend.experts.gpu import fill_kernel
from freetokend.experts.gpu.fill_kernel import fill_records
from freetokend.experts.gpu.merge_kernel import merge_branches
from freetokend.experts.plan.contract import CPU, DEFERRED, NONE
from tests.experts.gpu.reference_ops import ReferenceOps

EXPERTS, SLOTS = 7, 5


def memory(length_bytes: int) -> tuple[np.ndarray[tuple[int], np.dtype[np.uint8]], int]:
    """Page-aligned bytes that take no memory until they are written, and their address."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    data = np.frombuffer(mmap.mmap(-1, length_bytes, flags=flags), dtype=np.uint8)
    return data, int(data.ctypes.data)


def fill_list(pairs: list[tuple[int, int]], capacity: int) -> torch.Tensor:
    """As a planner writes it; what does not count would be read from nowhere."""
    fills = torch.full((capacity, 2), 1 << 29, dtype=torch.int32)
    if pairs:
        fills[: len(pairs)] = torch.tensor(pairs, dtype=torch.int32)
    return fills


def every_count_and_size_of_record(draw: random.Random) -> None:
    """Records shorter than a chunk, of several, and of several and a part."""
    for record_bytes in (4096, 16384, 2 * 16384 + 4096):
        for count in (0, 1, SLOTS):
            bank, bank_address = memory(EXPERTS * record_bytes)
            bank[:] = np.frombuffer(draw.randbytes(bank.size), dtype=np.uint8)
            slots, slots_address = memory(SLOTS * record_bytes)
            slots[:] = 7
            wanted = slots.reshape(SLOTS, record_bytes).copy()
            pairs = list(
                zip(
                    draw.sample(range(EXPERTS), count),
                    draw.sample(range(SLOTS), count),
                    strict=True,
                )
            )
            for expert, slot in pairs:
                wanted[slot] = bank.reshape(EXPERTS, record_bytes)[expert]
            number = torch.tensor([count], dtype=torch.int32)
            fill_records(
                fill_list(pairs, EXPERTS), number, bank_address, slots_address, record_bytes
            )
            assert (slots.reshape(SLOTS, record_bytes) == wanted).all()


def beyond_32_bits(draw: random.Random) -> None:
    """A record and a slot that begin 2^32 bytes and more behind the first."""
    record_bytes = 1 << 20
    far = (1 << 32) // record_bytes + 3
    bank, bank_address = memory((far + 1) * record_bytes)
    slots, slots_address = memory((far + 1) * record_bytes)
    content = np.frombuffer(draw.randbytes(record_bytes), dtype=np.uint8)
    bank[far * record_bytes :] = content
    fills, number = fill_list([(far, far - 1)], 2), torch.ones(1, dtype=torch.int32)
    fill_records(fills, number, bank_address, slots_address, record_bytes)
    assert (slots[(far - 1) * record_bytes : far * record_bytes] == content).all()


def a_count_beyond_the_list_ends_with_it(draw: random.Random) -> None:
    bank, bank_address = memory(2 * 4096)
    slots, slots_address = memory(2 * 4096)
    bank[:] = np.frombuffer(draw.randbytes(bank.size), dtype=np.uint8)
    fills = fill_list([(0, 1), (1, 0)], 2)
    number = torch.full((1,), 1 << 30, dtype=torch.int32)
    fill_records(fills, number, bank_address, slots_address, 4096)
    assert (slots[4096:] == bank[:4096]).all()
    assert (slots[:4096] == bank[4096:]).all()


def merged_rows(draw: random.Random) -> None:
    """Bit for bit the sum in routed order, without a look at rows of the other branch."""
    generator = torch.Generator().manual_seed(draw.getrandbits(30))
    for tokens, top_k, hidden in ((1, 1, 1), (3, 8, 257), (5, 6, 300), (0, 2, 16)):
        y_gpu, y_cpu = torch.randn(2, tokens, top_k, hidden, generator=generator).unbind(0)
        y_gpu, y_cpu = y_gpu * 1e3, y_cpu.clone()
        places = torch.tensor([0, 3, 1 << 20, CPU, CPU, NONE, DEFERRED], dtype=torch.int32)
        chosen = torch.randint(len(places), (tokens, top_k), generator=generator)
        physical = places[chosen]
        y_gpu[physical < 0] = float("nan")
        y_cpu[physical != CPU] = float("nan")
        got = merge_branches(y_gpu, y_cpu, physical)
        assert torch.equal(got, ReferenceOps.merge(y_gpu, y_cpu, physical))
        for token in range(tokens):
            one = slice(token, token + 1)
            alone = merge_branches(y_gpu[one], y_cpu[one], physical[one])
            assert torch.equal(alone[0], got[token])


def inside_inference_mode(draw: random.Random) -> None:
    """As steps run: with tensors that were made before, and inside."""
    record = draw.randbytes(4096)
    with torch.inference_mode():
        number = torch.ones(1, dtype=torch.int32)
        merged = merge_branches(torch.ones(1, 1, 4), torch.ones(1, 1, 4), number.view(1, 1) - 2)
        assert bool((merged == 1).all())
    for count in (number, torch.ones(1, dtype=torch.int32)):
        bank, bank_address = memory(4096)
        slots, slots_address = memory(4096)
        bank[:] = np.frombuffer(record, dtype=np.uint8)
        with torch.inference_mode():
            fill_records(fill_list([(0, 0)], 1), count, bank_address, slots_address, 4096)
        assert slots.tobytes() == record


def what_is_refused(draw: random.Random) -> None:
    fills, number = fill_list([], 2), torch.zeros(1, dtype=torch.int32)
    y, physical = torch.zeros(2, 2, 4), torch.zeros(2, 2, dtype=torch.int32)
    calls: list[Callable[[], object]] = [
        partial(fill_records, fills.long(), number, 64, 64, 4096),
        partial(fill_records, fills[:, :1], number, 64, 64, 4096),
        partial(fill_records, fills.T, number, 64, 64, 4096),
        partial(fill_records, fills, number.repeat(2), 64, 64, 4096),
        partial(fill_records, fills, number, 64, 64, 4097),
        partial(fill_records, fills, number, 64, 64, 0),
        partial(fill_records, fills, number, 0, 64, 4096),
        partial(fill_records, fills, number, 64, 8, 4096),
        partial(fill_records, fills.expand(2, 2), number, 64, 64, 1 << 46),
        partial(merge_branches, y.double(), y, physical),
        partial(merge_branches, y, y[:1], physical),
        partial(merge_branches, y, y, physical.long()),
        partial(merge_branches, y, y, physical[:, :1]),
        partial(merge_branches, y, y.transpose(0, 1), physical),
    ]
    for number_of_call, refused in enumerate(calls):
        try:
            refused()
        except InternalError:
            continue
        raise AssertionError(f"call {number_of_call} was accepted")
    assert fill_kernel._PAGE_BYTES == mmap.PAGESIZE


def main(seed: int) -> None:
    for check in (
        every_count_and_size_of_record,
        beyond_32_bits,
        a_count_beyond_the_list_ends_with_it,
        merged_rows,
        inside_inference_mode,
        what_is_refused,
    ):
        check(random.Random(seed))
    print("moved")


if __name__ == "__main__":
    main(int(sys.argv[1]))
