"""The metrics of events: sequences passing the gateway and requests passing HTTP."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import replace
from typing import Any, Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from freetokend.control.metrics.catalogue import metric
from freetokend.control.state import RequestTotals
from freetokend.core.errors import FreetokenError
from freetokend.link.messages import (
    EngineGateway,
    EngineSnapshot,
    FinishReason,
    GenerateRequest,
    SequenceStream,
    SequenceUpdate,
)

_METHODS: Final = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
AsgiApp = Callable[[Scope, Receive, Send], Awaitable[None]]


def counter(short_name: str, registry: CollectorRegistry) -> Counter:
    """The catalogue's counter, registered."""
    entry = metric(short_name)
    return Counter(entry.name, entry.help, entry.labels, registry=registry)


def histogram(short_name: str, registry: CollectorRegistry) -> Histogram:
    """The catalogue's histogram, registered."""
    entry = metric(short_name)
    return Histogram(entry.name, entry.help, entry.labels, buckets=entry.buckets, registry=registry)


class SequenceMeter:
    """Counts sequences of one model by how they end, and times their tokens."""

    def __init__(self, registry: CollectorRegistry, model: str) -> None:
        self._model = model
        self._finished = counter("requests_finished_total", registry)
        self._refused = counter("requests_refused_total", registry)
        self._prompt = counter("prompt_tokens_total", registry).labels(model)
        self._cached = counter("cached_prompt_tokens_total", registry).labels(model)
        self._completion = counter("completion_tokens_total", registry).labels(model)
        self._first_token = histogram("time_to_first_token_seconds", registry).labels(model)
        self._per_token = histogram("time_per_output_token_seconds", registry).labels(model)
        self._totals = RequestTotals()
        for outcome in FinishReason:
            self._finished.labels(model, outcome.value)

    def totals(self) -> RequestTotals:
        """What has ended so far."""
        return self._totals

    def refused(self, error: FreetokenError) -> None:
        """A sequence was refused before it started."""
        self._refused.labels(self._model, error.reason.value).inc()

    def first_token(self, after_s: float) -> None:
        """A sequence's first token came `after_s` after its submission."""
        self._first_token.observe(after_s)

    def ended(self, update: SequenceUpdate, outcome: FinishReason, decode_s: float) -> None:
        """A sequence ended; `decode_s` is the time from its first to its last token."""
        self._finished.labels(self._model, outcome.value).inc()
        self._prompt.inc(update.prompt_tokens)
        self._cached.inc(update.cached_tokens)
        self._completion.inc(update.completion_tokens)
        if update.completion_tokens > 1 and decode_s > 0:
            self._per_token.observe(decode_s / (update.completion_tokens - 1))
        totals = self._totals
        match outcome:
            case FinishReason.STOP | FinishReason.LENGTH:
                self._totals = replace(totals, finished_count=totals.finished_count + 1)
            case FinishReason.ERROR:
                self._totals = replace(totals, failed_count=totals.failed_count + 1)
            case FinishReason.CANCELLED:
                self._totals = replace(totals, cancelled_count=totals.cancelled_count + 1)


class MeteredGateway:
    """An `EngineGateway` in front of another that measures what passes and changes nothing."""

    def __init__(
        self,
        inner: EngineGateway,
        meter: SequenceMeter,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._inner = inner
        self._meter = meter
        self._clock = clock

    def snapshot(self) -> EngineSnapshot:
        """See `EngineGateway`."""
        return self._inner.snapshot()

    async def changed(self, generation: int) -> int:
        """See `EngineGateway`."""
        return await self._inner.changed(generation)

    def check_admission(self) -> None:
        """See `EngineGateway`; a refusal is counted, as the request goes no further."""
        try:
            self._inner.check_admission()
        except FreetokenError as error:
            self._meter.refused(error)
            raise

    def generate(self, request: GenerateRequest) -> MeteredStream:
        """See `EngineGateway`; a refusal is counted and passed on."""
        try:
            updates = self._inner.generate(request)
        except FreetokenError as error:
            self._meter.refused(error)
            raise
        return MeteredStream(updates, request, self._meter, self._clock)


class MeteredStream:
    """The updates of one sequence on their way through; ends exactly once in the metrics."""

    def __init__(
        self,
        inner: SequenceStream,
        request: GenerateRequest,
        meter: SequenceMeter,
        clock: Callable[[], float],
    ) -> None:
        self._inner = inner
        self._request = request
        self._meter = meter
        self._clock = clock
        self._submitted_s = clock()
        self._first_s: float | None = None
        self._last_s = self._submitted_s
        self._tokens_count = 0
        self._cached_tokens = 0
        self._over = False

    def __aiter__(self) -> MeteredStream:
        return self

    async def __anext__(self) -> SequenceUpdate:
        try:
            update = await anext(self._inner)
        except FreetokenError as error:
            # A gateway that is a generator refuses here, before its first update.
            if not self._over:
                self._over = True
                self._meter.refused(error)
            raise
        self._cached_tokens = max(self._cached_tokens, update.cached_tokens)
        if update.token_ids:
            self._last_s = self._clock()
            self._tokens_count += len(update.token_ids)
            if self._first_s is None:
                self._first_s = self._last_s
                self._meter.first_token(self._first_s - self._submitted_s)
        if update.finish_reason is not None:
            self._end(update, update.finish_reason)
        return update

    async def aclose(self) -> None:
        """The reader goes: passed on; before the end it counts as cancelled."""
        self._end_early(FinishReason.CANCELLED)
        await self._inner.aclose()

    async def finish(self) -> None:
        """The reader has all it wants: passed on; before the end it counts as stopped."""
        self._end_early(FinishReason.STOP)
        await self._inner.finish()

    def _end_early(self, outcome: FinishReason) -> None:
        # The reader saw no final update: count what had passed by.
        seen = SequenceUpdate(
            request_id=self._request.request_id,
            prompt_tokens=len(self._request.prompt_token_ids) if self._tokens_count else 0,
            cached_tokens=self._cached_tokens,
            completion_tokens=self._tokens_count,
        )
        self._end(seen, outcome)

    def _end(self, update: SequenceUpdate, outcome: FinishReason) -> None:
        if not self._over:
            self._over = True
            first_s = self._last_s if self._first_s is None else self._first_s
            self._meter.ended(update, outcome, self._last_s - first_s)


class HttpMeter:
    """ASGI middleware: counts and times every HTTP request of the application behind it."""

    def __init__(
        self, registry: CollectorRegistry, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._requests = counter("http_requests_total", registry)
        self._duration = histogram("http_request_duration_seconds", registry)
        in_flight = metric("http_requests_in_flight")
        self._in_flight = Gauge(in_flight.name, in_flight.help, registry=registry)
        self._clock = clock

    def wrap(self, app: AsgiApp) -> AsgiApp:
        """`app`, measured. Routes are the router's templates; unknown paths are one route."""

        async def measured(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http":
                await app(scope, receive, send)
                return
            status = 0

            async def noting_send(message: Message) -> None:
                nonlocal status
                if message["type"] == "http.response.start":
                    status = int(message["status"])
                await send(message)

            started_s = self._clock()
            self._in_flight.inc()
            try:
                await app(scope, receive, noting_send)
            finally:
                self._in_flight.dec()
                self._note(scope, status, self._clock() - started_s)

        return measured

    def _note(self, scope: Scope, status: int, duration_s: float) -> None:
        route = getattr(scope.get("route"), "path", None) or "other"
        method = scope["method"] if scope["method"] in _METHODS else "other"
        # 0: the application ended without an answer, most often because the client had gone.
        self._requests.labels(method, route, str(status or "none")).inc()
        self._duration.labels(route).observe(duration_s)
