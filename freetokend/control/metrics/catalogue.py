"""Every metric of freetokend: name, type, unit, help, labels. Names are an interface."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Final

PREFIX: Final = "freetoken_"


class Kind(StrEnum):
    """The types of Prometheus that are used here."""

    GAUGE = "gauge"
    COUNTER = "counter"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One family. `unit` is the Prometheus base unit that ends the name ("" for counts)."""

    name: str
    kind: Kind
    help: str
    unit: str = ""
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


def _gauge(name: str, help: str, *labels: str, unit: str = "") -> Metric:
    return Metric(name=PREFIX + name, kind=Kind.GAUGE, help=help, unit=unit, labels=labels)


def _counter(name: str, help: str, *labels: str, unit: str = "") -> Metric:
    return Metric(name=PREFIX + name, kind=Kind.COUNTER, help=help, unit=unit, labels=labels)


def _seconds_histogram(name: str, help: str, buckets: tuple[float, ...], *labels: str) -> Metric:
    return Metric(
        name=PREFIX + name,
        kind=Kind.HISTOGRAM,
        help=help,
        unit="seconds",
        labels=labels,
        buckets=buckets,
    )


_REQUEST_BUCKETS_S: Final = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)
_FIRST_TOKEN_BUCKETS_S: Final = (0.03, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0, 180.0)
_TOKEN_BUCKETS_S: Final = (0.003, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.3, 0.5, 1.0, 3.0)
_STALL_BUCKETS_S: Final = (0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)

_SERVICE: Final = (
    _gauge("build_info", "Version of the running daemon; always 1.", "version"),
    _gauge("start_time_seconds", "Unix time at which the daemon started.", unit="seconds"),
    _gauge("alive", "1 while the service can come good by itself.", "model"),
    _gauge("ready", "1 while requests are accepted.", "model"),
    _gauge("progressing", "0 while work is active and does not move.", "model"),
    _gauge(
        "health_warnings", "Standing warnings of the health registry.", "model", "code", "severity"
    ),
)

_ENGINE: Final = (
    _gauge(
        "engine_info",
        "What computes; always 1.",
        "model",
        "device",
        "device_name",
        "backend",
        "kernel",
        "numerics",
        "expert_format",
    ),
    _gauge("engine_state", "1 for the state the engine is in, 0 for the others.", "model", "state"),
    _counter("engine_restarts_total", "Engines started after one had ended.", "model"),
    _counter(
        "engine_gpu_faults_total",
        "Engines that a GPU ended where the CPU can serve as well.",
        "model",
    ),
    _gauge(
        "engine_gpu_avoided",
        "1 while the GPU is not used because it ended an engine; it is tried again later.",
        "model",
    ),
    _gauge(
        "engine_progress_age_seconds",
        "Time since the work at hand last moved; 0 while idle.",
        "model",
        unit="seconds",
    ),
    _gauge("engine_threads", "Threads of the CPU executor.", "model"),
    _gauge(
        "engine_first_token_seconds",
        "How long the engine's first token took, at start.",
        "model",
        unit="seconds",
    ),
    _counter("engine_steps_total", "Steps computed by the present engine.", "model"),
    _gauge("engine_last_step_seconds", "Duration of the last step.", "model", unit="seconds"),
    _counter(
        "engine_prefill_tokens_total",
        "Prompt tokens computed by the present engine.",
        "model",
        unit="tokens",
    ),
    _counter(
        "engine_decode_tokens_total",
        "Tokens produced by the present engine.",
        "model",
        unit="tokens",
    ),
    _counter(
        "engine_expert_executions_total",
        "Experts run by the present engine, counted once per step, layer and expert.",
        "model",
    ),
    _counter(
        "engine_preemptions_total",
        "Running requests that the present engine had to set back.",
        "model",
    ),
    _counter(
        "engine_sweeps_total",
        "Prefills of the present engine that streamed every layer of experts, to their end.",
        "model",
    ),
    _gauge(
        "engine_prefill_pending_tokens",
        "Prompt tokens accepted and not computed yet.",
        "model",
        unit="tokens",
    ),
    _gauge(
        "engine_prefill_tokens_per_second",
        "Prompt tokens computed per second while some were waiting; 0 until a first prompt.",
        "model",
    ),
    _gauge("requests_running", "Requests being computed.", "model"),
    _gauge("requests_waiting", "Requests waiting for a place.", "model"),
    _gauge("requests_running_limit", "Requests that may be computed together.", "model"),
    _gauge("requests_waiting_limit", "Requests that may wait for a place.", "model"),
    _gauge("context_limit_tokens", "Longest prompt plus answer served.", "model", unit="tokens"),
    _gauge("kv_size_bytes", "Memory for attention keys and values.", "model", unit="bytes"),
    _gauge("kv_pages", "Pages for keys and values.", "model"),
    _gauge("kv_pages_used", "Pages for keys and values in use.", "model"),
)

_POOL: Final = (
    _gauge("load_done_bytes", "Bytes of the model loaded so far.", "model", unit="bytes"),
    _gauge("load_size_bytes", "Bytes of the model to be loaded.", "model", unit="bytes"),
    _gauge("pool_size_bytes", "Host memory that holds the weights.", "model", unit="bytes"),
    _gauge("pool_pinned_bytes", "Part of the pool that is pinned.", "model", unit="bytes"),
    _gauge("pool_page_bytes", "Page size of the pool.", "model", unit="bytes"),
    _gauge("pool_reattached", "1 if the pool outlived an earlier engine.", "model"),
    _gauge("pool_attach_seconds", "How long attaching to the pool took.", "model", unit="seconds"),
    _gauge("pool_load_seconds", "How long reading the weights took.", "model", unit="seconds"),
    _gauge(
        "pool_load_bytes_per_second",
        "Rate at which the weights were read.",
        "model",
        unit="bytes_per_second",
    ),
    _gauge("pool_pin_seconds", "How long pinning took so far.", "model", unit="seconds"),
)

_CACHE: Final = (
    _gauge("cache_slots", "Slots of the expert cache.", "model"),
    _gauge("cache_slots_limit", "The most slots that the expert cache can have.", "model"),
    _gauge("cache_resident_experts", "Experts that have a slot.", "model"),
    _gauge("cache_slot_bytes", "Size of a slot.", "model", unit="bytes"),
    _gauge("cache_committed_bytes", "Memory of the slots.", "model", unit="bytes"),
    _gauge("cache_layers", "MoE layers, by what their misses do.", "model", "branch"),
    _gauge(
        "cache_filled_of_missing",
        "How many of so many missing experts are filled, with one token per expert; up to 64.",
        "model",
        "missing",
    ),
    _counter(
        "cache_hits_total", "Distinct experts of decode steps that had a slot.", "model", "layer"
    ),
    _counter(
        "cache_misses_total", "Distinct experts of decode steps without a slot.", "model", "layer"
    ),
    _counter("cache_fills_total", "Misses of decode steps that were filled.", "model", "layer"),
    _counter(
        "cache_cpu_executions_total",
        "Misses of decode steps that the CPU executed.",
        "model",
        "layer",
    ),
    _counter(
        "cache_evictions_total",
        "Experts of any layer that lost their slot to one of this layer.",
        "model",
        "layer",
    ),
    _counter("cache_link_fills_total", "Fills over the link, prefill included.", "model"),
    _counter("cache_link_bytes_total", "Bytes filled over the link.", "model", unit="bytes"),
    _counter("cache_link_busy_seconds_total", "Time the link was busy.", "model", unit="seconds"),
    _counter("cache_streamed_experts_total", "Experts that prefill streamed.", "model"),
)

_SPLIT: Final = (
    _gauge(
        "split_bandwidth_bytes_per_second",
        "What fills and the CPU reach now, each beside the other and alone, and how that is known.",
        "model",
        "link",
        "company",
        "source",
        unit="bytes_per_second",
    ),
    _gauge(
        "split_bandwidth_age_seconds",
        "Time since that was told last.",
        "model",
        "link",
        "company",
        "source",
        unit="seconds",
    ),
    _gauge(
        "split_fixed_seconds",
        "What a branch of a layer takes before its first expert.",
        "model",
        "link",
        unit="seconds",
    ),
    _gauge(
        "split_regret_ratio",
        "What steps lately took longer than with the table that followed from them.",
        "model",
    ),
    _gauge(
        "split_branch",
        "Where the misses of layers that are split go now; 1 for the one that holds.",
        "model",
        "branch",
    ),
    _counter("split_trials_total", "Calls of a layer that went another way, to compare.", "model"),
    _counter("split_fallbacks_total", "How often the split lost and was given up.", "model"),
    _counter("split_tables_total", "Tables of fills that followed the estimate.", "model"),
)

_MACHINE: Final = (
    _gauge("gpu_info", "The watched GPU; always 1.", "gpu", "name", "driver"),
    _gauge("gpu_lost", "1 while the GPU does not answer any more.", "gpu"),
    _gauge("gpu_memory_size_bytes", "Memory of the GPU.", "gpu", unit="bytes"),
    _gauge(
        "gpu_memory_free_bytes",
        "Memory of the GPU that can still be had; absent while unknown, as all that follows.",
        "gpu",
        unit="bytes",
    ),
    _gauge("gpu_memory_used_bytes", "Memory of the GPU that programs hold.", "gpu", unit="bytes"),
    _gauge("gpu_memory_own_bytes", "Part of it that this service holds.", "gpu", unit="bytes"),
    _gauge("gpu_memory_others_bytes", "Part of it that others hold.", "gpu", unit="bytes"),
    _gauge("gpu_link_generation", "PCIe generation of the link now; lower at idle.", "gpu"),
    _gauge("gpu_link_generation_limit", "PCIe generation of the link at most.", "gpu"),
    _gauge("gpu_link_lanes", "Lanes of the link now.", "gpu"),
    _gauge("gpu_link_lanes_limit", "Lanes of the link at most.", "gpu"),
    _gauge("gpu_throttled", "1 for each reason that holds the clocks down.", "gpu", "reason"),
    _counter("nvml_errors_total", "Readings of the GPU that failed; no driver is no failure."),
    _gauge("probe_failing", "1 while the probe of a part of the machine fails.", "probe"),
    _gauge("host_memory_size_bytes", "Memory of the host.", unit="bytes"),
    _gauge("host_memory_available_bytes", "Memory that programs can still get.", unit="bytes"),
    _gauge(
        "cgroup_memory_limit_bytes",
        "Memory limit of the control group that leaves least; absent without a limit.",
        unit="bytes",
    ),
    _gauge("cgroup_memory_used_bytes", "What that control group uses.", unit="bytes"),
    _gauge(
        "pressure_ratio",
        "Share of the last ten seconds in which some or all tasks waited for the resource.",
        "resource",
        "kind",
    ),
    _gauge("executor_load_ratio", "Other programs' share of the executor's CPUs."),
    _gauge("machine_age_seconds", "Time since the last look at the machine.", unit="seconds"),
)

_ELASTIC: Final = (
    _gauge("elastic_enabled", "1 if the cache follows the card by itself.", "model"),
    _gauge(
        "elastic_budget_bytes",
        "What slots and KV may take of the card now; absent while that is not known.",
        "model",
        unit="bytes",
    ),
    _gauge(
        "elastic_required_free_bytes",
        "What others are left of the card: cushion, rules, windows and holds.",
        "model",
        unit="bytes",
    ),
    _gauge(
        "elastic_target_bytes", "What slots and KV are to take of the card.", "model", unit="bytes"
    ),
    _gauge("elastic_actual_bytes", "What slots and KV take of the card.", "model", unit="bytes"),
    _gauge("elastic_reason", "1 for the reason why things are as they are.", "model", "reason"),
    _gauge("elastic_holds", "Holds that stand.", "model"),
    _gauge("elastic_held_bytes", "What the holds are for, together.", "model", unit="bytes"),
    _gauge(
        "elastic_tick_age_seconds",
        "Time since the controller last looked.",
        "model",
        unit="seconds",
    ),
    _counter("elastic_events_total", "Events of the memory, by kind.", "model", "kind"),
)

_RESIZES: Final = (
    _counter(
        "resizes_total",
        "Answered resizes of the engine's memory, by what they were for and how they ended.",
        "model",
        "trigger",
        "result",
    ),
    _seconds_histogram(
        "resize_stall_seconds",
        "How long no step was computed for a resize that was done.",
        _STALL_BUCKETS_S,
        "model",
    ),
    _seconds_histogram(
        "resize_safe_point_wait_seconds",
        "How long a resize that was done waited for the step before it.",
        _STALL_BUCKETS_S,
        "model",
    ),
    _seconds_histogram(
        "resize_answer_seconds",
        "From the decision to resize until the engine had done it.",
        _STALL_BUCKETS_S,
        "model",
    ),
)

_REQUESTS: Final = (
    _counter(
        "requests_finished_total",
        "Sequences that ended, by how they did; refused ones never started.",
        "model",
        "outcome",
    ),
    _counter("requests_refused_total", "Sequences refused before they started.", "model", "reason"),
    _counter("prompt_tokens_total", "Prompt tokens of ended sequences.", "model", unit="tokens"),
    _counter(
        "cached_prompt_tokens_total",
        "Prompt tokens of ended sequences that needed no computing.",
        "model",
        unit="tokens",
    ),
    _counter(
        "completion_tokens_total", "Tokens of ended sequences' answers.", "model", unit="tokens"
    ),
    _seconds_histogram(
        "time_to_first_token_seconds",
        "From a sequence's submission to its first token.",
        _FIRST_TOKEN_BUCKETS_S,
        "model",
    ),
    _seconds_histogram(
        "time_per_output_token_seconds",
        "Mean time between the tokens of one ended sequence, after its first.",
        _TOKEN_BUCKETS_S,
        "model",
    ),
)

_HTTP: Final = (
    _counter("http_requests_total", "HTTP requests answered.", "method", "route", "status"),
    _gauge("http_requests_in_flight", "HTTP requests being answered."),
    _seconds_histogram(
        "http_request_duration_seconds",
        "From an HTTP request's head to the last byte of its answer.",
        _REQUEST_BUCKETS_S,
        "route",
    ),
)

STATE_METRICS: Final[tuple[Metric, ...]] = (
    *(*_SERVICE, *_ENGINE, *_POOL, *_CACHE, *_SPLIT, *_MACHINE, *_ELASTIC),
)
EVENT_METRICS: Final[tuple[Metric, ...]] = (*_RESIZES, *_REQUESTS, *_HTTP)
CATALOGUE: Final[Mapping[str, Metric]] = MappingProxyType(
    {metric.name: metric for metric in (*STATE_METRICS, *EVENT_METRICS)}
)


def metric(short_name: str) -> Metric:
    """The catalogue's entry of a name without its prefix; raises `KeyError`."""
    return CATALOGUE[PREFIX + short_name]
