"""Faults of our own: one log event, an answer in the usual shape, nothing of the inside in it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from freetokend.link.messages import GenerateRequest, SequenceUpdate
from tests.serving.conftest import CHAT, HELLO, Listening, listen
from tests.serving.gateway import InstantGateway

SECRET = "the user's own words"


async def broken(request: GenerateRequest) -> AsyncIterator[SequenceUpdate]:
    raise RuntimeError(SECRET)
    yield SequenceUpdate(request_id=request.request_id)


async def broken_later(request: GenerateRequest) -> AsyncIterator[SequenceUpdate]:
    yield SequenceUpdate(request_id=request.request_id, token_ids=(70,))
    raise RuntimeError(SECRET)


def check_log(caplog: pytest.LogCaptureFixture) -> None:
    """Exactly one error, ours, that says where and not what."""
    errors = [record for record in caplog.records if record.levelname == "ERROR"]
    assert [record.getMessage() for record in errors] == ["request-failed"]
    fields: dict[str, Any] = vars(errors[0])["freetokend_fields"]
    assert fields["error"] == "RuntimeError"
    assert Path(__file__).name in fields["where"]
    assert SECRET not in caplog.text


async def check_still_serving(served: Listening, gateway: InstantGateway) -> None:
    gateway.answer = InstantGateway().answer
    answer = await served.client().chat.completions.create(model="tiny", messages=HELLO)
    assert answer.choices[0].finish_reason == "stop"
    assert gateway.open_count == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_a_fault_before_the_first_token_is_a_500(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, stream: bool
) -> None:
    gateway = InstantGateway(answer=broken)
    async with listen(gateway, tmp_path) as served, httpx.AsyncClient() as client:
        body = {"messages": HELLO, "stream": stream}
        answer = await client.post(f"{served.base_url}{CHAT}", json=body)
        assert answer.status_code == 500
        assert answer.json()["error"]["code"] == "internal"
        assert SECRET not in answer.text
        assert "Traceback" not in answer.text
        assert served.ended.calls[0]["outcome"] == "internal"
        check_log(caplog)
        await check_still_serving(served, gateway)


async def test_a_fault_in_a_stream_is_one_event(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    gateway = InstantGateway(answer=broken_later)
    async with listen(gateway, tmp_path) as served, httpx.AsyncClient() as client:
        body = {"messages": HELLO, "stream": True}
        answer = await client.post(f"{served.base_url}{CHAT}", json=body)
        assert answer.status_code == 200
        last = [line for line in answer.text.splitlines() if line][-1]
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "internal"
        assert SECRET not in answer.text
        call = served.ended.calls[0]
        assert (call["outcome"], call["completion_tokens"]) == ("internal", 1)
        check_log(caplog)
        await check_still_serving(served, gateway)


async def test_a_fault_of_any_other_route_is_a_500(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def render_metrics() -> tuple[bytes, str]:
        raise RuntimeError(SECRET)

    gateway = InstantGateway()
    async with (
        listen(gateway, tmp_path, render_metrics=render_metrics) as served,
        httpx.AsyncClient() as client,
    ):
        answer = await client.get(f"{served.base_url}/metrics")
        assert answer.status_code == 500
        assert answer.json()["error"]["code"] == "internal"
        assert SECRET not in answer.text
        check_log(caplog)
        await check_still_serving(served, gateway)
