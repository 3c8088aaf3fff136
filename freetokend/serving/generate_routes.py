"""POST /v1/chat/completions and /v1/completions: whole or streamed, cancelled on disconnect."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from freetokend.core.errors import FreetokenError, InvalidInputError, Reason
from freetokend.link.messages import EngineGateway
from freetokend.serving.admission import Admitted, admit_chat, admit_completion
from freetokend.serving.generation import Usage
from freetokend.serving.http_errors import as_freetoken_error, error_body
from freetokend.serving.model_text import ModelText
from freetokend.serving.openai_requests import (
    ChatRequest,
    CompletionRequest,
    parse_chat_request,
    parse_completion_request,
)
from freetokend.serving.openai_responses import ResponseShape, sse
from freetokend.serving.streams import ChoiceEvent, ChoiceStreams

# A refusal by the engine (a race the first check cannot see) still becomes an HTTP status when it
# comes this soon; later the headers are out and it is an event.
FIRST_EVENT_WAIT_S: Final = 0.25
# Proxies and agents give up on silence; 15 s is the shortest limit known in the field.
KEEP_ALIVE_S: Final = 10.0
_KEEP_ALIVE: Final = b": keep-alive\n\n"


class HttpObserver(Protocol):
    """Who counts requests (the metrics); called once per request when it has ended."""

    def request_ended(
        self,
        *,
        endpoint: str,
        outcome: str,
        duration_s: float,
        first_token_s: float | None,
        prompt_tokens: int,
        completion_tokens: int,
    ) -> None:
        """`outcome`: "ok", "cancelled" or a `Reason`. Times from the arrival of the request."""
        ...


@dataclass(slots=True, kw_only=True)
class _Account:
    """What is known of one request so far; told to the observer exactly once."""

    observer: HttpObserver
    endpoint: str
    started_s: float
    first_token_s: float | None = None
    usage: Usage = field(default_factory=Usage)
    told: bool = False

    def saw_text(self) -> None:
        if self.first_token_s is None:
            self.first_token_s = time.monotonic() - self.started_s

    def end(self, outcome: str) -> None:
        if self.told:
            return
        self.told = True
        self.observer.request_ended(
            endpoint=self.endpoint,
            outcome=outcome,
            duration_s=time.monotonic() - self.started_s,
            first_token_s=self.first_token_s,
            prompt_tokens=self.usage.prompt_tokens,
            completion_tokens=self.usage.completion_tokens,
        )


class _ClientGoneError(Exception):
    """The client hung up before a response that was not streamed was complete."""


async def read_body(request: Request, max_body_bytes: int) -> bytes:
    """The whole body. Raises InvalidInputError (payload_too_large) as soon as it is too long."""
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > max_body_bytes:
            raise InvalidInputError(
                f"the body is longer than {max_body_bytes} bytes ([http] max_body_bytes).",
                reason=Reason.PAYLOAD_TOO_LARGE,
            )
    return bytes(body)


async def _hung_up(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


class GenerationRoutes:
    """The two endpoints over one gateway and one model."""

    def __init__(
        self,
        gateway: EngineGateway,
        text: ModelText,
        observer: HttpObserver,
        *,
        max_body_bytes: int,
        keep_alive_s: float = KEEP_ALIVE_S,
    ) -> None:
        self._gateway = gateway
        self._text = text
        self._observer = observer
        self._max_body_bytes = max_body_bytes
        self._keep_alive_s = keep_alive_s

    def router(self) -> APIRouter:
        """Routes to be included in the application."""
        router = APIRouter()
        router.add_api_route("/v1/chat/completions", self.chat, methods=["POST"])
        router.add_api_route("/v1/completions", self.completion, methods=["POST"])
        return router

    async def chat(self, request: Request) -> Response:
        """A conversation in, the assistant's next message out."""

        def admit(body: bytes) -> tuple[ChatRequest, Admitted]:
            parsed = parse_chat_request(body)
            return parsed, admit_chat(parsed, self._text, self._gateway.snapshot())

        return await self._answer(request, "chat", admit)

    async def completion(self, request: Request) -> Response:
        """A prompt in, its continuation out."""

        def admit(body: bytes) -> tuple[CompletionRequest, Admitted]:
            parsed = parse_completion_request(body)
            return parsed, admit_completion(parsed, self._text, self._gateway.snapshot())

        return await self._answer(request, "completion", admit)

    async def _answer(
        self,
        request: Request,
        endpoint: str,
        admit: Callable[[bytes], tuple[ChatRequest | CompletionRequest, Admitted]],
    ) -> Response:
        account = _Account(observer=self._observer, endpoint=endpoint, started_s=time.monotonic())
        try:
            body = await read_body(request, self._max_body_bytes)
            # Templates and tokenizers are CPU work that must not hold up other streams.
            parsed, admitted = await asyncio.to_thread(admit, body)
            shape = ResponseShape(
                response_id=("chatcmpl-" if endpoint == "chat" else "cmpl-")
                + secrets.token_hex(12),
                created_s=int(time.time()),
                model=self._gateway.snapshot().model,
                chat=endpoint == "chat",
            )
            if not parsed.stream:
                return await self._whole(request, admitted, shape, account)
            options = parsed.stream_options
            include_usage = options is not None and bool(options.include_usage)
            return await self._streamed(admitted, shape, account, include_usage=include_usage)
        except _ClientGoneError:
            account.end("cancelled")
            return Response(status_code=499)
        except asyncio.CancelledError:
            account.end("cancelled")
            raise
        except Exception as error:
            account.end(as_freetoken_error(error).reason)
            raise

    async def _whole(
        self, request: Request, admitted: Admitted, shape: ResponseShape, account: _Account
    ) -> Response:
        async with ChoiceStreams(self._gateway, self._text, admitted) as streams:
            collecting = asyncio.create_task(_collect(streams, account))
            hung_up = asyncio.create_task(_hung_up(request))
            try:
                await asyncio.wait({collecting, hung_up}, return_when=asyncio.FIRST_COMPLETED)
                if not collecting.done():
                    raise _ClientGoneError
                choices = collecting.result()
            finally:
                collecting.cancel()
                hung_up.cancel()
        account.end("ok")
        return JSONResponse(shape.whole(choices, account.usage))

    async def _streamed(
        self, admitted: Admitted, shape: ResponseShape, account: _Account, *, include_usage: bool
    ) -> Response:
        streams = ChoiceStreams(self._gateway, self._text, admitted)
        await streams.__aenter__()
        try:
            first = await streams.next_event(FIRST_EVENT_WAIT_S)
            if first is not None and first.error is not None:
                raise first.error
        except BaseException:
            await streams.__aexit__(None, None, None)
            raise
        body = self._events(streams, first, shape, account, include_usage=include_usage)
        return StreamingResponse(
            body,
            media_type="text/event-stream",
            headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
        )

    async def _events(
        self,
        streams: ChoiceStreams,
        first: ChoiceEvent | None,
        shape: ResponseShape,
        account: _Account,
        *,
        include_usage: bool,
    ) -> AsyncGenerator[bytes, None]:
        outcome = "cancelled"
        try:
            if shape.chat:
                for index in range(streams.choices_count):
                    yield sse(shape.chunk(index, "", first=True, with_usage=include_usage))
            open_count = streams.choices_count
            event = first
            while open_count:
                if event is None:
                    event = await streams.next_event(self._keep_alive_s)
                if event is None:
                    yield _KEEP_ALIVE
                    continue
                if event.error is not None:
                    error = as_freetoken_error(event.error)
                    outcome = error.reason
                    yield sse(error_body(error))
                    return
                open_count -= self._note(event, account)
                for chunk in _chunks(event, shape, with_usage=include_usage):
                    yield sse(chunk)
                event = None
            if include_usage:
                yield sse(shape.usage_chunk(account.usage))
            outcome = "ok"
            yield b"data: [DONE]\n\n"
        finally:
            await streams.__aexit__(None, None, None)
            account.end(outcome)

    @staticmethod
    def _note(event: ChoiceEvent, account: _Account) -> int:
        """Book an update; returns 1 when it was the last of its choice."""
        update = event.update
        assert update is not None
        if update.text:
            account.saw_text()
        if update.finish_reason is None:
            return 0
        account.usage = account.usage.plus(update.usage or Usage())
        return 1


def _chunks(event: ChoiceEvent, shape: ResponseShape, *, with_usage: bool) -> list[dict[str, Any]]:
    update = event.update
    assert update is not None
    chunks: list[dict[str, Any]] = []
    if update.text:
        chunks.append(shape.chunk(event.index, update.text, with_usage=with_usage))
    if update.finish_reason is not None:
        chunks.append(shape.chunk(event.index, None, update.finish_reason, with_usage=with_usage))
    return chunks


async def _collect(streams: ChoiceStreams, account: _Account) -> list[tuple[str, str]]:
    texts = [""] * streams.choices_count
    reasons = [""] * streams.choices_count
    open_count = streams.choices_count
    while open_count:
        event = await streams.next_event(None)
        if event is None:
            raise FreetokenError("the event queue answered without an event.")
        if event.error is not None:
            raise event.error
        assert event.update is not None
        texts[event.index] += event.update.text
        if event.update.finish_reason is not None:
            reasons[event.index] = event.update.finish_reason
        open_count -= GenerationRoutes._note(event, account)
    return list(zip(texts, reasons, strict=True))
