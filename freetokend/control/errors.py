"""One interceptor that turns typed errors into gRPC statuses by the table of core.errors."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING, Any, Final

import grpc
import grpc.aio

from freetokend.core import logs
from freetokend.core.errors import FreetokenError, Reason, reaction

REASON_KEY: Final = "freetoken-reason"
PARAM_KEY: Final = "freetoken-param"
RETRY_AFTER_KEY: Final = "freetoken-retry-after-s"

_OWN_METHODS: Final = "/freetokend."

_log = logs.logger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]

if TYPE_CHECKING:
    # Generic for type checkers only; at run time the classes take no parameters.
    Interceptor = grpc.aio.ServerInterceptor[Any, Any]
    Handler = grpc.RpcMethodHandler[Any, Any]
else:
    Interceptor = grpc.aio.ServerInterceptor


class ErrorInterceptor(Interceptor):
    """Wraps every handler of our services; health and reflection answer for themselves.

    A fault of ours is logged and told as INTERNAL without details.
    """

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        """See `grpc.aio.ServerInterceptor`; our services take no streams of requests."""
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or not method.startswith(_OWN_METHODS):
            return handler
        if handler.response_streaming:
            return grpc.unary_stream_rpc_method_handler(
                _guarded_stream(handler.unary_stream, method),
                request_deserializer=handler.request_deserializer,
                response_serializer=handler.response_serializer,
            )
        return grpc.unary_unary_rpc_method_handler(
            _guarded_unary(handler.unary_unary, method),
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )


def _guarded_unary(behavior: Any, method: str) -> Callable[..., Any]:
    async def call(request: Any, context: Context) -> Any:
        try:
            return await behavior(request, context)
        except grpc.aio.AbortError:
            raise
        except Exception as error:
            await _abort(context, error, method)

    return call


def _guarded_stream(behavior: Any, method: str) -> Callable[..., AsyncIterator[Any]]:
    async def call(request: Any, context: Context) -> AsyncIterator[Any]:
        try:
            async for response in behavior(request, context):
                yield response
        except grpc.aio.AbortError:
            raise
        except Exception as error:
            await _abort(context, error, method)

    return call


async def _abort(context: Context, error: Exception, method: str) -> None:
    if not isinstance(error, FreetokenError):
        _log.exception("rpc-failed", method=method)
        error = FreetokenError(
            "a fault in the daemon; its log has the details", reason=Reason.INTERNAL
        )
    metadata = [(REASON_KEY, error.reason.value)]
    if error.param is not None:
        metadata.append((PARAM_KEY, error.param))
    if error.retry_after_s is not None:
        metadata.append((RETRY_AFTER_KEY, f"{error.retry_after_s:.3f}"))
    status = grpc.StatusCode[reaction(error.reason).grpc_status]
    await context.abort(status, error.message, tuple(metadata))
