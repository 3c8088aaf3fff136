"""The process of ggml's side: a layer of one ggml type, driven through `ggml_layer.cpp`."""

from __future__ import annotations

import ctypes

from benchmarks.layer_shape import QWEN3, routes
from benchmarks.peers.child import serve
from benchmarks.rounds import Burst, waited_s


class GgmlLayer:
    """One layer, then one batch of it, in ggml's memory."""

    def __init__(self) -> None:
        self._library: ctypes.CDLL | None = None
        self._layer: int | None = None
        self._batch: int | None = None
        self._threads_count = 1

    def open(self, library: str, type_name: str, threads_count: int) -> dict[str, object]:
        """Load the driver and fill a layer."""
        self._library = _declared(ctypes.CDLL(library))
        self._threads_count = threads_count
        self._layer = self._library.layer_open(
            type_name.encode(),
            threads_count,
            QWEN3.hidden_size,
            QWEN3.intermediate_size,
            QWEN3.experts_count,
            QWEN3.top_k,
        )
        if self._layer is None:
            raise ValueError(f"no ggml type {type_name}, or no memory for it")
        return {"buffer": self._library.layer_buffer_name(self._layer).decode()}

    def batch(self, tokens: int) -> dict[str, object]:
        """The batch that bursts run; returns the error of one call."""
        assert self._library is not None
        if self._batch is not None:
            self._library.batch_close(self._batch)
        route = routes(QWEN3, tokens)
        self._batch = self._library.batch_open(
            self._layer, tokens, route.ctypes.data_as(ctypes.POINTER(ctypes.c_int32)), len(route)
        )
        return {"error_ratio": self._library.batch_error(self._batch)}

    def burst(self, seconds: float) -> Burst:
        assert self._library is not None
        calls, elapsed_s = ctypes.c_int64(), ctypes.c_double()
        before_s = waited_s()
        self._library.batch_burst(
            self._batch, seconds, ctypes.byref(calls), ctypes.byref(elapsed_s)
        )
        lost_s = waited_s() - before_s
        share = max(0.0, 1.0 - lost_s / (self._threads_count * elapsed_s.value))
        return Burst(rate=calls.value / elapsed_s.value, cpu_share=share)


def _declared(library: ctypes.CDLL) -> ctypes.CDLL:
    library.layer_open.restype = ctypes.c_void_p
    library.layer_open.argtypes = [ctypes.c_char_p, *(5 * [ctypes.c_int])]
    library.layer_buffer_name.restype = ctypes.c_char_p
    library.layer_buffer_name.argtypes = [ctypes.c_void_p]
    library.batch_open.restype = ctypes.c_void_p
    library.batch_open.argtypes = [
        ctypes.c_void_p,
        ctypes.c_int,
        ctypes.POINTER(ctypes.c_int32),
        ctypes.c_int,
    ]
    library.batch_close.argtypes = [ctypes.c_void_p]
    library.batch_burst.argtypes = [
        ctypes.c_void_p,
        ctypes.c_double,
        ctypes.POINTER(ctypes.c_int64),
        ctypes.POINTER(ctypes.c_double),
    ]
    library.batch_error.restype = ctypes.c_double
    library.batch_error.argtypes = [ctypes.c_void_p]
    return library


def main() -> None:
    layer = GgmlLayer()
    serve(layer, {"open": layer.open, "batch": layer.batch})


if __name__ == "__main__":
    main()
