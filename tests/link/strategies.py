"""Hypothesis strategies for every message of the link."""

from __future__ import annotations

from hypothesis import strategies as st

from freetokend.core.cache_stats import CacheCounters, LayerCounters
from freetokend.core.errors import Reason
from freetokend.link.messages import (
    CacheDescription,
    CacheResized,
    CacheVerified,
    Cancel,
    EngineDescription,
    EngineSettings,
    EngineStats,
    Failure,
    FinishReason,
    GenerateRequest,
    Heartbeat,
    Hello,
    LayerRun,
    LoadProgress,
    LoadStage,
    ResizeCache,
    ResizeOutcome,
    Sampling,
    SequenceUpdate,
    SetLogLevel,
    Shutdown,
    SlotDifference,
    StepReport,
    VerifyCache,
)
from freetokend.link.trace_messages import (
    RoutedRows,
    StartTrace,
    StopTrace,
    TracedStep,
    TraceEnded,
    TraceStarted,
)
from freetokend.policy.backend_choice import LayerBranch

u32 = st.integers(0, 2**32 - 1)
u64 = st.integers(0, 2**64 - 1)
texts = st.text(max_size=20)
numbers = st.floats(allow_nan=False)
tokens = st.lists(u32, max_size=6).map(tuple)
request_ids = st.sampled_from(("a", "b", "c"))

stats = st.builds(
    EngineStats,
    running_count=u32,
    waiting_count=u32,
    kv_pages_used_count=u64,
    kv_pages_total_count=u64,
    steps_count=u64,
    prefill_tokens_count=u64,
    decode_tokens_count=u64,
    step_s=numbers,
    pool_pinned_bytes=u64,
    pool_bytes=u64,
    pin_s=numbers,
    pin_done=st.booleans(),
    pin_note=texts,
    expert_executions_count=u64,
    preemptions_count=u64,
    sweeps_count=u64,
    prefill_pending_tokens_count=u64,
    prefill_tokens_per_s=numbers,
)
updates = st.builds(
    SequenceUpdate,
    request_id=request_ids,
    token_ids=tokens,
    finish_reason=st.none() | st.sampled_from(FinishReason),
    error_reason=st.none() | st.sampled_from(Reason),
    error_message=texts,
    prompt_tokens=u32,
    cached_tokens=u32,
    completion_tokens=u32,
)
reports = st.builds(
    StepReport, step_index=u64, outputs=st.lists(updates, max_size=5).map(tuple), stats=stats
)
counters = st.builds(
    CacheCounters,
    slots_count=u32,
    slots_capacity=u32,
    resident_count=u32,
    slot_bytes=u64,
    committed_bytes=u64,
    generation=u64,
    layers=st.lists(
        st.builds(
            LayerCounters,
            hits_count=u64,
            misses_count=u64,
            fills_count=u64,
            cpu_count=u64,
            evictions_count=u64,
        ),
        max_size=3,
    ).map(tuple),
    fill_counts=st.lists(tokens, max_size=3).map(tuple),
    fills_count=u64,
    fill_bytes=u64,
    fill_busy_s=numbers,
    streamed_count=u64,
)
cache_descriptions = st.builds(
    CacheDescription,
    slots_count=u32,
    slots_capacity=u32,
    layer_runs=st.lists(
        st.builds(LayerRun, layers_count=u32, branch=st.sampled_from(LayerBranch), reason=texts),
        max_size=3,
    ).map(tuple),
    fill_rate_source=texts,
)
cache_answers = st.one_of(
    st.builds(
        CacheResized,
        generation=u64,
        outcome=st.sampled_from(ResizeOutcome),
        slots_count=u32,
        committed_bytes=u64,
        moved_count=u32,
        dropped_count=u32,
        duration_s=numbers,
        note=texts,
        error_reason=st.none() | st.sampled_from(Reason),
        error_message=texts,
    ),
    st.builds(
        CacheVerified,
        request_id=texts,
        compared_count=u32,
        compared_bytes=u64,
        differences=st.lists(
            st.builds(
                SlotDifference,
                layer_index=u32,
                expert_index=u32,
                slot_index=u32,
                offset_bytes=u64,
            ),
            max_size=3,
        ).map(tuple),
        duration_s=numbers,
        error_reason=st.none() | st.sampled_from(Reason),
        error_message=texts,
    ),
)
trace_messages = st.one_of(
    st.builds(
        TraceStarted,
        trace_id=texts,
        layers_count=u32,
        experts_per_layer_count=u32,
        experts_per_token_count=u32,
        source=texts,
        error_reason=st.none() | st.sampled_from(Reason),
        error_message=texts,
    ),
    st.builds(
        TracedStep,
        trace_id=texts,
        parts=st.lists(
            st.builds(
                RoutedRows,
                is_prefill=st.booleans(),
                rows_count=u32,
                expert_ids=st.binary(max_size=12),
            ),
            max_size=2,
        ).map(tuple),
    ),
    st.builds(
        TraceEnded, trace_id=texts, error_reason=st.sampled_from(Reason), error_message=texts
    ),
)
descriptions = st.builds(
    EngineDescription,
    model=texts,
    device=texts,
    device_name=texts,
    backend=texts,
    backend_reason=texts,
    kernel=texts,
    threads_count=u32,
    servable_context_tokens=u64,
    kv_bytes=u64,
    pool_bytes=u64,
    pool_page_bytes=u64,
    pool_reattached=st.booleans(),
    attach_s=numbers,
    load_s=numbers,
    load_bytes_per_s=numbers,
    first_token_s=numbers,
    layers_count=u32,
    moe_layers_count=u32,
    experts_per_layer_count=u32,
    bytes_per_expert=u64,
    max_running_count=u32,
    numerics=texts,
    expert_format=texts,
    dense_formats=st.lists(texts, max_size=3).map(tuple),
    cpus=st.lists(u32, max_size=3).map(tuple),
    threads_reason=texts,
    notes=st.lists(texts, max_size=3).map(tuple),
    cache=st.none() | cache_descriptions,
)
engine_messages = st.one_of(
    st.builds(
        Hello,
        token=texts,
        link_version=u32,
        pid=st.integers(0, 2**31 - 1),
        kind=texts,
        version=texts,
    ),
    st.builds(
        LoadProgress,
        stage=st.sampled_from(LoadStage).map(str),
        done_bytes=u64,
        total_bytes=u64,
    ),
    descriptions,
    reports,
    st.builds(
        Heartbeat,
        progress_count=u64,
        busy=st.booleans(),
        stats=stats,
        cache=st.none() | counters,
    ),
    st.builds(Failure, reason=st.sampled_from(Reason), message=texts),
    cache_answers,
    trace_messages,
)
settings_messages = st.builds(
    EngineSettings,
    model=texts,
    threads_count=u32,
    kv_bytes=u64,
    max_running_count=u32,
    max_waiting_count=u32,
    step_tokens=u32,
    max_context_tokens=u64,
    log_level=texts,
    log_format=texts,
    pin_pool=st.booleans(),
    backend=texts,
    numerics=texts,
    device=texts,
    slots_count=u32,
    device_bytes=u64,
    link_bytes_per_s=u64,
    preset=texts,
    layers=texts,
    attention=texts,
    sweep_tokens=u32,
)
requests = st.builds(
    GenerateRequest,
    request_id=texts,
    prompt_token_ids=tokens,
    max_new_tokens=u32,
    sampling=st.builds(
        Sampling,
        temperature=numbers,
        top_p=numbers,
        top_k=u32,
        min_p=numbers,
        seed=st.none() | u64,
    ),
    stop_token_ids=tokens,
    ignore_eos=st.booleans(),
)
control_messages = st.one_of(
    settings_messages,
    requests,
    st.builds(Cancel, request_id=texts),
    st.builds(Shutdown, drain=st.booleans()),
    st.builds(SetLogLevel, level=texts),
    st.builds(ResizeCache, generation=u64, slots_count=u32),
    st.builds(VerifyCache, request_id=texts),
    st.builds(StartTrace, trace_id=texts),
    st.builds(StopTrace, trace_id=texts),
)
