"""Compile the experts' kernels for GPUs and say in JSON what they take.

    python -m tests.experts.gpu.compiled CAPABILITY:FORMAT...

As a launch would: with a driver that only knows which GPU there would be.
"""

from __future__ import annotations

import json
import re
import sys
from typing import Any

import torch
from triton.runtime.driver import driver

from freetokend.experts.gpu import slot_experts, triton_experts
from freetokend.experts.gpu.slot_experts import SlotExperts
from freetokend.ftw.formats import parse_format, record_layout
from freetokend.ftw.layout import ExpertBank
from tests.experts.plan.compiled import AbsentGpu, Compiling, resources, spilled_bytes

HIDDEN, INNER, TOP_K = 2048, 768, 8
# A slot's number is made a 64-bit one before it is multiplied by the stride.
WIDE_OFFSET = re.compile(r"arith\.extsi %slot\w* : i32 to i64")
KERNELS = ("gate_up_rows", "down_rows", "gate_up_tiles", "down_tiles")


def bank_of(name: str) -> ExpertBank:
    """Experts as large as those of a model, with everything a record can hold."""
    layout = record_layout(parse_format(name), HIDDEN, INNER, has_bias=True)
    return ExpertBank(
        format=name,
        offset_bytes=0,
        record_bytes=layout.record_bytes,
        moe_layers_count=40,
        experts_per_layer_count=256,
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        moe_layer_indices=tuple(range(40)),
        activation="silu",
        activation_limit=7.0,
        has_bias=True,
    )


def compile_format(capability: int, name: str) -> dict[str, dict[str, Any]]:
    """Every kernel as `SlotExperts` launches it: name -> what was built, by hash."""
    driver.set_active(AbsentGpu(capability))
    bank = bank_of(name)
    experts = SlotExperts(
        bank,
        base_address=0x7F0000000000,
        slot_bytes=bank.record_bytes,
        slots_count=torch.zeros(1, dtype=torch.int32),
        tokens_capacity=17,
        top_k=TOP_K,
    )
    compiled: dict[str, dict[str, Any]] = {}
    for kernel in KERNELS:
        setattr(slot_experts, kernel, Compiling(getattr(triton_experts, kernel), compiled))
    for tokens in (1, 16, 17):  # none of them kernels of its own
        x = torch.zeros((tokens, HIDDEN), dtype=torch.bfloat16)
        physical = torch.full((tokens, TOP_K), -1, dtype=torch.int32)
        weights = torch.zeros((tokens, TOP_K))
        y = torch.zeros((tokens, TOP_K, HIDDEN))
        experts.decode(x, physical, weights, y)
        experts.prefill(x, physical, weights, y)
    return compiled


def main(cases: list[str]) -> None:
    rows = []
    for case in cases:
        capability, name = case.split(":")
        for kernel, variants in compile_format(int(capability), name).items():
            for built in variants.values():
                rows.append(
                    {
                        "capability": int(capability),
                        "format": name,
                        "kernel": kernel,
                        "target": built.metadata.target.arch,
                        "shared_bytes": built.metadata.shared,
                        "spilled_bytes": spilled_bytes(built),
                        "wide_offsets": WIDE_OFFSET.search(built.asm["ttir"]) is not None,
                        **resources(built.asm["cubin"]),
                        **ptx_facts(built.asm["ptx"]),
                    }
                )
    print(json.dumps(rows))


def ptx_facts(ptx: str) -> dict[str, bool]:
    """flushes: fp32 products that take the smallest numbers for zero; vectors: whether weights are
    read 16 bytes at a time or more; tensor_cores: whether it multiplies there."""
    lines = [line.strip() for line in ptx.splitlines()]
    arithmetic = ("mul.", "fma.", "add.", "sub.", "cvt.")
    return {
        "flushes": any(
            ".ftz" in line and any(word in line for word in arithmetic) for line in lines
        ),
        "vectors": any(re.search(r"ld\.global\S*\.v[48]\.b32", line) for line in lines),
        "tensor_cores": any(
            word in line for line in lines for word in ("mma.sync", "wgmma.", "tcgen05.mma")
        ),
    }


if __name__ == "__main__":
    main(sys.argv[1:])
