"""The launches of the plan's kernels as operations of torch, which FakeTensorMode and compilers of
graphs can look at without launching anything."""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType
from typing import Any, Final

import torch

from freetokend.experts.plan.triton_calls import (
    Inputs,
    Outputs,
    plan_kernel,
    release_kernel,
    reserve_kernel,
)
from freetokend.experts.plan.triton_steps import Sizes, State

# Without a limit the compiler trades a few spilled registers for a second program per
# multiprocessor, which there never is.
LAUNCH_OPTIONS: Final = MappingProxyType({"num_warps": 8, "maxnreg": 128})


@torch.library.custom_op("freetokend::cache_plan", mutates_args=("state", "outputs"))
def launch_plan(
    layer: int,
    inputs: Sequence[torch.Tensor],
    state: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
    sizes: Sequence[int],
) -> None:
    """`plan_kernel`; tensors and sizes in the order of the kernels' own tuples."""
    _kernel(plan_kernel)[(1,)](
        layer,
        _inputs(inputs),
        State(*state),
        Outputs(*outputs),
        SIZES=_sizes(sizes),
        **LAUNCH_OPTIONS,
    )


@torch.library.custom_op("freetokend::cache_reserve", mutates_args=("state", "outputs"))
def launch_reserve(
    layer: int,
    wanted: torch.Tensor | None,
    inputs: Sequence[torch.Tensor],
    state: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
    sizes: Sequence[int],
) -> None:
    """`reserve_kernel`."""
    given = _inputs(inputs)
    _kernel(reserve_kernel)[(1,)](
        layer,
        given.fillable if wanted is None else wanted,
        given,
        State(*state),
        Outputs(*outputs),
        SIZES=_sizes(sizes),
        HAS_WANTED=wanted is not None,
        **LAUNCH_OPTIONS,
    )


@torch.library.custom_op("freetokend::cache_release", mutates_args=("state",))
def launch_release(
    layer: int,
    uses: torch.Tensor,
    counts: Sequence[int],
    state: Sequence[torch.Tensor],
    sizes: Sequence[int],
) -> None:
    """`release_kernel`; counts: (tokens_count, kept_count)."""
    _kernel(release_kernel)[(1,)](
        layer, uses, *counts, State(*state), SIZES=_sizes(sizes), **LAUNCH_OPTIONS
    )


@launch_plan.register_fake
@launch_reserve.register_fake
@launch_release.register_fake
def _changes_what_it_is_given(*_: object) -> None:
    return None


def _kernel(kernel: object) -> Any:
    """A type checker would take what a launch is given for the arguments of a function."""
    return kernel


def _inputs(tensors: Sequence[torch.Tensor]) -> Inputs:
    routed, valid_tokens, fillable, fill_count = tensors
    buckets_count, columns_count = fill_count.shape
    return Inputs(
        routed=routed,
        valid_tokens=valid_tokens,
        fillable=fillable,
        fill_count=fill_count,
        buckets_count=buckets_count,
        columns_count=columns_count,
    )


def _sizes(sizes: Sequence[int]) -> Sizes:
    found = Sizes._make(sizes)
    return found._replace(cpu_kernel=bool(found.cpu_kernel))
