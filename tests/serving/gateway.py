"""An engine's gateway inside the test's process: answers as the test says, without waiting."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from freetokend.core.errors import UnavailableError
from freetokend.link.messages import (
    EngineDescription,
    EngineSnapshot,
    EngineState,
    EngineStats,
    FinishReason,
    GenerateRequest,
    SequenceUpdate,
)

CONTEXT_TOKENS = 200

DESCRIPTION = EngineDescription(
    model="tiny",
    device="cpu",
    device_name="none",
    backend="cpu",
    backend_reason="a test",
    kernel="none",
    threads_count=1,
    servable_context_tokens=CONTEXT_TOKENS,
    kv_bytes=0,
    pool_bytes=0,
    pool_page_bytes=4096,
    pool_reattached=False,
    attach_s=0.0,
    load_s=0.0,
    load_bytes_per_s=0.0,
    first_token_s=0.0,
    layers_count=1,
    moe_layers_count=1,
    experts_per_layer_count=1,
    bytes_per_expert=0,
    max_running_count=1,
    numerics="exact",
    expert_format="",
    dense_formats=(),
    cpus=(),
    threads_reason="",
)

Answer = Callable[[GenerateRequest], AsyncIterator[SequenceUpdate]]


async def echo(request: GenerateRequest) -> AsyncIterator[SequenceUpdate]:
    """The prompt, one token an update, up to the limit."""
    ids = request.prompt_token_ids[: request.max_new_tokens]
    for token_id in ids:
        yield SequenceUpdate(request_id=request.request_id, token_ids=(token_id,))
    yield SequenceUpdate(
        request_id=request.request_id,
        finish_reason=FinishReason.STOP,
        prompt_tokens=len(request.prompt_token_ids),
        completion_tokens=len(ids),
    )


class _Stream:
    """An iterator of updates that notes that it was closed."""

    def __init__(self, updates: AsyncIterator[SequenceUpdate], gateway: InstantGateway) -> None:
        self._updates = updates
        self._gateway = gateway

    def __aiter__(self) -> _Stream:
        return self

    async def __anext__(self) -> SequenceUpdate:
        return await anext(self._updates)

    async def aclose(self) -> None:
        self._gateway.open_count -= 1

    async def finish(self) -> None:
        """Whoever finishes closes as well."""


@dataclass
class InstantGateway:
    """An `EngineGateway`. `refusal` is raised by every admission, `state` is what it shows."""

    answer: Answer = echo
    refusal: UnavailableError | None = None
    state: EngineState = EngineState.READY
    requests: list[GenerateRequest] = field(default_factory=list)
    open_count: int = 0
    stats: EngineStats = field(default_factory=EngineStats)

    def snapshot(self) -> EngineSnapshot:
        up = self.state in {EngineState.READY, EngineState.DRAINING}
        return EngineSnapshot(
            state=self.state,
            state_since_s=0.0,
            model="tiny",
            description=DESCRIPTION if up else None,
            stats=self.stats,
        )

    def check_admission(self) -> None:
        if self.refusal is not None:
            raise self.refusal

    def generate(self, request: GenerateRequest) -> _Stream:
        self.check_admission()
        self.requests.append(request)
        self.open_count += 1
        return _Stream(self.answer(request), self)

    async def changed(self, generation: int) -> int:
        await asyncio.Event().wait()
        return generation
