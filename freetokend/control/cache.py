"""The expert cache as the protobuf messages of the control plane."""

from __future__ import annotations

from collections.abc import Iterator

from freetokend.api.control.v1 import control_pb2 as pb
from freetokend.control.state import ServiceState
from freetokend.core.cache_stats import CacheCounters, LayerCounters
from freetokend.link.messages import (
    CacheDescription,
    CacheVerified,
    EngineDescription,
    EngineSnapshot,
)


def cache_summary(snapshot: EngineSnapshot) -> pb.CacheSummary | None:
    """None without an engine that has a cache. Before its first heartbeat: what it said of it."""
    engine = snapshot.description
    if engine is None or engine.cache is None:
        return None
    counters = snapshot.cache or _at_the_start(engine, engine.cache)
    hits = sum(layer.hits_count for layer in counters.layers)
    misses = sum(layer.misses_count for layer in counters.layers)
    busy_s = counters.fill_busy_s
    return pb.CacheSummary(
        slots_count=counters.slots_count,
        slots_capacity_count=counters.slots_capacity,
        resident_count=counters.resident_count,
        experts_count=engine.moe_layers_count * engine.experts_per_layer_count,
        slot_bytes=counters.slot_bytes,
        committed_bytes=counters.committed_bytes,
        generation=counters.generation,
        hits_count=hits,
        misses_count=misses,
        hit_ratio=_hit_ratio(hits, misses),
        decode_fills_count=sum(layer.fills_count for layer in counters.layers),
        cpu_count=sum(layer.cpu_count for layer in counters.layers),
        evictions_count=sum(layer.evictions_count for layer in counters.layers),
        fills_count=counters.fills_count,
        fill_bytes=counters.fill_bytes,
        fill_busy_s=busy_s,
        fill_bytes_per_s=counters.fill_bytes / busy_s if busy_s > 0 else 0.0,
        streamed_count=counters.streamed_count,
        fill_rate_source=engine.cache.fill_rate_source,
    )


def _at_the_start(engine: EngineDescription, cache: CacheDescription) -> CacheCounters:
    return CacheCounters(
        slots_count=cache.slots_count,
        slots_capacity=cache.slots_capacity,
        resident_count=0,
        slot_bytes=engine.bytes_per_expert,
        committed_bytes=cache.slots_count * engine.bytes_per_expert,
        generation=0,
    )


def cache_response(state: ServiceState) -> pb.GetCacheResponse:
    """The whole cache, or why there is none."""
    engine, summary = state.snapshot.description, cache_summary(state.snapshot)
    if engine is None:
        reason = state.health.ready_reason or "no engine runs"
        return pb.GetCacheResponse(absent_reason=reason)
    if engine.cache is None or summary is None:
        return pb.GetCacheResponse(
            device=device_status(engine),
            absent_reason=f"the backend is {engine.backend}: {engine.backend_reason}",
        )
    counters = state.snapshot.cache
    return pb.GetCacheResponse(
        summary=summary,
        layers=_layers(engine.cache, () if counters is None else counters.layers),
        fill_table=_fill_table(() if counters is None else counters.fill_counts),
        device=device_status(engine),
    )


def _layers(
    cache: CacheDescription, counters: tuple[LayerCounters, ...]
) -> Iterator[pb.CacheLayer]:
    runs = [run for run in cache.layer_runs for _ in range(run.layers_count)]
    for index, run in enumerate(runs):
        layer = counters[index] if index < len(counters) else LayerCounters()
        yield pb.CacheLayer(
            layer_index=index,
            branch=run.branch.value,
            branch_reason=run.reason,
            hits_count=layer.hits_count,
            misses_count=layer.misses_count,
            hit_ratio=_hit_ratio(layer.hits_count, layer.misses_count),
            fills_count=layer.fills_count,
            cpu_count=layer.cpu_count,
            evictions_count=layer.evictions_count,
        )


def _fill_table(rows: tuple[tuple[int, ...], ...]) -> Iterator[pb.FillBucket]:
    for bucket, row in enumerate(rows):
        yield pb.FillBucket(
            up_to_tokens=1 << bucket, unbounded=bucket == len(rows) - 1, fill_count=row
        )


def _hit_ratio(hits_count: int, misses_count: int) -> float:
    asked_count = hits_count + misses_count
    return hits_count / asked_count if asked_count else 0.0


def device_status(engine: EngineDescription) -> pb.DeviceStatus:
    """What computes, and why."""
    return pb.DeviceStatus(
        device=engine.device,
        device_name=engine.device_name,
        backend=engine.backend,
        backend_reason=engine.backend_reason,
        kernel=engine.kernel,
        threads_count=engine.threads_count,
        cpus=engine.cpus,
        threads_reason=engine.threads_reason,
        numerics=engine.numerics,
    )


def verify_response(found: CacheVerified) -> pb.VerifyCacheResponse:
    """What the comparison found."""
    return pb.VerifyCacheResponse(
        compared_count=found.compared_count,
        compared_bytes=found.compared_bytes,
        duration_s=found.duration_s,
        differences=[
            pb.SlotDifference(
                layer_index=one.layer_index,
                expert_index=one.expert_index,
                slot_index=one.slot_index,
                offset_bytes=one.offset_bytes,
            )
            for one in found.differences
        ],
    )
