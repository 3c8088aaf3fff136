"""One line per finished HTTP generation request; sizes and times, never texts."""

from __future__ import annotations

from freetokend.core import logs
from freetokend.core.errors import Reason, reaction

_log = logs.logger(__name__)


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
        """Log it; what went wrong by our doing is a warning, a client's mistake is not."""
        ours = outcome != "ok" and reaction(Reason(outcome)).http_status >= 500
        log = _log.warning if ours else _log.info
        log(
            "request-ended",
            endpoint=endpoint,
            outcome=outcome,
            duration_s=duration_s,
            first_token_s=first_token_s,
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
        )
