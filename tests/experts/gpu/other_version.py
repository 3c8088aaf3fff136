"""The kernels of the expert cache under whatever Triton comes first on the path.

    TRITON_INTERPRET=1 python -m tests.experts.gpu.other_version lives
    python -m tests.experts.gpu.other_version CAPABILITY:FORMAT...

Says in JSON which version that was, and what was compiled.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import triton

from tests.experts.gpu.compiled import compile_format
from tests.experts.gpu.compiled_moves import compile_moves
from tests.experts.plan.compiled import compile_all, resources
from tests.experts.plan.interpreted import few_at_a_time
from tests.experts.plan.traces import live

LIVES, STEPS = 2, 12


def compiled(cases: list[str]) -> list[dict[str, Any]]:
    """Plans, fills, merges and doorbells for every GPU, and the experts of a format each."""
    rows = []
    for case in cases:
        capability, name = case.split(":")
        gpu = int(capability)
        for found in (compile_all(gpu), compile_moves(gpu), compile_format(gpu, name)):
            for kernel, variants in found.items():
                rows += [
                    {
                        "capability": gpu,
                        "kernel": kernel,
                        "target": built.metadata.target.arch,
                        "shared_bytes": built.metadata.shared,
                        **resources(built.asm["cubin"]),
                    }
                    for built in variants.values()
                ]
    return rows


def main(arguments: list[str]) -> None:
    rows: list[dict[str, Any]] = []
    if arguments == ["lives"]:
        for seed in range(LIVES):
            live(few_at_a_time, seed, STEPS)
    else:
        rows = compiled(arguments)
    print(json.dumps({"version": triton.__version__, "file": triton.__file__, "rows": rows}))


if __name__ == "__main__":
    main(sys.argv[1:])
