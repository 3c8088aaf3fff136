"""Clients that leave and engines that die: everything is freed and counted truly."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from freetokend.link.messages import EngineSettings, GenerateRequest, SequenceUpdate
from freetokend.serving.model_text import load_model_text
from tests.serving.conftest import CHAT, COMPLETIONS, HELLO, Ended, Served, make_app, serve
from tests.serving.gateway import InstantGateway
from tests.support.scripted import Gate, make_gate
from tests.support.tiny_tokenizer import write_tiny_text

CYCLE = {"kind": "cycle", "token_ids": [70, 71]}
PROMPT = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"


@contextmanager
def gated(directory: Path) -> Iterator[Gate]:
    """A gate in a directory of its own, opened wide in the end."""
    gate = Gate(make_gate(directory))
    try:
        yield gate
    finally:
        gate.close()


def content(line: str) -> str:
    """The text of a line of a chat stream."""
    if not line.startswith("data: {"):
        return ""
    event = json.loads(line.removeprefix("data: "))
    return "".join(choice["delta"].get("content", "") for choice in event.get("choices", []))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prefill_steps_count", [0, 1000])
@pytest.mark.parametrize("half", [False, True])
async def test_hanging_up_frees_the_engine(
    tmp_path: Path, stream: bool, prefill_steps_count: int, half: bool
) -> None:
    """Also a client that closes only its sending half: nothing tells it from one that left."""
    with gated(tmp_path) as gate:
        script = {
            "model": "tiny",
            "tokens": CYCLE,
            "gate": str(tmp_path / "gate"),
            "heartbeat_s": 0.02,
            "prefill_steps_count": prefill_steps_count,
        }
        async with serve(tmp_path, script) as served:
            _, writer = await served.raw(
                {"messages": HELLO, "stream": stream, "max_tokens": 10_000}
            )
            gate.open()
            await served.engine.wait_until(lambda s: s.stats.running_count == 1)
            if half:
                writer.write_eof()
            else:
                writer.close()
            await served.ended.wait_count(1)
            freed = await served.until_idle(gate)
            assert freed.stats.decode_tokens_count < 500
            call = served.ended.calls[0]
            assert call["outcome"] == "cancelled"
            assert call["prompt_tokens"] == len(served.ids(PROMPT))
            writer.close()


async def test_a_cancelled_stream_is_counted_up_to_the_last_token(tmp_path: Path) -> None:
    with gated(tmp_path) as gate:
        script = {"model": "tiny", "tokens": CYCLE, "gate": str(tmp_path / "gate")}
        script |= {"heartbeat_s": 0.02}
        async with serve(tmp_path, script) as served:
            reader, writer = await served.raw({"messages": HELLO, "stream": True})
            gate.open(7)
            seen = ""
            async with asyncio.timeout(20):
                while len(seen) < 7:
                    seen += content((await reader.readline()).decode())
            writer.close()
            await served.ended.wait_count(1)
            await served.until_idle(gate)
            call = served.ended.calls[0]
            assert call["outcome"] == "cancelled"
            assert call["prompt_tokens"] == len(served.ids(PROMPT))
            assert call["completion_tokens"] == 7
            assert call["first_token_s"] is not None


async def test_a_body_that_never_ends_is_a_cancelled_request(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with serve(tmp_path, {"model": "tiny"}) as served:
        _, writer = await served.raw({"messages": HELLO}, left_out_bytes=3)
        writer.close()
        await served.ended.wait_count(1)
        call = served.ended.calls[0]
        assert (call["outcome"], call["prompt_tokens"]) == ("cancelled", 0)
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def killed_at_step(step_index: int) -> dict[str, Any]:
    fault = {"at": "step", "step_index": step_index, "action": "signal", "signal": 9, "once": True}
    return {"model": "tiny", "tokens": CYCLE, "step_s": 0.005, "faults": [fault]}


async def test_engine_death_mid_stream_is_one_error_event_and_no_done(tmp_path: Path) -> None:
    async with (
        serve(tmp_path, killed_at_step(40)) as served,
        httpx.AsyncClient(timeout=30) as client,
    ):
        body = {"messages": HELLO, "stream": True, "max_tokens": 8000}
        answer = await client.post(f"{served.base_url}{CHAT}", json=body)
        lines = [line for line in answer.text.splitlines() if line.startswith("data: ")]
        events = [json.loads(line.removeprefix("data: ")) for line in lines]
        assert events[-1]["error"]["code"] == "engine_failed"
        assert all("error" not in event for event in events[:-1])
        await served.ended.wait_count(1)
        call = served.ended.calls[0]
        assert call["outcome"] == "engine_failed"
        assert call["prompt_tokens"] == len(served.ids(PROMPT))
        # a byte a token, and all that had arrived was passed on
        assert call["completion_tokens"] == len("".join(map(content, lines))) > 0


async def test_engine_death_of_a_whole_request_is_a_500(tmp_path: Path) -> None:
    async with serve(tmp_path, killed_at_step(40)) as served:
        with pytest.raises(openai.InternalServerError) as caught:
            await served.client().chat.completions.create(
                model="tiny", messages=HELLO, max_tokens=8000
            )
        assert caught.value.code == "engine_failed"
        await served.ended.wait_count(1)
        call = served.ended.calls[0]
        assert call["outcome"] == "engine_failed"
        assert call["prompt_tokens"] == len(served.ids(PROMPT))
        assert 0 < call["completion_tokens"] < 40


async def leave_at_random(served: Served, choose: random.Random) -> None:
    """One client that leaves, in one of the ways there are, at one of the moments there are."""
    chat = choose.random() < 0.5
    body: dict[str, Any] = {"stream": choose.random() < 0.7, "max_tokens": 8000, "ignore_eos": True}
    body |= {"messages": HELLO} if chat else {"prompt": "abc", "n": choose.randint(1, 3)}
    left_out_bytes = 2 if choose.random() < 0.1 else 0
    reader, writer = await served.raw(
        body, path=CHAT if chat else COMPLETIONS, left_out_bytes=left_out_bytes
    )
    if body["stream"] and not left_out_bytes:
        for _ in range(choose.choice([0, 0, 1, 5, 40])):
            await reader.readline()
    if choose.random() < 0.3:
        writer.write_eof()
        await reader.read()  # to the end that the server makes
    writer.close()


@pytest.mark.parametrize("seed", [1, 2])
async def test_sixty_four_clients_that_leave_free_everything(tmp_path: Path, seed: int) -> None:
    choose = random.Random(seed)
    script = {"model": "tiny", "tokens": CYCLE, "step_s": 0.002, "prefill_steps_count": 3}
    script |= {"heartbeat_s": 0.02}
    settings = EngineSettings(model="tiny", max_running_count=16, max_waiting_count=256)
    async with serve(tmp_path, script, settings=settings) as served, asyncio.timeout(60):
        await asyncio.gather(*(leave_at_random(served, choose) for _ in range(64)))
        await served.ended.wait_count(64)
        await served.until_idle()
        assert {call["outcome"] for call in served.ended.calls} == {"cancelled"}
        answer = await served.client().completions.create(model="tiny", prompt="a", max_tokens=2)
        assert answer.choices[0].finish_reason == "length"


async def never(request: GenerateRequest) -> AsyncIterator[SequenceUpdate]:
    await asyncio.Event().wait()
    yield SequenceUpdate(request_id=request.request_id)


@pytest.mark.parametrize("spec_version", ["2.3", "2.4"])
async def test_a_client_that_left_before_the_headers_frees_the_engine(
    tmp_path: Path, spec_version: str
) -> None:
    """The stream of events is then never begun, so it cannot be what cleans up."""
    gateway, ended = InstantGateway(answer=never), Ended()
    app = make_app(gateway, load_model_text(write_tiny_text(tmp_path)), ended)
    body = json.dumps({"messages": HELLO, "stream": True}).encode()
    messages = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> dict[str, Any]:
        return messages.pop() if messages else {"type": "http.disconnect"}

    async def send(_message: object) -> None:
        raise OSError("the client has gone")

    scope = {"type": "http", "method": "POST", "path": CHAT, "headers": [], "query_string": b""}
    async with asyncio.timeout(20):
        await app({**scope, "asgi": {"spec_version": spec_version}}, receive, send)
    assert [call["outcome"] for call in ended.calls] == ["cancelled"]
    await asyncio.sleep(0)  # the cancelled tasks' turn
    assert (len(gateway.requests), gateway.open_count) == (1, 0)
