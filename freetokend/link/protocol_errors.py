"""What is wrong with a message that no build of ours sends."""

from __future__ import annotations

from freetokend.core.errors import InternalError, Reason


class LinkProtocolError(InternalError):
    """The other end of the link sent something that no build of ours sends."""


def decode_reason(text: str) -> Reason:
    """The reason of that name. Raises `LinkProtocolError`."""
    try:
        return Reason(text)
    except ValueError:
        raise LinkProtocolError(f"the engine gave an unknown reason {text[:64]!r}") from None
