"""The service on a quantised demo model, from `ftw convert --quantize` to a chat answer."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from freetokend.demo.errors import DemoError
from tests.daemon.running import DEADLINE_S, Daemon, daemon
from tests.support.demo_model import demo_ftw

pytestmark = pytest.mark.slow

REQUEST = {
    "messages": [
        {"role": "user", "content": "What is the capital of France? Answer in one sentence."}
    ],
    "temperature": 0,
    "max_tokens": 24,
}


@pytest.fixture(scope="module")
def model_dir() -> Path:
    try:
        return demo_ftw("demo", "nvfp4")
    except DemoError as error:
        pytest.fail(f"the demo model is needed: {error}", pytrace=False)


async def status(running: Daemon) -> dict[str, Any]:
    """What `freetokenctl status` says."""
    socket = str(running.runtime_dir / "admin.sock")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "freetokend.ctl", "--socket", socket, "status", "-o", "json"),
        stdout=asyncio.subprocess.PIPE,
    )
    answer, _ = await process.communicate()
    assert process.returncode == 0
    found: dict[str, Any] = json.loads(answer)
    return found


async def test_a_chat_is_answered(model_dir: Path) -> None:
    async with daemon("--model", str(model_dir)) as running:
        base_url = await running.base_url()
        await running.engine_pid()
        async with httpx.AsyncClient(base_url=base_url, timeout=DEADLINE_S) as http:
            response = await http.post("/v1/chat/completions", json=REQUEST)
        assert response.status_code == 200, response.text
        choice = response.json()["choices"][0]
        assert "Paris" in choice["message"]["content"]
        model = (await status(running))["model"]
        assert (model["expert_format"], model["dense_formats"]) == ("nvfp4", ["bf16"])
        running.terminate()
        assert await running.wait_exit() == 0
