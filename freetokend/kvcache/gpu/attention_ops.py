"""Paged attention on a GPU as operations of torch: launches that a graph can hold.

Pages are bf16 [pages, Nkv, page_tokens, D]. `where`: page_table int32 [S, P]; sequence_index and
positions int32 [T], tokens in the order of their sequences. All contiguous and on one device.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType
from typing import Any, Final

import torch
import triton.language as tl

from freetokend.core.errors import InternalError
from freetokend.kvcache.gpu.triton_attention import (
    Batch,
    Parts,
    Sizes,
    attend_parts,
    attend_tiles,
    merge_parts,
    store_kv,
)

# The least rows of a product on the tensor cores.
_LEAST_ROWS: Final = 16
_STORE_BLOCK: Final = 512
# Programs for the parts of one token and key head; enough to fill a GPU with a single token.
_MOST_PART_PROGRAMS: Final = 64
# A product and a sum are rounded one by one, so that two kernels cannot differ in which they join.
STORE_OPTIONS: Final = MappingProxyType({"num_warps": 2, "enable_fp_fusion": False})
# Without a limit the compiler spills a few registers for a program more per multiprocessor.
ATTEND_OPTIONS: Final = MappingProxyType(
    {"num_stages": 2, "enable_fp_fusion": False, "maxnreg": 255}
)
MERGE_OPTIONS: Final = MappingProxyType({"num_warps": 1, "enable_fp_fusion": False})


@torch.library.custom_op("freetokend::store_kv", mutates_args=("keys", "values"))
def store_pages(
    k: torch.Tensor,
    v: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    where: Sequence[torch.Tensor],
) -> None:
    """k, v: fp32 [T, Nkv, D], rounded to bf16 into their places in the pages."""
    tokens, kv_heads, head = k.shape
    _require_rows(k, v, keys)
    if tokens:
        sizes = _sizes(keys, kv_heads, part_tokens=keys.shape[2], rows=_LEAST_ROWS)
        _kernel(store_kv)[(tokens, -(-kv_heads * head // _STORE_BLOCK))](
            k,
            v,
            keys,
            values,
            Batch(*where),
            where[0].shape[1],
            SIZES=sizes,
            BLOCK=_STORE_BLOCK,
            **STORE_OPTIONS,
        )


@torch.library.custom_op("freetokend::attend_pages_tiles", mutates_args=())
def attend_in_tiles(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    where: Sequence[torch.Tensor],
    scale: float,
    part_tokens: int,
    interpreted: bool,
) -> torch.Tensor:
    """For many tokens of a sequence at once: q fp32 [T, Nq, D] -> bf16 [T, Nq * D].

    interpreted: under Triton's interpreter, which has no bf16 products.
    """
    tokens, q_heads, head = q.shape
    # More queries read the same keys, as far as registers go.
    rows = _LEAST_ROWS if head > 128 else 2 * _LEAST_ROWS
    sizes = _sizes(keys, q_heads, part_tokens=part_tokens, rows=rows)
    out = _attended(q)
    if tokens:
        tokens_per_tile = sizes.rows // sizes.group_block
        _kernel(attend_tiles)[(-(-tokens // tokens_per_tile), sizes.kv_heads)](
            q,
            keys,
            values,
            Batch(*where),
            out,
            tokens,
            where[0].shape[1],
            scale,
            SIZES=sizes,
            DOT=_dot(interpreted),
            num_warps=_warps(sizes),
            **ATTEND_OPTIONS,
        )
    return out


@torch.library.custom_op("freetokend::attend_pages_parts", mutates_args=())
def attend_in_parts(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    where: Sequence[torch.Tensor],
    scale: float,
    part_tokens: int,
    interpreted: bool,
) -> torch.Tensor:
    """For one token of each sequence, whose contexts are read in parts at once: as
    `attend_in_tiles`, in launches whose shape depends on the shapes given alone."""
    tokens, q_heads, head = q.shape
    sizes = _sizes(keys, q_heads, part_tokens=part_tokens, rows=_LEAST_ROWS)
    out = _attended(q)
    if tokens == 0:
        return out
    parts_count = -(-where[0].shape[1] * sizes.page_tokens // part_tokens)
    places = (tokens, sizes.kv_heads, parts_count, sizes.group)
    parts = Parts(
        tops=q.new_empty(places), totals=q.new_empty(places), sums=q.new_empty((*places, head))
    )
    batch = Batch(*where)
    programs_count = min(parts_count, _MOST_PART_PROGRAMS)
    _kernel(attend_parts)[(tokens, sizes.kv_heads, programs_count)](
        q,
        keys,
        values,
        batch,
        parts,
        where[0].shape[1],
        parts_count,
        scale,
        SIZES=sizes,
        DOT=_dot(interpreted),
        num_warps=_warps(sizes),
        **ATTEND_OPTIONS,
    )
    _kernel(merge_parts)[(tokens, q_heads)](
        parts, batch, out, parts_count, SIZES=sizes, **MERGE_OPTIONS
    )
    return out


@store_pages.register_fake
def _stores(
    k: torch.Tensor,
    v: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    where: Sequence[torch.Tensor],
) -> None:
    _require_rows(k, v, keys)


@attend_in_tiles.register_fake
@attend_in_parts.register_fake
def _attends(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    where: Sequence[torch.Tensor],
    scale: float,
    part_tokens: int,
    interpreted: bool,
) -> torch.Tensor:
    _sizes(keys, q.shape[1], part_tokens=part_tokens, rows=_LEAST_ROWS)
    return _attended(q)


def _attended(q: torch.Tensor) -> torch.Tensor:
    if q.dtype is not torch.float32 or not q.is_contiguous():
        raise InternalError(f"queries are {q.dtype} {list(q.shape)}, not contiguous fp32")
    return q.new_empty((q.shape[0], q.shape[1] * q.shape[2]), dtype=torch.bfloat16)


def _require_rows(k: torch.Tensor, v: torch.Tensor, keys: torch.Tensor) -> None:
    for name, one in (("keys", k), ("values", v)):
        if (
            one.dtype is not torch.float32
            or tuple(one.shape) != (k.shape[0], keys.shape[1], keys.shape[3])
            or not one.is_contiguous()
        ):
            raise InternalError(
                f"new {name} are {one.dtype} {list(one.shape)}; the pages take contiguous fp32 "
                f"[{k.shape[0]}, {keys.shape[1]}, {keys.shape[3]}]"
            )


def _sizes(pages: torch.Tensor, heads_count: int, *, part_tokens: int, rows: int) -> Sizes:
    """heads_count: of the queries, or of the keys where there are none."""
    _, kv_heads, page_tokens, head = pages.shape
    if pages.dtype is not torch.bfloat16 or not pages.is_contiguous():
        raise InternalError(f"pages are {pages.dtype} {list(pages.shape)}, not contiguous bf16")
    if heads_count % kv_heads:
        raise InternalError(f"{heads_count} query heads do not divide among {kv_heads} key heads")
    head_block = max(_power_of_two(head), _LEAST_ROWS)
    block = 32 if head_block > 128 else 64
    if part_tokens % page_tokens:
        raise InternalError(f"parts of {part_tokens} tokens do not end with a page ({page_tokens})")
    group = heads_count // kv_heads
    return Sizes(
        kv_heads=kv_heads,
        group=group,
        group_block=_power_of_two(group),
        head=head,
        head_block=head_block,
        page_tokens=page_tokens,
        rows=max(rows, _power_of_two(group)),
        block=block,
        part_tokens=part_tokens,
    )


def _warps(sizes: Sizes) -> int:
    """Of a program; they share the columns of every product, so that the order of a row's sums
    depends on their number: it is the same in both kernels."""
    return 8 if sizes.head_block == 128 else 4


def _power_of_two(number: int) -> int:
    """The next one."""
    return 1 << (number - 1).bit_length()


def _dot(interpreted: bool) -> tl.dtype:
    return tl.float32 if interpreted else tl.bfloat16


def _kernel(kernel: object) -> Any:
    """A type checker would take what a launch is given for the arguments of a function."""
    return kernel
