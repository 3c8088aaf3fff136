"""What is refused over HTTP, with which status, and at exactly which boundary."""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from freetokend.core.errors import Reason
from freetokend.link.messages import (
    EngineSettings,
    EngineState,
    FinishReason,
    GenerateRequest,
    SequenceUpdate,
)
from freetokend.policy.restart import RestartBudget
from freetokend.serving.model_text import load_model_text
from tests.serving.conftest import CHAT, COMPLETIONS, HELLO, Ended, listen, make_app, serve
from tests.serving.gateway import CONTEXT_TOKENS, InstantGateway
from tests.support.scripted import DEADLINE_S, Gate, make_gate, supervised
from tests.support.tiny_tokenizer import write_tiny_text

BODIES = {CHAT: {"messages": HELLO}, COMPLETIONS: {"prompt": "hello"}}
# Tokens that the template puts around one user message, one a byte.
CHAT_OVERHEAD_TOKENS = len("*user\n*\n*assistant\n")


def in_process(
    tmp_path: Path, gateway: InstantGateway | None = None, **options: Any
) -> httpx.AsyncClient:
    """A client of the application itself, without sockets."""
    text = load_model_text(write_tiny_text(tmp_path))
    app = make_app(gateway or InstantGateway(), text, Ended(), **options)
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test")


def error_of(answer: httpx.Response) -> dict[str, Any]:
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return dict(error)


def sized(prompt_tokens: int, path: str) -> dict[str, Any]:
    """A body whose prompt has exactly this many tokens."""
    if path == COMPLETIONS:
        return {"prompt": "x" * prompt_tokens}
    text = "x" * (prompt_tokens - CHAT_OVERHEAD_TOKENS)
    return {"messages": [{"role": "user", "content": text}]}


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_a_body_may_be_as_long_as_allowed_and_no_byte_longer(
    tmp_path: Path, path: str
) -> None:
    body = json.dumps(BODIES[path]).encode()
    async with in_process(tmp_path, max_body_bytes=len(body) + 10) as client:
        answer = await client.post(path, content=body.ljust(len(body) + 10))
        assert answer.status_code == 200
        answer = await client.post(path, content=body.ljust(len(body) + 11))
        assert answer.status_code == 413
        assert error_of(answer)["code"] == "payload_too_large"
        assert str(len(body) + 10) in error_of(answer)["message"]


async def test_unknown_paths_and_methods_are_json_errors(tmp_path: Path) -> None:
    async with in_process(tmp_path) as client:
        answer = await client.get("/v1/nothing")
        assert (answer.status_code, error_of(answer)["code"]) == (404, "not_found")
        answer = await client.get(CHAT)
        assert (answer.status_code, error_of(answer)["code"]) == (405, "method_not_allowed")
        assert answer.headers["allow"] == "POST"
        answer = await client.delete("/v1/models")
        assert answer.status_code == 405


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_another_model_is_a_404_that_names_both(tmp_path: Path, path: str) -> None:
    async with in_process(tmp_path) as client:
        answer = await client.post(path, json={**BODIES[path], "model": "gpt-4"})
        assert answer.status_code == 404
        error = error_of(answer)
        assert (error["code"], error["param"]) == ("model_not_found", "model")
        assert "'gpt-4'" in error["message"]
        assert "'tiny'" in error["message"]
        answer = await client.get("/v1/models/gpt-4")
        assert (answer.status_code, error_of(answer)["code"]) == (404, "model_not_found")


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_context_is_full_at_exactly_the_servable_length(tmp_path: Path, path: str) -> None:
    gateway = InstantGateway()
    async with in_process(tmp_path, gateway) as client:
        body = {**sized(CONTEXT_TOKENS - 1, path), "max_tokens": 50}
        assert (await client.post(path, json=body)).status_code == 200
        assert gateway.requests[-1].max_new_tokens == 1
        assert len(gateway.requests[-1].prompt_token_ids) == CONTEXT_TOKENS - 1
        for prompt_tokens in (CONTEXT_TOKENS, CONTEXT_TOKENS + 7):
            answer = await client.post(path, json=sized(prompt_tokens, path))
            error = error_of(answer)
            assert (answer.status_code, error["code"]) == (400, "context_length_exceeded")
            param = "messages" if path == CHAT else "prompt"
            assert error["param"] == param
            assert f"maximum context length is {CONTEXT_TOKENS} tokens" in error["message"]
            assert f"your {param} resulted in {prompt_tokens} tokens" in error["message"]
        assert len(gateway.requests) == 1


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_the_cap_is_clamped_to_what_remains(tmp_path: Path, path: str) -> None:
    gateway = InstantGateway()
    async with in_process(tmp_path, gateway) as client:
        for asked, got in ((10**12, 100), (101, 100), (100, 100), (99, 99), (1, 1)):
            body = {**sized(CONTEXT_TOKENS - 100, path), "max_tokens": asked}
            assert (await client.post(path, json=body)).status_code == 200
            assert gateway.requests[-1].max_new_tokens == got


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("stream", [None, False])
async def test_stream_options_need_a_stream(tmp_path: Path, path: str, stream: bool | None) -> None:
    options = {"stream": stream, "stream_options": {"include_usage": True}}
    async with in_process(tmp_path) as client:
        answer = await client.post(path, json={**BODIES[path], **options})
        assert answer.status_code == 400
        assert error_of(answer)["param"] == "stream_options"
        accepted = {**BODIES[path], **options, "stream": True}
        assert (await client.post(path, json=accepted)).status_code == 200


@pytest.mark.parametrize("prompt", ["", [], [""], ["a", ""], [[]], [[1], []]])
async def test_an_empty_prompt_is_refused(tmp_path: Path, prompt: object) -> None:
    gateway = InstantGateway()
    async with in_process(tmp_path, gateway) as client:
        answer = await client.post(COMPLETIONS, json={"prompt": prompt})
        assert answer.status_code == 400
        assert error_of(answer)["param"] == "prompt"
    assert not gateway.requests


async def test_a_prompt_counts_once_however_many_choices_continue_it(tmp_path: Path) -> None:
    async with in_process(tmp_path) as client:
        body: dict[str, Any] = {"prompt": ["ab", "xyz"], "n": 2, "max_tokens": 9}
        whole = (await client.post(COMPLETIONS, json=body)).json()
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        streamed = (await client.post(COMPLETIONS, json=body)).text.splitlines()
        events = [json.loads(line[6:]) for line in streamed if line.startswith("data: {")]
        for usage in (whole["usage"], events[-1]["usage"]):
            assert usage["prompt_tokens"] == len("ab") + len("xyz")
            assert usage["completion_tokens"] == 2 * (len("ab") + len("xyz"))
            assert usage["total_tokens"] == 15


@pytest.mark.parametrize("stream", [False, True])
async def test_a_full_queue_is_a_429(tmp_path: Path, stream: bool) -> None:
    gate = Gate(make_gate(tmp_path))
    script = {"model": "tiny", "gate": str(tmp_path / "gate"), "heartbeat_s": 0.02}
    settings = EngineSettings(model="tiny", max_running_count=1, max_waiting_count=1)
    async with serve(tmp_path, script, settings=settings) as served, httpx.AsyncClient() as client:
        writers = [(await served.raw({"messages": HELLO}))[1] for _ in range(2)]
        supervisor = served.engine.supervisor
        await served.engine.wait_until(lambda _: supervisor.in_flight_count == 2)
        body = {"messages": HELLO, "stream": stream}
        answer = await client.post(f"{served.base_url}{CHAT}", json=body)
        assert answer.status_code == 429
        assert int(answer.headers["retry-after"]) >= 1
        assert error_of(answer)["code"] == "queue_full"
        assert (await client.get(f"{served.base_url}/v1/models")).status_code == 200
        for writer in writers:
            writer.close()
        await served.until_idle(gate)
        # one request that is more than the queue holds
        answer = await client.post(f"{served.base_url}{CHAT}", json={**body, "n": 3})
        assert answer.status_code == 429
        await served.until_idle(gate)
    gate.close()


def full(request: GenerateRequest) -> SequenceUpdate:
    return SequenceUpdate(
        request_id=request.request_id,
        finish_reason=FinishReason.ERROR,
        error_reason=Reason.QUEUE_FULL,
        error_message="the engine's queue is full",
    )


@pytest.mark.parametrize("stream", [False, True])
async def test_a_queue_that_the_engine_finds_full_is_a_429_too(
    tmp_path: Path, stream: bool
) -> None:
    async def answer_full(request: GenerateRequest) -> AsyncIterator[SequenceUpdate]:
        yield full(request)

    gateway = InstantGateway(answer=answer_full)
    async with in_process(tmp_path, gateway) as client:
        answer = await client.post(CHAT, json={"messages": HELLO, "stream": stream})
        assert answer.status_code == 429
        assert answer.headers["retry-after"] == "1"
        assert error_of(answer)["code"] == "queue_full"
    assert len(gateway.requests) == 1
    assert gateway.open_count == 0


async def test_a_refusal_after_the_headers_is_an_event(tmp_path: Path) -> None:
    late = asyncio.Event()

    async def answer_full_late(request: GenerateRequest) -> AsyncIterator[SequenceUpdate]:
        await late.wait()
        yield full(request)

    async with (
        listen(InstantGateway(answer=answer_full_late), tmp_path) as served,
        httpx.AsyncClient() as client,
        client.stream(
            "POST", f"{served.base_url}{CHAT}", json={"messages": HELLO, "stream": True}
        ) as answer,
    ):
        assert answer.status_code == 200
        late.set()
        lines = [line async for line in answer.aiter_lines() if line]
        assert json.loads(lines[-1].removeprefix("data: "))["error"]["code"] == "queue_full"
        assert served.ended.calls[0]["outcome"] == "queue_full"


async def test_loading_is_a_503_with_retry_after(tmp_path: Path) -> None:
    script = {"model": "tiny", "faults": [{"at": "load", "action": "hang"}]}
    async with (
        serve(tmp_path, script, wait_ready=False) as served,
        httpx.AsyncClient(base_url=served.base_url) as client,
    ):
        answer = await client.post(CHAT, json={"messages": HELLO})
        assert answer.status_code == 503
        assert int(answer.headers["retry-after"]) >= 1
        assert error_of(answer)["code"] == "loading"
        assert (await client.get("/v1/models")).status_code == 503
        assert (await client.get("/readyz")).status_code == 503
        assert (await client.get("/livez")).json() == {"status": "alive"}


async def test_a_failed_engine_is_told_briefly_and_ends_liveness(tmp_path: Path) -> None:
    """Clients get the short cause; what the engine printed stays in status and journal."""
    argv = (sys.executable, "-c", "import sys; sys.exit('an engine log line')")
    budget = RestartBudget(restarts_count=0)
    with tempfile.TemporaryDirectory(prefix="ftk-") as name:
        async with (
            supervised(argv, directory=Path(name), budget=budget) as engine,
            listen(engine.supervisor, tmp_path) as served,
            httpx.AsyncClient(base_url=served.base_url, timeout=DEADLINE_S) as client,
        ):
            snapshot = await engine.wait_state(EngineState.FAILED)
            assert "an engine log line" in snapshot.cause
            chat = await client.post(CHAT, json={"messages": HELLO})
            assert error_of(chat)["code"] == "engine_unavailable"
            assert "exit code 1" in error_of(chat)["message"]
            answers = [chat]
            answers += [await client.get(path) for path in ("/v1/models", "/readyz", "/livez")]
            for answer in answers:
                assert answer.status_code == 503
                assert int(answer.headers["retry-after"]) >= 1
                assert "log line" not in answer.text
            assert answers[-1].json() == {
                "status": "not alive",
                "reason": "the engine failed and is not restarted",
            }
