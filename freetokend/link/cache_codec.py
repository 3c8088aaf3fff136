"""The expert cache's part of link.proto to values and back; total as `codec` is."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, assert_never

from freetokend.api.link.v1 import link_pb2 as pb
from freetokend.core.cache_stats import Bandwidth, CacheCounters, LayerCounters, SplitCounters
from freetokend.link.messages import (
    CacheDescription,
    CacheResized,
    CacheVerified,
    LayerRun,
    ResizeCache,
    ResizeOutcome,
    SizeCommand,
    SleepEngine,
    SlotDifference,
    WakeEngine,
)
from freetokend.link.protocol_errors import LinkProtocolError, decode_reason
from freetokend.policy.backend_choice import LayerBranch
from freetokend.policy.vram_budget import VramFacts

_OUTCOMES: Final[Mapping[ResizeOutcome, pb.ResizeOutcome]] = MappingProxyType(
    {
        ResizeOutcome.DONE: pb.RESIZE_OUTCOME_DONE,
        ResizeOutcome.UNCHANGED: pb.RESIZE_OUTCOME_UNCHANGED,
        ResizeOutcome.DEFERRED: pb.RESIZE_OUTCOME_DEFERRED,
        ResizeOutcome.SUPERSEDED: pb.RESIZE_OUTCOME_SUPERSEDED,
        ResizeOutcome.FAILED: pb.RESIZE_OUTCOME_FAILED,
    }
)
_OUTCOME_VALUES: Final[Mapping[int, ResizeOutcome]] = MappingProxyType(
    {number: outcome for outcome, number in _OUTCOMES.items()}
)

_MEMORY_FIELDS: Final = (
    "dense_bytes",
    "workspace_bytes",
    "state_bytes",
    "graph_bytes",
    "record_bytes",
    "experts_count",
    "experts_per_layer_count",
    "top_k",
    "kv_page_bytes",
    "kv_page_tokens",
    "model_context_tokens",
    "max_running_count",
    "on_host",
    "granularity_bytes",
)


def encode_cache_description(cache: CacheDescription) -> pb.CacheDescription:
    """Part of `Ready`."""
    return pb.CacheDescription(
        slots_count=cache.slots_count,
        slots_capacity_count=cache.slots_capacity,
        layer_runs=[
            pb.LayerRun(layers_count=run.layers_count, branch=run.branch.value, reason=run.reason)
            for run in cache.layer_runs
        ],
        fill_rate_source=cache.fill_rate_source,
    )


def decode_cache_description(cache: pb.CacheDescription) -> CacheDescription:
    """Raises `LinkProtocolError` for a branch that does not exist."""
    return CacheDescription(
        slots_count=cache.slots_count,
        slots_capacity=cache.slots_capacity_count,
        layer_runs=tuple(
            LayerRun(layers_count=run.layers_count, branch=_branch(run.branch), reason=run.reason)
            for run in cache.layer_runs
        ),
        fill_rate_source=cache.fill_rate_source,
    )


def _branch(text: str) -> LayerBranch:
    try:
        return LayerBranch(text)
    except ValueError:
        raise LinkProtocolError(f"the engine gave an unknown branch {text[:64]!r}") from None


def encode_memory(memory: VramFacts) -> pb.MemoryShape:
    """Part of `Ready`: what does not change while the engine runs."""
    return pb.MemoryShape(
        **{name: getattr(memory, name) for name in _MEMORY_FIELDS},
        kv_granularity_bytes=memory.kv_granularity_bytes or 0,
    )


def decode_memory(memory: pb.MemoryShape) -> VramFacts:
    """Part of `Ready`; what is free is not known to it."""
    return VramFacts(
        free_bytes=None,
        own_bytes=0,
        kv_granularity_bytes=memory.kv_granularity_bytes or None,
        **{name: getattr(memory, name) for name in _MEMORY_FIELDS},
    )


def encode_cache_stats(counters: CacheCounters) -> pb.CacheStats:
    """Part of a heartbeat."""
    return pb.CacheStats(
        slots_count=counters.slots_count,
        slots_capacity_count=counters.slots_capacity,
        resident_count=counters.resident_count,
        slot_bytes=counters.slot_bytes,
        committed_bytes=counters.committed_bytes,
        generation=counters.generation,
        layers=[
            pb.LayerCacheStats(
                hits_count=layer.hits_count,
                misses_count=layer.misses_count,
                fills_count=layer.fills_count,
                cpu_count=layer.cpu_count,
                evictions_count=layer.evictions_count,
            )
            for layer in counters.layers
        ],
        fill_rows=[pb.FillRow(fill_count=row) for row in counters.fill_counts],
        fills_count=counters.fills_count,
        fill_bytes=counters.fill_bytes,
        fill_busy_s=counters.fill_busy_s,
        streamed_count=counters.streamed_count,
        split=None if counters.split is None else _encode_split(counters.split),
    )


def decode_cache_stats(stats: pb.CacheStats) -> CacheCounters:
    """Part of a heartbeat."""
    return CacheCounters(
        slots_count=stats.slots_count,
        slots_capacity=stats.slots_capacity_count,
        resident_count=stats.resident_count,
        slot_bytes=stats.slot_bytes,
        committed_bytes=stats.committed_bytes,
        generation=stats.generation,
        layers=tuple(
            LayerCounters(
                hits_count=layer.hits_count,
                misses_count=layer.misses_count,
                fills_count=layer.fills_count,
                cpu_count=layer.cpu_count,
                evictions_count=layer.evictions_count,
            )
            for layer in stats.layers
        ),
        fill_counts=tuple(tuple(row.fill_count) for row in stats.fill_rows),
        fills_count=stats.fills_count,
        fill_bytes=stats.fill_bytes,
        fill_busy_s=stats.fill_busy_s,
        streamed_count=stats.streamed_count,
        split=_decode_split(stats.split) if stats.HasField("split") else None,
    )


def _encode_split(split: SplitCounters) -> pb.SplitStats:
    return pb.SplitStats(
        branch=split.branch,
        reason=split.reason,
        bandwidths=[
            pb.Bandwidth(
                link=one.link,
                beside=one.beside,
                bytes_per_s=one.bytes_per_s,
                source=one.source,
                age_s=one.age_s,
            )
            for one in split.bandwidths
        ],
        fill_fixed_s=split.fill_fixed_s,
        cpu_fixed_s=split.cpu_fixed_s,
        regret_ratio=split.regret_ratio,
        trials_count=split.trials_count,
        fallbacks_count=split.fallbacks_count,
        tables_count=split.tables_count,
    )


def _decode_split(split: pb.SplitStats) -> SplitCounters:
    return SplitCounters(
        branch=split.branch,
        reason=split.reason,
        bandwidths=tuple(
            Bandwidth(
                link=one.link,
                beside=one.beside,
                bytes_per_s=one.bytes_per_s,
                source=one.source,
                age_s=one.age_s,
            )
            for one in split.bandwidths
        ),
        fill_fixed_s=split.fill_fixed_s,
        cpu_fixed_s=split.cpu_fixed_s,
        regret_ratio=split.regret_ratio,
        trials_count=split.trials_count,
        fallbacks_count=split.fallbacks_count,
        tables_count=split.tables_count,
    )


def encode_size_command(command: SizeCommand) -> pb.ControlMessage:
    """A command with a generation."""
    match command:
        case ResizeCache():
            return pb.ControlMessage(
                resize_cache=pb.ResizeCache(
                    generation=command.generation,
                    slots_count=command.slots_count,
                    kv_pages_count=command.kv_pages_count,
                    urgent=command.urgent,
                )
            )
        case SleepEngine():
            return pb.ControlMessage(sleep=pb.SleepEngine(generation=command.generation))
        case WakeEngine():
            return pb.ControlMessage(
                wake=pb.WakeEngine(
                    generation=command.generation,
                    slots_count=command.slots_count,
                    kv_pages_count=command.kv_pages_count,
                )
            )
        case _:
            assert_never(command)


def decode_resize(resize: pb.ResizeCache) -> ResizeCache:
    """See `encode_size_command`."""
    return ResizeCache(
        generation=resize.generation,
        slots_count=resize.slots_count,
        kv_pages_count=resize.kv_pages_count if resize.HasField("kv_pages_count") else None,
        urgent=resize.urgent,
    )


def decode_wake(wake: pb.WakeEngine) -> WakeEngine:
    """See `encode_size_command`."""
    return WakeEngine(
        generation=wake.generation,
        slots_count=wake.slots_count,
        kv_pages_count=wake.kv_pages_count,
    )


def encode_resized(answer: CacheResized) -> pb.CacheResized:
    """The answer to a command with a generation."""
    return pb.CacheResized(
        generation=answer.generation,
        outcome=_OUTCOMES[answer.outcome],
        slots_count=answer.slots_count,
        committed_bytes=answer.committed_bytes,
        moved_count=answer.moved_count,
        dropped_count=answer.dropped_count,
        duration_s=answer.stall_s,
        slots_before_count=answer.slots_before_count,
        committed_before_bytes=answer.committed_before_bytes,
        kv_pages_count=answer.kv_pages_count,
        kv_pages_before_count=answer.kv_pages_before_count,
        kv_bytes=answer.kv_bytes,
        kv_before_bytes=answer.kv_before_bytes,
        safe_point_wait_s=answer.safe_point_wait_s,
        note=answer.note,
        error_reason="" if answer.error_reason is None else answer.error_reason.value,
        error_message=answer.error_message,
    )


def decode_resized(answer: pb.CacheResized) -> CacheResized:
    """Raises `LinkProtocolError` for an outcome or a reason that does not exist."""
    outcome = _OUTCOME_VALUES.get(answer.outcome)
    if outcome is None:
        raise LinkProtocolError(f"resize outcome number {answer.outcome} is unknown")
    return CacheResized(
        generation=answer.generation,
        outcome=outcome,
        slots_count=answer.slots_count,
        committed_bytes=answer.committed_bytes,
        moved_count=answer.moved_count,
        dropped_count=answer.dropped_count,
        stall_s=answer.duration_s,
        slots_before_count=answer.slots_before_count,
        committed_before_bytes=answer.committed_before_bytes,
        kv_pages_count=answer.kv_pages_count,
        kv_pages_before_count=answer.kv_pages_before_count,
        kv_bytes=answer.kv_bytes,
        kv_before_bytes=answer.kv_before_bytes,
        safe_point_wait_s=answer.safe_point_wait_s,
        note=answer.note,
        error_reason=decode_reason(answer.error_reason) if answer.error_reason else None,
        error_message=answer.error_message,
    )


def encode_verified(answer: CacheVerified) -> pb.CacheVerified:
    """The answer to a comparison."""
    return pb.CacheVerified(
        request_id=answer.request_id,
        compared_count=answer.compared_count,
        compared_bytes=answer.compared_bytes,
        differences=[
            pb.SlotDifference(
                layer_index=one.layer_index,
                expert_index=one.expert_index,
                slot_index=one.slot_index,
                offset_bytes=one.offset_bytes,
            )
            for one in answer.differences
        ],
        duration_s=answer.duration_s,
        error_reason="" if answer.error_reason is None else answer.error_reason.value,
        error_message=answer.error_message,
    )


def decode_verified(answer: pb.CacheVerified) -> CacheVerified:
    """Raises `LinkProtocolError` for a reason that does not exist."""
    return CacheVerified(
        request_id=answer.request_id,
        compared_count=answer.compared_count,
        compared_bytes=answer.compared_bytes,
        differences=tuple(
            SlotDifference(
                layer_index=one.layer_index,
                expert_index=one.expert_index,
                slot_index=one.slot_index,
                offset_bytes=one.offset_bytes,
            )
            for one in answer.differences
        ),
        duration_s=answer.duration_s,
        error_reason=decode_reason(answer.error_reason) if answer.error_reason else None,
        error_message=answer.error_message,
    )
