"""A routing trace in memory: which experts every token of every step was sent to."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

import numpy as np
from numpy.typing import NDArray

MAX_LAYERS: Final = 4096
MAX_EXPERTS_PER_LAYER: Final = 65_535
MAX_EXPERTS_PER_TOKEN: Final = 512
# In place of every expert of a row that a layer did not compute.
SKIPPED: Final = 65_535


class Phase(StrEnum):
    """What a step did: read a prompt (layers are streamed whole) or write tokens."""

    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceShape:
    """The model's sizes, as far as routing is concerned; layers are those with experts."""

    layers_count: int
    experts_per_layer: int
    experts_per_token: int

    def __post_init__(self) -> None:
        """Raises ValueError for sizes that no model has."""
        if not 1 <= self.layers_count <= MAX_LAYERS:
            raise ValueError(f"layers_count is {self.layers_count}, not 1 to {MAX_LAYERS}")
        if not 1 <= self.experts_per_layer <= MAX_EXPERTS_PER_LAYER:
            raise ValueError(
                f"experts_per_layer is {self.experts_per_layer}, not 1 to {MAX_EXPERTS_PER_LAYER}"
            )
        most = min(self.experts_per_layer, MAX_EXPERTS_PER_TOKEN)
        if not 1 <= self.experts_per_token <= most:
            raise ValueError(f"experts_per_token is {self.experts_per_token}, not 1 to {most}")

    @property
    def experts_count(self) -> int:
        """All experts of the model: expert_id = layer * experts_per_layer + expert."""
        return self.layers_count * self.experts_per_layer


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceStep:
    """One step of the engine. ids: uint16 [layers, tokens, k], experts within their layer.

    An engine computes the last layer for those tokens only that are followed by one it has to
    choose: of a prompt, for its last token. Where a layer skipped a token its ids are `SKIPPED`.
    """

    phase: Phase
    ids: NDArray[np.uint16]

    @property
    def tokens_count(self) -> int:
        return int(self.ids.shape[1])


def check_ids(shape: TraceShape, ids: NDArray[np.integer]) -> None:
    """Raises ValueError unless ids [layers, tokens, k] are experts of `shape`, or whole rows of
    `SKIPPED`."""
    sizes = (shape.layers_count, shape.experts_per_token)
    if ids.ndim != 3 or (ids.shape[0], ids.shape[2]) != sizes or ids.size == 0:
        raise ValueError(f"ids are {ids.shape}, not ({sizes[0]}, tokens, {sizes[1]})")
    skipped = ids == SKIPPED
    if skipped.any() and (skipped.any(axis=2) != skipped.all(axis=2)).any():
        raise ValueError("a row is skipped in part")
    known = ids[~skipped]
    if known.size and not 0 <= int(known.min()) <= int(known.max()) < shape.experts_per_layer:
        raise ValueError(
            f"ids reach from {known.min()} to {known.max()} of {shape.experts_per_layer} experts"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingTrace:
    """The steps in order; `source` says where they come from."""

    shape: TraceShape
    steps: tuple[TraceStep, ...]
    source: str = ""
