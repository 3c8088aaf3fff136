"""The time until a first token, as a header of the answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from freetokend.link.messages import EngineStats
from freetokend.serving.generate_routes import PREFILL_HEADER
from freetokend.serving.model_text import load_model_text
from tests.serving.conftest import COMPLETIONS, Ended, make_app
from tests.serving.gateway import InstantGateway
from tests.support.tiny_tokenizer import write_tiny_text

BUSY = EngineStats(prefill_tokens_per_s=10.0, prefill_pending_tokens_count=90)


async def answer_of(tmp_path: Path, stats: EngineStats, **body: Any) -> httpx.Response:
    write_tiny_text(tmp_path)
    app = make_app(InstantGateway(stats=stats), load_model_text(tmp_path), Ended())
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        return await client.post(COMPLETIONS, json={"max_tokens": 2, **body})


@pytest.mark.parametrize("stream", [False, True])
async def test_it_counts_what_waits_and_every_choice(tmp_path: Path, stream: bool) -> None:
    one = await answer_of(tmp_path, BUSY, prompt=[5] * 10, stream=stream)
    assert one.status_code == 200
    assert one.headers[PREFILL_HEADER] == "10.00"
    three = await answer_of(tmp_path, BUSY, prompt=[5] * 10, n=3, stream=stream)
    assert three.headers[PREFILL_HEADER] == "12.00"


async def test_there_is_none_before_a_first_prompt(tmp_path: Path) -> None:
    answer = await answer_of(tmp_path, EngineStats(), prompt=[5] * 10)
    assert answer.status_code == 200
    assert PREFILL_HEADER not in answer.headers
