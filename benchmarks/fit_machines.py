"""Fits the machine model to published results and predicts every machine from the others.

usage: python -m benchmarks.fit_machines

Two parameters are fitted: the fixed cost of a layer and what the executor reaches in a step. Slots
that were not published are what the card has left beside the dense weights and a reserve between
`_RESERVE`'s ends, one layer at least. Published splits are rounded, also down to no fill.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from freetokend.policy.machine_model import (
    FITTED,
    DecodeEstimate,
    MachineParameters,
    Range,
    decode_estimate,
)
from freetokend.policy.published_machines import HELD_BACK, MACHINES, PublishedMachine

# Keys and values, workspace, graphs, the driver's own: at the least a short context; at the most
# what the 32 GB card, whose slots are published, has left beside them and the dense weights.
_RESERVE: Final = Range(low=2.0e9, high=5.5e9)
_START: Final = MachineParameters(
    layer_s=100e-6,
    device_efficiency_ratio=FITTED.device_efficiency_ratio,
    host_efficiency_ratio=0.7,
)
_FIRST_STEP: Final = 0.25
_LAST_STEP: Final = 0.001


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """A machine, as predicted with parameters that do not know its result."""

    machine: PublishedMachine
    parameters: MachineParameters
    estimate: DecodeEstimate

    @property
    def error_ratio(self) -> float:
        """Of the middle of the inputs against the middle of what was published; above 0: faster."""
        return self.estimate.middle_tokens_per_s / self.machine.tokens_per_s.middle - 1

    @property
    def meets_range(self) -> bool:
        """Whether the inputs' ranges allow what was published."""
        predicted, published = self.estimate.tokens_per_s, self.machine.tokens_per_s
        return predicted.low <= published.high and published.low <= predicted.high


def slots_of(machine: PublishedMachine) -> Range:
    """As published, or what can be left for them."""
    if machine.slots_count is not None:
        return machine.slots_count
    model = machine.model

    def left(dense_bytes: float, reserve_bytes: float) -> float:
        slots = (machine.device_bytes - dense_bytes - reserve_bytes) / model.record_bytes
        return min(max(slots, model.experts_per_layer_count), model.experts_count)

    return Range(
        low=left(model.dense_bytes.high, _RESERVE.high),
        high=left(model.dense_bytes.low, _RESERVE.low),
    )


def predict(machine: PublishedMachine, parameters: MachineParameters) -> Prediction:
    """With these parameters."""
    estimate = decode_estimate(
        machine.model,
        machine.rates,
        parameters,
        slots_count=slots_of(machine),
        context_tokens=machine.context_tokens,
        least_fills_count=0,
    )
    return Prediction(machine=machine, parameters=parameters, estimate=estimate)


def fit(machines: Sequence[PublishedMachine]) -> MachineParameters:
    """The least sum of squared logarithms of predicted / published, found by steps that halve."""
    best = _START
    least = _loss(machines, best)
    step = _FIRST_STEP
    while step > _LAST_STEP:
        moved = False
        for ratio in (math.exp(step), math.exp(-step)):
            for tried in (
                replace(best, layer_s=best.layer_s * ratio),
                replace(best, host_efficiency_ratio=min(best.host_efficiency_ratio * ratio, 1.0)),
            ):
                loss = _loss(machines, tried)
                if loss < least:
                    best, least, moved = tried, loss, True
        if not moved:
            step /= 2
    return best


def _loss(machines: Sequence[PublishedMachine], parameters: MachineParameters) -> float:
    return sum(math.log1p(predict(machine, parameters).error_ratio) ** 2 for machine in machines)


def leave_one_out() -> list[Prediction]:
    """Every machine, predicted by what the five others fit."""
    return [
        predict(machine, fit([other for other in MACHINES if other is not machine]))
        for machine in MACHINES
    ]


def held_back(parameters: MachineParameters) -> list[Prediction]:
    """The results that take part in no fit."""
    return [predict(machine, parameters) for machine in HELD_BACK]


def table(predictions: Sequence[Prediction]) -> str:
    """A line for each."""
    lines = [
        f"{'machine':<38} {'published':>11} {'predicted':>9} {'error':>6} {'range':>13}  "
        f"{'layer':>6} {'host':>4}  inputs that are ranges"
    ]
    for one in predictions:
        published, found = one.machine.tokens_per_s, one.estimate
        shown = f"{published.low:g}"
        if published.high > published.low:
            shown = f"{shown}-{published.high:g}"
        lines.append(
            f"{one.machine.name:<38} {shown:>11} {found.middle_tokens_per_s:>9.1f} "
            f"{one.error_ratio:>+6.0%} "
            f"{found.tokens_per_s.low:>6.1f}-{found.tokens_per_s.high:<6.1f}  "
            f"{one.parameters.layer_s * 1e6:>3.0f} us "
            f"{one.parameters.host_efficiency_ratio:>4.2f}  {one.machine.inputs}"
        )
    return "\n".join(lines)


def main() -> None:
    """Print both tables and the parameters that all machines fit."""
    everything = fit(MACHINES)
    print("Each machine predicted from the five others (decode, tokens per second):\n")
    print(table(leave_one_out()))
    print("\nNever fitted, predicted from all six:\n")
    print(table(held_back(everything)))
    print(
        f"\nfitted to all six: layer_s {everything.layer_s * 1e6:.1f} us, host_efficiency_ratio "
        f"{everything.host_efficiency_ratio:.3f} (device_efficiency_ratio is set to "
        f"{everything.device_efficiency_ratio:g})"
    )


if __name__ == "__main__":
    main()
