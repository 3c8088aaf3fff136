"""Errors as part of the interface: few classes, stable reasons, one total table.

A class says how the receiver reacts (change the request, retry later, do not restart, ...); a
`Reason` says what happened and is the key of `REACTIONS`, which every border (HTTP, gRPC, exit
codes) reads instead of deciding for itself. Messages say what happened, why, and what to do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import ClassVar, Final


class Reason(StrEnum):
    """Stable identifiers: they appear in JSON bodies, gRPC details, logs and exit codes."""

    INVALID_REQUEST = "invalid_request"
    CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
    PAYLOAD_TOO_LARGE = "payload_too_large"
    UNAUTHENTICATED = "unauthenticated"
    PERMISSION_DENIED = "permission_denied"
    NOT_FOUND = "not_found"
    MODEL_NOT_FOUND = "model_not_found"
    METHOD_NOT_ALLOWED = "method_not_allowed"
    QUEUE_FULL = "queue_full"
    LOADING = "loading"
    DRAINING = "draining"
    ENGINE_UNAVAILABLE = "engine_unavailable"
    ENGINE_FAILED = "engine_failed"
    CANCELLED = "cancelled"
    CONFIG_INVALID = "config_invalid"
    MODEL_INVALID = "model_invalid"
    MODEL_UNSUPPORTED = "model_unsupported"
    HOST_MEMORY = "host_memory"
    DEVICE_MEMORY = "device_memory"
    DISK_SPACE = "disk_space"
    ADDRESS_IN_USE = "address_in_use"
    DEVICE_UNUSABLE = "device_unusable"
    IO_FAILED = "io_failed"
    INTERNAL = "internal"


class FreetokenError(Exception):
    """Base of every error that may cross a border.

    `param` names the offending field, if there is one. `retry_after_s` is a hint for the caller.
    """

    default_reason: ClassVar[Reason] = Reason.INTERNAL

    def __init__(
        self,
        message: str,
        *,
        reason: Reason | None = None,
        param: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.reason = reason if reason is not None else self.default_reason
        self.param = param
        self.retry_after_s = retry_after_s


class InvalidInputError(FreetokenError):
    """The caller must change what it sent."""

    default_reason = Reason.INVALID_REQUEST


class NotFoundError(FreetokenError):
    """What was named does not exist here."""

    default_reason = Reason.NOT_FOUND


class AccessError(FreetokenError):
    """The caller is not known or not allowed."""

    default_reason = Reason.PERMISSION_DENIED


class UnavailableError(FreetokenError):
    """Nothing is wrong with the request: retry later (queue full, loading, draining, restart)."""

    default_reason = Reason.ENGINE_UNAVAILABLE


class CancelledRequestError(FreetokenError):
    """The caller went away; the work has been dropped."""

    default_reason = Reason.CANCELLED


class ConfigError(FreetokenError):
    """The configuration must be changed; starting again without a change cannot help."""

    default_reason = Reason.CONFIG_INVALID


class ModelDataError(FreetokenError):
    """Model files are missing, damaged or of an unsupported kind; a restart cannot help."""

    default_reason = Reason.MODEL_INVALID


class ResourceError(FreetokenError):
    """The machine lacks memory, disk or a usable device."""

    default_reason = Reason.HOST_MEMORY


class InternalError(FreetokenError):
    """A fault of ours."""

    default_reason = Reason.INTERNAL


@dataclass(frozen=True, slots=True, kw_only=True)
class Reaction:
    """How one reason is told at each border.

    `grpc_status` is the name of a grpc.StatusCode; `exit_code` follows sysexits(3) where it fits.
    """

    grpc_status: str
    http_status: int
    openai_type: str
    anthropic_type: str
    exit_code: int


def _reaction(grpc: str, http: int, openai: str, anthropic: str, exit_code: int) -> Reaction:
    return Reaction(
        grpc_status=grpc,
        http_status=http,
        openai_type=openai,
        anthropic_type=anthropic,
        exit_code=exit_code,
    )


REACTIONS: Final[Mapping[Reason, Reaction]] = MappingProxyType(
    {
        Reason.INVALID_REQUEST: _reaction(
            "INVALID_ARGUMENT", 400, "invalid_request_error", "invalid_request_error", 64
        ),
        Reason.CONTEXT_LENGTH_EXCEEDED: _reaction(
            "INVALID_ARGUMENT", 400, "invalid_request_error", "invalid_request_error", 64
        ),
        Reason.PAYLOAD_TOO_LARGE: _reaction(
            "INVALID_ARGUMENT", 413, "invalid_request_error", "request_too_large", 64
        ),
        Reason.UNAUTHENTICATED: _reaction(
            "UNAUTHENTICATED", 401, "invalid_request_error", "authentication_error", 77
        ),
        Reason.PERMISSION_DENIED: _reaction(
            "PERMISSION_DENIED", 403, "invalid_request_error", "permission_error", 77
        ),
        Reason.NOT_FOUND: _reaction(
            "NOT_FOUND", 404, "invalid_request_error", "not_found_error", 66
        ),
        Reason.MODEL_NOT_FOUND: _reaction(
            "NOT_FOUND", 404, "invalid_request_error", "not_found_error", 66
        ),
        Reason.METHOD_NOT_ALLOWED: _reaction(
            "UNIMPLEMENTED", 405, "invalid_request_error", "invalid_request_error", 64
        ),
        Reason.QUEUE_FULL: _reaction(
            "RESOURCE_EXHAUSTED", 429, "rate_limit_error", "rate_limit_error", 75
        ),
        Reason.LOADING: _reaction("UNAVAILABLE", 503, "server_error", "overloaded_error", 75),
        Reason.DRAINING: _reaction("UNAVAILABLE", 503, "server_error", "overloaded_error", 75),
        Reason.ENGINE_UNAVAILABLE: _reaction(
            "UNAVAILABLE", 503, "server_error", "overloaded_error", 69
        ),
        Reason.ENGINE_FAILED: _reaction("INTERNAL", 500, "server_error", "api_error", 70),
        Reason.CANCELLED: _reaction("CANCELLED", 499, "invalid_request_error", "api_error", 130),
        Reason.CONFIG_INVALID: _reaction(
            "FAILED_PRECONDITION", 500, "server_error", "api_error", 78
        ),
        Reason.MODEL_INVALID: _reaction(
            "FAILED_PRECONDITION", 500, "server_error", "api_error", 65
        ),
        Reason.MODEL_UNSUPPORTED: _reaction(
            "FAILED_PRECONDITION", 500, "server_error", "api_error", 65
        ),
        Reason.HOST_MEMORY: _reaction(
            "RESOURCE_EXHAUSTED", 503, "server_error", "overloaded_error", 71
        ),
        Reason.DEVICE_MEMORY: _reaction(
            "RESOURCE_EXHAUSTED", 503, "server_error", "overloaded_error", 71
        ),
        Reason.DISK_SPACE: _reaction("RESOURCE_EXHAUSTED", 503, "server_error", "api_error", 73),
        Reason.ADDRESS_IN_USE: _reaction("UNAVAILABLE", 503, "server_error", "api_error", 75),
        Reason.DEVICE_UNUSABLE: _reaction(
            "FAILED_PRECONDITION", 503, "server_error", "api_error", 71
        ),
        Reason.IO_FAILED: _reaction("INTERNAL", 500, "server_error", "api_error", 74),
        Reason.INTERNAL: _reaction("INTERNAL", 500, "server_error", "api_error", 70),
    }
)


def reaction(reason: Reason) -> Reaction:
    """The one answer to "how is this told?"; total over `Reason` (a test checks it)."""
    return REACTIONS[reason]
