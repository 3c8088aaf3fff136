"""The service manager's side of sd_notify(3): a datagram socket that remembers what it hears."""

from __future__ import annotations

import asyncio
import socket
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

Assignments = dict[str, str]


@dataclass
class NotifySocket:
    """`messages` in order of arrival, each as its assignments."""

    path: str
    messages: list[Assignments] = field(default_factory=list)
    arrived: asyncio.Event = field(default_factory=asyncio.Event)

    def values(self, name: str) -> list[str]:
        """Everything that was assigned to `name` so far."""
        return [message[name] for message in self.messages if name in message]

    async def wait_until(
        self, condition: Callable[[NotifySocket], bool], deadline_s: float
    ) -> None:
        """Wait for messages until `condition` holds."""
        async with asyncio.timeout(deadline_s):
            while not condition(self):
                self.arrived.clear()
                await self.arrived.wait()

    async def wait_for(self, name: str, value: str, deadline_s: float = 30.0) -> None:
        """Wait until `name` has been assigned `value`."""
        await self.wait_until(lambda heard: value in heard.values(name), deadline_s)


@asynccontextmanager
async def notify_socket() -> AsyncIterator[NotifySocket]:
    """Listen; give `path` to the process under test as NOTIFY_SOCKET."""
    with tempfile.TemporaryDirectory(prefix="ftk-") as name:
        path = str(Path(name) / "notify")
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        listener.setblocking(False)
        listener.bind(path)
        heard = NotifySocket(path)
        loop = asyncio.get_running_loop()

        def receive() -> None:
            text = listener.recv(65536).decode()
            heard.messages.append(dict(line.split("=", 1) for line in text.splitlines()))
            heard.arrived.set()

        loop.add_reader(listener, receive)
        try:
            yield heard
        finally:
            loop.remove_reader(listener)
            listener.close()
