"""`ServiceState` as the protobuf `Status`."""

from __future__ import annotations

from typing import Final

from freetokend.api.control.v1 import control_pb2 as pb
from freetokend.control.cache import cache_summary, device_status
from freetokend.control.elastic_messages import elastic_status
from freetokend.control.machine import machine_status
from freetokend.control.state import RaisedWarning, ServiceState
from freetokend.link.messages import EngineDescription, EngineState
from freetokend.policy.health import Severity

_STATES: Final = {
    EngineState.STARTING: pb.ENGINE_STATE_STARTING,
    EngineState.LOADING: pb.ENGINE_STATE_LOADING,
    EngineState.READY: pb.ENGINE_STATE_READY,
    EngineState.DRAINING: pb.ENGINE_STATE_DRAINING,
    EngineState.RESTARTING: pb.ENGINE_STATE_RESTARTING,
    EngineState.FAILED: pb.ENGINE_STATE_FAILED,
    EngineState.STOPPED: pb.ENGINE_STATE_STOPPED,
}

_SEVERITIES: Final = {
    Severity.INFO: pb.SEVERITY_INFO,
    Severity.WARNING: pb.SEVERITY_WARNING,
    Severity.ERROR: pb.SEVERITY_ERROR,
}


def status_message(state: ServiceState) -> pb.Status:
    """The whole state; parts that only a ready engine knows are left unset until then."""
    message = pb.Status(
        version=state.version,
        pid=state.pid,
        uptime_s=state.uptime_s,
        alive=state.health.alive,
        ready=state.health.ready,
        ready_reason=state.health.ready_reason,
        progressing=state.health.progressing,
        engine=_engine(state),
        model=pb.ModelStatus(model=state.snapshot.model),
        requests=_requests(state),
        warnings=[_warning(raised) for raised in state.warnings],
        http_address=state.http_address,
        log_level=state.log_level,
        generation=state.generation,
        machine=machine_status(state.machine, state.now_s),
        elastic=elastic_status(state.elastic, state.now_s),
    )
    description = state.snapshot.description
    if description is not None:
        _describe(message, state, description)
    return message


def _engine(state: ServiceState) -> pb.EngineStatus:
    snapshot = state.snapshot
    message = pb.EngineStatus(
        state=_STATES[snapshot.state],
        pid=snapshot.pid or 0,
        state_for_s=state.state_for_s,
        restarts_count=snapshot.restarts_count,
        cause=snapshot.cause,
        next_restart_s=state.next_restart_s or 0.0,
        progress_age_s=state.progress_age_s,
    )
    if snapshot.load is not None and snapshot.state is EngineState.LOADING:
        message.load.stage = snapshot.load.stage
        message.load.done_bytes = snapshot.load.done_bytes
        message.load.total_bytes = snapshot.load.total_bytes
    return message


def _requests(state: ServiceState) -> pb.RequestStatus:
    stats = state.snapshot.stats
    return pb.RequestStatus(
        running_count=stats.running_count,
        waiting_count=stats.waiting_count,
        finished_count=state.requests.finished_count,
        failed_count=state.requests.failed_count,
        cancelled_count=state.requests.cancelled_count,
        prefill_tokens_count=stats.prefill_tokens_count,
        decode_tokens_count=stats.decode_tokens_count,
        decode_tokens_per_s=state.rates.decode_tokens_per_s,
        prefill_tokens_per_s=state.rates.prefill_tokens_per_s,
    )


def _warning(raised: RaisedWarning) -> pb.Warning:
    return pb.Warning(
        code=raised.warning.code,
        severity=_SEVERITIES[raised.warning.severity],
        text=raised.warning.text,
        since_s=raised.since_s,
    )


def _describe(message: pb.Status, state: ServiceState, engine: EngineDescription) -> None:
    stats = state.snapshot.stats
    message.engine.first_token_s = engine.first_token_s
    message.model.CopyFrom(
        pb.ModelStatus(
            model=engine.model,
            servable_context_tokens=engine.servable_context_tokens,
            layers_count=engine.layers_count,
            moe_layers_count=engine.moe_layers_count,
            experts_per_layer_count=engine.experts_per_layer_count,
            bytes_per_expert=engine.bytes_per_expert,
            expert_format=engine.expert_format,
            dense_formats=engine.dense_formats,
        )
    )
    message.device.CopyFrom(device_status(engine))
    cache = cache_summary(state.snapshot)
    if cache is not None:
        message.cache.CopyFrom(cache)
    message.pool.CopyFrom(
        pb.PoolStatus(
            size_bytes=engine.pool_bytes,
            page_bytes=engine.pool_page_bytes,
            pinned_bytes=stats.pool_pinned_bytes,
            pin_done=stats.pin_done,
            pin_note=stats.pin_note,
            reattached=engine.pool_reattached,
            attach_s=engine.attach_s,
            load_s=engine.load_s,
            load_bytes_per_s=engine.load_bytes_per_s,
            pin_s=stats.pin_s,
        )
    )
    message.kv.CopyFrom(
        pb.KvStatus(
            size_bytes=engine.kv_bytes,
            pages_used_count=stats.kv_pages_used_count,
            pages_total_count=stats.kv_pages_total_count,
        )
    )
