"""May this request enter? Decided once, on arrival, with both numbers in every refusal."""

from __future__ import annotations

from dataclasses import dataclass

from freetokend.core.errors import Reason


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionState:
    """What admission looks at: the servable context and how full the queue is."""

    servable_context_tokens: int
    waiting_count: int
    max_waiting_count: int
    draining: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Admitted:
    """The request may wait; `max_new_tokens` is what was asked, clamped to what remains."""

    max_new_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """The request is answered with this reason and nothing else happens to it."""

    reason: Reason
    message: str
    retry_after_s: float | None = None


def decide_admission(
    prompt_tokens: int, max_new_tokens: int, state: AdmissionState
) -> Admitted | Refused:
    """A permanent refusal (too large, malformed) comes before a temporary one (queue, drain).

    The servable context counts prompt and completion together; asking for more new tokens than
    remain is not an error, having no room for even one is.
    """
    if prompt_tokens < 1:
        return Refused(reason=Reason.INVALID_REQUEST, message="The prompt has no tokens.")
    if max_new_tokens < 1:
        return Refused(
            reason=Reason.INVALID_REQUEST,
            message=f"max_new_tokens is {max_new_tokens}; it must be at least 1.",
        )
    remaining_tokens = state.servable_context_tokens - prompt_tokens
    if remaining_tokens < 1:
        return Refused(
            reason=Reason.CONTEXT_LENGTH_EXCEEDED,
            message=(
                f"The prompt has {prompt_tokens} tokens, but one request can have "
                f"{state.servable_context_tokens} tokens here, prompt and completion together. "
                "Shorten the prompt."
            ),
        )
    if state.draining:
        return Refused(
            reason=Reason.DRAINING,
            message="The service is stopping and takes no new requests.",
            retry_after_s=5.0,
        )
    if state.waiting_count >= state.max_waiting_count:
        return Refused(
            reason=Reason.QUEUE_FULL,
            message=(
                f"{state.waiting_count} requests are waiting already, the limit is "
                f"{state.max_waiting_count}. Retry later."
            ),
            retry_after_s=1.0,
        )
    return Admitted(max_new_tokens=min(max_new_tokens, remaining_tokens))
