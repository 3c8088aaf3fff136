"""Three streams that an engine process serves at once, and what each alone would say."""

from __future__ import annotations

import asyncio

from freetokend.ftw.reader import FtwDirectory
from freetokend.link.messages import FinishReason, GenerateRequest
from tests.enginehost.local_engine import local_engine, serve
from tests.support.scripted import EngineHarness, greedy


def three_requests(tokens_count: int) -> list[GenerateRequest]:
    return [
        greedy(f"r{index}", tuple(range(5 * index, 5 * index + 9)), tokens_count, ignore_eos=True)
        for index in range(3)
    ]


async def stream_tokens(harness: EngineHarness, request: GenerateRequest) -> list[int]:
    updates = await harness.collect(request)
    assert updates[-1].finish_reason is FinishReason.LENGTH
    return [token for update in updates for token in update.token_ids]


async def three_streams(harness: EngineHarness, tokens_count: int) -> list[list[int]]:
    streams = (stream_tokens(harness, request) for request in three_requests(tokens_count))
    return list(await asyncio.gather(*streams))


def each_alone(directory: FtwDirectory, tokens_count: int) -> list[list[int]]:
    """Without a device or a cache."""
    with local_engine(directory, backend="cpu") as built:
        return [serve(built, [one]).tokens[one.request_id] for one in three_requests(tokens_count)]
