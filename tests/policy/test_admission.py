"""Admission: a table of arrivals and answers."""

from __future__ import annotations

import pytest

from freetokend.core.errors import Reason
from freetokend.policy.admission import (
    AdmissionState,
    Admitted,
    Refused,
    decide_admission,
)


def state(waiting: int = 0, *, draining: bool = False) -> AdmissionState:
    return AdmissionState(
        servable_context_tokens=100, waiting_count=waiting, max_waiting_count=3, draining=draining
    )


@pytest.mark.parametrize(
    ("prompt_tokens", "max_new_tokens", "expected"),
    [(10, 5, 5), (10, 90, 90), (10, 91, 90), (10, 1 << 31, 90), (99, 7, 1), (1, 99, 99)],
)
def test_new_tokens_are_clamped_to_what_remains(
    prompt_tokens: int, max_new_tokens: int, expected: int
) -> None:
    assert decide_admission(prompt_tokens, max_new_tokens, state()) == Admitted(
        max_new_tokens=expected
    )


@pytest.mark.parametrize(
    ("prompt_tokens", "max_new_tokens", "now", "reason"),
    [
        (100, 1, state(), Reason.CONTEXT_LENGTH_EXCEEDED),
        (101, 1, state(), Reason.CONTEXT_LENGTH_EXCEEDED),
        (10, 1, state(3), Reason.QUEUE_FULL),
        (10, 1, state(draining=True), Reason.DRAINING),
        (0, 1, state(), Reason.INVALID_REQUEST),
        (10, 0, state(), Reason.INVALID_REQUEST),
        (10, -1, state(), Reason.INVALID_REQUEST),
        # what will never fit is said at once, however full the queue is
        (100, 1, state(3, draining=True), Reason.CONTEXT_LENGTH_EXCEEDED),
    ],
)
def test_refusals(
    prompt_tokens: int, max_new_tokens: int, now: AdmissionState, reason: Reason
) -> None:
    decision = decide_admission(prompt_tokens, max_new_tokens, now)
    assert isinstance(decision, Refused)
    assert decision.reason is reason


def test_refusals_for_size_name_both_numbers_and_temporary_ones_say_when() -> None:
    too_large = decide_admission(123, 1, state())
    assert isinstance(too_large, Refused)
    assert "123" in too_large.message
    assert "100" in too_large.message
    assert too_large.retry_after_s is None
    full = decide_admission(1, 1, state(3))
    assert isinstance(full, Refused)
    assert full.retry_after_s is not None
