"""Keeps user text from being read as special tokens.

A template is rendered to text and the text is tokenized, so a user who writes `<|im_end|>` would
end their own turn. `SpecialTextGuard` takes such text out before rendering, leaves a placeholder,
and the encoder puts it back as ordinary characters.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

# A placeholder is built from private-use characters: no tokenizer or template gives them a
# meaning, and text that holds the opening one itself is guarded too.
_OPEN: Final = "\ue000"
_CLOSE: Final = "\ue001"


class SpecialTextGuard:
    """Remembers what was taken out of one request's messages."""

    def __init__(self, special_texts: Sequence[str]) -> None:
        known = sorted({*special_texts, _OPEN}, key=len, reverse=True)
        self._pattern = re.compile("|".join(re.escape(text) for text in known))
        self._taken: list[str] = []

    def protect(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """The messages with every special text in a string replaced by a placeholder."""
        return [self._protect(dict(message)) for message in messages]

    def _protect(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._pattern.sub(self._take, value)
        if isinstance(value, dict):
            return {key: self._protect(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self._protect(item) for item in value]
        return value

    def _take(self, match: re.Match[str]) -> str:
        self._taken.append(match.group())
        return f"{_OPEN}{len(self._taken) - 1}{_CLOSE}"

    def pieces(self, rendered: str) -> list[tuple[str, bool]]:
        """The rendered text in order as (text, is_users): user pieces are never special."""
        out: list[tuple[str, bool]] = []
        for index, piece in enumerate(re.split(f"{_OPEN}(\\d+){_CLOSE}", rendered)):
            text = self._taken[int(piece)] if index % 2 else piece
            if text:
                out.append((text, bool(index % 2)))
        return out
