"""Choosing a token from a row of logits: typed face of the `_exec` extension module.

A row's result depends on the row, the parameters and the draw index only, never on other rows,
threads or the instruction set. Filters, in this order: temperature, top_k (keeps every token that
equals the k-th best), top_p (the smallest set of best tokens, the lower id first, that reaches
this share of the sum), min_p (at least this share of the best). Probabilities are fp32 relative to
the best, their sums fp64. The draw is the first 64 bits of Philox4x64-10 with the seed as key and
the draw index as counter, as numpy's `Philox(key=seed, counter=draw_index).random_raw()`.
"""

from __future__ import annotations

from dataclasses import dataclass

from freetokend.core.errors import InternalError, ResourceError
from freetokend.native import _exec


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A token, or None when the row is not numbers: NaN or +inf in it, or nothing above -inf.

    `peak` is the largest logit, NaN if any is NaN.
    """

    token_id: int | None
    peak: float


class Sampler:
    """Working memory for one caller at a time; grows to the largest vocabulary seen."""

    def __init__(self) -> None:
        self._native = _exec.Sampler()

    def sample_row(
        self,
        logits: int,
        *,
        vocab_size: int,
        temperature: float,
        top_k: int,
        top_p: float,
        min_p: float,
        seed: int,
        draw_index: int,
    ) -> Sample:
        """logits: address of fp32 [vocab_size]; seed and draw_index: 64 bits.

        `temperature` 0 takes the best token, the lowest id among equals. Raises InternalError for
        parameters that are negative or NaN (a negative top_k is off) or a second caller.
        """
        try:
            token_id, numbers, peak = self._native.sample_row(
                logits,
                vocab_size=vocab_size,
                temperature=temperature,
                top_k=top_k,
                top_p=top_p,
                min_p=min_p,
                seed=seed,
                draw_index=draw_index,
            )
        except (ValueError, TypeError) as error:
            raise InternalError(f"sampling called wrongly: {error}") from error
        except MemoryError as error:
            raise ResourceError("no memory for the sampler's working buffers") from error
        except RuntimeError as error:
            raise InternalError(f"sampling: {error}") from error
        return Sample(token_id=token_id if numbers else None, peak=peak)
