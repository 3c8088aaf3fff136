"""POST /v1/chat/completions and /v1/completions: whole or streamed, cancelled on disconnect."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from typing import Any, Final, Protocol

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from freetokend.core.errors import InvalidInputError, Reason
from freetokend.link.messages import EngineDescription, EngineGateway
from freetokend.policy.prefill_estimate import estimated_prefill_s
from freetokend.serving.admission import (
    Admitted,
    admit_chat,
    admit_completion,
    admitting_description,
)
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
from freetokend.serving.streams import ChoiceStreams, ChoiceUpdate

# A refusal by the engine (a race the first check cannot see) still becomes an HTTP status when it
# comes this soon; later the headers are out and it is an event.
FIRST_EVENT_WAIT_S: Final = 0.25
# Proxies and agents give up on silence; 15 s is the shortest limit known in the field.
KEEP_ALIVE_S: Final = 10.0
# Seconds until the prompt is computed, as estimated when the request arrived.
PREFILL_HEADER: Final = "X-Freetokend-Estimated-Prefill-Seconds"
_KEEP_ALIVE: Final = b": keep-alive\n\n"

_Admit = Callable[[bytes, EngineDescription], tuple[ChatRequest | CompletionRequest, Admitted]]


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


class _Exchange:
    """One HTTP request from its arrival to its end, which the observer is told exactly once."""

    def __init__(self, observer: HttpObserver, endpoint: str) -> None:
        self._observer = observer
        self._endpoint = endpoint
        self._started_s = time.monotonic()
        self._first_token_s: float | None = None
        self._ended = False
        self.streams: ChoiceStreams | None = None  # from the admission on

    def saw_text(self) -> None:
        """The client is about to get text."""
        if self._first_token_s is None:
            self._first_token_s = time.monotonic() - self._started_s

    def end(self, outcome: str) -> None:
        """Free the engine, tell the observer. Only the first call counts."""
        if self._ended:
            return
        self._ended = True
        usage = Usage()
        if self.streams is not None:
            self.streams.close()
            usage = self.streams.usage()
        self._observer.request_ended(
            endpoint=self._endpoint,
            outcome=outcome,
            duration_s=time.monotonic() - self._started_s,
            first_token_s=self._first_token_s,
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
        )


class _EventStream(StreamingResponse):
    """Server-sent events that end their exchange however they end, even before the first one."""

    def __init__(
        self, events: AsyncGenerator[bytes, None], exchange: _Exchange, headers: dict[str, str]
    ) -> None:
        super().__init__(
            events,
            media_type="text/event-stream",
            headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **headers},
        )
        self._exchange = exchange

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._exchange.end("cancelled")  # unless the events came to an end of their own


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

        def admit(body: bytes, engine: EngineDescription) -> tuple[ChatRequest, Admitted]:
            parsed = parse_chat_request(body)
            return parsed, admit_chat(parsed, self._text, engine)

        return await self._answer(request, "chat", admit)

    async def completion(self, request: Request) -> Response:
        """A prompt in, its continuation out."""

        def admit(body: bytes, engine: EngineDescription) -> tuple[CompletionRequest, Admitted]:
            parsed = parse_completion_request(body)
            return parsed, admit_completion(parsed, self._text, engine)

        return await self._answer(request, "completion", admit)

    async def _answer(self, request: Request, endpoint: str, admit: _Admit) -> Response:
        exchange = _Exchange(self._observer, endpoint)
        try:
            body = await read_body(request, self._max_body_bytes)
            engine = admitting_description(self._gateway)
            # Templates and tokenizers are CPU work that must not hold up other streams.
            parsed, admitted = await asyncio.to_thread(admit, body, engine)
            shape = ResponseShape(
                response_id=("chatcmpl-" if endpoint == "chat" else "cmpl-")
                + secrets.token_hex(12),
                created_s=int(time.time()),
                model=engine.model,
                chat=endpoint == "chat",
            )
            headers = self._estimate(admitted)
            streams = exchange.streams = ChoiceStreams(self._gateway, self._text, admitted)
            if not parsed.stream:
                return await _whole(request, streams, shape, exchange, headers)
            first = await streams.next_update(FIRST_EVENT_WAIT_S)
            events = self._events(
                streams, first, shape, exchange, include_usage=parsed.include_usage
            )
            return _EventStream(events, exchange, headers)
        except (_ClientGoneError, ClientDisconnect):
            exchange.end("cancelled")
            return Response(status_code=499)
        except asyncio.CancelledError:
            exchange.end("cancelled")
            raise
        except Exception as error:
            known = as_freetoken_error(error)
            exchange.end(known.reason)
            raise known from error

    def _estimate(self, admitted: Admitted) -> dict[str, str]:
        """The header that says when a first token can be expected, once that is known."""
        stats = self._gateway.snapshot().stats
        estimate_s = estimated_prefill_s(
            sum(len(request.prompt_token_ids) for request in admitted.requests),
            stats.prefill_pending_tokens_count,
            stats.prefill_tokens_per_s,
        )
        return {} if estimate_s is None else {PREFILL_HEADER: f"{estimate_s:.2f}"}

    async def _events(
        self,
        streams: ChoiceStreams,
        first: ChoiceUpdate | None,
        shape: ResponseShape,
        exchange: _Exchange,
        *,
        include_usage: bool,
    ) -> AsyncGenerator[bytes, None]:
        try:
            if shape.chat:
                for index in range(streams.choices_count):
                    yield sse(shape.chunk(index, "", first=True, with_usage=include_usage))
            open_count = streams.choices_count
            update = first
            while open_count:
                if update is None:
                    update = await streams.next_update(self._keep_alive_s)
                if update is None:
                    yield _KEEP_ALIVE
                    continue
                if update.text:
                    exchange.saw_text()
                if update.finish_reason is not None:
                    open_count -= 1
                for chunk in _chunks(update, shape, with_usage=include_usage):
                    yield sse(chunk)
                update = None
            if include_usage:
                yield sse(shape.usage_chunk(streams.usage()))
            exchange.end("ok")
            yield b"data: [DONE]\n\n"
        except Exception as error:
            # The status is long out: the error is an event, and no [DONE] follows.
            known = as_freetoken_error(error)
            exchange.end(known.reason)
            yield sse(error_body(known))


def _chunks(
    update: ChoiceUpdate, shape: ResponseShape, *, with_usage: bool
) -> Iterator[dict[str, Any]]:
    if update.text:
        yield shape.chunk(update.index, update.text, with_usage=with_usage)
    if update.finish_reason is not None:
        yield shape.chunk(update.index, None, update.finish_reason, with_usage=with_usage)


async def _whole(
    request: Request,
    streams: ChoiceStreams,
    shape: ResponseShape,
    exchange: _Exchange,
    headers: dict[str, str],
) -> Response:
    collecting = asyncio.create_task(_collect(streams, exchange))
    hung_up = asyncio.create_task(_hung_up(request))
    try:
        await asyncio.wait({collecting, hung_up}, return_when=asyncio.FIRST_COMPLETED)
        if not collecting.done():
            raise _ClientGoneError
        choices = collecting.result()
    finally:
        collecting.cancel()
        hung_up.cancel()
    exchange.end("ok")
    return JSONResponse(shape.whole(choices, streams.usage()), headers=headers)


async def _collect(streams: ChoiceStreams, exchange: _Exchange) -> list[tuple[str, str]]:
    """Text and finish reason of every choice. Raises the error that ended one."""
    texts: list[list[str]] = [[] for _ in range(streams.choices_count)]
    reasons = [""] * streams.choices_count
    open_count = streams.choices_count
    while open_count:
        update = await streams.next_update(None)
        if update is None:
            continue
        if update.text:
            exchange.saw_text()
            texts[update.index].append(update.text)
        if update.finish_reason is not None:
            reasons[update.index] = update.finish_reason
            open_count -= 1
    return [("".join(pieces), reason) for pieces, reason in zip(texts, reasons, strict=True)]
