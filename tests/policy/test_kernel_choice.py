"""The table of kernels: total over formats and GPUs, with a reason in every cell."""

from __future__ import annotations

import itertools

import pytest

from freetokend.core.errors import Reason, ResourceError
from freetokend.ftw.formats import Kind, parse_format
from freetokend.policy.kernel_choice import (
    CAPABILITIES,
    Kernel,
    Phase,
    choose_kernel,
    kernel_table,
)

INTEGERS = [
    f"{kind}_g{group}_{scale}{zero}"
    for kind, group, scale, zero in itertools.product(
        ("int4", "int8"), (32, 64, 128), ("f16", "bf16"), ("", "_zp")
    )
]
FORMATS = [kind.value for kind in Kind if kind not in (Kind.INT4, Kind.INT8)] + INTEGERS


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_has_a_kernel_on_every_gpu(name: str) -> None:
    assert str(parse_format(name)) == name
    table = kernel_table(name)
    assert set(table) == set(itertools.product(CAPABILITIES, Phase))
    for (_, phase), choice in table.items():
        assert choice.kernel is (Kernel.ROWS if phase is Phase.DECODE else Kernel.TILES)
        assert choice.reason


def test_names_that_are_no_format_have_none() -> None:
    for name in ("", "int4", "bf16_g32", "q4_0", "fp16", "nvfp4_g16", "int8_g48_f16"):
        with pytest.raises(ValueError, match="format"):
            choose_kernel(name, (8, 6), Phase.DECODE)


@pytest.mark.parametrize("capability", [(3, 5), (6, 1), (7, 0), (7, 5)])
def test_gpus_without_bf16_are_refused_and_told_why(capability: tuple[int, int]) -> None:
    for phase in Phase:
        with pytest.raises(ResourceError, match="bf16") as raised:
            choose_kernel("mxfp4", capability, phase)
        assert raised.value.reason is Reason.DEVICE_UNUSABLE
        assert f"{capability[0]}.{capability[1]}" in raised.value.message


@pytest.mark.parametrize(
    ("capability", "closest"),
    [
        ((8, 0), "8.6"),
        ((8, 7), "8.6"),
        ((10, 3), "10.0"),
        ((11, 0), "10.0"),
        ((12, 1), "12.0"),
        ((13, 0), "12.0"),
    ],
)
def test_other_gpus_are_taken_as_the_closest_known(
    capability: tuple[int, int], closest: str
) -> None:
    for phase in Phase:
        choice = choose_kernel("q4_K", capability, phase)
        assert f"{capability[0]}.{capability[1]} is compiled as it runs" in choice.reason
        assert f"{closest} is the closest" in choice.reason
