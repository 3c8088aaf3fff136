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

_UNAVAILABLE = frozenset(
    {Reason.QUEUE_FULL, Reason.LOADING, Reason.DRAINING, Reason.ENGINE_UNAVAILABLE}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Token counts of one sequence, or of all those of a request, so far."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0

    def after(self, update: SequenceUpdate) -> Usage:
        """The counts of a sequence once `update` has arrived as well."""
        # Only the last update is sure to say what was used, and it counts the stop token too.
        delivered_tokens = self.completion_tokens + len(update.token_ids)
        return Usage(
            prompt_tokens=self.prompt_tokens,
            cached_tokens=max(self.cached_tokens, update.cached_tokens),
            completion_tokens=max(delivered_tokens, update.completion_tokens),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TextUpdate:
    """New text (maybe none) and the counts up to it; the last one has `finish_reason`.

    `finish_reason` is "stop" or "length".
    """

    text: str
    usage: Usage
    finish_reason: str | None = None


def update_error(update: SequenceUpdate) -> FreetokenError:
    """The error of an ERROR or CANCELLED update, as the class its reason belongs to."""
    if update.finish_reason is FinishReason.CANCELLED:
        # We cancel only what nobody reads any more: here the engine dropped it by itself.
        return UnavailableError("the engine dropped the request; send it again", retry_after_s=1.0)
    reason = update.error_reason or Reason.INTERNAL
    if reason in {Reason.INVALID_REQUEST, Reason.CONTEXT_LENGTH_EXCEEDED}:
        return InvalidInputError(update.error_message, reason=reason)
    if reason in _UNAVAILABLE:
        return UnavailableError(update.error_message, reason=reason, retry_after_s=1.0)
    return InternalError(update.error_message, reason=reason)


async def generate_text(
    gateway: EngineGateway, text: ModelText, request: GenerateRequest, stop: tuple[str, ...]
) -> AsyncGenerator[TextUpdate, None]:
    """Stream a sequence as text; the first update comes when it is submitted, without text.

    Raises what `EngineGateway.generate` raises, and the error of an ERROR update, after the text
    and the counts up to it. A stop string ends the sequence on the engine too. Closing the
    iterator cancels.
    """
    detokenizer = IncrementalDetokenizer(text.decode, context_ids=request.prompt_token_ids[-4:])
    matcher = StopMatcher(stop)
    usage = Usage(prompt_tokens=len(request.prompt_token_ids))
    async with aclosing(gateway.generate(request)) as updates:
        yield TextUpdate(text="", usage=usage)
        async for update in updates:
            usage = usage.after(update)
            piece = matcher.push(detokenizer.push(update.token_ids))
            ended = update.finish_reason in {FinishReason.STOP, FinishReason.LENGTH}
            if ended:
                piece += matcher.push(detokenizer.finish())
                piece += matcher.finish()
            if matcher.matched is not None:
                await updates.finish()  # or the sequence would count as one that nobody wanted
            if ended or matcher.matched is not None:
                length = update.finish_reason is FinishReason.LENGTH and matcher.matched is None
                reason = "length" if length else "stop"
                yield TextUpdate(text=piece, usage=usage, finish_reason=reason)
                return
            yield TextUpdate(text=piece, usage=usage)
            if update.finish_reason is not None:
                raise update_error(update)
    raise InternalError("the engine ended a sequence without saying why.")
