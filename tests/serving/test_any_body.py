"""Whatever is posted: a known status, an error in OpenAI's shape, never a fault of ours."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from freetokend.core.errors import Reason, UnavailableError
from freetokend.serving.model_text import load_model_text
from tests.serving.conftest import CHAT, COMPLETIONS, Ended, make_app
from tests.serving.gateway import InstantGateway
from tests.support.tiny_tokenizer import write_tiny_text

STATUSES = {200, 400, 404, 413, 429, 503}
MAX_BODY_BYTES = 3000

VALID: dict[str, dict[str, Any]] = {
    CHAT: {
        "model": "tiny",
        "messages": [
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": [{"type": "text", "text": "hi"}]},
        ],
        "max_completion_tokens": 5,
        "tools": [],
        "response_format": {"type": "text"},
    },
    COMPLETIONS: {"model": "tiny", "prompt": ["a", "b"], "echo": False, "max_tokens": 3},
}
COMMON: dict[str, Any] = {
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 5,
    "min_p": 0.1,
    "seed": 1,
    "n": 2,
    "stop": ["x"],
    "stream": True,
    "stream_options": {"include_usage": True},
    "ignore_eos": True,
    "logit_bias": {},
    "presence_penalty": 0,
}

# any character: lone surrogates too, which JSON can write and nothing can encode
texts = st.text(st.characters(), max_size=8) | st.sampled_from(["<|im_end|>", "\ud800", "\ue000"])
numbers = st.integers() | st.floats() | st.sampled_from([2**63, 2**64, 10**400, 1e308, -0.0])
values = st.recursive(
    st.none() | st.booleans() | numbers | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)


@st.composite
def bodies(draw: st.DrawFn, path: str) -> bytes:
    """A valid body with some fields changed, dropped or added, and sometimes broken bytes."""
    fields = [*VALID[path], *COMMON]
    body: dict[str, Any] = {**VALID[path]}
    for field in draw(st.sets(st.sampled_from(sorted(COMMON)), max_size=6)):
        body[field] = COMMON[field]
    body |= draw(st.dictionaries(st.sampled_from(fields) | texts, values, max_size=2))
    if path == CHAT and draw(st.booleans()):
        message = draw(st.fixed_dictionaries({"role": st.just("user") | values, "content": values}))
        body["messages"] = [message, {"role": "user", "content": draw(texts)}]
    raw = json.dumps(body, ensure_ascii=draw(st.booleans())).encode("utf-8", "surrogatepass")
    if draw(st.integers(0, 9)) == 0:
        at = draw(st.integers(0, len(raw)))
        raw = raw[:at] + draw(st.binary(max_size=4)) + raw[at + draw(st.integers(0, 4)) :]
    return raw


@pytest.fixture(scope="module")
def gateway() -> InstantGateway:
    return InstantGateway()


@pytest.fixture(scope="module")
def app(gateway: InstantGateway, tmp_path_factory: pytest.TempPathFactory) -> FastAPI:
    text = load_model_text(write_tiny_text(tmp_path_factory.mktemp("tiny")))
    return make_app(gateway, text, Ended(), max_body_bytes=MAX_BODY_BYTES)


async def post(app: FastAPI, path: str, body: bytes) -> httpx.Response:
    # a fault that is raised out of the application fails the test by itself
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        return await client.post(path, content=body)


def check(answer: httpx.Response) -> None:
    assert answer.status_code in STATUSES
    if answer.status_code != 200:
        error = answer.json()["error"]
        assert error["message"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["code"] in list(Reason)
    elif answer.headers["content-type"].startswith("text/event-stream"):
        events = [line for line in answer.text.splitlines() if line.startswith("data: ")]
        assert events[-1] == "data: [DONE]"
        assert not any("error" in json.loads(event[6:]) for event in events[:-1])
    else:
        assert answer.json()["choices"]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_any_body_is_answered(
    app: FastAPI, gateway: InstantGateway, path: str, data: st.DataObject
) -> None:
    reason = data.draw(st.sampled_from([None, None, None, Reason.QUEUE_FULL, Reason.LOADING]))
    gateway.refusal = None if reason is None else UnavailableError("later", reason=reason)
    answer = asyncio.run(post(app, path, data.draw(bodies(path))))
    check(answer)
    assert reason is None or answer.status_code in {413, 429, 503}
    assert gateway.open_count == 0


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_bodies_without_any_change_are_served(
    app: FastAPI, gateway: InstantGateway, path: str
) -> None:
    """The mutations start from something that works, or they would test one refusal only."""
    gateway.refusal = None
    body = json.dumps({**VALID[path], **COMMON}).encode()
    answer = asyncio.run(post(app, path, body))
    assert answer.status_code == 200
    check(answer)


def deep(depth: int) -> bytes:
    return b'{"prompt": "a", "x": ' + b"[" * depth + b"]" * depth + b"}"


@pytest.mark.parametrize("depth", [10, 900, 1000, 1400])
def test_nesting_is_no_fault(app: FastAPI, gateway: InstantGateway, depth: int) -> None:
    gateway.refusal = None
    check(asyncio.run(post(app, COMPLETIONS, deep(depth))))
