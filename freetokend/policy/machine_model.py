"""How fast a machine would decode a model, from a handful of its figures and before it is bought.

One token goes through the layers one after another:

    token = layers * fixed
          + dense weights and keys read / (GPU memory rate * device_efficiency)
          + executed slots          / (GPU memory rate * device_efficiency)
          + MoE layers * E[time of the misses of a layer]

A layer's misses are binomial with `step_cost.estimated_miss_ratio` of the share of experts that has
a slot. Of m missing experts of S bytes q are filled while the CPU executes the rest:

    q = m           m * S / B_P
    0 <= q < m      max(q * S / B_P, m * S / B_H) / host_efficiency

B_P is the link's rate alone, B_H the executor's; in a step the executor, alone or beside fills,
reaches `host_efficiency` of B_H. Fills are paced so that both end together: with as many as
m * B_P / B_H, the closed form of `fill_table`, they cost nothing more, and a faster link never
costs time. What a measured machine takes is worked out in `step_cost` from its contended rates.

Figures that are not known are ranges; the answer is one then. The three parameters hold for every
machine; `benchmarks.fit_machines` fits them to published results.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from freetokend.policy.fill_table import closed_form_fills
from freetokend.policy.step_cost import estimated_miss_ratio, misses_probabilities


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """What is known of a figure: it lies between the two, both included."""

    low: float
    high: float

    @property
    def middle(self) -> float:
        """What is taken where one number is wanted."""
        return (self.low + self.high) / 2

    def times(self, ratio: float) -> Range:
        """Both ends so many times as high."""
        return Range(low=self.low * ratio, high=self.high * ratio)


def exactly(value: float) -> Range:
    """A figure that is known."""
    return Range(low=value, high=value)


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineParameters:
    """What no data sheet says, the same for every machine.

    layer_s: per layer and step, whatever its size: launches, routing, the round trip to the CPU.
    device_efficiency_ratio: of the GPU memory's rate, what reading weights at batch 1 reaches.
    host_efficiency_ratio: of the executor's rate, what it reaches in a step with all that goes on
    beside it.
    """

    layer_s: float
    device_efficiency_ratio: float
    host_efficiency_ratio: float


# From all six published machines (`python -m benchmarks.fit_machines`), but for the efficiency of
# the GPU's memory: on six machines it cannot be told from the fixed costs, so it is set.
FITTED: Final = MachineParameters(
    layer_s=55e-6, device_efficiency_ratio=0.8, host_efficiency_ratio=0.499
)
# No machine is predicted from the others worse than this.
MODEL_ERROR_RATIO: Final = 0.18


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The model. dense_bytes: all but routed experts; dense_read_bytes: what a token reads of them
    (no embedding rows but its own); architecture: as in a config.json."""

    name: str
    architecture: str
    weight_format: str
    layers_count: int
    moe_layers_count: int
    experts_per_layer_count: int
    top_k: int
    record_bytes: int
    dense_bytes: Range
    dense_read_bytes: Range
    kv_bytes_per_token: int
    context_tokens: int

    @property
    def experts_count(self) -> int:
        """Of all layers."""
        return self.moe_layers_count * self.experts_per_layer_count

    @property
    def pool_bytes(self) -> int:
        """All routed experts."""
        return self.experts_count * self.record_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineRates:
    """Bytes per second: of the GPU's memory, of the link (B_P), of the CPU's executor (B_H)."""

    device: Range
    link: Range
    host: Range


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenTimes:
    """Where the time of a token goes, in seconds; `total_s` is the sum."""

    fixed_s: float
    dense_s: float
    slots_s: float
    misses_s: float

    @property
    def total_s(self) -> float:
        """Of a token."""
        return self.fixed_s + self.dense_s + self.slots_s + self.misses_s


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeEstimate:
    """tokens_per_s over the ranges of the inputs; the other figures belong to their middles.

    fills_per_layer, misses_per_layer: expected, of a token.
    """

    tokens_per_s: Range
    middle_tokens_per_s: float
    miss_ratio: float
    misses_per_layer: float
    fills_per_layer: float
    times: TokenTimes


def decode_estimate(
    model: ModelShape,
    rates: MachineRates,
    parameters: MachineParameters,
    *,
    slots_count: Range,
    context_tokens: int = 0,
    least_fills_count: int = 1,
) -> DecodeEstimate:
    """One sequence of so many tokens, the cache warm. least_fills_count: of a layer with misses; 1
    in this program, 0 where the split may be rounded down to nothing."""

    def misses(pick: Callable[[Range], float]) -> MissTimes:
        return MissTimes(
            record_bytes=model.record_bytes,
            link_bytes_per_s=pick(rates.link),
            host_bytes_per_s=pick(rates.host) * parameters.host_efficiency_ratio,
            paced_link_bytes_per_s=pick(rates.link) * parameters.host_efficiency_ratio,
            least_fills_count=least_fills_count,
        )

    def times(pick: Callable[[Range], float], bytes_of: Callable[[Range], float]) -> TokenTimes:
        return _token_times(
            model,
            parameters,
            misses(pick),
            slots_count=pick(slots_count),
            device_bytes_per_s=pick(rates.device) * parameters.device_efficiency_ratio,
            read_bytes=bytes_of(model.dense_read_bytes) + context_tokens * model.kv_bytes_per_token,
        )

    middle = times(_middle, _middle)
    miss_ratio = _miss_ratio(model, slots_count.middle)
    return DecodeEstimate(
        tokens_per_s=Range(low=1 / times(_low, _high).total_s, high=1 / times(_high, _low).total_s),
        middle_tokens_per_s=1 / middle.total_s,
        miss_ratio=miss_ratio,
        misses_per_layer=model.top_k * miss_ratio,
        fills_per_layer=_mean(misses(_middle).fills_count, model.top_k, miss_ratio),
        times=middle,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class MissTimes:
    """What a layer's misses take. host_bytes_per_s, paced_link_bytes_per_s: of the executor and of
    fills beside it, in a step."""

    record_bytes: int
    link_bytes_per_s: float
    host_bytes_per_s: float
    paced_link_bytes_per_s: float
    least_fills_count: int

    def filled_s(self, misses_count: int) -> float:
        """Seconds to fill all of them."""
        return misses_count * self.record_bytes / self.link_bytes_per_s

    def split_s(self, misses_count: int) -> float:
        """Seconds where the CPU executes most; infinite where nothing is left for it."""
        fills = min(self.least_fills_count, misses_count)
        if fills == misses_count:
            return math.inf if misses_count else 0.0
        return self.record_bytes * max(
            fills / self.paced_link_bytes_per_s, misses_count / self.host_bytes_per_s
        )

    def best_s(self, misses_count: int) -> float:
        """Seconds of the better way."""
        return min(self.filled_s(misses_count), self.split_s(misses_count))

    def fills_count(self, misses_count: int) -> int:
        """Fills of the better way: all, or those that end no later than the executor."""
        if self.filled_s(misses_count) <= self.split_s(misses_count):
            return misses_count
        wanted = closed_form_fills(
            misses_count,
            link_bytes_per_s=self.paced_link_bytes_per_s,
            host_bytes_per_s=self.host_bytes_per_s,
        )
        return max(min(self.least_fills_count, misses_count), math.floor(wanted))


def _token_times(
    model: ModelShape,
    parameters: MachineParameters,
    misses: MissTimes,
    *,
    slots_count: float,
    device_bytes_per_s: float,
    read_bytes: float,
) -> TokenTimes:
    miss_ratio = _miss_ratio(model, slots_count)
    # Also what the CPU executes counts as read from slots: a percent or two of the token, and it
    # lets no prediction get worse when another resource gets better.
    slots_bytes = model.moe_layers_count * model.top_k * model.record_bytes
    return TokenTimes(
        fixed_s=model.layers_count * parameters.layer_s,
        dense_s=read_bytes / device_bytes_per_s,
        slots_s=slots_bytes / device_bytes_per_s,
        misses_s=model.moe_layers_count * _mean(misses.best_s, model.top_k, miss_ratio),
    )


def _mean(value_of: Callable[[int], float], top_k: int, miss_ratio: float) -> float:
    """Over the number of a layer's misses."""
    return sum(
        share * value_of(misses)
        for misses, share in enumerate(misses_probabilities(top_k, miss_ratio))
        if share
    )


def _miss_ratio(model: ModelShape, slots_count: float) -> float:
    return estimated_miss_ratio(slots_count / model.experts_count)


def _low(value: Range) -> float:
    return value.low


def _middle(value: Range) -> float:
    return value.middle


def _high(value: Range) -> float:
    return value.high
