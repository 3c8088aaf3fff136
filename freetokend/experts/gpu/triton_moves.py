"""What moves beside the experts in Triton: records into slots, and the branches' rows together."""

# Triton's language is not Python to a type checker.
# mypy: ignore-errors
# ruff: noqa: N803, N806

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["most_fills"])
def copy_records(
    fills, fills_count, bank, slots, most_fills, RECORD_BYTES: tl.constexpr, CHUNK: tl.constexpr
):  # fmt: skip
    """Program p copies every program_count-th chunk of the records in the list, from the p-th on.

    fills: int32 [E, 2], (expert_id, slot), of which the first fills_count (int32 [1]) count; bank,
    slots: addresses of the first record and of the first slot. A chunk has CHUNK bytes, the last
    one of a record what is left.
    """
    CHUNKS: tl.constexpr = (RECORD_BYTES + CHUNK - 1) // CHUNK
    count = tl.minimum(tl.load(fills_count), most_fills)
    word = tl.arange(0, CHUNK // 4)
    for number in range(tl.program_id(0), count * CHUNKS, tl.num_programs(0)):
        entry = fills + number // CHUNKS * 2
        expert_id = tl.load(entry).to(tl.int64)
        slot = tl.load(entry + 1).to(tl.int64)
        start = (number % CHUNKS) * (CHUNK // 4)
        inside = start + word < RECORD_BYTES // 4
        there = (bank + expert_id * RECORD_BYTES).to(tl.pointer_type(tl.int32))
        here = (slots + slot * RECORD_BYTES).to(tl.pointer_type(tl.int32))
        # Nobody reads the pool again soon; what lies in the slots is wanted next.
        words = tl.load(
            tl.multiple_of(there + start, 16) + word, mask=inside, eviction_policy="evict_first"
        )
        tl.store(tl.multiple_of(here + start, 16) + word, words, mask=inside)


@triton.jit
def merge_rows(
    y_gpu, y_cpu, physical, out, HIDDEN: tl.constexpr, TOP_K: tl.constexpr, CPU: tl.constexpr,
    BLOCK: tl.constexpr
):  # fmt: skip
    """Program (token, part): BLOCK numbers of its sum.

    y_*: fp32 [T, k, hidden]; physical: int32 [T, k], a slot, or CPU, or nothing; out: fp32
    [T, hidden]. One addition after the other, so that nothing but the token's own rows matters.
    """
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for k in range(TOP_K):
        pair = token * TOP_K + k
        place = tl.load(physical + pair)
        row = pair * HIDDEN + at
        of_gpu = at < tl.where(place >= 0, HIDDEN, 0)
        of_cpu = at < tl.where(place == CPU, HIDDEN, 0)
        total += tl.load(y_gpu + row, mask=of_gpu, other=0.0)
        total += tl.load(y_cpu + row, mask=of_cpu, other=0.0)
    tl.store(out + token * HIDDEN + at, total, mask=at < HIDDEN)
