"""The plan file: what is shipped, what is accepted, what is refused."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest

from freetokend.demo.errors import DemoError
from freetokend.demo.plan.format import format_plan, parse_plan, plan_digest
from freetokend.demo.variants import Variant, plan_bytes
from tests.demo.tiny_model import EXPERTS, HIDDEN, LAYERS, NEURONS, tiny_plan


def _file(**changes: Any) -> bytes:
    """A valid plan file with some arrays replaced, or left out when None."""
    with np.load(io.BytesIO(format_plan(tiny_plan()))) as arrays:
        content: dict[str, Any] = {name: arrays[name] for name in arrays.files}
    content.update(changes)
    stream = io.BytesIO()
    np.savez_compressed(stream, **{k: v for k, v in content.items() if v is not None})
    return stream.getvalue()


@pytest.mark.parametrize(
    ("variant", "kept", "alpha", "expert_neurons", "digest"),
    [
        (
            Variant.DEMO,
            768,
            0.7,
            1536,
            "452307740d3c1747fd9650a1f214ab24d6142566c278caa86d5f5a5095d5b50b",
        ),
        (
            Variant.STRESS,
            1152,
            0.0,
            1152,
            "9f42044231257d39261aa2b33e20a45beb5b0fb54a7f53b79ed60feaf05cc134",
        ),
    ],
)
def test_shipped_plans(
    variant: Variant, kept: int, alpha: float, expert_neurons: int, digest: str
) -> None:
    data = plan_bytes(variant)
    plan = parse_plan(data)
    assert (plan.layers, plan.experts, plan.hidden, plan.neurons) == (30, 8, 576, 1536)
    assert plan.top_k == 2
    assert plan.alpha == alpha
    assert (plan.keep.sum(axis=-1) == kept).all()
    assert plan.expert_neurons == expert_neurons
    assert plan_digest(data) == digest


def test_round_trip() -> None:
    plan = tiny_plan(alpha=0.25, kept=5)
    again = parse_plan(format_plan(plan))
    np.testing.assert_array_equal(again.router, plan.router)
    np.testing.assert_array_equal(again.keep, plan.keep)
    assert (again.alpha, again.top_k) == (0.25, plan.top_k)


BYTES = NEURONS // 8


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"router": None}, "it holds"),
        ({"extra": np.zeros(1)}, "it holds"),
        ({"router": np.zeros((LAYERS, EXPERTS, HIDDEN), np.float32)}, "router must be float16"),
        ({"router": np.zeros((LAYERS, HIDDEN), np.float16)}, "router must be float16"),
        ({"router": np.full((LAYERS, EXPERTS, HIDDEN), np.nan, np.float16)}, "not finite"),
        ({"router": np.zeros((LAYERS + 1, EXPERTS, HIDDEN), np.float16)}, "keep must be bool"),
        ({"router": np.zeros((LAYERS, EXPERTS, 0), np.float16)}, "empty"),
        ({"keep": np.zeros((LAYERS, EXPERTS, BYTES), np.uint8)}, "same number of neurons"),
        ({"keep": np.arange(LAYERS * EXPERTS * BYTES, dtype=np.uint8)}, "keep must be uint8"),
        ({"keep": np.ones((LAYERS, EXPERTS, BYTES), np.int64)}, "keep must be uint8"),
        ({"alpha": np.float64(1.5)}, "alpha must lie in"),
        ({"alpha": np.float64("nan")}, "alpha must lie in"),
        ({"alpha": np.zeros(2)}, "plain numbers"),
        ({"k": np.int64(0)}, "k must lie in"),
        ({"k": np.int64(EXPERTS + 1)}, "k must lie in"),
        ({"router": np.array([object()])}, "cannot be read"),  # would need a pickle
    ],
)
def test_refused(changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(DemoError, match=complaint) as caught:
        parse_plan(_file(**changes))
    assert "install freetokend anew" in str(caught.value)


@pytest.mark.parametrize("data", [b"", b"no zip at all", format_plan(tiny_plan())[:200]])
def test_damaged_file_is_refused(data: bytes) -> None:
    with pytest.raises(DemoError, match="cannot be read"):
        parse_plan(data)
