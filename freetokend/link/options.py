"""gRPC options that both ends of the link share."""

from __future__ import annotations

from typing import Final

# A prompt of a million tokens is about 3 MB; a message near this limit is a fault, not a prompt.
MAX_MESSAGE_BYTES: Final = 64 << 20

CHANNEL_OPTIONS: Final[tuple[tuple[str, int], ...]] = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.enable_http_proxy", 0),  # the environment may name a proxy; a Unix socket has none
    ("grpc.so_reuseport", 0),
)
