"""The card of the simulated machine: who holds how much of it, and what an allocation can get."""

from __future__ import annotations

from dataclasses import dataclass, field

from freetokend.core.units import GIB, MIB
from freetokend.policy.vram_budget import VramFacts

SHAPE = VramFacts(
    free_bytes=None,
    own_bytes=0,
    dense_bytes=1536 * MIB,
    workspace_bytes=512 * MIB,
    state_bytes=0,
    graph_bytes=128 * MIB,
    record_bytes=18 * MIB,
    experts_count=1024,
    experts_per_layer_count=32,
    top_k=8,
    kv_page_bytes=3 * MIB,
    kv_page_tokens=32,
    model_context_tokens=32_768,
    max_running_count=4,
)
FIXED_BYTES = SHAPE.dense_bytes + SHAPE.workspace_bytes + SHAPE.state_bytes + SHAPE.graph_bytes
# What a process has of the card as soon as it uses it, asleep or not.
CONTEXT_BYTES = 300 * MIB


@dataclass(slots=True)
class Card:
    """Every byte is free, another process's, or the engine's. `pieces_bytes`: the largest
    allocation that succeeds, whatever is free (fragmentation)."""

    total_bytes: int = 24 * GIB
    others_bytes: dict[str, int] = field(default_factory=dict)
    engine_bytes: int = 0
    pieces_bytes: int | None = None

    @property
    def free_bytes(self) -> int:
        return self.total_bytes - self.engine_bytes - sum(self.others_bytes.values())

    def take(self, name: str, size_bytes: int) -> None:
        """Another process wants to hold so much; it gets what is free."""
        held_bytes = self.others_bytes.get(name, 0)
        more_bytes = min(size_bytes - held_bytes, self.free_bytes)
        self.others_bytes[name] = held_bytes + more_bytes
        if not self.others_bytes[name]:
            del self.others_bytes[name]

    def allocate(self, size_bytes: int) -> bool:
        """For the engine: all of it or nothing."""
        if size_bytes > self.free_bytes:
            return False
        if self.pieces_bytes is not None and size_bytes > self.pieces_bytes:
            return False
        self.engine_bytes += size_bytes
        return True

    def release(self, size_bytes: int) -> None:
        self.engine_bytes -= size_bytes
