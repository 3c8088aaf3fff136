"""The process of torch's side: a bf16 layer as eager model code computes it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional

from benchmarks.layer_shape import QWEN3, routes
from benchmarks.peers.child import serve
from benchmarks.rounds import Burst, run_burst

DISTINCT_EXPERTS = 4


class TorchLayer:
    """Stacked weights [experts, ...]; a batch goes through its experts one after the other."""

    def __init__(self) -> None:
        self._call: Callable[[int], None] | None = None
        self._threads_count = 1
        self._next = 0

    @torch.inference_mode()
    def open(self, threads_count: int) -> dict[str, object]:
        """Fill the layer."""
        torch.set_num_threads(threads_count)
        self._threads_count = threads_count
        generator = torch.Generator().manual_seed(1)
        repeats = QWEN3.experts_count // DISTINCT_EXPERTS

        def weights(rows: int, columns: int) -> torch.Tensor:
            shape = (DISTINCT_EXPERTS, rows, columns)
            few = (torch.randn(shape, generator=generator) * 0.02).to(torch.bfloat16)
            return few.repeat(repeats, 1, 1)

        self._gate_up = weights(2 * QWEN3.intermediate_size, QWEN3.hidden_size)
        self._down = weights(QWEN3.hidden_size, QWEN3.intermediate_size)
        return {"version": torch.__version__}

    def batch(self, tokens: int) -> dict[str, object]:
        """The batch that bursts run."""
        route = torch.from_numpy(routes(QWEN3, tokens)).long()
        x = torch.randn((tokens, QWEN3.hidden_size)).to(torch.bfloat16) * 0.3

        def call(index: int) -> None:
            self._layer(x, route[index % len(route)])

        self._call = call
        self._next = 0
        return {"error_ratio": 0.0}

    @torch.inference_mode()
    def _layer(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(x)
        for expert in sorted(set(ids.flatten().tolist())):
            token = (ids == expert).nonzero()[:, 0]
            gate, up = functional.linear(x[token], self._gate_up[expert]).chunk(2, dim=-1)
            product = functional.linear(functional.silu(gate) * up, self._down[expert])
            out.index_add_(0, token, product * (1 / QWEN3.top_k))
        return out

    def burst(self, seconds: float) -> Burst:
        assert self._call is not None
        burst, self._next = run_burst(
            self._call, 1.0, seconds, self._threads_count, first=self._next
        )
        return burst


def main() -> None:
    layer = TorchLayer()
    serve(layer, {"open": layer.open, "batch": layer.batch})


if __name__ == "__main__":
    main()
