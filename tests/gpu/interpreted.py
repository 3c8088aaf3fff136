"""Whole steps by the kernels of a GPU under Triton's interpreter, beside the CPU's.

    TRITON_INTERPRET=1 python -m tests.gpu.interpreted

The plan, fills, experts in slots, attention and merges, put together as on a GPU, and experts of a
chunk that are streamed; says its rows in JSON.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Final

from tests.gpu import checks
from tests.gpu.bench import Bench, interpreted_kind
from tests.gpu.judge import Judge
from tests.gpu.rows import Row
from tests.gpu.sweep_checks import streamed
from tests.kvcache.gpu.interpreted import patch_once
from tests.support.device_model import SmallShape

SHAPE: Final = SmallShape(layers=2, hidden=32, inter=32, experts=4, heads=2, kv_heads=1, vocab=32)


def main() -> None:
    patch_once()
    bench = Bench(interpreted_kind(SHAPE.layers), SHAPE)
    judge = Judge(bench)
    rows: list[Row] = []
    for check in (checks.split, checks.graphs, checks.bells, checks.contents):
        rows += check(bench, judge)
    rows += streamed(bench)
    bench.close()
    print(json.dumps([asdict(row) for row in rows]))


if __name__ == "__main__":
    main()
