"""The link contract, kept by the scripted engine."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from freetokend.link.messages import EngineState
from tests.link.contract import LinkContract
from tests.support.scripted import EngineHarness, scripted_engine


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def harness() -> AsyncIterator[EngineHarness]:
    script: dict[str, Any] = {
        "tokens": {"kind": "fixed", "token_ids": list(range(5, 205))},
        "step_s": 0.001,
        "heartbeat_s": 0.05,
        "description": {"servable_context_tokens": 100_000},
    }
    async with scripted_engine(script) as harness:
        await harness.wait_state(EngineState.READY)
        yield harness


@pytest.mark.asyncio(loop_scope="module")
class TestScriptedEngine(LinkContract):
    """Everything in `LinkContract`."""
