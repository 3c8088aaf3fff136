"""How many tokens a step and a sweep may have. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from freetokend.link.messages import EngineSettings

# Room for prompts beside a full batch of decoding requests; below it a prompt would crawl.
LEAST_PREFILL_TOKENS: Final = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepLimits:
    """Of prompts: from how many tokens on they are swept, and the most of one sweep."""

    from_tokens: int
    tokens: int


def raised_step_tokens(settings: EngineSettings) -> tuple[int, tuple[str, ...]]:
    """As asked, or as many as a full batch needs, and a note of that."""
    least = settings.max_running_count + LEAST_PREFILL_TOKENS
    if settings.step_tokens >= least:
        return settings.step_tokens, ()
    note = (
        f"engine.step_tokens was raised from {settings.step_tokens} to {least}: one token of each "
        f"of {settings.max_running_count} running requests and {LEAST_PREFILL_TOKENS} of a prompt."
    )
    return least, (note,)
