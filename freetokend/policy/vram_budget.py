"""How the memory of a GPU is divided: slots for experts, KV pages, and what has to be there.

    dense weights + workspace + recurrent states + graphs + cushion + slots + KV
        <= free now + own

"Own" is what this engine holds on the card already and can use again. Slots and KV pages grow
along one path that depends on the model and on what was asked, not on the memory: a list of places
(slots, pages), each at least the one before, with a straight line between two of them. The division
is the last point of the path that fits, so that more memory never means fewer slots or pages, and
nothing is ever over the budget.

What was asked in numbers is a constraint: it is met exactly or refused with the arithmetic. So is
what a preset stands for. Left to itself ("auto") the path gives, in this order: one token's experts
and a short context, one layer of slots, the context that agents need, a second layer of slots (then
prefill can load one while it computes the other), and from there on both until every expert has a
slot.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final, NamedTuple

from freetokend.core.errors import ConfigError, InternalError, Reason, ResourceError
from freetokend.core.units import KIB, format_bytes
from freetokend.policy.kv_sizing import AGENT_FLOOR_TOKENS, pages_for
from freetokend.policy.memory import gib

# For what others on the card take between two looks at it.
DEFAULT_CUSHION_BYTES: Final = 3 << 29
# What the driver's virtual memory calls commit at a time.
DEFAULT_GRANULARITY_BYTES: Final = 2 << 20
# A context below this serves no conversation; what cannot have it is not started.
LEAST_CONTEXT_TOKENS: Final = 4 * KIB
# Of what is left after the floors KV takes this share: several conversations beside each other are
# worth more than the few slots in a hundred that it costs. Agents keep long ones, so half of it.
KV_SHARE_PERCENT: Final = 12
AGENT_KV_SHARE_PERCENT: Final = 50
# A driver that does not know says 2^64 - 1.
_UNKNOWN_FROM_BYTES: Final = 1 << 60


class Preset(StrEnum):
    """What the card is to be used for.

    minimum: 4k tokens of KV, one layer of slots, and the rest for other programs.
    chat: 10k tokens of KV, as many slots as fit. agent: at least 50k tokens and two layers.
    """

    AUTO = "auto"
    MINIMUM = "minimum"
    CHAT = "chat"
    AGENT = "agent"


_PRESET_TOKENS: Final = {
    Preset.MINIMUM: 4 * KIB,
    Preset.CHAT: 10 * KIB,
    Preset.AGENT: 50 * KIB,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class VramFacts:
    """The card and the model. `free_bytes` None: the driver does not say.

    workspace_bytes: of the largest prefill chunk. experts_count: of all layers, 0 for a dense
    model. max_running_count: sequences that run at once. on_host: ordinary memory stands for the
    card's, as much as engine.device_bytes says. Slots and KV pages each take a whole number of
    granules; kv_granularity_bytes None: of the same size.
    """

    free_bytes: int | None
    own_bytes: int
    dense_bytes: int
    workspace_bytes: int
    state_bytes: int
    graph_bytes: int
    record_bytes: int
    experts_count: int
    experts_per_layer_count: int
    top_k: int
    kv_page_bytes: int
    kv_page_tokens: int
    model_context_tokens: int
    max_running_count: int
    on_host: bool = False
    cushion_bytes: int = DEFAULT_CUSHION_BYTES
    granularity_bytes: int = DEFAULT_GRANULARITY_BYTES
    kv_granularity_bytes: int | None = None

    @property
    def kv_granule_bytes(self) -> int:
        """What KV pages take a multiple of."""
        return self.kv_granularity_bytes or self.granularity_bytes

    @property
    def fixed_rows(self) -> tuple[tuple[str, int], ...]:
        """What neither slots nor KV can have."""
        return (
            ("dense weights", self.dense_bytes),
            ("workspace", self.workspace_bytes),
            ("recurrent states", self.state_bytes),
            ("graphs", self.graph_bytes),
            ("cushion", self.cushion_bytes),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class VramWishes:
    """What was asked; None: decide."""

    preset: Preset = Preset.AUTO
    slots_count: int | None = None
    kv_bytes: int | None = None
    max_context_tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class VramRow:
    """One line of the division."""

    name: str
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class VramPlan:
    """The division. `split` says it in a sentence, `rows` line by line, with what is left over.

    slots_bytes and kv_bytes are whole granules, as the driver will show them. two_layers: prefill
    can load one layer while it computes another; otherwise it loads on demand.
    """

    slots_count: int
    slots_bytes: int
    kv_pages_count: int
    kv_bytes: int
    servable_context_tokens: int
    limited_by: str
    left_bytes: int
    two_layers: bool
    all_resident: bool
    rows: tuple[VramRow, ...]
    split: str
    note: str = ""


class _Place(NamedTuple):
    slots: int
    pages: int


def plan_vram(facts: VramFacts, wishes: VramWishes) -> VramPlan:
    """Divide the memory.

    ConfigError: a number that no card could meet. ResourceError (DEVICE_MEMORY): this one cannot
    now; the message has every number of the sum.
    """
    room_bytes = _total_bytes(facts) - sum(size for _, size in facts.fixed_rows)
    path = _path(facts, wishes)
    if _bytes_at(facts, path[0]) > room_bytes:
        raise _does_not_fit(facts, wishes, path[0], room_bytes)
    return _plan(facts, wishes, _last_that_fits(facts, path, room_bytes), room_bytes)


def least_bytes(facts: VramFacts, wishes: VramWishes) -> int:
    """What slots and KV take at the least; `free_bytes` does not matter. Raises ConfigError."""
    return _bytes_at(facts, _path(facts, wishes)[0])


def _total_bytes(facts: VramFacts) -> int:
    sizes = (facts.own_bytes, *(size for _, size in facts.fixed_rows))
    counts = (
        facts.record_bytes,
        facts.experts_per_layer_count,
        facts.top_k,
        facts.kv_page_bytes,
        facts.kv_page_tokens,
        facts.model_context_tokens,
        facts.max_running_count,
        facts.granularity_bytes,
    )
    if min(sizes) < 0 or min(counts) < 1 or facts.experts_count < 0:
        raise InternalError(f"memory cannot be divided by these figures: {facts}")
    if facts.free_bytes is None or not 0 <= facts.free_bytes < _UNKNOWN_FROM_BYTES:
        raise ResourceError(
            f"How much memory of the GPU is free is not known (the driver says "
            f"{facts.free_bytes}), so nothing can be placed there. Check the driver with "
            'nvidia-smi, or set engine.backend to "cpu".',
            reason=Reason.DEVICE_MEMORY,
        )
    return facts.free_bytes + facts.own_bytes


def _path(facts: VramFacts, wishes: VramWishes) -> list[_Place]:
    """The places between which slots and pages grow; the first has to fit."""
    most = _Place(facts.experts_count, _most_pages(facts, wishes))
    layer = min(facts.experts_per_layer_count, most.slots)
    two_layers = min(2 * facts.experts_per_layer_count, most.slots)
    one_token = min(facts.top_k, most.slots)
    asked_tokens = 0 if wishes.max_context_tokens is None else _target_tokens(facts, wishes)

    def pages(tokens: int) -> int:
        return min(pages_for(max(tokens, asked_tokens), facts.kv_page_tokens), most.pages)

    match wishes.preset:
        case Preset.AUTO:
            target_tokens = _target_tokens(facts, wishes)
            least = pages(min(LEAST_CONTEXT_TOKENS, target_tokens))
            floor = pages(min(AGENT_FLOOR_TOKENS, target_tokens))
            path = [_Place(one_token, least), _Place(layer, least), _Place(layer, floor)]
            path += _together(facts, _Place(two_layers, floor), most, KV_SHARE_PERCENT)
        case Preset.MINIMUM:
            path = [_Place(layer, pages(_PRESET_TOKENS[wishes.preset]))]
        case Preset.CHAT:
            held = pages(_PRESET_TOKENS[wishes.preset])
            path = [_Place(one_token, held), _Place(most.slots, held)]
        case Preset.AGENT:
            start = _Place(two_layers, pages(_PRESET_TOKENS[wishes.preset]))
            path = _together(facts, start, most, AGENT_KV_SHARE_PERCENT)
    if wishes.slots_count is not None:
        check_slots_count(wishes.slots_count, facts.experts_count)
        path = [place._replace(slots=wishes.slots_count) for place in path]
    if wishes.kv_bytes is not None:
        held = _asked_pages(facts, wishes.kv_bytes)
        path = [place._replace(pages=held) for place in path]
    return path


def _together(facts: VramFacts, start: _Place, most: _Place, kv_percent: int) -> list[_Place]:
    """From start, KV takes so many of a hundred bytes until one of both has all that it can use."""
    slots_bytes = (most.slots - start.slots) * facts.record_bytes
    kv_bytes = (most.pages - start.pages) * facts.kv_page_bytes
    if slots_bytes * kv_percent <= kv_bytes * (100 - kv_percent):
        beside_bytes = slots_bytes * kv_percent // (100 - kv_percent)
        corner = _Place(most.slots, start.pages + beside_bytes // facts.kv_page_bytes)
    else:
        beside_bytes = kv_bytes * (100 - kv_percent) // kv_percent
        corner = _Place(start.slots + beside_bytes // facts.record_bytes, most.pages)
    return [start, corner, most]


def _target_tokens(facts: VramFacts, wishes: VramWishes) -> int:
    """The longest context that one request may have, were there room for it."""
    if wishes.max_context_tokens is None:
        return facts.model_context_tokens
    if wishes.max_context_tokens < 1:
        raise ConfigError(
            f"engine.max_context_tokens = {wishes.max_context_tokens}; it must be at least 1.",
            param="engine.max_context_tokens",
        )
    return min(facts.model_context_tokens, wishes.max_context_tokens)


def _most_pages(facts: VramFacts, wishes: VramWishes) -> int:
    """Every running sequence at full length; more pages have no use."""
    one_sequence = pages_for(_target_tokens(facts, wishes), facts.kv_page_tokens)
    return one_sequence * facts.max_running_count


def check_slots_count(slots_count: int, experts_count: int) -> None:
    """Raises ConfigError for a number of slots that no memory could make useful."""
    if not min(1, experts_count) <= slots_count <= experts_count:
        raise ConfigError(
            f"engine.slots_count = {slots_count}; the model has {experts_count} experts, so "
            f'it must be from 1 to {experts_count}, or "auto". To use no slots at all, set '
            'engine.backend to "cpu".',
            param="engine.slots_count",
        )


def _asked_pages(facts: VramFacts, kv_bytes: int) -> int:
    pages_count = kv_bytes // facts.kv_page_bytes
    if pages_count < 1:
        raise ConfigError(
            f"engine.kv_bytes = {kv_bytes} is less than one page of {facts.kv_page_tokens} tokens, "
            f'which takes {facts.kv_page_bytes} bytes. Raise it or use "auto".',
            param="engine.kv_bytes",
        )
    return pages_count


def _last_that_fits(facts: VramFacts, path: list[_Place], room_bytes: int) -> _Place:
    """Along the path; its first place is known to fit."""
    reached = path[0]
    for place in path[1:]:
        if _bytes_at(facts, place) <= room_bytes:
            reached = place
            continue
        steps = max(place.slots - reached.slots, place.pages - reached.pages)
        low, high = 0, steps
        while high - low > 1:
            middle = (low + high) // 2
            if _bytes_at(facts, _between(reached, place, middle, steps)) <= room_bytes:
                low = middle
            else:
                high = middle
        return _between(reached, place, low, steps)
    return reached


def _between(start: _Place, end: _Place, step: int, steps: int) -> _Place:
    return _Place(
        start.slots + (end.slots - start.slots) * step // steps,
        start.pages + (end.pages - start.pages) * step // steps,
    )


def _granules(size_bytes: int, granule: int) -> int:
    return -(-size_bytes // granule) * granule


def _slots_bytes(facts: VramFacts, place: _Place) -> int:
    return _granules(place.slots * facts.record_bytes, facts.granularity_bytes)


def _kv_bytes(facts: VramFacts, place: _Place) -> int:
    return _granules(place.pages * facts.kv_page_bytes, facts.kv_granule_bytes)


def _bytes_at(facts: VramFacts, place: _Place) -> int:
    return _slots_bytes(facts, place) + _kv_bytes(facts, place)


def _plan(facts: VramFacts, wishes: VramWishes, place: _Place, room_bytes: int) -> VramPlan:
    target_tokens = _target_tokens(facts, wishes)
    held_tokens = place.pages * facts.kv_page_tokens
    servable_tokens = min(target_tokens, held_tokens)
    if servable_tokens < target_tokens:
        limited_by = "the KV pool"
    elif target_tokens < facts.model_context_tokens:
        limited_by = "engine.max_context_tokens"
    else:
        limited_by = "the model"
    left_bytes = room_bytes - _bytes_at(facts, place)
    rows = (
        *(VramRow(name=name, size_bytes=size) for name, size in facts.fixed_rows),
        VramRow(name="expert slots", size_bytes=_slots_bytes(facts, place)),
        VramRow(name="KV", size_bytes=_kv_bytes(facts, place)),
        VramRow(name="left over", size_bytes=left_bytes),
    )
    note = ""
    if place.pages > _most_pages(facts, wishes):
        note = (
            f"engine.kv_bytes reserves {place.pages} KV pages; {facts.max_running_count} running "
            f"requests of {target_tokens} tokens can use {_most_pages(facts, wishes)}."
        )
    return VramPlan(
        slots_count=place.slots,
        slots_bytes=_slots_bytes(facts, place),
        kv_pages_count=place.pages,
        kv_bytes=_kv_bytes(facts, place),
        servable_context_tokens=servable_tokens,
        limited_by=limited_by,
        left_bytes=left_bytes,
        two_layers=place.slots >= min(2 * facts.experts_per_layer_count, facts.experts_count),
        all_resident=place.slots == facts.experts_count,
        rows=rows,
        split=(
            f"{_sum_text(facts, place)}, {gib(left_bytes)} left of {_total_text(facts)}; "
            f"{held_tokens} tokens of KV for all requests, {servable_tokens} for one, limited by "
            f"{limited_by}"
        ),
        note=note,
    )


def _sum_text(facts: VramFacts, place: _Place) -> str:
    parts = [f"{name} {gib(size)}" for name, size in facts.fixed_rows if size]
    parts.append(
        f"experts {gib(_slots_bytes(facts, place))} ({place.slots} of {facts.experts_count} slots "
        f"of {format_bytes(facts.record_bytes)})"
    )
    parts.append(
        f"KV {gib(_kv_bytes(facts, place))} ({place.pages} pages of {facts.kv_page_tokens} tokens)"
    )
    sum_bytes = sum(size for _, size in facts.fixed_rows) + _bytes_at(facts, place)
    return f"{' + '.join(parts)} = {gib(sum_bytes)}"


def _total_text(facts: VramFacts) -> str:
    free_bytes = facts.free_bytes or 0
    return (
        f"{gib(free_bytes + facts.own_bytes)} (free {gib(free_bytes)} + own {gib(facts.own_bytes)})"
    )


def _does_not_fit(
    facts: VramFacts, wishes: VramWishes, least: _Place, room_bytes: int
) -> ResourceError:
    short_bytes = _bytes_at(facts, least) - room_bytes
    asked = _asked_text(wishes)
    param = None
    if wishes.slots_count is not None:
        param = "engine.slots_count"
    elif wishes.kv_bytes is not None:
        param = "engine.kv_bytes"
    place = "into the host device" if facts.on_host else "on this GPU"
    what = f"{asked} cannot be met" if asked else f"The model does not fit {place}"
    return ResourceError(
        f"{what}: {_sum_text(facts, least)}, but there is {_total_text(facts)}, "
        f"{gib(short_bytes)} too little. {_advice(facts, wishes, least, room_bytes)}",
        reason=Reason.DEVICE_MEMORY,
        param=param,
    )


def _asked_text(wishes: VramWishes) -> str:
    asked = []
    if wishes.preset is not Preset.AUTO:
        asked.append(f'the preset "{wishes.preset}"')
    if wishes.slots_count is not None:
        asked.append(f"engine.slots_count = {wishes.slots_count}")
    if wishes.kv_bytes is not None:
        asked.append(f"engine.kv_bytes = {wishes.kv_bytes}")
    if wishes.max_context_tokens is not None:
        asked.append(f"engine.max_context_tokens = {wishes.max_context_tokens}")
    text = " with ".join(asked)
    return text[:1].upper() + text[1:] if text.startswith("the ") else text


def _advice(facts: VramFacts, wishes: VramWishes, least: _Place, room_bytes: int) -> str:
    """What would help, with the figure where there is one."""
    advice = []
    granule, kv_granule = facts.granularity_bytes, facts.kv_granule_bytes
    if wishes.slots_count is not None:
        beside_bytes = max(room_bytes - _kv_bytes(facts, least), 0) // granule * granule
        fitting = beside_bytes // facts.record_bytes
        if fitting:
            advice.append(f"{fitting} slots would fit.")
    if wishes.kv_bytes is not None:
        beside_bytes = max(room_bytes - _slots_bytes(facts, least), 0) // kv_granule * kv_granule
        fitting = beside_bytes // facts.kv_page_bytes
        if fitting:
            advice.append(f"{fitting * facts.kv_page_bytes} bytes of KV would fit.")
    if wishes.preset is not Preset.AUTO:
        advice.append('The preset "auto" takes what there is.')
    room = (
        "Raise engine.device_bytes"
        if facts.on_host
        else "Close other programs that use the GPU, lower engine.step_tokens"
    )
    advice.append(f'{room}, or set engine.backend to "cpu".')
    return " ".join(advice)
