"""How many KV pages to reserve, and the context that one request can really have.

Auto keeps a floor that agents need (32k tokens where that fits) and takes a share of what is left
of the memory; it never reserves more than every running sequence at full length could use. An
explicit size is a constraint: it is met or refused with the arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from freetokend.core.errors import ConfigError, Reason, ResourceError
from freetokend.core.units import format_bytes
from freetokend.policy.memory import gib

AGENT_FLOOR_TOKENS: Final = 32_768
# Above the floor, auto takes this share of the memory that the pool and the headroom leave: pages
# are committed as they are used, so the rest of the machine feels only what requests fill.
AUTO_SHARE_RATIO: Final = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class KvShape:
    """One page of every layer: keys and values of `page_tokens` positions."""

    layers_count: int
    kv_heads_count: int
    head_size: int
    element_bytes: int
    page_tokens: int

    @property
    def bytes_per_token(self) -> int:
        return 2 * self.layers_count * self.kv_heads_count * self.head_size * self.element_bytes

    @property
    def page_bytes(self) -> int:
        return self.bytes_per_token * self.page_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class KvDemand:
    """What was asked; None means auto. `model_context_tokens` is the checkpoint's own maximum."""

    model_context_tokens: int
    max_running_count: int
    available_bytes: int
    kv_bytes: int | None = None
    max_context_tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class KvPlan:
    """The decision, for people: `split` says it, `note` that more was asked than is useful."""

    pages_count: int
    page_tokens: int
    kv_bytes: int
    servable_context_tokens: int
    limited_by: str
    split: str
    note: str = ""


def size_kv(shape: KvShape, demand: KvDemand) -> KvPlan:
    """Decide the number of pages; raises ConfigError or ResourceError with the arithmetic."""
    target_tokens = demand.model_context_tokens
    if demand.max_context_tokens is not None:
        target_tokens = min(target_tokens, demand.max_context_tokens)
    target_pages = pages_for(target_tokens, shape.page_tokens)
    most_pages = target_pages * demand.max_running_count
    if demand.kv_bytes is not None:
        pages, limited_by = _explicit_pages(shape, demand, demand.kv_bytes, most_pages)
    else:
        pages, limited_by = _auto_pages(shape, demand, target_tokens, most_pages)
    held_tokens = pages * shape.page_tokens
    servable_tokens = min(target_tokens, held_tokens)
    if servable_tokens < target_tokens:
        limited_by = f"the KV pool ({limited_by})"
    elif target_tokens < demand.model_context_tokens:
        limited_by = "engine.max_context_tokens"
    else:
        limited_by = "the model"
    kv_bytes = pages * shape.page_bytes
    split = (
        f"KV {gib(kv_bytes)} = {pages} pages of {shape.page_tokens} tokens "
        f"({shape.bytes_per_token} bytes per token): {held_tokens} tokens for all requests, "
        f"{servable_tokens} for one, limited by {limited_by}"
    )
    note = ""
    if demand.kv_bytes is not None and demand.kv_bytes // shape.page_bytes > most_pages:
        note = (
            f"engine.kv_bytes asks for {format_bytes(demand.kv_bytes)} of KV memory; "
            f"{format_bytes(kv_bytes)} is reserved, all that {demand.max_running_count} running "
            f"requests of {target_tokens} tokens can use."
        )
    return KvPlan(
        pages_count=pages,
        page_tokens=shape.page_tokens,
        kv_bytes=kv_bytes,
        servable_context_tokens=servable_tokens,
        limited_by=limited_by,
        split=split,
        note=note,
    )


def pages_for(tokens: int, page_tokens: int) -> int:
    """Pages that hold `tokens` positions."""
    return -(-tokens // page_tokens)


def _explicit_pages(
    shape: KvShape, demand: KvDemand, kv_bytes: int, most_pages: int
) -> tuple[int, str]:
    pages = min(kv_bytes // shape.page_bytes, most_pages)
    if pages < 1:
        raise ConfigError(
            f"engine.kv_bytes = {kv_bytes} is less than one page of {shape.page_tokens} tokens, "
            f"which takes {shape.page_bytes} bytes ({shape.layers_count} layers, "
            f'{shape.kv_heads_count} KV heads of {shape.head_size}). Raise it or use "auto".',
            reason=Reason.CONFIG_INVALID,
            param="engine.kv_bytes",
        )
    if pages * shape.page_bytes > demand.available_bytes:
        raise ResourceError(
            f"engine.kv_bytes asks for {gib(pages * shape.page_bytes)} of KV memory, but the pool "
            f"and the headroom leave {gib(max(demand.available_bytes, 0))}. Lower it or use "
            '"auto".',
            reason=Reason.HOST_MEMORY,
            param="engine.kv_bytes",
        )
    return pages, "engine.kv_bytes"


def _auto_pages(
    shape: KvShape, demand: KvDemand, target_tokens: int, most_pages: int
) -> tuple[int, str]:
    fitting_pages = max(demand.available_bytes, 0) // shape.page_bytes
    if fitting_pages < 1:
        raise ResourceError(
            f"No memory is left for keys and values: one page of {shape.page_tokens} tokens takes "
            f"{shape.page_bytes} bytes, the pool and the headroom leave "
            f"{max(demand.available_bytes, 0)}. Close other programs or choose a smaller model.",
            reason=Reason.HOST_MEMORY,
        )
    # A context that was asked for explicitly is the floor itself.
    floor_tokens = target_tokens
    if demand.max_context_tokens is None:
        floor_tokens = min(target_tokens, AGENT_FLOOR_TOKENS)
    floor_pages = pages_for(floor_tokens, shape.page_tokens)
    share_pages = int(demand.available_bytes * AUTO_SHARE_RATIO) // shape.page_bytes
    pages = min(max(floor_pages, share_pages), most_pages, fitting_pages)
    return pages, "available memory"
