"""`freetokenctl trace replay`: offline work on routing traces. Imports numpy."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Final

from freetokend.core.errors import InvalidInputError, ModelDataError
from freetokend.traces.compare import TraceComparison, slots_at, step_demand, table
from freetokend.traces.trace import Phase, RoutingTrace
from freetokend.traces.trace_file import read_trace

DEFAULT_PERCENT: Final = (5.0, 10.0, 20.0, 40.0, 60.0, 80.0)


def replay(arguments: argparse.Namespace) -> int:
    """Print what the trace would have missed under every policy."""
    trace = read_trace(Path(arguments.file))
    shape = trace.shape
    sizes = list(arguments.slots or [])
    if not sizes:
        sizes = [slots_at(shape, percent / 100) for percent in DEFAULT_PERCENT]
    for slots_count in sizes:
        if slots_count > shape.experts_count:
            raise InvalidInputError(
                f"{slots_count} slots are more than the model of this trace has experts "
                f"({shape.experts_count}). Give a smaller number.",
                param="slots",
            )
    if not any(step.phase is Phase.DECODE for step in trace.steps):
        raise ModelDataError(
            f"{arguments.file} has no decode step, so nothing can be compared. "
            "Record while tokens are written."
        )
    comparison = TraceComparison(trace)
    found = [comparison.at(slots_count) for slots_count in sorted(set(sizes))]
    if arguments.output == "json":
        facts = asdict(shape) | {"source": trace.source, **_counts(trace)}
        print(json.dumps({"trace": facts, "replays": [asdict(one) for one in found]}, indent=1))
    else:
        counts = _counts(trace)
        print(
            f"{arguments.file}: {trace.source or 'of unknown source'}\n"
            f"{shape.layers_count} layers of {shape.experts_per_layer} experts, "
            f"{shape.experts_per_token} per token ({step_demand(shape)} in a step of one token); "
            f"{counts['decode_steps_count']} decode steps, "
            f"{counts['prefill_steps_count']} prompt steps\n\n"
            "Misses in decode steps, in percent of the experts needed:\n"
        )
        print(table(found))
    return 0


def _counts(trace: RoutingTrace) -> dict[str, int]:
    decodes = sum(step.phase is Phase.DECODE for step in trace.steps)
    return {
        "decode_steps_count": decodes,
        "prefill_steps_count": len(trace.steps) - decodes,
    }
