"""One sequence, from token ids to text: detokenizer and stop strings around the engine's stream."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass

from freetokend.core.errors import (
    FreetokenError,
    InternalError,
    InvalidInputError,
    Reason,
    UnavailableError,
)
from freetokend.link.messages import (
    EngineGateway,
    FinishReason,
    GenerateRequest,
    SequenceUpdate,
)
from freetokend.serving.detokenizer import IncrementalDetokenizer, StopMatcher
from freetokend.serving.model_text import ModelText


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Token counts of one or more sequences."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0

    def plus(self, other: Usage) -> Usage:
        """The sum of two counts."""
        return Usage(
            prompt_tokens=self.prompt_tokens + other.prompt_tokens,
            cached_tokens=self.cached_tokens + other.cached_tokens,
            completion_tokens=self.completion_tokens + other.completion_tokens,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TextUpdate:
    """New text; the last one of a sequence has `finish_reason` ("stop", "length") and usage."""

    text: str
    finish_reason: str | None = None
    usage: Usage | None = None


def update_error(update: SequenceUpdate) -> FreetokenError:
    """The error that an ERROR update carries, as the class its reason belongs to."""
    reason = update.error_reason or Reason.INTERNAL
    if reason in {Reason.INVALID_REQUEST, Reason.CONTEXT_LENGTH_EXCEEDED}:
        return InvalidInputError(update.error_message, reason=reason, param="messages")
    if reason in {Reason.QUEUE_FULL, Reason.LOADING, Reason.DRAINING, Reason.ENGINE_UNAVAILABLE}:
        return UnavailableError(update.error_message, reason=reason, retry_after_s=1.0)
    return InternalError(update.error_message, reason=reason)


async def generate_text(
    gateway: EngineGateway, text: ModelText, request: GenerateRequest, stop: tuple[str, ...]
) -> AsyncGenerator[TextUpdate, None]:
    """Stream a sequence as text.

    Raises what `EngineGateway.generate` raises, and the error of an ERROR update. A stop string
    ends the sequence on the engine too. Closing the iterator cancels.
    """
    detokenizer = IncrementalDetokenizer(text.decode, context_ids=request.prompt_token_ids[-4:])
    matcher = StopMatcher(stop)
    tokens_count = 0
    async with aclosing(gateway.generate(request)) as updates:
        async for update in updates:
            tokens_count += len(update.token_ids)
            piece = matcher.push(detokenizer.push(update.token_ids))
            if update.finish_reason is None and matcher.matched is None:
                if piece:
                    yield TextUpdate(text=piece)
                continue
            if update.finish_reason is FinishReason.ERROR:
                if piece:
                    yield TextUpdate(text=piece)
                raise update_error(update)
            if update.finish_reason is FinishReason.CANCELLED:
                raise UnavailableError(
                    update.error_message or "the request was cancelled by the server.",
                    reason=update.error_reason or Reason.CANCELLED,
                )
            if matcher.matched is None:
                piece += matcher.push(detokenizer.finish())
            if matcher.matched is None:
                piece += matcher.finish()
            yield _last(update, piece, request, tokens_count, matched=matcher.matched is not None)
            return
    raise InternalError("the engine ended a sequence without saying why.")


def _last(
    update: SequenceUpdate,
    piece: str,
    request: GenerateRequest,
    tokens_count: int,
    *,
    matched: bool,
) -> TextUpdate:
    # after a stop string the engine has not said what was used: count it here
    finished = update.finish_reason is not None
    usage = Usage(
        prompt_tokens=update.prompt_tokens if finished else len(request.prompt_token_ids),
        cached_tokens=update.cached_tokens,
        completion_tokens=update.completion_tokens if finished else tokens_count,
    )
    length = update.finish_reason is FinishReason.LENGTH and not matched
    return TextUpdate(text=piece, finish_reason="length" if length else "stop", usage=usage)
