"""link.proto messages to values and back.

Total in both directions: every value has one encoding, every well-formed message one value, and
what is not well-formed (an empty oneof, an unknown enum number or reason) is a `LinkProtocolError`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, assert_never

from freetokend.api.link.v1 import link_pb2 as pb
from freetokend.link.bandwidth_codec import (
    decode_bandwidth,
    decode_measure,
    encode_bandwidth,
    encode_measure,
)
from freetokend.link.bandwidth_messages import (
    BandwidthMeasured,
    BandwidthProgress,
    MeasureBandwidth,
)
from freetokend.link.cache_codec import (
    decode_cache_description,
    decode_cache_stats,
    decode_memory,
    decode_resize,
    decode_resized,
    decode_verified,
    decode_wake,
    encode_cache_description,
    encode_cache_stats,
    encode_memory,
    encode_resized,
    encode_size_command,
    encode_verified,
)
from freetokend.link.messages import (
    CacheResized,
    CacheVerified,
    Cancel,
    ControlMessage,
    EngineDescription,
    EngineMessage,
    EngineSettings,
    Failure,
    FinishReason,
    GenerateRequest,
    Heartbeat,
    Hello,
    LoadProgress,
    LoadStage,
    ResizeCache,
    Sampling,
    SequenceUpdate,
    SetLogLevel,
    Shutdown,
    SleepEngine,
    StepReport,
    VerifyCache,
    WakeEngine,
)
from freetokend.link.protocol_errors import LinkProtocolError, decode_reason
from freetokend.link.stats_codec import decode_stats, encode_stats
from freetokend.link.trace_codec import (
    decode_trace_ended,
    decode_trace_started,
    decode_traced_step,
    encode_trace,
)
from freetokend.link.trace_messages import (
    StartTrace,
    StopTrace,
    TracedStep,
    TraceEnded,
    TraceStarted,
)

_STAGES: Final[Mapping[str, pb.LoadStage]] = MappingProxyType(
    {
        LoadStage.ATTACH: pb.LOAD_STAGE_ATTACH,
        LoadStage.READ: pb.LOAD_STAGE_READ,
        LoadStage.PREPARE: pb.LOAD_STAGE_PREPARE,
        LoadStage.WARM_UP: pb.LOAD_STAGE_WARM_UP,
    }
)
_STAGE_NAMES: Final[Mapping[int, str]] = MappingProxyType({v: str(k) for k, v in _STAGES.items()})
_FINISHES: Final[Mapping[FinishReason | None, pb.FinishReason]] = MappingProxyType(
    {
        None: pb.FINISH_REASON_UNSPECIFIED,
        FinishReason.STOP: pb.FINISH_REASON_STOP,
        FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
        FinishReason.CANCELLED: pb.FINISH_REASON_CANCELLED,
        FinishReason.ERROR: pb.FINISH_REASON_ERROR,
    }
)
_FINISH_VALUES: Final[Mapping[int, FinishReason | None]] = MappingProxyType(
    {v: k for k, v in _FINISHES.items()}
)


def encode_engine_message(message: EngineMessage) -> pb.EngineMessage:
    """Engine to control. Raises `LinkProtocolError` for a load stage that does not exist."""
    match message:
        case Hello():
            return pb.EngineMessage(
                hello=pb.Hello(
                    token=message.token,
                    link_version=message.link_version,
                    pid=message.pid,
                    kind=message.kind,
                    version=message.version,
                )
            )
        case LoadProgress():
            stage = _STAGES.get(message.stage)
            if stage is None:
                raise LinkProtocolError(f"load stage {message.stage!r} does not exist")
            return pb.EngineMessage(
                load_progress=pb.LoadProgress(
                    stage=stage,
                    done_bytes=message.done_bytes,
                    total_bytes=message.total_bytes,
                    on_gpu=message.on_gpu,
                )
            )
        case EngineDescription():
            return pb.EngineMessage(ready=_encode_description(message))
        case StepReport():
            return pb.EngineMessage(
                step_report=pb.StepReport(
                    step_index=message.step_index,
                    outputs=[_encode_update(update) for update in message.outputs],
                    stats=encode_stats(message.stats),
                )
            )
        case Heartbeat():
            return pb.EngineMessage(
                heartbeat=pb.Heartbeat(
                    progress_count=message.progress_count,
                    busy=message.busy,
                    stats=encode_stats(message.stats),
                    cache=None if message.cache is None else encode_cache_stats(message.cache),
                )
            )
        case Failure():
            return pb.EngineMessage(
                failure=pb.Failure(reason=str(message.reason), message=message.message)
            )
        case CacheResized():
            return pb.EngineMessage(cache_resized=encode_resized(message))
        case CacheVerified():
            return pb.EngineMessage(cache_verified=encode_verified(message))
        case TraceStarted() | TracedStep() | TraceEnded():
            return encode_trace(message)
        case BandwidthProgress() | BandwidthMeasured():
            return encode_bandwidth(message)
        case _:
            assert_never(message)


def decode_engine_message(message: pb.EngineMessage) -> EngineMessage:
    """Control's side of `encode_engine_message`. Raises `LinkProtocolError`."""
    match message.WhichOneof("body"):
        case "hello":
            hello = message.hello
            return Hello(
                token=hello.token,
                link_version=hello.link_version,
                pid=hello.pid,
                kind=hello.kind,
                version=hello.version,
            )
        case "load_progress":
            load = message.load_progress
            stage = _STAGE_NAMES.get(load.stage)
            if stage is None:
                raise LinkProtocolError(f"load stage number {load.stage} is unknown")
            return LoadProgress(
                stage=stage,
                done_bytes=load.done_bytes,
                total_bytes=load.total_bytes,
                on_gpu=load.on_gpu,
            )
        case "ready":
            return _decode_description(message.ready)
        case "step_report":
            report = message.step_report
            return StepReport(
                step_index=report.step_index,
                outputs=tuple(_decode_update(output) for output in report.outputs),
                stats=decode_stats(report.stats),
            )
        case "heartbeat":
            beat = message.heartbeat
            return Heartbeat(
                progress_count=beat.progress_count,
                busy=beat.busy,
                stats=decode_stats(beat.stats),
                cache=decode_cache_stats(beat.cache) if beat.HasField("cache") else None,
            )
        case "failure":
            return Failure(
                reason=decode_reason(message.failure.reason), message=message.failure.message
            )
        case "cache_resized":
            return decode_resized(message.cache_resized)
        case "cache_verified":
            return decode_verified(message.cache_verified)
        case "trace_started":
            return decode_trace_started(message.trace_started)
        case "traced_step":
            return decode_traced_step(message.traced_step)
        case "trace_ended":
            return decode_trace_ended(message.trace_ended)
        case "bandwidth_progress" | "bandwidth_measured":
            return decode_bandwidth(message)
        case _:
            raise LinkProtocolError("the engine sent a message without a known body")


def encode_control_message(message: ControlMessage) -> pb.ControlMessage:
    """Control to engine."""
    match message:
        case EngineSettings():
            return pb.ControlMessage(welcome=_encode_settings(message))
        case GenerateRequest():
            return pb.ControlMessage(submit=_encode_request(message))
        case Cancel():
            return pb.ControlMessage(cancel=pb.Cancel(request_id=message.request_id))
        case Shutdown():
            return pb.ControlMessage(shutdown=pb.Shutdown(drain=message.drain))
        case SetLogLevel():
            return pb.ControlMessage(set_log_level=pb.SetLogLevel(level=message.level))
        case ResizeCache() | SleepEngine() | WakeEngine():
            return encode_size_command(message)
        case VerifyCache():
            return pb.ControlMessage(verify_cache=pb.VerifyCache(request_id=message.request_id))
        case StartTrace():
            return pb.ControlMessage(start_trace=pb.StartTrace(trace_id=message.trace_id))
        case StopTrace():
            return pb.ControlMessage(stop_trace=pb.StopTrace(trace_id=message.trace_id))
        case MeasureBandwidth():
            return encode_measure(message)
        case _:
            assert_never(message)


def decode_control_message(message: pb.ControlMessage) -> ControlMessage:
    """The engine's side of `encode_control_message`. Raises `LinkProtocolError`."""
    match message.WhichOneof("body"):
        case "welcome":
            return _decode_settings(message.welcome)
        case "submit":
            return _decode_request(message.submit)
        case "cancel":
            return Cancel(request_id=message.cancel.request_id)
        case "shutdown":
            return Shutdown(drain=message.shutdown.drain)
        case "set_log_level":
            return SetLogLevel(level=message.set_log_level.level)
        case "resize_cache":
            return decode_resize(message.resize_cache)
        case "sleep":
            return SleepEngine(generation=message.sleep.generation)
        case "wake":
            return decode_wake(message.wake)
        case "verify_cache":
            return VerifyCache(request_id=message.verify_cache.request_id)
        case "start_trace":
            return StartTrace(trace_id=message.start_trace.trace_id)
        case "stop_trace":
            return StopTrace(trace_id=message.stop_trace.trace_id)
        case "measure_bandwidth":
            return decode_measure(message.measure_bandwidth)
        case _:
            raise LinkProtocolError("control sent a message without a known body")


def _encode_settings(settings: EngineSettings) -> pb.Welcome:
    return pb.Welcome(
        model=settings.model,
        threads_count=settings.threads_count,
        kv_bytes=settings.kv_bytes,
        max_running_count=settings.max_running_count,
        max_waiting_count=settings.max_waiting_count,
        step_tokens=settings.step_tokens,
        max_context_tokens=settings.max_context_tokens,
        log_level=settings.log_level,
        log_format=settings.log_format,
        pin_pool=settings.pin_pool,
        backend=settings.backend,
        numerics=settings.numerics,
        device=settings.device,
        slots_count=settings.slots_count,
        device_bytes=settings.device_bytes,
        link_bytes_per_s=settings.link_bytes_per_s,
        preset=settings.preset,
        layers=settings.layers,
        attention=settings.attention,
        sweep_tokens=settings.sweep_tokens,
        gpu=settings.gpu,
        gpu_fault=settings.gpu_fault,
    )


def _decode_settings(welcome: pb.Welcome) -> EngineSettings:
    return EngineSettings(
        model=welcome.model,
        threads_count=welcome.threads_count,
        kv_bytes=welcome.kv_bytes,
        max_running_count=welcome.max_running_count,
        max_waiting_count=welcome.max_waiting_count,
        step_tokens=welcome.step_tokens,
        max_context_tokens=welcome.max_context_tokens,
        log_level=welcome.log_level,
        log_format=welcome.log_format,
        pin_pool=welcome.pin_pool,
        backend=welcome.backend,
        numerics=welcome.numerics,
        device=welcome.device,
        slots_count=welcome.slots_count,
        device_bytes=welcome.device_bytes,
        link_bytes_per_s=welcome.link_bytes_per_s,
        preset=welcome.preset,
        layers=welcome.layers,
        attention=welcome.attention,
        sweep_tokens=welcome.sweep_tokens,
        gpu=welcome.gpu,
        gpu_fault=welcome.gpu_fault,
    )


def _encode_request(request: GenerateRequest) -> pb.Submit:
    sampling = request.sampling
    return pb.Submit(
        request_id=request.request_id,
        prompt_token_ids=request.prompt_token_ids,
        max_new_tokens=request.max_new_tokens,
        sampling=pb.Sampling(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            seed=sampling.seed,
        ),
        stop_token_ids=request.stop_token_ids,
        ignore_eos=request.ignore_eos,
    )


def _decode_request(submit: pb.Submit) -> GenerateRequest:
    sampling = submit.sampling
    return GenerateRequest(
        request_id=submit.request_id,
        prompt_token_ids=tuple(submit.prompt_token_ids),
        max_new_tokens=submit.max_new_tokens,
        sampling=Sampling(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            seed=sampling.seed if sampling.HasField("seed") else None,
        ),
        stop_token_ids=tuple(submit.stop_token_ids),
        ignore_eos=submit.ignore_eos,
    )


def _encode_update(update: SequenceUpdate) -> pb.SequenceOutput:
    return pb.SequenceOutput(
        request_id=update.request_id,
        token_ids=update.token_ids,
        finish_reason=_FINISHES[update.finish_reason],
        error_reason="" if update.error_reason is None else str(update.error_reason),
        error_message=update.error_message,
        prompt_tokens=update.prompt_tokens,
        cached_tokens=update.cached_tokens,
        completion_tokens=update.completion_tokens,
    )


def _decode_update(output: pb.SequenceOutput) -> SequenceUpdate:
    if output.finish_reason not in _FINISH_VALUES:
        raise LinkProtocolError(f"finish reason number {output.finish_reason} is unknown")
    return SequenceUpdate(
        request_id=output.request_id,
        token_ids=tuple(output.token_ids),
        finish_reason=_FINISH_VALUES[output.finish_reason],
        error_reason=decode_reason(output.error_reason) if output.error_reason else None,
        error_message=output.error_message,
        prompt_tokens=output.prompt_tokens,
        cached_tokens=output.cached_tokens,
        completion_tokens=output.completion_tokens,
    )


def _encode_description(description: EngineDescription) -> pb.Ready:
    return pb.Ready(
        model=description.model,
        device=description.device,
        device_name=description.device_name,
        backend=description.backend,
        backend_reason=description.backend_reason,
        kernel=description.kernel,
        threads_count=description.threads_count,
        servable_context_tokens=description.servable_context_tokens,
        kv_bytes=description.kv_bytes,
        pool_bytes=description.pool_bytes,
        pool_page_bytes=description.pool_page_bytes,
        pool_reattached=description.pool_reattached,
        attach_s=description.attach_s,
        load_s=description.load_s,
        load_bytes_per_s=description.load_bytes_per_s,
        first_token_s=description.first_token_s,
        layers_count=description.layers_count,
        moe_layers_count=description.moe_layers_count,
        experts_per_layer_count=description.experts_per_layer_count,
        bytes_per_expert=description.bytes_per_expert,
        notes=description.notes,
        max_running_count=description.max_running_count,
        numerics=description.numerics,
        expert_format=description.expert_format,
        dense_formats=description.dense_formats,
        cpus=description.cpus,
        threads_reason=description.threads_reason,
        cache=None if description.cache is None else encode_cache_description(description.cache),
        device_uuid=description.device_uuid,
        memory=None if description.memory is None else encode_memory(description.memory),
    )


def _decode_description(ready: pb.Ready) -> EngineDescription:
    return EngineDescription(
        model=ready.model,
        device=ready.device,
        device_name=ready.device_name,
        backend=ready.backend,
        backend_reason=ready.backend_reason,
        kernel=ready.kernel,
        threads_count=ready.threads_count,
        servable_context_tokens=ready.servable_context_tokens,
        kv_bytes=ready.kv_bytes,
        pool_bytes=ready.pool_bytes,
        pool_page_bytes=ready.pool_page_bytes,
        pool_reattached=ready.pool_reattached,
        attach_s=ready.attach_s,
        load_s=ready.load_s,
        load_bytes_per_s=ready.load_bytes_per_s,
        first_token_s=ready.first_token_s,
        layers_count=ready.layers_count,
        moe_layers_count=ready.moe_layers_count,
        experts_per_layer_count=ready.experts_per_layer_count,
        bytes_per_expert=ready.bytes_per_expert,
        max_running_count=ready.max_running_count,
        numerics=ready.numerics,
        expert_format=ready.expert_format,
        dense_formats=tuple(ready.dense_formats),
        cpus=tuple(ready.cpus),
        threads_reason=ready.threads_reason,
        notes=tuple(ready.notes),
        cache=decode_cache_description(ready.cache) if ready.HasField("cache") else None,
        device_uuid=ready.device_uuid,
        memory=decode_memory(ready.memory) if ready.HasField("memory") else None,
    )
