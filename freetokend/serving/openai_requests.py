"""What OpenAI clients may send, checked field by field; nothing is swallowed.

A documented field that this version does not serve is refused by name unless it has its neutral
value. Unknown fields are left alone (clients send private ones).
"""

from __future__ import annotations

import json
import re
from typing import Any, Final, Literal, Never

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from freetokend.core.errors import InvalidInputError

MAX_STOP_COUNT: Final = 16
MAX_CHOICES_COUNT: Final = 16
MAX_PROMPTS_COUNT: Final = 64

# \ud800 to \udfff as an escape: common as a pair (a character beyond the first 65536), rarely alone
_SURROGATE_ESCAPE: Final = re.compile(r"\\u[dD][89a-fA-F]")
_LONE_SURROGATE: Final = re.compile("[\ud800-\udfff]")

# field -> values that ask for nothing
_NEUTRAL_CHAT: Final[dict[str, tuple[Any, ...]]] = {
    "audio": (None,),
    "frequency_penalty": (None, 0),
    "function_call": (None, "none"),
    "functions": (None, []),
    "logit_bias": (None, {}),
    "logprobs": (None, False),
    "modalities": (None, ["text"]),
    "prediction": (None,),
    "presence_penalty": (None, 0),
    "reasoning_effort": (None,),
    "repetition_penalty": (None, 1),
    "response_format": (None, {"type": "text"}),
    "tool_choice": (None, "none", "auto"),
    "tools": (None, []),
    "top_logprobs": (None, 0),
    "web_search_options": (None,),
}
_NEUTRAL_COMPLETION: Final[dict[str, tuple[Any, ...]]] = {
    "best_of": (None, 1),
    "echo": (None, False),
    "frequency_penalty": (None, 0),
    "logit_bias": (None, {}),
    "logprobs": (None,),
    "presence_penalty": (None, 0),
    "repetition_penalty": (None, 1),
    "suffix": (None, ""),
}


class _Strict(BaseModel):
    # strict: "true" is not True and "5" is not 5; ints are still accepted where floats are meant
    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)


class ContentPart(_Strict):
    """One part of a message; only text is served."""

    type: str
    text: str | None = None


class Message(_Strict):
    """One message of a conversation."""

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None


class StreamOptions(_Strict):
    """`include_usage` adds one usage chunk before [DONE]."""

    include_usage: bool | None = None


class _Generation(_Strict):
    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1, le=2**31 - 1)
    min_p: float | None = Field(default=None, ge=0, le=1)
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**64)
    n: int | None = Field(default=None, ge=1, le=MAX_CHOICES_COUNT)
    stop: str | list[str] | None = Field(default=None)
    max_tokens: int | None = Field(default=None, ge=1)
    ignore_eos: bool | None = None

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a chunk that holds the counts."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def stop_strings(self) -> tuple[str, ...]:
        """Stop strings as a tuple; raises InvalidInputError for an empty or an endless list."""
        stop = [self.stop] if isinstance(self.stop, str) else list(self.stop or ())
        if len(stop) > MAX_STOP_COUNT:
            raise InvalidInputError(
                f"stop holds {len(stop)} strings; at most {MAX_STOP_COUNT} are allowed.",
                param="stop",
            )
        if any(not text for text in stop):
            raise InvalidInputError("stop holds an empty string. Leave it out.", param="stop")
        return tuple(stop)


class ChatRequest(_Generation):
    """Body of POST /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)

    def output_limit_tokens(self) -> int | None:
        """The newer name wins when both are given."""
        return self.max_completion_tokens or self.max_tokens


class CompletionRequest(_Generation):
    """Body of POST /v1/completions."""

    prompt: str | list[str] | list[int] | list[list[int]]

    def output_limit_tokens(self) -> int | None:
        """As asked; None leaves it to the servable context."""
        return self.max_tokens

    def prompts(self) -> list[str | list[int]]:
        """The prompts, one a choice; raises InvalidInputError when there are none or too many."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        if not prompt:
            raise InvalidInputError(
                "prompt is an empty list. Send text or token ids.", param="prompt"
            )
        if isinstance(prompt[0], int):
            return [[int(token_id) for token_id in prompt]]
        if len(prompt) > MAX_PROMPTS_COUNT:
            raise InvalidInputError(
                f"prompt holds {len(prompt)} prompts; at most {MAX_PROMPTS_COUNT} are allowed.",
                param="prompt",
            )
        return list(prompt)


def _refuse_constant(name: str) -> Never:
    raise InvalidInputError(
        f"the body holds {name}, which is not a JSON number. Send a finite one."
    )


def _has_lone_surrogate(value: Any) -> bool:
    open_values = [value]
    while open_values:
        item = open_values.pop()
        if isinstance(item, str) and _LONE_SURROGATE.search(item):
            return True
        if isinstance(item, list):
            open_values += item
        elif isinstance(item, dict):
            open_values += item.keys()
            open_values += item.values()
    return False


def _refuse_lone_surrogates(data: dict[str, Any]) -> None:
    # JSON can write half a UTF-16 pair; it is no character, so no tokenizer takes it
    for field, value in data.items():
        if _has_lone_surrogate([field, value]):
            name = ascii(field)[1:-1]
            raise InvalidInputError(
                f"{name} holds a lone surrogate (\\ud800 to \\udfff without its other half), which "
                "is no character. Send both halves, or \\ufffd in its place.",
                param=name,
            )


def _parse_json(body: bytes) -> dict[str, Any]:
    try:
        text = body.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InvalidInputError(f"the body is not UTF-8 (byte {error.start}).") from None
    try:
        data = json.loads(text, parse_constant=_refuse_constant)
    except RecursionError:
        raise InvalidInputError("the body is nested too deeply.") from None
    except ValueError as error:
        raise InvalidInputError(f"the body is not valid JSON: {error}.") from None
    if not isinstance(data, dict):
        raise InvalidInputError("the body must be a JSON object.")
    if _SURROGATE_ESCAPE.search(text):
        _refuse_lone_surrogates(data)
    return data


def _describe(error: ValidationError) -> InvalidInputError:
    # The first complaint, by the path the client wrote; pydantic adds union arms, which are noise.
    first = error.errors(include_url=False, include_context=False)[0]
    path: list[str] = []
    for step in first["loc"]:
        if isinstance(step, int):
            path.append(f"[{step}]")
        elif "[" not in step and step not in {"str", "int"}:
            path.append(step if not path else f".{step}")
    param = "".join(path)
    return InvalidInputError(f"{param or 'body'}: {first['msg']}.", param=param or None)


def _refuse_unserved(data: dict[str, Any], neutral: dict[str, tuple[Any, ...]]) -> None:
    for field, values in neutral.items():
        if field in data and not any(
            data[field] == value and isinstance(data[field], bool) == isinstance(value, bool)
            for value in values
        ):
            raise InvalidInputError(
                f"{field} is not served by this version. Leave it out or send its neutral value.",
                param=field,
            )


def _refuse_options_without_stream(request: ChatRequest | CompletionRequest) -> None:
    if request.stream_options is not None and not request.stream:
        raise InvalidInputError(
            "stream_options is for streams only. Leave it out or send stream: true.",
            param="stream_options",
        )


def parse_chat_request(body: bytes) -> ChatRequest:
    """Raises InvalidInputError naming the field."""
    data = _parse_json(body)
    _refuse_unserved(data, _NEUTRAL_CHAT)
    try:
        request = ChatRequest.model_validate(data)
    except ValidationError as error:
        raise _describe(error) from None
    _refuse_options_without_stream(request)
    return request


def parse_completion_request(body: bytes) -> CompletionRequest:
    """Raises InvalidInputError naming the field."""
    data = _parse_json(body)
    _refuse_unserved(data, _NEUTRAL_COMPLETION)
    try:
        request = CompletionRequest.model_validate(data)
    except ValidationError as error:
        raise _describe(error) from None
    _refuse_options_without_stream(request)
    return request


_ROLES: Final[dict[str, Literal["system", "user", "assistant"]]] = {
    "system": "system",
    "developer": "system",  # the newer name of the same thing
    "user": "user",
    "assistant": "assistant",
}


def _content_text(message: Message, where: str) -> str:
    if message.content is None:
        if message.role == "assistant":
            return ""
        raise InvalidInputError(f"{where}.content is missing.", param=f"{where}.content")
    if isinstance(message.content, str):
        return message.content
    texts: list[str] = []
    for index, part in enumerate(message.content):
        if part.type != "text" or part.text is None:
            raise InvalidInputError(
                f"{where}.content[{index}] is of type {part.type!r}; this model reads text only.",
                param=f"{where}.content[{index}]",
            )
        texts.append(part.text)
    return "\n".join(texts)


def template_messages(messages: list[Message]) -> list[dict[str, str]]:
    """Messages as templates expect them: known roles, text content, one leading system message.

    Raises InvalidInputError for an unknown role, a tool message or a part that is not text.
    """
    out: list[dict[str, str]] = []
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        role = _ROLES.get(message.role)
        extra = message.model_extra or {}
        if message.role in {"tool", "function"} or extra.get("tool_calls"):
            raise InvalidInputError(
                f"{where} belongs to a tool call; this version does not serve tools.", param=where
            )
        if role is None:
            raise InvalidInputError(
                f"{where}.role is {message.role!r}; known are {', '.join(_ROLES)}.",
                param=f"{where}.role",
            )
        text = _content_text(message, where)
        leading = all(earlier["role"] == "system" for earlier in out)
        if role == "system" and out and leading:
            out[0]["content"] += "\n\n" + text
        else:
            out.append({"role": role, "content": text})
    return out
