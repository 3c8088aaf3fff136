"""Which expert leaves the cache first: orders of eviction in integer arithmetic.

A slot gets a key when its expert is used (hit or filled). When a plan call for one MoE layer needs
room, its victims are the slots with the least

    slot_key - ticks_per_layer * layers_ahead

where `layers_ahead`, 1 to L, is how many layers on the model comes to the slot's layer again (L:
it is the layer of this call). The clock counts plan calls, so a step of a model with L such layers
takes L ticks. An order may keep one int64 per expert, resident or not (its score), and no more. A
plan kernel copies the few lines of arithmetic here and agrees with them bit for bit.

`Lru`: key = clock, and layers do not matter. `DecayedUse` is the default. Its score is the base-2
logarithm, in ticks, of the sum of 2 ^ (t / half_life) over the times t of the expert's uses:

    score' = max(score, t) + half_life * log2(1 + 2 ^ (-|score - t| / half_life))

This is LRFU (Lee et al., IEEE Transactions on Computers 50, 2001) with keys that never have to be
aged: an expert that was used once has the key it would have in LRU, and what it was used before
adds to it. The term with the logarithm is replaced by

    (4 * half_life - d) ^ 2 / (16 * half_life),  d = |score - t| < 4 * half_life,  else 0

which has the same value and slope at d = 0 and is off by less than 0.1 half-lives. Scores outlive
residency: an expert that returns has its history, and what passes by once does not push out what
is used again and again. The term with the layers says that of two experts used as often, the one
whose layer has just gone by is the farther in the future: where the cache is not much larger than
one step's demand, that keeps experts from leaving just before they are wanted.

`benchmarks/miss_rate.py` compares this with LRU, two placements and Belady's optimum. Tried on its
traces beside it: half-lives of 1 to 64 steps, two of them together (sum and maximum), keys lowered
at fill, the term with the layers at 1/4 to 2 half-lives per step, linear and logarithmic.
Half-lives of 4 to 8 steps missed least where recent use says much (256 experts), 16 where it says
little (8 experts), but from 8 on LRU was better in the former. The term with the layers helped on
every trace at nearly every size, most with few slots, and hardly depends on its weight. What is
left: with exactly one step's demand of slots LRU can be better by a hair.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Protocol

# Score of an expert that was never used: out of reach of any bonus.
NEVER: Final = -(1 << 40)
# Key of a slot that may go before all others: prefill streamed it and decode hardly wants it.
COLDEST: Final = -(1 << 41)

HALF_LIFE_STEPS: Final = 6
# A prompt counts as so many uses, in doublings, of an expert that all of its tokens used.
PROMPT_DOUBLINGS: Final = 6


class EvictionOrder(Protocol):
    """Integers that order slots. `score`: the expert's, NEVER at first; kept by the caller.

    Clocks are at least 0 and below 2 ^ 40.
    """

    @property
    def ticks_per_layer(self) -> int:
        """What a slot's key loses, when victims are chosen, per layer that its own is ahead."""
        ...

    def score_on_use(self, score: int, clock: int) -> int:
        """The expert's score after a decode step that used it (whoever computed it)."""
        ...

    def score_on_prompt(self, score: int, clock: int, uses_count: int, tokens_count: int) -> int:
        """The score after a prompt of so many tokens, so many (> 0) of which used the expert."""
        ...

    def key(self, score: int, clock: int) -> int:
        """The slot's key at a hit or a fill; `score` is the new one."""
        ...


@dataclass(frozen=True, slots=True)
class Lru:
    """Least recently used first. Keeps no score."""

    @property
    def ticks_per_layer(self) -> int:
        return 0

    def score_on_use(self, score: int, clock: int) -> int:
        del clock
        return score

    def score_on_prompt(self, score: int, clock: int, uses_count: int, tokens_count: int) -> int:
        del clock, uses_count, tokens_count
        return score

    def key(self, score: int, clock: int) -> int:
        del score
        return clock


@dataclass(frozen=True, slots=True)
class DecayedUse:
    """Least decayed number of uses first, layers that have just gone by before those to come.

    half_life_ticks: after so many plan calls a use counts half; at least 1, below 2 ^ 24.
    """

    half_life_ticks: int
    ticks_per_layer: int

    def score_on_use(self, score: int, clock: int) -> int:
        return self._joined(score, clock)

    def score_on_prompt(self, score: int, clock: int, uses_count: int, tokens_count: int) -> int:
        share = self._log2(uses_count) - self._log2(tokens_count)
        return self._joined(score, clock + PROMPT_DOUBLINGS * self.half_life_ticks + share)

    def key(self, score: int, clock: int) -> int:
        del clock
        return score

    def _joined(self, score: int, moment: int) -> int:
        """The greater of both and the bonus: log2 of the sum of two powers of two."""
        near = 4 * self.half_life_ticks - abs(score - moment)
        if near <= 0:
            return max(score, moment)
        return max(score, moment) + near * near // (16 * self.half_life_ticks)

    def _log2(self, count: int) -> int:
        """half_life_ticks * log2(count) for 1 <= count < 2 ^ 24, linear between powers of two."""
        whole = count.bit_length() - 1
        part = ((count << 8 >> whole) - 256) * self.half_life_ticks >> 8
        return whole * self.half_life_ticks + part


def default_order(layers_count: int) -> DecayedUse:
    """The order for a model with so many (at least 1) MoE layers.

    A use a whole step away counts half as much as one at hand.
    """
    return DecayedUse(
        half_life_ticks=HALF_LIFE_STEPS * layers_count, ticks_per_layer=HALF_LIFE_STEPS
    )
