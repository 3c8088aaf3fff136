"""The process of vLLM's side: the same checkpoint in bf16, through its engine step by step."""

from __future__ import annotations

import importlib
import time
from typing import Any, Final

from benchmarks.peers.child import serve
from benchmarks.rounds import Burst, waited_s

PROMPT_TOKENS: Final = 16
CONTEXT_TOKENS: Final = 1024
MOST_SEQUENCES: Final = 32


class VllmModel:
    """A model; bursts decode in several sequences or compute prompts."""

    def __init__(self) -> None:
        self._vllm: Any = None
        self._engine: Any = None
        self._threads_count = 1
        self._sequences = 1
        self._tokens = 1
        self._requests_count = 0

    def open(self, directory: str, threads_count: int, compiled: bool) -> dict[str, object]:
        """Load the checkpoint, and compile its graph if asked to."""
        self._vllm = importlib.import_module("vllm")  # only this rival's environment has it
        self._threads_count = threads_count
        self._engine = self._vllm.LLM(
            model=directory,
            dtype="bfloat16",
            max_model_len=CONTEXT_TOKENS,
            max_num_seqs=MOST_SEQUENCES,
            enforce_eager=not compiled,
            enable_prefix_caching=False,
        ).llm_engine
        return {"version": self._vllm.__version__}

    def batch(self, sequences: int, tokens: int) -> dict[str, object]:
        """sequences 0: a prompt of `tokens`; else decode of that many tokens in each."""
        self._sequences, self._tokens = sequences, tokens
        return {}

    def burst(self, seconds: float) -> Burst:
        before_s = waited_s()
        tokens, elapsed_s = 0, 0.0
        while elapsed_s < seconds:
            some, took_s = self._prompt() if self._sequences == 0 else self._decode()
            tokens += some
            elapsed_s += took_s
        lost_s = waited_s() - before_s
        share = max(0.0, 1.0 - lost_s / (self._threads_count * elapsed_s))
        return Burst(rate=tokens / elapsed_s, cpu_share=share)

    def _prompt(self) -> tuple[int, float]:
        """Tokens computed, and the time from the request to its first token."""
        start_s = time.perf_counter()
        self._add(self._tokens, 1)
        while self._engine.has_unfinished_requests():
            self._engine.step()
        return self._tokens, time.perf_counter() - start_s

    def _decode(self) -> tuple[int, float]:
        """Tokens after the first of every sequence, and their time."""
        for _ in range(self._sequences):
            self._add(PROMPT_TOKENS, 1 + self._tokens)
        waiting = self._sequences
        while waiting:
            outputs = self._engine.step()
            waiting -= sum(len(out.outputs[0].token_ids) == 1 for out in outputs)
        start_s = time.perf_counter()
        while self._engine.has_unfinished_requests():
            self._engine.step()
        return self._sequences * self._tokens, time.perf_counter() - start_s

    def _add(self, prompt_tokens: int, tokens: int) -> None:
        self._requests_count += 1
        self._engine.add_request(
            str(self._requests_count),
            {"prompt_token_ids": [3 + 7 * index % 200 for index in range(prompt_tokens)]},
            self._vllm.SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True),
        )


def main() -> None:
    model = VllmModel()
    serve(model, {"open": model.open, "batch": model.batch})


if __name__ == "__main__":
    main()
