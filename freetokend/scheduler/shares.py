"""Who computes how many tokens next: the shares of a step, and those of a sweep.

A prompt is prefilled in steps, beside those that decode, or in a sweep, which streams every layer
once for all prompts in it. A sweep costs the same for few tokens as for many; below the crossover
(`from_tokens`) steps are faster.
"""

from __future__ import annotations

from heapq import merge
from operator import attrgetter
from typing import Final

from freetokend.scheduler.roster import Roster, Share
from freetokend.scheduler.sequence import Place, Sequence

_AGE: Final = attrgetter("key")


def step_shares(roster: Roster, step_tokens: int) -> list[Share]:
    """Decoding sequences first, prompts by age after them, then new ones that fit."""
    shares = _decoding(roster)
    budget = step_tokens - len(shares)
    for sequence in roster.running:
        if budget > 0 and not sequence.is_decoding:
            count = min(sequence.pending_count, budget)
            shares.append((sequence, count))
            budget -= count
    free_count = roster.unpromised_pages()
    while roster.waiting and budget > 0:
        sequence = roster.waiting[0]
        needed = roster.admission_pages(sequence)
        if roster.free_places_count == 0 or (needed > free_count and roster.running):
            break
        free_count -= needed
        roster.admit(sequence)
        count = min(sequence.pending_count, budget)
        shares.append((sequence, count))
        budget -= count
    return _by_age(shares)


def step_shares_beside_sweep(roster: Roster, step_tokens: int, from_tokens: int) -> list[Share]:
    """As `step_shares`, for the sequences that are not in the sweep.

    Prompts are taken as long as all of them together are below the crossover: those that are not
    wait for the next sweep. Who waits for that keeps the place and the pages it needs, so that a
    younger short prompt overtakes it at no cost to it; behind one that does not fit nobody starts.
    """
    shares = _decoding(roster)
    budget = step_tokens - len(shares)
    room = from_tokens - 1
    for sequence in roster.running:
        pending = sequence.pending_count
        if budget > 0 and pending <= room and not (sequence.in_sweep or sequence.is_decoding):
            room -= pending
            count = min(pending, budget)
            shares.append((sequence, count))
            budget -= count
    free_count, places_count = roster.unpromised_pages(), roster.free_places_count
    for sequence in list(roster.waiting):
        free_count -= roster.admission_pages(sequence)
        places_count -= 1
        if free_count < 0 or places_count < 0 or budget <= 0 or room <= 0:
            break
        pending = sequence.pending_count
        if pending <= room:
            roster.admit(sequence)
            room -= pending
            count = min(pending, budget)
            shares.append((sequence, count))
            budget -= count
    return _by_age(shares)


def sweep_shares(roster: Roster, sweep_tokens: int, from_tokens: int) -> list[Share]:
    """All prefills that fit, by age, and one token of each that decodes, which come before it.

    Empty when the prefills are below the crossover; then nobody was admitted either.
    """
    decoding = _decoding(roster)
    prefills = [one for one in roster.running if not one.is_decoding]
    free_count, places_count = roster.unpromised_pages(), roster.free_places_count
    new: list[Sequence] = []
    for sequence in roster.waiting:
        needed = roster.admission_pages(sequence)
        if places_count == 0 or (needed > free_count and (new or roster.running)):
            break
        free_count -= needed
        places_count -= 1
        new.append(sequence)
    shares: list[Share] = []
    budget = sweep_tokens
    for sequence in merge(prefills, new, key=_AGE):
        if budget > 0:
            count = min(sequence.pending_count, budget)
            shares.append((sequence, count))
            budget -= count
    if sweep_tokens - budget < from_tokens:
        return []
    for sequence, _ in shares:
        if sequence.place is Place.WAITING:
            roster.admit(sequence)
    return _by_age(decoding + shares)


def decoding_shares(roster: Roster) -> list[Share]:
    """One token of each that decodes and is not to run alone, by age."""
    return [share for share in _decoding(roster) if share[0].suspect_count == 0]


def _decoding(roster: Roster) -> list[Share]:
    return [(one, 1) for one in roster.running if one.is_decoding]


def _by_age(shares: list[Share]) -> list[Share]:
    return sorted(shares, key=lambda share: share[0].key)
