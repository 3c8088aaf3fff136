"""The part of FlashInfer that is called, with its signatures, computed in torch.

The signatures are those of flashinfer-python 0.7.4 (flashinfer/prefill.py), read from its wheel.
Calls are noted, so that they can be bound to the package's own signatures where it is installed.
"""

# ruff: noqa: PLR0917

from __future__ import annotations

from typing import Any

import torch

RECORDED_VERSION = "0.7.4"
Call = tuple[str, tuple[Any, ...], dict[str, Any]]


class BatchPrefillWithPagedKVCacheWrapper:
    """Attention of the last queries of sequences over their pages."""

    calls: list[Call]

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: torch.Tensor | None = None,
        paged_kv_indptr_buf: torch.Tensor | None = None,
        paged_kv_indices_buf: torch.Tensor | None = None,
        paged_kv_last_page_len_buf: torch.Tensor | None = None,
        custom_mask_buf: torch.Tensor | None = None,
        mask_indptr_buf: torch.Tensor | None = None,
        backend: str = "auto",
        jit_args: list[Any] | None = None,
        jit_kwargs: dict[str, Any] | None = None,
        variant_owns_mask: bool = False,
        max_total_num_rows: int | None = None,
    ) -> None:
        assert kv_layout == "HND"
        assert (float_workspace_buffer.dtype, use_cuda_graph) == (torch.uint8, False)
        self.calls = [("__init__", (float_workspace_buffer,), {"kv_layout": kv_layout})]
        self._planned: Any = None

    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        head_dim_vo: int | None = None,
        custom_mask: torch.Tensor | None = None,
        packed_custom_mask: torch.Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: str | torch.dtype = "float16",
        kv_data_type: str | torch.dtype | None = None,
        o_data_type: str | torch.dtype | None = None,
        non_blocking: bool = True,
        prefix_len_ptr: torch.Tensor | None = None,
        token_pos_in_items_ptr: torch.Tensor | None = None,
        token_pos_in_items_len: int = 0,
        max_item_len_ptr: torch.Tensor | None = None,
        seq_lens: torch.Tensor | None = None,
        seq_lens_q: torch.Tensor | None = None,
        block_tables: torch.Tensor | None = None,
        max_token_per_sequence: int | None = None,
        max_sequence_kv: int | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        uniform_q_len: int | None = None,
        use_token_head_sf: bool = False,
    ) -> None:
        indices = (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        assert {one.dtype for one in indices} == {torch.int32}
        assert (causal, q_data_type, kv_data_type) == (True, torch.bfloat16, torch.bfloat16)
        assert sm_scale is not None
        self.calls.append(
            (
                "plan",
                (*indices, num_qo_heads, num_kv_heads, head_dim_qk, page_size),
                {
                    "causal": causal,
                    "sm_scale": sm_scale,
                    "q_data_type": q_data_type,
                    "kv_data_type": kv_data_type,
                    "disable_split_kv": disable_split_kv,
                },
            )
        )
        self._planned = (*indices, num_qo_heads // num_kv_heads, page_size, sm_scale)

    def run(
        self,
        q: torch.Tensor,
        paged_kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        *args: Any,
        q_scale: float | torch.Tensor | None = None,
        k_scale: float | torch.Tensor | None = None,
        v_scale: float | torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        lse_base: str = "log2",
        lse_layout: str = "NH",
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: torch.Tensor | None = None,
        kv_cache_sf: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        use_fp16_softmax: bool | None = None,
        uses_spcompress: bool | None = None,
    ) -> torch.Tensor:
        self.calls.append(("run", (q, paged_kv_cache), {}))
        keys, values = paged_kv_cache
        assert q.dtype is keys.dtype is values.dtype is torch.bfloat16
        starts, page_starts, pages, last_tokens, group, page_tokens, scale = self._planned
        outs = []
        for sequence, last in enumerate(last_tokens.tolist()):
            of_queries = slice(*starts[sequence : sequence + 2].tolist())
            of_pages = slice(*page_starts[sequence : sequence + 2].tolist())
            held = pages[of_pages].long()
            length = (len(held) - 1) * page_tokens + last
            # [pages, heads, tokens, columns] -> [heads, length, columns]
            near_k, near_v = (
                one[held]
                .transpose(0, 1)
                .flatten(1, 2)[:, :length]
                .float()
                .repeat_interleave(group, dim=0)
                for one in (keys, values)
            )
            rows = q[of_queries].float()
            first = length - rows.shape[0]
            seen = torch.arange(length)[None, :] <= first + torch.arange(rows.shape[0])[:, None]
            scores = torch.einsum("thd,hsd->hts", rows, near_k) * scale
            weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
            outs.append(torch.einsum("hts,hsd->thd", weights, near_v))
        return torch.cat(outs).bfloat16()
