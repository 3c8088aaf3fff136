"""Compile the attention kernels for GPUs and say in JSON what they take.

python -m tests.kvcache.gpu.compiled CAPABILITY:HEAD_SIZE:GROUP...
"""

from __future__ import annotations

import json
import re
import sys
from typing import Any

import torch
from triton.runtime.driver import driver

from freetokend.kvcache.gpu import attention_ops, triton_attention
from freetokend.kvcache.gpu.pages import DevicePages
from freetokend.policy.kv_sizing import KvShape
from tests.experts.plan.compiled import AbsentGpu, Compiling, resources, spilled_bytes

KERNELS = ("store_kv", "attend_tiles", "attend_parts", "merge_parts")
KV_HEADS, PAGE_TOKENS = 2, 32
# Numbers of pages, tokens and sequences become 64-bit ones before they are multiplied.
WIDE = re.compile(r"arith\.extsi %(\w+?)(?:_\d+)? : (?:tensor<\d+x)?i32>? to ")

LOADS = re.compile(r"ld\.global\S*\.v4\.b32|cp\.async\.cg")
# How warps share the tiles of the products.
WARPS = re.compile(r"nvidia_mma<\{[^}]*warpsPerCTA = (\[[^]]*\])")


def compile_attention(capability: int, head: int, group: int) -> dict[str, dict[str, Any]]:
    """Every kernel as the operations launch it: name -> what was built, by hash."""
    driver.set_active(AbsentGpu(capability))
    compiled: dict[str, dict[str, Any]] = {}
    for name in KERNELS:
        setattr(attention_ops, name, Compiling(getattr(triton_attention, name), compiled))
    shape = KvShape(
        layers_count=1,
        kv_heads_count=KV_HEADS,
        head_size=head,
        element_bytes=2,
        page_tokens=PAGE_TOKENS,
    )
    layer = DevicePages.take(shape, 2, torch.device("cpu")).layers[0]
    for tokens, width in ((1, 1), (16, 16), (17, 5)):  # none of them kernels of its own
        q = torch.zeros(tokens, KV_HEADS * group, head)
        k = torch.zeros(tokens, KV_HEADS, head)
        numbers = torch.zeros(tokens, dtype=torch.int32)
        where = [torch.zeros(tokens, width, dtype=torch.int32), numbers, numbers]
        attention_ops.store_pages(k, k, layer.keys, layer.values, where)
        for attend in (attention_ops.attend_in_tiles, attention_ops.attend_in_parts):
            attend(q, layer.keys, layer.values, where, head**-0.5, 256, False)
    return compiled


def distinct(pattern: str | re.Pattern[str], text: str) -> list[str]:
    """What it matches, each once."""
    return sorted(set(re.findall(pattern, text)))


def main(cases: list[str]) -> None:
    rows = []
    for case in cases:
        capability, head, group = map(int, case.split(":"))
        for kernel, variants in compile_attention(capability, head, group).items():
            for built in variants.values():
                ptx = built.asm["ptx"]
                rows.append(
                    {
                        "case": case,
                        "kernel": kernel,
                        "target": built.metadata.target.arch,
                        "shared_bytes": built.metadata.shared,
                        "spilled_bytes": spilled_bytes(built),
                        "widened": distinct(WIDE, built.asm["ttir"]),
                        "products": distinct(r"(mma\.sync|wgmma\.mma|tcgen05\.mma)", ptx),
                        "product_warps": [
                            json.loads(one) for one in distinct(WARPS, built.asm["ttgir"])
                        ],
                        "loads_16": len(LOADS.findall(ptx)),
                        **resources(built.asm["cubin"]),
                    }
                )
    print(json.dumps(rows))


if __name__ == "__main__":
    main(sys.argv[1:])
