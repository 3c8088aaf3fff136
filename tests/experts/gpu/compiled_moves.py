"""Compile fills, merges and doorbells for GPUs and say in JSON what they take.

python -m tests.experts.gpu.compiled_moves CAPABILITY...
"""

from __future__ import annotations

import json
import re
import sys
from typing import Any

import torch
from triton.runtime.driver import driver

from freetokend.experts.gpu import doorbells, fill_kernel, merge_kernel, triton_bells, triton_moves
from tests.experts.plan.compiled import AbsentGpu, Compiling, resources, spilled_bytes

# Records that end within a chunk, as most do.
RECORD_BYTES = 9 * 4096
# An expert's and a slot's number are made 64-bit ones before they are multiplied.
WIDE = {
    "copy_records": re.compile(r"arith\.extsi %(expert_id|slot)\w* : i32 to i64"),
    "merge_rows": re.compile(r"arith\.extsi %(token)\w* : i32 to i64"),
    "ring_kernel": re.compile(r"arith\.extsi %(no)body"),
    "await_kernel": re.compile(r"arith\.extsi %(no)body"),
}
# What orders the words that the CPU and the GPU share.
ORDERED = re.compile(r"\b(?:st|ld|atom|red|fence|membar)\.(?:release|acquire|acq_rel|sys)\S*")


def compile_moves(capability: int) -> dict[str, dict[str, Any]]:
    """Each kernel as its operation launches it: name -> what was built, by hash."""
    driver.set_active(AbsentGpu(capability))
    compiled: dict[str, dict[str, Any]] = {}
    for module, name in ((fill_kernel, "copy_records"), (merge_kernel, "merge_rows")):
        setattr(module, name, Compiling(getattr(triton_moves, name), compiled))
    for name in ("ring_kernel", "await_kernel"):
        setattr(doorbells, name, Compiling(getattr(triton_bells, name), compiled))
    for experts, tokens in ((1, 1), (16, 16), (256, 17)):  # none of them kernels of its own
        fills = torch.zeros(experts, 2, dtype=torch.int32)
        bank, slots = 0x7F0000000000 + 4096 * experts, 0x7E0000200000
        fill_kernel.fill_records(
            fills, torch.zeros(1, dtype=torch.int32), bank, slots, RECORD_BYTES
        )
        y, physical = torch.zeros(tokens, 8, 2048), torch.zeros(tokens, 8, dtype=torch.int32)
        merge_kernel.merge_branches(y, y, physical)
        turns, words = torch.zeros(2, dtype=torch.int32), 0x7F0000000000 + 64 * tokens
        doorbells.ring_doorbell(turns, words, tokens, interpreted=False)
        doorbells.await_doorbell(turns, words, 1000 * tokens, interpreted=False)
    return compiled


def main(capabilities: list[int]) -> None:
    rows = []
    for capability in capabilities:
        for name, variants in compile_moves(capability).items():
            for built in variants.values():
                widened = set(WIDE[name].findall(built.asm["ttir"]))
                ptx = built.asm["ptx"]
                rows.append(
                    {
                        "capability": capability,
                        "kernel": name,
                        "target": built.metadata.target.arch,
                        "shared_bytes": built.metadata.shared,
                        "spilled_bytes": spilled_bytes(built),
                        "widened": sorted(widened),
                        "ordered": ORDERED.findall(ptx),
                        "loads_16": len(re.findall(r"ld\.global\S*\.v4\.b32", ptx)),
                        "stores_16": len(re.findall(r"st\.global\S*\.v4\.b32", ptx)),
                        **resources(built.asm["cubin"]),
                    }
                )
    print(json.dumps(rows))


if __name__ == "__main__":
    main([int(one) for one in sys.argv[1:]])
