"""Goals of the layer benchmark: AVX2's only where AVX2 was asked for."""

from __future__ import annotations

import pytest

from benchmarks.expert_layer import Bench
from benchmarks.memory import HugeMemory
from benchmarks.rounds import Plan
from freetokend.ftw.formats import parse_format

PAGE_BYTES = 2 << 20


def goal(isa: str, weight_format: str, tokens: int = 1) -> float:
    bench = Bench(
        plan=Plan(),
        cpus=[0],
        isa=isa,
        numerics="exact",
        rivals=(),
        batches=(tokens,),
        first=False,
        ceiling=HugeMemory(4096),
    )
    return bench.goals(parse_format(weight_format), tokens, PAGE_BYTES).rival_goal("ggml")


@pytest.mark.parametrize(
    ("weight_format", "best", "avx2"),
    [
        ("bf16", 1.2, 1.35),
        ("fp8_block", 1.8, 1.8),
        ("int8_g32_f16", 1.8, 1.8),
        ("int4_g32_f16", 1.6, 1.7),
        ("mxfp4", 1.95, 1.7),
        ("nvfp4", 4.0, 1.7),
        ("q4_K", 0.0, 1.7),
        ("q6_K", 0.0, 0.0),
    ],
)
def test_one_token_by_the_instruction_set_that_was_asked_for(
    weight_format: str, best: float, avx2: float
) -> None:
    assert goal("auto", weight_format) == best
    assert goal("avx2", weight_format) == avx2


def test_more_tokens_have_one_goal() -> None:
    for tokens in (32, 512):
        for weight_format in ("bf16", "int4_g32_f16", "int8_g32_f16"):
            assert goal("avx2", weight_format, tokens) == goal("auto", weight_format, tokens)
