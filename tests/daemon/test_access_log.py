"""The line of a finished request: its level, its fields, and no text of anybody's."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from freetokend.core.errors import Reason, reaction
from freetokend.daemon.access_log import AccessLog


def ended(outcome: str, caplog: pytest.LogCaptureFixture) -> logging.LogRecord:
    caplog.clear()
    with caplog.at_level(logging.INFO, "freetokend"):
        AccessLog().request_ended(
            endpoint="chat",
            outcome=outcome,
            duration_s=1.5,
            first_token_s=None,
            prompt_tokens=7,
            completion_tokens=3,
        )
    (record,) = caplog.records
    return record


def test_counts_and_times_are_fields(caplog: pytest.LogCaptureFixture) -> None:
    fields: dict[str, Any] = vars(ended("cancelled", caplog))["freetokend_fields"]
    assert fields["outcome"] == "cancelled"
    assert (fields["prompt_tokens"], fields["completion_tokens"]) == (7, 3)


def test_only_what_is_our_doing_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    assert ended("ok", caplog).levelno == logging.INFO
    for reason in Reason:
        ours = reaction(reason).http_status >= 500
        expected = logging.WARNING if ours else logging.INFO
        assert ended(reason.value, caplog).levelno == expected
    assert ended("cancelled", caplog).levelno == logging.INFO
    assert ended("invalid_request", caplog).levelno == logging.INFO
    assert ended("engine_failed", caplog).levelno == logging.WARNING
