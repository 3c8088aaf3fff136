"""Token ids to text, piece by piece: never half a character, never a stop string's beginning.

`IncrementalDetokenizer` yields text as soon as it is certain; `StopMatcher` holds back a tail that
could still become a stop string. Concatenated pieces equal the text of decoding all ids at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]

_REPLACEMENT = "\ufffd"
# How many undecoded ids may pile up while they decode to an incomplete character. A UTF-8
# character is at most 4 bytes, one id each in the worst case; beyond that the bytes are invalid
# and waiting longer cannot help.
_MAX_PENDING_TOKENS = 8


class IncrementalDetokenizer:
    """Decodes a growing list of ids with a window of context (merges can depend on neighbours).

    State: `_prefix` ids already turned into text and kept as context, `_pending` ids not yet.
    """

    def __init__(self, decode: Decode, *, context_ids: Sequence[int] = ()) -> None:
        self._decode = decode
        self._prefix: list[int] = list(context_ids)
        self._prefix_text = decode(self._prefix) if self._prefix else ""
        if self._prefix_text.endswith(_REPLACEMENT):
            # half a character at the border belongs to neither side: start without context
            self._prefix, self._prefix_text = [], ""
        self._pending: list[int] = []

    def push(self, token_ids: Sequence[int]) -> str:
        """Add ids; returns the text that is now certain (maybe empty)."""
        out: list[str] = []
        for token_id in token_ids:
            self._pending.append(token_id)
            text = self._decode([*self._prefix, *self._pending])
            fresh = text[len(self._prefix_text) :]
            complete = not fresh.endswith(_REPLACEMENT)
            if fresh and (complete or len(self._pending) >= _MAX_PENDING_TOKENS):
                out.append(fresh)
                self._advance()
        return "".join(out)

    def finish(self) -> str:
        """What is left at the end, incomplete characters as U+FFFD."""
        text = self._decode([*self._prefix, *self._pending])
        fresh = text[len(self._prefix_text) :]
        self._pending.clear()
        return fresh

    def _advance(self) -> None:
        # The ids just printed become the context of the next ones.
        self._prefix = self._pending
        self._pending = []
        self._prefix_text = self._decode(self._prefix)


class StopMatcher:
    """Cuts the text at the first stop string, wherever piece borders fall."""

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = tuple(text for text in stop if text)
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """Returns the text that cannot be part of a stop string; sets `matched` when one is hit."""
        if self.matched is not None:
            return ""
        if not self._stop:
            return text
        buffer = self._held + text
        hits = [(at, stop) for stop in self._stop if (at := buffer.find(stop)) >= 0]
        if hits:
            at, self.matched = min(hits, key=lambda hit: (hit[0], -len(hit[1])))
            self._held = ""
            return buffer[:at]
        keep = self._possible_start_length(buffer)
        self._held = buffer[len(buffer) - keep :]
        return buffer[: len(buffer) - keep]

    def finish(self) -> str:
        """The held tail, which turned out not to be a stop string."""
        tail, self._held = self._held, ""
        return tail

    def _possible_start_length(self, buffer: str) -> int:
        longest = 0
        for stop in self._stop:
            for length in range(min(len(stop) - 1, len(buffer)), longest, -1):
                if buffer.endswith(stop[:length]):
                    longest = length
                    break
        return longest
