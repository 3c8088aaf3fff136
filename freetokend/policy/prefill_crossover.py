"""From how many tokens on a suffix is prefilled by streaming whole layers.

Streaming moves every expert that is not resident, however few tokens there are, but hides the
computation behind it; the decode path moves (or leaves to the CPU) only what the tokens ask for,
layer by layer, and hides nothing:

    streaming:    max(bytes not resident / B_P + fixed costs, n * c)
    decode path:  sum over layers of the split of their expected misses, + n * c'

A token misses k * miss_ratio of a layer's E * (1 - r) experts that are not resident. Were they all
as likely, n tokens together would miss

    E * (1 - r) * (1 - (1 - k * miss_ratio / (E * (1 - r))) ^ n)

of them. Real routing repeats itself, so this is the most to be expected.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate

from freetokend.core.errors import InternalError
from freetokend.policy.fill_table import (
    branch_ends_s,
    fill_all_table,
    fill_table,
    split_s,
    token_bucket,
)
from freetokend.policy.step_cost import StepCosts


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillFacts:
    """What decides beside the rates of `costs`.

    resident_ratio: of the experts, those with a slot. miss_ratio: of the experts that a token asks
    for, those without. fillable_layers_count: the layers that can be streamed; the others cost the
    same either way. stream_token_s, decode_token_s: computation per token of a large chunk, and of
    a step of a few tokens, which is not less.
    """

    costs: StepCosts
    resident_ratio: float
    miss_ratio: float
    cpu_kernel: bool
    fillable_layers_count: int
    stream_token_s: float
    decode_token_s: float


def expected_misses(facts: PrefillFacts, tokens_count: int) -> float:
    """Distinct experts of one layer that so many tokens ask for and do not find."""
    absent = facts.costs.experts_per_layer_count * (1.0 - facts.resident_ratio)
    if absent <= 0:
        return 0.0
    asked_ratio = min(facts.costs.top_k * facts.miss_ratio / absent, 1.0)
    return absent * (1.0 - (1.0 - asked_ratio) ** tokens_count)


def streaming_s(facts: PrefillFacts, tokens_count: int) -> float:
    """Seconds to prefill so many tokens by streaming what is not resident."""
    rates = facts.costs.rates
    absent = facts.costs.experts_per_layer_count * (1.0 - facts.resident_ratio)
    layer_s = rates.fill_fixed_s + absent * rates.record_bytes / rates.fill_alone_bytes_per_s
    return max(facts.fillable_layers_count * layer_s, tokens_count * facts.stream_token_s)


def prefill_crossover(facts: PrefillFacts, *, most_tokens: int) -> int:
    """Suffixes of fewer tokens than this take the decode path; 1 to most_tokens + 1.

    Both take as long: the decode path, which evicts less. Everything takes it where no layer can
    be streamed or none needs to be. For a pool with room for two layers, without which nothing can
    be streamed anyway.
    """
    if most_tokens < 1:
        raise InternalError(f"a crossover among {most_tokens} tokens")
    if facts.fillable_layers_count == 0 or facts.resident_ratio >= 1:
        return most_tokens + 1
    path = _DecodePath.of(facts)
    low, high = 0, most_tokens + 1  # the decode path at low, streaming at high
    while high - low > 1:
        middle = (low + high) // 2
        if path.seconds(middle) <= streaming_s(facts, middle):
            low = middle
        else:
            high = middle
    return high


def decode_path_s(facts: PrefillFacts, tokens_count: int) -> float:
    """Seconds to prefill so many tokens as a decode step would."""
    return _DecodePath.of(facts).seconds(tokens_count)


@dataclass(frozen=True, slots=True, kw_only=True)
class _DecodePath:
    """layer_s[bucket][m]; of the last bucket cpu_s[m], when the CPU ends, and cpu_alone_s[m], what
    it would need if nothing were filled meanwhile. All rise with m, and
    layer_s with the bucket, whatever was measured, so that there is one crossing.

    The last bucket has no end, but what was measured for it has: beyond, the CPU's part is taken to
    grow with the tokens per expert.
    """

    facts: PrefillFacts
    layer_s: tuple[tuple[float, ...], ...]
    cpu_s: tuple[float, ...]
    cpu_alone_s: tuple[float, ...]

    @classmethod
    def of(cls, facts: PrefillFacts) -> _DecodePath:
        rates, experts = facts.costs.rates, facts.costs.experts_per_layer_count
        table = fill_all_table(experts)
        if facts.cpu_kernel:
            table = fill_table(rates, experts, later_ratio=1)
        rising: list[tuple[float, ...]] = []
        for bucket, fills in enumerate(table):
            row = [
                split_s(rates, bucket=bucket, misses_count=m, fills_count=q)
                for m, q in enumerate(fills)
            ]
            before = rising[-1] if rising else (0.0,) * len(row)
            rising.append(tuple(accumulate(map(max, row, before), max)))
        last = len(table) - 1
        cpu = [
            branch_ends_s(rates, bucket=last, misses_count=m, fills_count=q)[1]
            for m, q in enumerate(table[last])
        ]
        expert_s = (
            rates.record_bytes * rates.cpu_slowdown_ratios[last] / rates.cpu_alone_bytes_per_s
        )
        return cls(
            facts=facts,
            layer_s=tuple(rising),
            cpu_s=tuple(accumulate(cpu, max)),
            cpu_alone_s=tuple(
                accumulate(((m - q) * expert_s for m, q in enumerate(table[last])), max)
            ),
        )

    def seconds(self, tokens_count: int) -> float:
        facts = self.facts
        misses = expected_misses(facts, tokens_count)
        most = facts.costs.experts_per_layer_count
        whole = min(int(misses), most)
        below_s = self._layer_s(whole, tokens_count)
        above_s = self._layer_s(min(whole + 1, most), tokens_count)
        layer_s = below_s + (misses - whole) * (above_s - below_s)
        token_s = max(facts.decode_token_s, facts.stream_token_s)
        return facts.fillable_layers_count * layer_s + tokens_count * token_s

    def _layer_s(self, misses_count: int, tokens_count: int) -> float:
        """By the expected number of tokens per distinct expert, each expert as likely."""
        experts, top_k = self.facts.costs.experts_per_layer_count, self.facts.costs.top_k
        distinct = experts * (1.0 - (1.0 - top_k / experts) ** tokens_count)
        tokens_per_expert = tokens_count * top_k / distinct
        # The one token of a step alone must not become a little more than one.
        bucket = token_bucket(math.ceil(tokens_per_expert - 1e-9), 1, len(self.layer_s))
        measured_tokens = float(1 << (len(self.layer_s) - 1))
        beyond_ratio = max(tokens_per_expert / measured_tokens, 1.0)
        layer_s = self.layer_s[bucket][misses_count]
        if beyond_ratio == 1.0:
            return layer_s
        more_s = (beyond_ratio - 1.0) * self.cpu_alone_s[misses_count]
        return max(layer_s, self.cpu_s[misses_count] + more_s)
