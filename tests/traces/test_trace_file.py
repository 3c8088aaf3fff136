"""The file form of traces: what is written comes back, anything else is refused by name."""

from __future__ import annotations

import errno
import json
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freetokend.core.errors import FreetokenError, InvalidInputError, ModelDataError, Reason
from freetokend.traces.trace import SKIPPED, Phase, RoutingTrace, TraceShape, TraceStep
from freetokend.traces.trace_file import MAX_HEADER_BYTES, TraceWriter, read_trace, write_trace

SHAPE = TraceShape(layers_count=3, experts_per_layer=8, experts_per_token=2)
HEADER = {
    "format": "freetokend-routing-trace",
    "version": 2,
    "layers_count": 3,
    "experts_per_layer": 8,
    "experts_per_token": 2,
    "source": "a test",
}


def make_trace(shape: TraceShape = SHAPE, tokens: tuple[int, ...] = (5, 1, 2)) -> RoutingTrace:
    random = np.random.default_rng(1)
    steps = tuple(
        TraceStep(
            phase=Phase.DECODE if index else Phase.PREFILL,
            ids=random.integers(
                0,
                shape.experts_per_layer,
                (shape.layers_count, count, shape.experts_per_token),
                dtype=np.uint16,
            ),
        )
        for index, count in enumerate(tokens)
    )
    return RoutingTrace(shape=shape, steps=steps, source="a test")


def same(one: RoutingTrace, other: RoutingTrace) -> bool:
    return (
        (one.shape, one.source) == (other.shape, other.source)
        and len(one.steps) == len(other.steps)
        and all(
            a.phase is b.phase and np.array_equal(a.ids, b.ids)
            for a, b in zip(one.steps, other.steps, strict=True)
        )
    )


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "some.trace"


@pytest.mark.parametrize("experts", [8, 255, 256, 257, 65_535])
@pytest.mark.parametrize("tokens", [(), (5, 1, 2)])
def test_what_is_written_comes_back(path: Path, experts: int, tokens: tuple[int, ...]) -> None:
    shape = TraceShape(layers_count=2, experts_per_layer=experts, experts_per_token=3)
    trace = make_trace(shape, tokens)
    write_trace(path, trace)
    assert same(read_trace(path), trace)
    assert [one.name for one in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize("experts", [8, 255, 256, 65_535])
def test_rows_that_a_layer_skipped_come_back(path: Path, experts: int) -> None:
    shape = TraceShape(layers_count=3, experts_per_layer=experts, experts_per_token=2)
    trace = make_trace(shape)
    trace.steps[0].ids[2, :4] = SKIPPED
    trace.steps[1].ids[1, 0] = experts - 1
    write_trace(path, trace)
    assert same(read_trace(path), trace)


def test_rows_that_are_skipped_in_part_are_refused(path: Path) -> None:
    trace = make_trace()
    trace.steps[0].ids[2, 4, 1] = SKIPPED
    with pytest.raises(ValueError, match="in part"):
        write_trace(path, trace)
    with_header(path, step(2, 1, bytes([0, 1, 2, 255, 4, 5])))
    with pytest.raises(ModelDataError, match="in part"):
        read_trace(path)


@pytest.mark.parametrize(("experts", "size"), [(256, 1), (257, 2)])
def test_version_1_is_read(path: Path, experts: int, size: int) -> None:
    """With as many as 256 experts in one byte, so that 255 is an expert."""
    ids = [0, 1, 2, 255, 4, 5]
    body = b"".join(one.to_bytes(size, "little") for one in ids)
    with_header(path, step(2, 1, body) + step(0, 1, b""), version=1, experts_per_layer=experts)
    (found,) = read_trace(path).steps
    assert found.ids.ravel().tolist() == ids


def test_the_name_appears_when_the_recording_is_complete(path: Path) -> None:
    writer = TraceWriter(path, SHAPE)
    writer.add(Phase.DECODE, make_trace().steps[1].ids)
    assert not path.exists()
    writer.close()
    assert len(read_trace(path).steps) == 1


def test_a_recording_that_fails_leaves_nothing(path: Path) -> None:
    with pytest.raises(ValueError, match="reach"), TraceWriter(path, SHAPE) as writer:
        writer.add(Phase.DECODE, np.full((3, 1, 2), 8))
    assert list(path.parent.iterdir()) == []


@pytest.mark.parametrize("shape", [(3, 2), (2, 1, 2), (3, 1, 3), (3, 0, 2)])
def test_ids_of_another_shape_are_refused(path: Path, shape: tuple[int, ...]) -> None:
    with TraceWriter(path, SHAPE) as writer, pytest.raises(ValueError, match="not"):
        writer.add(Phase.DECODE, np.zeros(shape, dtype=np.int32))


def test_negative_ids_are_refused(path: Path) -> None:
    with TraceWriter(path, SHAPE) as writer, pytest.raises(ValueError, match="-1"):
        writer.add(Phase.DECODE, np.full((3, 1, 2), -1))


def test_every_shorter_file_is_refused(path: Path) -> None:
    write_trace(path, make_trace())
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(ModelDataError, match=r"some\.trace"):
            read_trace(path)


def test_every_flipped_byte_behind_the_header_is_noticed(path: Path) -> None:
    write_trace(path, make_trace())
    whole = path.read_bytes()
    for index in range(whole.index(b"\n") + 1, len(whole)):
        path.write_bytes(whole[:index] + bytes([whole[index] ^ 0x10]) + whole[index + 1 :])
        with pytest.raises(ModelDataError, match=r"some\.trace"):
            read_trace(path)


def with_header(path: Path, body: bytes = b"", **changes: object) -> None:
    path.write_bytes(json.dumps(HEADER | changes).encode() + b"\n" + body)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"format": "another"}, "not a routing trace"),
        ({"version": 3}, "format version 3"),
        ({"version": "x" * 900}, "format version"),
        ({"layers_count": 0}, "layers_count"),
        ({"layers_count": 10**9}, "layers_count"),
        ({"experts_per_layer": 1 << 16}, "experts_per_layer"),
        ({"experts_per_token": 9}, "experts_per_token"),
        ({"experts_per_token": True}, "whole numbers"),
        ({"experts_per_token": 2.0}, "whole numbers"),
        ({"layers_count": None}, "whole numbers"),
        ({"source": 1}, "whole numbers"),
    ],
)
def test_headers_that_cannot_be_true(path: Path, changes: dict[str, object], told: str) -> None:
    with_header(path, **changes)
    with pytest.raises(ModelDataError, match=told):
        read_trace(path)


def sealed(record: bytes) -> bytes:
    return record + zlib.crc32(record).to_bytes(4, "little")


def step(code: int, tokens: int, ids: bytes) -> bytes:
    return sealed(bytes([code]) + tokens.to_bytes(4, "little") + ids)


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (step(2, 1, bytes([0, 1, 2, 3, 4, 8])), "reach from 0 to 8 of 8 experts"),
        (step(3, 1, bytes(6)), "unknown kind 3"),
        (step(2, 0, b""), "no tokens"),
        (step(2, 0xFFFF_FFFF, bytes(6)), "cut off"),
        (step(2, 1, bytes(6)) + step(0, 2, b""), "its end says 2"),
        (step(0, 0, b"") + b"more", "4 bytes follow"),
    ],
)
def test_steps_that_cannot_be_true(path: Path, body: bytes, told: str) -> None:
    with_header(path, body)
    with pytest.raises(ModelDataError, match=told):
        read_trace(path)


@pytest.mark.parametrize("content", [b"", b"\n", b"[]\n", b"[" * 4000, b"\xff" * 9000, b"{}"])
def test_other_files_are_not_traces(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises(ModelDataError, match="not a routing trace"):
        read_trace(path)


@settings(max_examples=200)
@given(st.binary(max_size=200), st.booleans())
def test_noise_is_refused(
    tmp_path_factory: pytest.TempPathFactory, noise: bytes, head: bool
) -> None:
    path = tmp_path_factory.mktemp("noise") / "some.trace"
    if head:
        with_header(path, noise)
    else:
        path.write_bytes(noise)
    with pytest.raises(ModelDataError, match=r"some\.trace"):
        read_trace(path)


def test_a_file_that_is_not_there(path: Path) -> None:
    with pytest.raises(FreetokenError, match=r"some\.trace") as caught:
        read_trace(path)
    assert caught.value.reason is Reason.IO_FAILED


def test_a_place_where_nothing_can_be_written(tmp_path: Path) -> None:
    with pytest.raises(FreetokenError, match="written") as caught:
        TraceWriter(tmp_path / "no" / "where.trace", SHAPE)
    assert caught.value.reason is Reason.IO_FAILED


def test_a_full_disk_is_told() -> None:
    writer = TraceWriter(Path("/dev/shm/freetokend-full.trace"), SHAPE)

    class Full:
        def write(self, data: bytes) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

        def close(self) -> None:
            return

    writer._stream.close()
    writer._stream = Full()  # type: ignore[assignment]
    with pytest.raises(FreetokenError, match="No space left"):
        writer.add(Phase.DECODE, np.zeros((3, 1, 2), dtype=np.int32))
    writer.discard()


def test_a_source_longer_than_a_header(path: Path) -> None:
    with pytest.raises(InvalidInputError, match="too long"):
        TraceWriter(path, SHAPE, source="x" * MAX_HEADER_BYTES)
