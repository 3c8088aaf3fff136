"""Measurements of bandwidths seen from control: one at a time, waited for with progress."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from freetokend.core.errors import FreetokenError, Reason, UnavailableError
from freetokend.link.bandwidth_messages import (
    BandwidthMeasured,
    BandwidthMessage,
    BandwidthProgress,
    MeasureBandwidth,
)

# Beyond the limit of the work itself: a long step may be under way when it is asked for.
_ANSWER_MARGIN_S = 60.0


class BandwidthRequests:
    """Owner of the measurement there is; lives in the event loop."""

    def __init__(self) -> None:
        self._newest = 0
        self._run_id = ""
        self._measured: asyncio.Future[BandwidthMeasured] | None = None
        self._progress: Callable[[str], None] = lambda part: None

    async def measure(
        self,
        send: Callable[[MeasureBandwidth], None],
        *,
        parts: tuple[str, ...],
        limit_s: float,
        progress: Callable[[str], None],
    ) -> BandwidthMeasured:
        """Ask and wait. Raises `UnavailableError` (another one is under way, or no answer) and the
        engine's refusal."""
        if self._measured is not None:
            raise UnavailableError(
                "bandwidths are being measured already; wait until that has ended, which takes "
                "seconds, and try again",
                reason=Reason.QUEUE_FULL,
            )
        self._newest += 1
        self._run_id, self._progress = f"bandwidth-{self._newest}", progress
        self._measured = asyncio.get_running_loop().create_future()
        try:
            send(MeasureBandwidth(run_id=self._run_id, parts=parts, limit_s=limit_s))
            async with asyncio.timeout(limit_s + _ANSWER_MARGIN_S):
                measured = await self._measured
        except TimeoutError:
            raise UnavailableError(
                f"the engine did not answer within {limit_s + _ANSWER_MARGIN_S:g} s: it may be in "
                "a long step; see `freetokenctl status` and try again"
            ) from None
        finally:
            self._measured = None
        if measured.error_reason is not None:
            raise FreetokenError(measured.error_message, reason=measured.error_reason)
        return measured

    def told(self, message: BandwidthMessage) -> None:
        """What the engine tells; of measurements that nobody waits for it is dropped."""
        if self._measured is None or message.run_id != self._run_id:
            return
        if isinstance(message, BandwidthProgress):
            self._progress(message.part)
        elif not self._measured.done():
            self._measured.set_result(message)

    def fail(self, cause: str) -> None:
        """No answer will come any more."""
        if self._measured is not None and not self._measured.done():
            self._measured.set_exception(UnavailableError(f"{cause}; try again when it is ready"))
