"""What a tap kept of a step as steps of a trace. numpy, no torch."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from freetokend.engine.work import SequenceWork, StepWork
from freetokend.native.routing_tap import Tapped
from freetokend.traces.trace import SKIPPED, Phase, TraceShape, TraceStep


def routed_steps(work: StepWork, tapped: Tapped, shape: TraceShape) -> tuple[TraceStep, ...]:
    """The rows that read prompts, then those that write a token each; at most two steps.

    A layer behind the last attention has computed the rows that want logits only; it has skipped
    the others. Raises ValueError when the tap has not seen this step, or not all of it.
    """
    tokens_count = work.tokens_count
    ends = np.cumsum([len(one.token_ids) for one in work.sequences])
    outputs = [end - 1 for end, one in zip(ends, work.sequences, strict=True) if _wants_token(one)]
    sizes = (shape.layers_count, tokens_count, shape.experts_per_token)
    ids = np.full(sizes, SKIPPED, dtype=np.uint16)
    for layer, rows in _layers(tapped, shape):
        if len(rows) == tokens_count:
            ids[layer] = rows
        elif len(rows) == len(outputs):
            ids[layer, outputs] = rows
        else:
            raise ValueError(
                f"layer {layer} computed {len(rows)} rows of a step of {tokens_count} tokens, of "
                f"which {len(outputs)} want logits"
            )
    writes = np.repeat(
        [_writes(one) for one in work.sequences], [len(one.token_ids) for one in work.sequences]
    )
    return tuple(
        TraceStep(phase=phase, ids=ids[:, chosen])
        for phase, chosen in ((Phase.PREFILL, ~writes), (Phase.DECODE, writes))
        if chosen.any()
    )


def _wants_token(sequence: SequenceWork) -> bool:
    return sequence.draw_index is not None


def _writes(sequence: SequenceWork) -> bool:
    """Whether it goes on from its own last token; the first token ends the reading of a prompt."""
    return len(sequence.token_ids) == 1 and bool(sequence.draw_index)


def _layers(tapped: Tapped, shape: TraceShape) -> list[tuple[int, NDArray[np.uint16]]]:
    """Every layer of the model once, with [rows, k] of each."""
    seen = [one.moe_layer_index for one in tapped.layers]
    if seen != list(range(shape.layers_count)):
        raise ValueError(f"a step went through the layers {seen} of {shape.layers_count}")
    ids = np.frombuffer(tapped.ids, dtype="<u2")
    counts = [one.tokens_count * one.experts_per_token for one in tapped.layers]
    parts = np.split(ids, np.cumsum(counts)[:-1])
    return [
        (one.moe_layer_index, part.reshape(one.tokens_count, one.experts_per_token))
        for one, part in zip(tapped.layers, parts, strict=True)
    ]
