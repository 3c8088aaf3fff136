"""One line per finished HTTP generation request; sizes and times, never texts."""

from __future__ import annotations

from typing import Final

from freetokend.core import logs

_log = logs.logger(__name__)

_QUIET_OUTCOMES: Final = frozenset({"ok", "cancelled"})


class AccessLog:
    """Implements serving's `HttpObserver`."""

    def request_ended(
        self,
        *,
        endpoint: str,
        outcome: str,
        duration_s: float,
        first_token_s: float | None,
        prompt_tokens: int,
        completion_tokens: int,
    ) -> None:
        """Log it; what went wrong by our doing is a warning."""
        log = _log.info if outcome in _QUIET_OUTCOMES else _log.warning
        log(
            "request-ended",
            endpoint=endpoint,
            outcome=outcome,
            duration_s=duration_s,
            first_token_s=first_token_s,
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
        )
