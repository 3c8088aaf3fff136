"""The link contract, kept by the scripted engine."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from types import MappingProxyType
from typing import Any

import pytest
import pytest_asyncio

from freetokend.link.messages import EngineState
from tests.link.contract import LinkContract
from tests.support.scripted import EngineHarness, scripted_engine

SCRIPT: dict[str, Any] = {
    "tokens": {"kind": "fixed", "token_ids": list(range(5, 205))},
    "step_s": 0.001,
    "heartbeat_s": 0.05,
    "description": {"servable_context_tokens": 100_000},
}


@pytest_asyncio.fixture(scope="class", loop_scope="class")
async def harness(request: pytest.FixtureRequest) -> AsyncIterator[EngineHarness]:
    async with scripted_engine({**SCRIPT, **request.cls.more}) as harness:
        await harness.wait_state(EngineState.READY)
        yield harness


@pytest.mark.asyncio(loop_scope="class")
class TestScriptedEngine(LinkContract):
    """Everything in `LinkContract`."""

    more: Mapping[str, Any] = MappingProxyType({})


@pytest.mark.asyncio(loop_scope="class")
class TestScriptedEngineWithACache(LinkContract):
    """The same with an expert cache."""

    more: Mapping[str, Any] = MappingProxyType({"cache": {"layers_count": 3}})
