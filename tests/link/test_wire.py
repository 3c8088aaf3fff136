"""The two ends against each other over a real socket: admission, order, disconnects."""

from __future__ import annotations

import asyncio
import os
import stat
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import pytest

from freetokend.api.link.v1 import link_pb2 as pb
from freetokend.api.link.v1 import link_pb2_grpc as pb_grpc
from freetokend.core.errors import AccessError, ConfigError, UnavailableError
from freetokend.link.engine_side import (
    TOKEN_ENVIRONMENT,
    EngineLinkClient,
    take_link_token,
)
from freetokend.link.messages import (
    LINK_VERSION,
    Cancel,
    ControlMessage,
    Disconnected,
    EngineMessage,
    EngineSettings,
    EngineStats,
    Heartbeat,
    Hello,
    SequenceUpdate,
    Shutdown,
    StepReport,
)
from freetokend.link.server import Attachment, LinkServer
from tests.support.scripted import DEADLINE_S, greedy

SETTINGS = EngineSettings(model="wire", step_tokens=77)


@dataclass
class Listener:
    """Writes down what the server tells it."""

    inbox: asyncio.Queue[EngineMessage] = field(default_factory=asyncio.Queue)
    hellos: list[Hello] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)
    gone: asyncio.Event = field(default_factory=asyncio.Event)

    def attached(self, hello: Hello) -> None:
        self.hellos.append(hello)

    def received(self, message: EngineMessage) -> None:
        self.inbox.put_nowait(message)

    def refused(self, text: str) -> None:
        self.refusals.append(text)

    def detached(self, cause: str) -> None:
        self.gone.set()

    async def next_of(self, kind: type[EngineMessage]) -> EngineMessage:
        """The next message of one kind; others are passed over."""
        async with asyncio.timeout(DEADLINE_S):
            while not isinstance(message := await self.inbox.get(), kind):
                pass
            return message


@dataclass
class Wire:
    server: LinkServer
    listener: Listener
    attachment: Attachment

    def client(
        self, token: str | None = None, link_version: int = LINK_VERSION
    ) -> EngineLinkClient:
        return EngineLinkClient(
            self.server.address,
            token=self.attachment.token if token is None else token,
            kind="test",
            heartbeat_s=0.02,
            link_version=link_version,
        )


@pytest.fixture
async def wire() -> AsyncIterator[Wire]:
    with tempfile.TemporaryDirectory(prefix="ftk-") as name:
        server = LinkServer(Path(name) / "link")
        await server.start()
        listener = Listener()
        yield Wire(server, listener, server.expect(SETTINGS, listener))
        await server.stop()


async def test_messages_pass_both_ways_in_order(wire: Wire) -> None:
    client = wire.client()
    assert await asyncio.to_thread(client.connect) == SETTINGS
    assert [(h.kind, h.pid) for h in wire.listener.hellos] == [("test", os.getpid())]
    sent: list[ControlMessage] = [greedy("one"), Cancel(request_id="one"), Shutdown(drain=True)]
    for message in sent:
        wire.attachment.send(message)
    received = [await asyncio.to_thread(client.inbox.get, True, DEADLINE_S) for _ in sent]
    assert received == sent
    report = StepReport(
        step_index=3,
        outputs=(SequenceUpdate(request_id="one", token_ids=(5, 6)),),
        stats=EngineStats(steps_count=3),
    )
    client.progress(4)
    client.set_busy(True)
    client.send(report)
    assert await wire.listener.next_of(StepReport) == report
    beat = await wire.listener.next_of(Heartbeat)
    assert beat == Heartbeat(progress_count=4, busy=True, stats=report.stats)
    await asyncio.to_thread(client.close)
    async with asyncio.timeout(DEADLINE_S):
        await wire.listener.gone.wait()


async def test_a_watched_count_is_progress_without_a_call(wire: Wire) -> None:
    client = wire.client()
    counted = iter(range(10, 10_000))
    client.watch(lambda: next(counted))
    client.progress(5)
    await asyncio.to_thread(client.connect)
    for expected in (15, 16, 17):
        beat = await wire.listener.next_of(Heartbeat)
        assert beat == Heartbeat(progress_count=expected, busy=False, stats=EngineStats())
    await asyncio.to_thread(client.close)


async def test_everything_sent_before_close_arrives(wire: Wire) -> None:
    client = wire.client()
    await asyncio.to_thread(client.connect)
    tokens = tuple(range(5000))
    for index in tokens:
        client.send(
            StepReport(
                step_index=index, outputs=(SequenceUpdate(request_id="r", token_ids=(index,)),)
            )
        )
    await asyncio.to_thread(client.close)
    async with asyncio.timeout(DEADLINE_S):
        await wire.listener.gone.wait()
    received: list[int] = []
    while not wire.listener.inbox.empty():
        message = wire.listener.inbox.get_nowait()
        if isinstance(message, StepReport):
            received.extend(token for output in message.outputs for token in output.token_ids)
    assert tuple(received) == tokens


async def test_wrong_token_is_refused(wire: Wire) -> None:
    with pytest.raises(AccessError, match="not that of an engine this process started"):
        await asyncio.to_thread(wire.client(token="guess").connect)
    assert wire.listener.hellos == []
    await asyncio.to_thread(wire.client().connect)


async def test_other_link_version_is_refused_with_both_numbers(wire: Wire) -> None:
    client = wire.client(link_version=9999)
    with pytest.raises(ConfigError, match="link version 9999") as refusal:
        await asyncio.to_thread(client.connect)
    assert f"control process version {LINK_VERSION}" in refusal.value.message
    assert len(wire.listener.refusals) == 1
    assert wire.listener.hellos == []


async def test_second_engine_with_the_same_token_is_refused(wire: Wire) -> None:
    first = wire.client()
    await asyncio.to_thread(first.connect)
    with pytest.raises(UnavailableError, match="already attached"):
        await asyncio.to_thread(wire.client().connect)
    first.send(StepReport(step_index=1))
    assert await wire.listener.next_of(StepReport) == StepReport(step_index=1)
    await asyncio.to_thread(first.close)


async def test_revoked_token_admits_nobody(wire: Wire) -> None:
    wire.server.revoke(wire.attachment)
    with pytest.raises(AccessError):
        await asyncio.to_thread(wire.client().connect)


async def test_stream_that_does_not_begin_with_hello_is_refused(wire: Wire) -> None:
    async with grpc.aio.insecure_channel(wire.server.address) as channel:
        stub = pb_grpc.EngineLinkStub(channel)  # type: ignore[no-untyped-call]
        call = stub.Attach(iter([pb.EngineMessage(heartbeat=pb.Heartbeat())]))
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await call.read()
        assert refusal.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_malformed_message_ends_the_stream(wire: Wire) -> None:
    hello = pb.Hello(token=wire.attachment.token, link_version=LINK_VERSION)
    async with grpc.aio.insecure_channel(wire.server.address) as channel:
        stub = pb_grpc.EngineLinkStub(channel)  # type: ignore[no-untyped-call]
        call = stub.Attach(iter([pb.EngineMessage(hello=hello), pb.EngineMessage()]))
        async with asyncio.timeout(DEADLINE_S):
            assert (await call.read()).WhichOneof("body") == "welcome"
            await wire.listener.gone.wait()


async def test_lost_control_is_seen_in_the_inbox(wire: Wire) -> None:
    client = wire.client()
    await asyncio.to_thread(client.connect)
    await wire.server.stop()
    last = await asyncio.to_thread(client.inbox.get, True, DEADLINE_S)
    assert isinstance(last, Disconnected)
    client.send(StepReport(step_index=1))  # nobody listens: dropped, not an error
    await asyncio.to_thread(client.close)


async def test_nobody_listening_is_an_error_not_a_wait() -> None:
    with tempfile.TemporaryDirectory(prefix="ftk-") as name:
        client = EngineLinkClient(f"unix:{name}/nobody.sock", token="t", kind="test")
        with pytest.raises(UnavailableError):
            await asyncio.to_thread(client.connect, DEADLINE_S)


def test_token_is_taken_out_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN_ENVIRONMENT, "secret")
    assert take_link_token() == "secret"
    assert TOKEN_ENVIRONMENT not in os.environ
    with pytest.raises(ConfigError, match="started by freetokend"):
        take_link_token()


async def test_directory_is_private_and_the_socket_goes(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="ftk-") as name:
        directory = Path(name) / "link"
        directory.mkdir(mode=0o777)
        server = LinkServer(directory)
        await server.start()
        assert stat.S_IMODE(os.stat(directory).st_mode) == 0o700
        assert os.listdir(directory) == [f"link-{os.getpid()}.sock"]
        await server.stop()
        assert os.listdir(directory) == []


async def test_unusable_places_are_named(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 100)
    with pytest.raises(ConfigError, match="107 bytes"):
        await LinkServer(deep).start()
    occupied = tmp_path / "file"
    occupied.touch()
    with pytest.raises(ConfigError, match="file"):
        await LinkServer(occupied).start()
    with pytest.raises(ConfigError, match="cannot use"):
        await LinkServer(occupied / "below").start()
