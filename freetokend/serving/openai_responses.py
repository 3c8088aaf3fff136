"""Response bodies of the two generation endpoints, whole and as chunks; dictionaries, no logic."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from freetokend.serving.generation import Usage


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseShape:
    """What both endpoints share in a response: id, creation time (Unix seconds), model."""

    response_id: str
    created_s: int
    model: str
    chat: bool

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.response_id,
            "object": kind,
            "created": self.created_s,
            "model": self.model,
        }

    def whole(self, choices: Sequence[tuple[str, str]], usage: Usage) -> dict[str, Any]:
        """The body of a response that is not streamed; `choices` are (text, finish_reason)."""
        kind = "chat.completion" if self.chat else "text_completion"
        return {
            **self._head(kind),
            "choices": [
                self._choice(index, text, finish_reason)
                for index, (text, finish_reason) in enumerate(choices)
            ],
            "usage": usage_body(usage),
        }

    def _choice(self, index: int, text: str, finish_reason: str) -> dict[str, Any]:
        content: dict[str, Any]
        if self.chat:
            content = {"message": {"role": "assistant", "content": text, "refusal": None}}
        else:
            content = {"text": text}
        return {"index": index, **content, "logprobs": None, "finish_reason": finish_reason}

    def chunk(
        self,
        index: int,
        text: str | None,
        finish_reason: str | None = None,
        *,
        first: bool = False,
        with_usage: bool = False,
    ) -> dict[str, Any]:
        """One streamed choice. `first` opens a chat message (role); `text` None adds no content.

        With `stream_options.include_usage` every chunk but the last one carries `usage: null`.
        """
        content: dict[str, Any]
        if self.chat:
            delta: dict[str, Any] = {"role": "assistant"} if first else {}
            if text is not None:
                delta["content"] = text
            content = {"delta": delta}
        else:
            content = {"text": text or ""}
        body: dict[str, Any] = {
            **self._head("chat.completion.chunk" if self.chat else "text_completion"),
            "choices": [
                {"index": index, **content, "logprobs": None, "finish_reason": finish_reason}
            ],
        }
        if with_usage:
            body["usage"] = None
        return body

    def usage_chunk(self, usage: Usage) -> dict[str, Any]:
        """The chunk with the counts, sent once before [DONE] when the client asked for it."""
        return {
            **self._head("chat.completion.chunk" if self.chat else "text_completion"),
            "choices": [],
            "usage": usage_body(usage),
        }


def usage_body(usage: Usage) -> dict[str, Any]:
    """`usage` as OpenAI writes it."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def sse(body: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return (
        b"data: " + json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"
    )
