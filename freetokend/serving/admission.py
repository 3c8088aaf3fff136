"""From a checked request body to requests for the engine, or a refusal with both numbers."""

from __future__ import annotations

import secrets
from dataclasses import dataclass

from freetokend.core.errors import InternalError, InvalidInputError, NotFoundError, Reason
from freetokend.link.messages import (
    EngineDescription,
    EngineGateway,
    EngineSnapshot,
    EngineState,
    GenerateRequest,
    Sampling,
)
from freetokend.serving.model_text import ModelText
from freetokend.serving.openai_requests import ChatRequest, CompletionRequest, template_messages

_DEFAULT_COMPLETION_TOKENS = 16  # what the completions API has always defaulted to
_SEED_SPACE = 2**64


@dataclass(frozen=True, slots=True, kw_only=True)
class Admitted:
    """What one HTTP request becomes: one engine request per choice, and its stop strings.

    The requests are in the order of the prompts, `choices_per_prompt_count` for each.
    """

    requests: tuple[GenerateRequest, ...]
    choices_per_prompt_count: int
    stop: tuple[str, ...]


def known_description(snapshot: EngineSnapshot) -> EngineDescription | None:
    """What the engine that is up said of itself; None while none is."""
    up = snapshot.state in {EngineState.READY, EngineState.DRAINING}
    return snapshot.description if up else None


def admitting_description(gateway: EngineGateway) -> EngineDescription:
    """The description of an engine that takes requests.

    Raises what `EngineGateway.check_admission` raises when none does. To be called in the event
    loop, as everything of the gateway.
    """
    gateway.check_admission()
    description = known_description(gateway.snapshot())
    if description is None:
        raise InternalError("the engine takes requests but has not said what it can serve.")
    return description


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
            f"your {param} resulted in {prompt_tokens} tokens. Please reduce the length of the "
            f"{param}.",
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
    choices_count = request.n or 1
    out: list[GenerateRequest] = []
    for prompt in prompts:
        if not prompt:
            raise InvalidInputError(
                f"{param} is empty: there is nothing to go on from.", param=param
            )
        limit_tokens = _output_limit_tokens(
            len(prompt), asked_tokens, servable_context_tokens, param
        )
        for _ in range(choices_count):
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
    return Admitted(
        requests=tuple(out), choices_per_prompt_count=choices_count, stop=request.stop_strings()
    )


def admit_chat(request: ChatRequest, text: ModelText, description: EngineDescription) -> Admitted:
    """Raises InvalidInputError or NotFoundError naming the field. CPU work, for any thread."""
    check_model(request.model, description.model)
    prompt = text.render_chat(template_messages(request.messages))
    return _requests(request, [prompt], text, description.servable_context_tokens, param="messages")


def admit_completion(
    request: CompletionRequest, text: ModelText, description: EngineDescription
) -> Admitted:
    """Raises InvalidInputError or NotFoundError naming the field. CPU work, for any thread."""
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
