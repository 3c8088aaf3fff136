"""The sizes that the shapes of tensor rules are written in."""

from __future__ import annotations

from freetokend.core.deepseek_v4_config import DeepseekV4Config
from freetokend.core.model_config import ModelConfig


def rule_sizes(config: ModelConfig) -> dict[str, int]:
    """Each size by the name that `freetokend.ftw.families` has for it, in elements."""
    sizes = {
        "hidden": config.hidden_size,
        "vocab": config.vocab_size,
        "head": config.head_size,
        "q_heads": config.q_heads_count,
        "q_width": config.q_heads_count * config.head_size,
        "kv_width": config.kv_heads_count * config.head_size,
        "experts": config.experts_per_layer_count,
        "top_k": config.router.top_k,
        "dense": config.dense_size,
    }
    if config.deepseek_v4 is not None:
        sizes |= _deepseek_v4_sizes(config, config.deepseek_v4)
    return sizes


def _deepseek_v4_sizes(config: ModelConfig, special: DeepseekV4Config) -> dict[str, int]:
    streams = special.streams_count
    return {
        "one": 1,
        "three": 3,
        "q_rank": special.q_rank,
        "output_ranks": special.output_groups_count * special.output_rank,
        "output_group": config.q_heads_count * config.head_size // special.output_groups_count,
        "head_twice": 2 * config.head_size,
        "sparse_rate": special.sparse_rate,
        "heavy_rate": special.heavy_rate,
        "index_heads": special.index_heads_count,
        "index_head": special.index_head_size,
        "index_head_twice": 2 * special.index_head_size,
        "index_width": special.index_heads_count * special.index_head_size,
        "streams": streams,
        "streams_width": streams * config.hidden_size,
        # Into a block, out of it, and from each stream to each.
        "mixes": (2 + streams) * streams,
        "shared": special.shared_size,
    }
