"""From a checked request body to requests for the engine, or a refusal with both numbers."""

from __future__ import annotations

import secrets
from dataclasses import dataclass

from freetokend.core.errors import InvalidInputError, NotFoundError, Reason, UnavailableError
from freetokend.link.messages import (
    EngineDescription,
    EngineSnapshot,
    EngineState,
    GenerateRequest,
    Sampling,
)
from freetokend.serving.model_text import ModelText
from freetokend.serving.openai_requests import ChatRequest, CompletionRequest, template_messages

_DEFAULT_COMPLETION_TOKENS = 16  # what the completions API has always defaulted to
_SEED_SPACE = 2**64

_NOT_READY = {
    EngineState.STARTING: (Reason.LOADING, "the model is being loaded"),
    EngineState.LOADING: (Reason.LOADING, "the model is being loaded"),
    EngineState.RESTARTING: (Reason.ENGINE_UNAVAILABLE, "the engine is being restarted"),
    EngineState.DRAINING: (Reason.DRAINING, "the server is draining and takes no new requests"),
    EngineState.STOPPED: (Reason.DRAINING, "the server is stopping"),
    EngineState.FAILED: (Reason.ENGINE_UNAVAILABLE, "the engine has failed"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Admitted:
    """What one HTTP request becomes: one engine request per choice, and its stop strings."""

    requests: tuple[GenerateRequest, ...]
    stop: tuple[str, ...]


def ready_description(snapshot: EngineSnapshot) -> EngineDescription:
    """The engine's description. Raises UnavailableError with a truthful cause when it is not up."""
    if snapshot.state is EngineState.READY and snapshot.description is not None:
        return snapshot.description
    reason, text = _NOT_READY.get(
        snapshot.state, (Reason.ENGINE_UNAVAILABLE, "the engine is not up")
    )
    cause = f" ({snapshot.cause})" if snapshot.cause else ""
    raise UnavailableError(
        f"{text}{cause}. Try again in a few seconds.", reason=reason, retry_after_s=2.0
    )


def check_model(asked: str | None, served: str) -> None:
    """One model is served: its id, or no id at all. Raises NotFoundError naming both."""
    if asked is not None and asked != served:
        raise NotFoundError(
            f"the model {asked!r} is not served here; {served!r} is.",
            reason=Reason.MODEL_NOT_FOUND,
            param="model",
        )


def _sampling(request: ChatRequest | CompletionRequest, choice_index: int) -> Sampling:
    seed = request.seed
    if seed is not None:
        # choices of one request must differ, yet repeat with the same seed
        seed = (seed + choice_index) % _SEED_SPACE
    return Sampling(
        temperature=1.0 if request.temperature is None else request.temperature,
        top_p=1.0 if request.top_p is None else request.top_p,
        top_k=max(request.top_k or 0, 0),
        min_p=request.min_p or 0.0,
        seed=seed,
    )


def _output_limit_tokens(
    prompt_tokens: int, asked_tokens: int | None, servable_context_tokens: int, param: str
) -> int:
    """The cap on new tokens: what was asked for, clamped to what remains of the context.

    Raises InvalidInputError (context_length_exceeded) only when nothing remains.
    """
    remaining_tokens = servable_context_tokens - prompt_tokens
    if remaining_tokens < 1:
        raise InvalidInputError(
            f"This model's maximum context length is {servable_context_tokens} tokens. However, "
            f"your messages resulted in {prompt_tokens} tokens. Please reduce the length of the "
            "messages.",
            reason=Reason.CONTEXT_LENGTH_EXCEEDED,
            param=param,
        )
    return min(asked_tokens or remaining_tokens, remaining_tokens)


def _requests(
    request: ChatRequest | CompletionRequest,
    prompts: list[tuple[int, ...]],
    text: ModelText,
    servable_context_tokens: int,
    param: str,
) -> Admitted:
    asked_tokens = request.output_limit_tokens()
    if asked_tokens is None and isinstance(request, CompletionRequest):
        asked_tokens = _DEFAULT_COMPLETION_TOKENS
    out: list[GenerateRequest] = []
    for prompt in prompts:
        if not prompt:
            raise InvalidInputError(
                f"{param} is empty: there is nothing to go on from.", param=param
            )
        limit_tokens = _output_limit_tokens(
            len(prompt), asked_tokens, servable_context_tokens, param
        )
        for _ in range(request.n or 1):
            out.append(
                GenerateRequest(
                    request_id=secrets.token_hex(12),
                    prompt_token_ids=prompt,
                    max_new_tokens=limit_tokens,
                    sampling=_sampling(request, len(out)),
                    stop_token_ids=text.eos_token_ids,
                    ignore_eos=bool(request.ignore_eos),
                )
            )
    return Admitted(requests=tuple(out), stop=request.stop_strings())


def admit_chat(request: ChatRequest, text: ModelText, snapshot: EngineSnapshot) -> Admitted:
    """Raises InvalidInputError, NotFoundError or UnavailableError; nothing was submitted then."""
    description = ready_description(snapshot)
    check_model(request.model, description.model)
    prompt = text.render_chat(template_messages(request.messages))
    return _requests(request, [prompt], text, description.servable_context_tokens, param="messages")


def admit_completion(
    request: CompletionRequest, text: ModelText, snapshot: EngineSnapshot
) -> Admitted:
    """Raises InvalidInputError, NotFoundError or UnavailableError; nothing was submitted then."""
    description = ready_description(snapshot)
    check_model(request.model, description.model)
    vocab_size = text.tokenizer.get_vocab_size(with_added_tokens=True)
    prompts: list[tuple[int, ...]] = []
    for prompt in request.prompts():
        if isinstance(prompt, str):
            prompts.append(text.encode_plain(prompt))
            continue
        if any(not 0 <= token_id < vocab_size for token_id in prompt):
            raise InvalidInputError(
                f"prompt holds a token id outside 0..{vocab_size - 1}.", param="prompt"
            )
        prompts.append(tuple(prompt))
    return _requests(request, prompts, text, description.servable_context_tokens, param="prompt")
