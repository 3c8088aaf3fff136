"""The metrics that are read off the present state, at the moment somebody scrapes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Final

from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from freetokend.control.metrics.elastic import add_elastic
from freetokend.control.metrics.families import Families
from freetokend.control.metrics.machine import add_machine
from freetokend.control.state import ServiceState
from freetokend.core.cache_stats import SplitCounters
from freetokend.link.messages import EngineState
from freetokend.policy.backend_choice import LayerBranch

# One step of a few requests misses no more; a series for each of hundreds helps nobody.
_MOST_MISSING: Final = 64


class StateCollector(Collector):
    """Holds nothing: every scrape takes one `ServiceState` and writes all of it."""

    def __init__(
        self,
        state: Callable[[], ServiceState],
        *,
        start_time_s: float,
        max_running_count: int,
        max_waiting_count: int,
    ) -> None:
        self._state = state
        self._start_time_s = start_time_s
        self._max_running_count = max_running_count
        self._max_waiting_count = max_waiting_count

    def describe(self) -> Iterable[Family]:
        """The families without samples, so that registering takes no scrape."""
        return Families().all()

    def collect(self) -> Iterable[Family]:
        """One scrape."""
        state = self._state()
        families = Families()
        self._service(families, state)
        _engine(families, state)
        _described(families, state)
        _cache(families, state)
        add_machine(families, state.machine, state.now_s)
        add_elastic(families, state.elastic, state.now_s, state.snapshot.model)
        return families.all()

    def _service(self, families: Families, state: ServiceState) -> None:
        model = state.snapshot.model
        families.add("build_info", 1, state.version)
        families.add("start_time_seconds", self._start_time_s)
        families.add("alive", state.health.alive, model)
        families.add("ready", state.health.ready, model)
        families.add("progressing", state.health.progressing, model)
        standing = Counter(
            (raised.warning.code, raised.warning.severity.value) for raised in state.warnings
        )
        for (code, severity), count in standing.items():
            families.add("health_warnings", count, model, code, severity)
        families.add("requests_running_limit", self._max_running_count, model)
        families.add("requests_waiting_limit", self._max_waiting_count, model)


def _engine(families: Families, state: ServiceState) -> None:
    snapshot, stats = state.snapshot, state.snapshot.stats
    model = snapshot.model
    for known in EngineState:
        families.add("engine_state", known is snapshot.state, model, known.value)
    families.add("engine_restarts_total", snapshot.restarts_count, model)
    families.add("engine_gpu_faults_total", snapshot.gpu_faults_count, model)
    families.add("engine_gpu_avoided", bool(snapshot.gpu_fault), model)
    families.add("engine_progress_age_seconds", state.progress_age_s, model)
    families.add("engine_steps_total", stats.steps_count, model)
    families.add("engine_last_step_seconds", stats.step_s, model)
    families.add("engine_prefill_tokens_total", stats.prefill_tokens_count, model)
    families.add("engine_decode_tokens_total", stats.decode_tokens_count, model)
    families.add("engine_expert_executions_total", stats.expert_executions_count, model)
    families.add("engine_preemptions_total", stats.preemptions_count, model)
    families.add("engine_sweeps_total", stats.sweeps_count, model)
    families.add("engine_prefill_pending_tokens", stats.prefill_pending_tokens_count, model)
    families.add("engine_prefill_tokens_per_second", stats.prefill_tokens_per_s, model)
    families.add("requests_running", stats.running_count, model)
    families.add("requests_waiting", stats.waiting_count, model)
    families.add("kv_pages", stats.kv_pages_total_count, model)
    families.add("kv_pages_used", stats.kv_pages_used_count, model)
    if snapshot.load is not None:
        families.add("load_done_bytes", snapshot.load.done_bytes, model)
        families.add("load_size_bytes", snapshot.load.total_bytes, model)


def _described(families: Families, state: ServiceState) -> None:
    """What only an engine that has described itself knows; absent, not zero, until then."""
    engine, stats, model = state.snapshot.description, state.snapshot.stats, state.snapshot.model
    if engine is None:
        return
    families.add(
        "engine_info",
        1,
        model,
        engine.device,
        engine.device_name,
        engine.backend,
        engine.kernel,
        engine.numerics,
        engine.expert_format,
    )
    families.add("engine_threads", engine.threads_count, model)
    families.add("engine_first_token_seconds", engine.first_token_s, model)
    families.add("context_limit_tokens", engine.servable_context_tokens, model)
    families.add("kv_size_bytes", engine.kv_bytes, model)
    families.add("pool_size_bytes", engine.pool_bytes, model)
    families.add("pool_page_bytes", engine.pool_page_bytes, model)
    families.add("pool_pinned_bytes", stats.pool_pinned_bytes, model)
    families.add("pool_pin_seconds", stats.pin_s, model)
    families.add("pool_reattached", engine.pool_reattached, model)
    families.add("pool_attach_seconds", engine.attach_s, model)
    families.add("pool_load_seconds", engine.load_s, model)
    families.add("pool_load_bytes_per_second", engine.load_bytes_per_s, model)


def _cache(families: Families, state: ServiceState) -> None:
    """Absent without an expert cache, and until the engine's first heartbeat."""
    snapshot, model = state.snapshot, state.snapshot.model
    engine, cache = snapshot.description, snapshot.cache
    if engine is None or engine.cache is None or cache is None:
        return
    families.add("cache_slots", cache.slots_count, model)
    families.add("cache_slots_limit", cache.slots_capacity, model)
    families.add("cache_resident_experts", cache.resident_count, model)
    families.add("cache_slot_bytes", cache.slot_bytes, model)
    families.add("cache_committed_bytes", cache.committed_bytes, model)
    branches = Counter[LayerBranch]()
    for run in engine.cache.layer_runs:
        branches[run.branch] += run.layers_count
    for branch in LayerBranch:
        families.add("cache_layers", branches[branch], model, branch.value)
    row = cache.fill_counts[0] if cache.fill_counts else ()
    for missing, filled in enumerate(row[: _MOST_MISSING + 1]):
        families.add("cache_filled_of_missing", filled, model, str(missing))
    for index, layer in enumerate(cache.layers):
        labels = (model, str(index))
        families.add("cache_hits_total", layer.hits_count, *labels)
        families.add("cache_misses_total", layer.misses_count, *labels)
        families.add("cache_fills_total", layer.fills_count, *labels)
        families.add("cache_cpu_executions_total", layer.cpu_count, *labels)
        families.add("cache_evictions_total", layer.evictions_count, *labels)
    families.add("cache_link_fills_total", cache.fills_count, model)
    families.add("cache_link_bytes_total", cache.fill_bytes, model)
    families.add("cache_link_busy_seconds_total", cache.fill_busy_s, model)
    families.add("cache_streamed_experts_total", cache.streamed_count, model)
    if cache.split is not None:
        _split(families, cache.split, model)


def _split(families: Families, split: SplitCounters, model: str) -> None:
    """Absent where no rates are followed."""
    for one in split.bandwidths:
        labels = (model, one.link, "beside" if one.beside else "alone", one.source)
        families.add("split_bandwidth_bytes_per_second", one.bytes_per_s, *labels)
        families.add("split_bandwidth_age_seconds", one.age_s, *labels)
    families.add("split_fixed_seconds", split.fill_fixed_s, model, "fill")
    families.add("split_fixed_seconds", split.cpu_fixed_s, model, "cpu")
    families.add("split_regret_ratio", split.regret_ratio, model)
    for branch in (LayerBranch.SPLIT, LayerBranch.FILL, LayerBranch.CPU):
        if split.branch:
            families.add("split_branch", split.branch == branch.value, model, branch.value)
    families.add("split_trials_total", split.trials_count, model)
    families.add("split_fallbacks_total", split.fallbacks_count, model)
    families.add("split_tables_total", split.tables_count, model)
