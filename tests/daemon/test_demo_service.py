"""The service on the demo model, real weights and real routing: a full house of streams."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from freetokend.demo.errors import DemoError
from tests.daemon.running import daemon, read_events
from tests.support.demo_model import demo_ftw

pytestmark = pytest.mark.slow

CLIENTS_COUNT = 64
TOPICS = ("the sea", "a tree", "bread", "gravity", "a cat", "winter", "music", "the moon")
STREAM_DEADLINE_S = 300.0  # bound of a failing test: a loaded machine reads 64 prompts slowly


@pytest.fixture(scope="module")
def model_dir() -> Path:
    try:
        return demo_ftw()
    except DemoError as error:
        pytest.fail(f"the demo model is needed: {error}", pytrace=False)


def request(index: int) -> dict[str, Any]:
    """One of eight different questions, of a length of its own."""
    return {
        "messages": [{"role": "user", "content": f"Say something about {TOPICS[index % 8]}."}],
        "stream": True,
        "temperature": 0,
        "max_tokens": 4 + index % 8,
        "ignore_eos": True,
        "stream_options": {"include_usage": True},
    }


async def streamed(http: httpx.AsyncClient, index: int) -> tuple[str, int]:
    """Text and number of tokens of one streamed answer; fails on anything but a full one."""
    text, tokens, done = "", 0, False
    async with http.stream("POST", "/v1/chat/completions", json=request(index)) as response:
        assert response.status_code == 200
        async for event in read_events(response):
            assert "error" not in event
            if event.get("done"):
                done = True
            elif event["choices"]:
                text += event["choices"][0]["delta"].get("content") or ""
            else:
                tokens = event["usage"]["completion_tokens"]
    assert done
    return text, tokens


async def test_64_clients_at_once_get_what_each_gets_alone(model_dir: Path) -> None:
    async with daemon("--model", str(model_dir)) as running:
        base_url = await running.base_url()
        await running.engine_pid()
        limits = httpx.Limits(max_connections=CLIENTS_COUNT)
        async with httpx.AsyncClient(
            base_url=base_url, timeout=STREAM_DEADLINE_S, limits=limits
        ) as http:
            alone = [await streamed(http, index) for index in range(8)]
            together = await asyncio.gather(*(streamed(http, i) for i in range(CLIENTS_COUNT)))
        assert [tokens for _, tokens in alone] == [4 + index for index in range(8)]
        assert len({text for text, _ in alone}) > 4  # the questions are told apart
        for index, answer in enumerate(together):
            assert answer == alone[index % 8]
        running.terminate()
        assert await running.wait_exit() == 0
