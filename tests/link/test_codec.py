"""The codec is total, and what no build of ours sends is refused with a text."""

from __future__ import annotations

import pytest
from google.protobuf.message import DecodeError
from hypothesis import example, given
from hypothesis import strategies as st

from freetokend.api.link.v1 import link_pb2 as pb
from freetokend.link.codec import (
    decode_control_message,
    decode_engine_message,
    encode_control_message,
    encode_engine_message,
)
from freetokend.link.messages import (
    ControlMessage,
    EngineMessage,
    GenerateRequest,
    LoadProgress,
    Sampling,
)
from freetokend.link.protocol_errors import LinkProtocolError
from tests.link.strategies import control_messages, engine_messages


@given(engine_messages)
def test_engine_messages_round_trip(message: EngineMessage) -> None:
    wire = encode_engine_message(message).SerializeToString()
    assert decode_engine_message(pb.EngineMessage.FromString(wire)) == message


@given(control_messages)
@example(
    GenerateRequest(
        request_id="seed-0", prompt_token_ids=(), max_new_tokens=1, sampling=Sampling(seed=0)
    )
)
def test_control_messages_round_trip(message: ControlMessage) -> None:
    wire = encode_control_message(message).SerializeToString()
    assert decode_control_message(pb.ControlMessage.FromString(wire)) == message


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (pb.EngineMessage(), "without a known body"),
        (pb.EngineMessage(load_progress=pb.LoadProgress()), "load stage number 0"),
        (pb.EngineMessage(failure=pb.Failure(reason="tired")), "unknown reason 'tired'"),
        (pb.EngineMessage(failure=pb.Failure()), "unknown reason ''"),
        (
            pb.EngineMessage(
                step_report=pb.StepReport(outputs=[pb.SequenceOutput(error_reason="odd")])
            ),
            "unknown reason 'odd'",
        ),
        (pb.EngineMessage(cache_resized=pb.CacheResized()), "resize outcome number 0"),
        (
            pb.EngineMessage(cache_verified=pb.CacheVerified(error_reason="odd")),
            "unknown reason 'odd'",
        ),
        (
            pb.EngineMessage(
                ready=pb.Ready(cache=pb.CacheDescription(layer_runs=[pb.LayerRun(branch="up")]))
            ),
            "unknown branch 'up'",
        ),
    ],
)
def test_malformed_engine_messages_are_refused(message: pb.EngineMessage, words: str) -> None:
    with pytest.raises(LinkProtocolError, match=words):
        decode_engine_message(message)


def test_unknown_finish_number_is_refused() -> None:
    output = pb.SequenceOutput.FromString(b"\x18\x63")  # field 3, varint 99
    with pytest.raises(LinkProtocolError, match="finish reason number 99"):
        decode_engine_message(pb.EngineMessage(step_report=pb.StepReport(outputs=[output])))


def test_empty_control_message_is_refused() -> None:
    with pytest.raises(LinkProtocolError, match="without a known body"):
        decode_control_message(pb.ControlMessage())


def test_unknown_stage_is_not_sent() -> None:
    with pytest.raises(LinkProtocolError, match="'resting'"):
        encode_engine_message(LoadProgress(stage="resting", done_bytes=0, total_bytes=0))


@given(st.binary(max_size=64))
def test_any_parsed_bytes_decode_or_are_refused(data: bytes) -> None:
    try:
        message = pb.EngineMessage.FromString(data)
    except DecodeError:
        return
    try:
        decoded = decode_engine_message(message)
    except LinkProtocolError:
        return
    assert decode_engine_message(encode_engine_message(decoded)) == decoded
