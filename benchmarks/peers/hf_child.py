"""The process of transformers' side: the same checkpoint in bf16, eager."""

from __future__ import annotations

import time
from typing import Any

import torch

from benchmarks.peers.child import serve
from benchmarks.rounds import Burst, waited_s

PROMPT_TOKENS = 16


class HfModel:
    """A model; bursts decode in several sequences or compute a prompt."""

    def __init__(self) -> None:
        self._model: Any = None
        self._threads_count = 1
        self._sequences = 1
        self._tokens = 1

    def open(self, directory: str, threads_count: int) -> dict[str, object]:
        """Load the checkpoint."""
        import transformers  # noqa: PLC0415 - slow

        torch.set_num_threads(threads_count)
        self._threads_count = threads_count
        self._model = transformers.AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.bfloat16, experts_implementation="eager"
        )
        self._model.eval()
        return {"version": transformers.__version__}

    def batch(self, sequences: int, tokens: int) -> dict[str, object]:
        """sequences 0: a prompt of `tokens`; else decode steps, as many as fit in a burst."""
        self._sequences, self._tokens = sequences, tokens
        return {}

    @torch.inference_mode()
    def burst(self, seconds: float) -> Burst:
        generator = torch.Generator().manual_seed(1)
        shape = (1, self._tokens) if self._sequences == 0 else (self._sequences, PROMPT_TOKENS)
        ids = torch.randint(0, 8000, shape, generator=generator)
        cache = None
        if self._sequences:
            cache = self._model(ids, use_cache=True).past_key_values
            ids = ids[:, -1:]
        before_s = waited_s()
        start_s = time.perf_counter()
        tokens, elapsed_s = 0, 0.0
        while elapsed_s < seconds:
            out = self._model(ids, past_key_values=cache, use_cache=cache is not None)
            if cache is not None:
                ids = out.logits[:, -1:].argmax(-1)
            tokens += ids.numel()
            elapsed_s = time.perf_counter() - start_s
        lost_s = waited_s() - before_s
        share = max(0.0, 1.0 - lost_s / (self._threads_count * elapsed_s))
        return Burst(rate=tokens / elapsed_s, cpu_share=share)


def main() -> None:
    model = HfModel()
    serve(model, {"open": model.open, "batch": model.batch})


if __name__ == "__main__":
    main()
