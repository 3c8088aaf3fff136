"""The service on both demo models with experts in every weight format: a chat over HTTP."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from freetokend.demo.errors import DemoError
from freetokend.ftw.formats import parse_format
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


FORMATS = ("bf16", "fp8_block", "mxfp4", "nvfp4", "int4_g64_bf16_zp", "q4_0")


def quantised(variant: str, name: str) -> Path:
    try:
        return demo_ftw(variant, name)
    except DemoError as error:
        pytest.fail(f"the {variant} model is needed: {error}", pytrace=False)


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


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("variant", ["demo", "stress"])
async def test_chats_are_answered(variant: str, name: str) -> None:
    async with daemon("--model", str(quantised(variant, name))) as running:
        base_url = await running.base_url()
        await running.engine_pid()
        async with httpx.AsyncClient(base_url=base_url, timeout=DEADLINE_S) as http:
            responses = await asyncio.gather(
                *(http.post("/v1/chat/completions", json=REQUEST) for _ in range(2))
            )
        for response in responses:
            assert response.status_code == 200, response.text
        answers = {response.json()["choices"][0]["message"]["content"] for response in responses}
        assert len(answers) == 1
        assert "Paris" in answers.pop()
        model = (await status(running))["model"]
        assert model["expert_format"] == str(parse_format(name))
        assert model["dense_formats"] == ["bf16"]
        running.terminate()
        assert await running.wait_exit() == 0
