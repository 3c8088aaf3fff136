"""Compile the plan kernels for a GPU and say in JSON what they take.

    python -m tests.experts.plan.compiled CAPABILITY...

As a launch would: through Triton's own binding of the arguments that the planner gives, with a
driver that only knows which GPU there would be.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from freetokend.experts.plan import triton_calls, triton_launch
from freetokend.experts.plan.contract import PlanInputs, PlanOutputs, PlanShape
from freetokend.experts.plan.triton_kernel import TritonPlanner
from freetokend.experts.residency import ResidencyState
from freetokend.policy.eviction import default_order

SHAPE = PlanShape(
    moe_layers_count=40, experts_per_layer_count=256, top_k=8, tokens_capacity=16, cpu_kernel=True
)
# From where on ptxas wants to hear that the architecture's own features are meant.
ARCHITECTURES_FROM = 90


class AbsentGpu:
    """What Triton asks a driver when it compiles."""

    def __init__(self, capability: int) -> None:
        self.target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        # A kernel keeps what it has compiled by device: each of these GPUs is one of its own.
        return int(self.target.arch)

    def get_current_stream(self, device: int = 0) -> int:
        del device
        return 0


class Compiling:
    """In the place of a kernel: a launch compiles and is recorded."""

    def __init__(self, kernel: Any, compiled: dict[str, Any]) -> None:
        self.kernel, self.compiled = kernel, compiled

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*args: Any, **options: Any) -> None:
            name = self.kernel.__name__
            built = self.kernel.warmup(*args, grid=grid, **options)
            self.compiled.setdefault(name, {})[built.hash] = built

        return launch


def compile_all(capability: int) -> dict[str, dict[str, Any]]:
    """Every kernel as the planner launches it: name -> what was built, by hash."""
    driver.set_active(AbsentGpu(capability))
    state = ResidencyState.empty(experts_count=40 * 256, slots_capacity=16384)
    planner = TritonPlanner(state, SHAPE, default_order(40))
    compiled: dict[str, dict[str, Any]] = {}
    for name in ("plan_kernel", "reserve_kernel", "release_kernel"):
        setattr(triton_launch, name, Compiling(getattr(triton_calls, name), compiled))

    def ints(*size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.int32)

    inputs = PlanInputs(
        routed=ints(16, 8),
        valid_tokens=ints(1),
        fillable=ints(40),
        fill_count=ints(4, 65),
    )
    outputs = PlanOutputs.empty(SHAPE)
    for layer in (0, 1, 16, 39):  # none of them a kernel of its own
        planner.plan(layer, inputs, outputs)
        planner.reserve(layer, inputs, outputs)
        planner.release(layer, ints(256), tokens_count=1 + layer, kept_count=layer)
    planner.reserve(0, inputs, outputs, wanted=ints(256))
    return compiled


def resources(cubin: bytes) -> dict[str, int]:
    """Registers, stack, shared and local bytes as the binary declares them."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        shown = subprocess.run(
            [tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    found = re.findall(r"\b(REG|STACK|SHARED|LOCAL):(\d+)", shown)
    return {name.lower(): int(number) for name, number in found}


def spilled_bytes(built: Any) -> int:
    """Bytes that registers are spilled to; a stack alone may be that of a called division."""
    if resources(built.asm["cubin"])["stack"] == 0:
        return 0
    capability = built.metadata.target.arch
    suffix = "a" if capability >= ARCHITECTURES_FROM else ""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(built.asm["ptx"])
        for tool in ("ptxas", "ptxas-blackwell"):  # the first refuses what it does not know
            command = [
                str(Path(triton.__file__).parent / "backends/nvidia/bin" / tool),
                *("-v", f"--gpu-name=sm_{capability}{suffix}", str(source), "-o", "/dev/null"),
            ]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode == 0:
                break
    said = done.stderr
    found = re.findall(r"(\d+) bytes spill", said)
    assert found, said
    return sum(map(int, found))


def main(capabilities: list[int]) -> None:
    rows = [
        {
            "capability": capability,
            "kernel": name,
            "cubin_bytes": len(built.asm["cubin"]),
            "shared_bytes": built.metadata.shared,
            "spilled_bytes": spilled_bytes(built),
            **resources(built.asm["cubin"]),
        }
        for capability in capabilities
        for name, variants in compile_all(capability).items()
        for built in variants.values()
        if built.metadata.target.arch == capability
    ]
    print(json.dumps(rows))


if __name__ == "__main__":
    main([int(argument) for argument in sys.argv[1:]])
