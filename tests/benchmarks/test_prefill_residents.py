"""What a streamed prefill may cost a neighbour: which comparison is judged, and why."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from benchmarks.prefill_residents import Case, Found, Talk, rows_of
from benchmarks.result import Row
from freetokend.traces.trace import TraceShape

TALK = Talk(prompt=np.zeros((4, 1, 2), np.uint16), written=())
CASE = Case(
    name="a model",
    shape=TraceShape(layers_count=4, experts_per_layer=8, experts_per_token=2),
    resident_ratio=0.5,
    neighbour=TALK,
    newcomer=TALK,
)
MILD = Found(cold=0.5, warm=0.3, alone=(0.10, 0.10), beside=(0.14, 0.12), narrow=0.12)


def verdicts(found: Found) -> tuple[Row, dict[tuple[str, str], str]]:
    """The row beside the undisturbed neighbour, and of each comparison what it says."""
    first, *neighbour = rows_of(CASE, found)
    assert first.verdict == "pass"
    told = {
        ("during" if "during" in row.case else "after", row.rival): row.verdict for row in neighbour
    }
    return neighbour[0], told


def test_a_neighbour_is_compared_with_an_undisturbed_one() -> None:
    row, told = verdicts(MILD)
    assert "-4.0 points" in row.case
    assert set(told.values()) == {"pass"}
    _, told = verdicts(replace(MILD, beside=(0.16, 0.12)))
    assert told["during", "undisturbed"] == "miss"
    _, told = verdicts(replace(MILD, beside=(0.14, 0.16)))
    assert told["after", "undisturbed"] == "miss"


def test_where_the_slots_alone_cost_more_that_is_said_and_the_rest_judged() -> None:
    scarce = replace(MILD, beside=(0.30, 0.12), narrow=0.27)
    row, told = verdicts(scarce)
    assert "-20.0 points, of which the slots of two layers -17.0" in row.case
    assert told["during", "undisturbed"] == "reported"
    assert told["during", "without it and its windows"] == "pass"
    _, told = verdicts(replace(scarce, beside=(0.33, 0.12)))
    assert told["during", "without it and its windows"] == "miss"
