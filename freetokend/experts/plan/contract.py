"""The plan call: what one MoE layer reads from the expert cache and what it changes there.

Three implementations agree in every integer, of state and of outputs: `oracle` (plain Python, the
readable statement), `native` (C++, arrays in host memory) and `triton_kernel` (arrays on a GPU).
Below, E is the number of experts of a layer, L of MoE layers, T tokens a call has room for, k
experts per token; expert_id = moe_layer_index * E + expert. The state is `ResidencyState`.

**plan(layer)**, the decode step of one MoE layer:

1. clock += 1; `now` is the new clock.
2. needed = distinct experts of rows [0, valid_tokens) of `routed`; negative numbers are no expert.
   Rows behind are padding: they touch nothing. pairs = entries of those rows that are experts.
   A number >= E is refused (InternalError, nothing has changed) or, on a GPU, which cannot refuse,
   counts as no expert and in REFUSED.
3. hits = needed experts that have a slot; m = number of the others, the misses.
   A hit's slot gets the key of a use (below).
4. evictable = slots in [0, slots_count) that are not held and hold no needed expert; empty ones
   count. bucket = min(buckets - 1, bit length of (ceil(pairs / needed) - 1)).
   q, the number of misses to fill:
     the layer is not fillable                  0
     else, the format has no CPU kernel         min(m, evictable)
     else, m = 0                                0
     else                   min(max(fill_count[bucket][min(m, M)], 1), m, evictable)
5. filled = the q misses with the greatest demanded_at, ties to the lower expert. victims = the q
   evictable slots that come first in victim order: empty ones, then the least
   slot_key - ticks_per_layer * layers_ahead, ties to the lower slot; layers_ahead = (layer of the
   slot's expert - layer - 1) mod L + 1. Both in ascending order are paired. The evicted have no
   slot any more, the filled have theirs, with the key of a use.
6. The misses that are not filled go to the CPU or, where there is no CPU kernel, are deferred: the
   caller runs what it has, sets the entries that are not DEFERRED to -1 and calls again until
   nothing is deferred. Slots of earlier rounds can then be evicted, so a round fills at least one
   expert unless every slot is held (or the layer is not fillable): that is the caller's to see.
7. Each needed expert that is not deferred: score = score_on_use(score, now), demanded_at = now.

The key of a use is key(new score, now) of the order; where the slot is held, that + HELD.

**reserve(layer)**, before prefill streams a layer: missing = the wanted experts (all, or those
where `wanted` is not 0) without a slot. Filled are the first min(missing, evictable) of them in
ascending order (none where the layer is not fillable), where no slot of this layer is evictable,
whoever lies there. They are paired as above, with key COLDEST. Then every wanted expert's slot
is held: key + HELD where it was not yet. What found no slot counts as DEFERRED. No clock, score
or demanded_at changes.

**release(layer)**, after the layer was computed for `tokens_count` tokens, `uses[e]` of which were
routed to e: clock += 1. An expert with uses > 0 gets score_on_prompt(score, now, uses, tokens).
Of the experts in held slots of this layer, the `kept_count` with most uses (> 0; ties to the
lower expert) get key(score, now) and demanded_at = now; the others the key they had before:
COLDEST if they were streamed. None of the layer's slots is held any more.

Only what is named changes; entries of lists behind their counts stay as they were.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Final, Protocol

import torch

from freetokend.core.errors import InternalError
from freetokend.policy.eviction import DecayedUse, Lru

# Entries of `physical` that are not slots.
CPU: Final = -1
NONE: Final = -2
DEFERRED: Final = -3

# What stands for the key of an empty slot: below COLDEST less any layer's distance.
EMPTY_RANK: Final = -(1 << 43)


class Stat(IntEnum):
    """Places in `stats`. All but the last three count distinct experts.

    reserve: HITS, MISSES, FILLS, EVICTIONS and DEFERRED, of wanted experts; the others 0.
    """

    HITS = 0
    MISSES = 1
    FILLS = 2
    CPU = 3
    EVICTIONS = 4
    DEFERRED = 5
    HIT_PAIRS = 6
    PAIRS = 7
    REFUSED = 8


# What the implementations without Python know.
KernelOrder = Lru | DecayedUse


def order_ticks(order: KernelOrder) -> tuple[int, int]:
    """(half_life_ticks, ticks_per_layer) as the kernels take them; LRU has half-life 0."""
    match order:
        case Lru():
            return (0, order.ticks_per_layer)
        case DecayedUse():
            return (order.half_life_ticks, order.ticks_per_layer)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanShape:
    """Sizes and facts that hold as long as the model does.

    cpu_kernel: whether the CPU can execute this weight format.
    """

    moe_layers_count: int
    experts_per_layer_count: int
    top_k: int
    tokens_capacity: int
    cpu_kernel: bool

    def __post_init__(self) -> None:
        if (
            min(
                self.moe_layers_count,
                self.experts_per_layer_count,
                self.top_k,
                self.tokens_capacity,
            )
            < 1
        ):
            raise InternalError(f"a plan needs sizes of at least 1, not {self}")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanInputs:
    """Tensors on the state's device, contiguous; addresses may be captured in a graph.

    routed: int32 [T, k], experts of the layer, negative: none
    valid_tokens: int32 [1], 0 to T
    fillable: int32 [L], not 0 where the layer's records can be filled (are pinned)
    fill_count: int32 [buckets, M + 1], fills by bucket and misses; at least one bucket
    """

    routed: torch.Tensor
    valid_tokens: torch.Tensor
    fillable: torch.Tensor
    fill_count: torch.Tensor

    def check(self, shape: PlanShape) -> None:
        """InternalError where a tensor is not what it has to be."""
        tokens, top_k = shape.tokens_capacity, shape.top_k
        require_int32("routed", self.routed, (tokens, top_k))
        require_int32("valid_tokens", self.valid_tokens, (1,))
        require_int32("fillable", self.fillable, (shape.moe_layers_count,))
        if self.fill_count.dim() != 2 or not self.fill_count.numel():
            raise InternalError(
                f"fill_count is {list(self.fill_count.shape)}; it must be [buckets, misses + 1]"
            )
        require_int32("fill_count", self.fill_count, tuple(self.fill_count.shape))


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOutputs:
    """Tensors on the state's device, contiguous; written by every call.

    physical: int32 [T, k], the slot of each routed expert, or CPU, NONE or DEFERRED
    fills: int32 [E, 2], (expert_id, slot), both ascending; fills_count: int32 [1]
    cpu: int32 [E], experts of the layer, ascending; cpu_count: int32 [1]
    stats: int64 [len(Stat)]
    """

    physical: torch.Tensor
    fills: torch.Tensor
    fills_count: torch.Tensor
    cpu: torch.Tensor
    cpu_count: torch.Tensor
    stats: torch.Tensor

    @classmethod
    def empty(cls, shape: PlanShape, device: torch.device | str = "cpu") -> PlanOutputs:
        """Outputs of the right sizes: nothing routed, empty lists."""

        def filled(size: tuple[int, ...], value: int = 0) -> torch.Tensor:
            return torch.full(size, value, dtype=torch.int32, device=device)

        experts = shape.experts_per_layer_count
        return cls(
            physical=filled((shape.tokens_capacity, shape.top_k), NONE),
            fills=filled((experts, 2), -1),
            fills_count=filled((1,)),
            cpu=filled((experts,), -1),
            cpu_count=filled((1,)),
            stats=torch.zeros(len(Stat), dtype=torch.int64, device=device),
        )

    def check(self, shape: PlanShape) -> None:
        """InternalError where a tensor is not what it has to be."""
        experts = shape.experts_per_layer_count
        require_int32("physical", self.physical, (shape.tokens_capacity, shape.top_k))
        require_int32("fills", self.fills, (experts, 2))
        require_int32("fills_count", self.fills_count, (1,))
        require_int32("cpu", self.cpu, (experts,))
        require_int32("cpu_count", self.cpu_count, (1,))
        require_ints("stats", self.stats, (len(Stat),), torch.int64)


class CachePlanner(Protocol):
    """An implementation over one `ResidencyState`; calls are queued in order where it lives.

    No call waits for the device or allocates once sizes have settled.
    """

    def plan(self, moe_layer_index: int, inputs: PlanInputs, outputs: PlanOutputs) -> None:
        """One MoE layer of a decode step."""
        ...

    def reserve(
        self,
        moe_layer_index: int,
        inputs: PlanInputs,
        outputs: PlanOutputs,
        *,
        wanted: torch.Tensor | None = None,
    ) -> None:
        """Slots for a layer, held until `release`. wanted: int32 [E]; None for every expert.

        Reads `fillable` alone of the inputs, and writes the fill list and statistics alone.
        """
        ...

    def release(
        self, moe_layer_index: int, uses: torch.Tensor, *, tokens_count: int, kept_count: int
    ) -> None:
        """The layer's slots are free again. uses: int32 [E], each at most tokens_count."""
        ...


def require_int32(name: str, tensor: torch.Tensor, size: tuple[int, ...]) -> None:
    """InternalError unless it is a contiguous int32 tensor of this size."""
    require_ints(name, tensor, size, torch.int32)


def require_ints(
    name: str, tensor: torch.Tensor, size: tuple[int, ...], dtype: torch.dtype
) -> None:
    """InternalError unless it is a contiguous tensor of this size and dtype."""
    if tensor.dtype is not dtype or tuple(tensor.shape) != size or not tensor.is_contiguous():
        raise InternalError(
            f"{name} of a plan call is {tensor.dtype} {list(tensor.shape)}; it must be a "
            f"contiguous {dtype} tensor of shape {list(size)}"
        )
