"""What DeepSeek-V4 has that other families do not, read from its config.json.

Both generations of its config are read: `compress_ratios` (0, 4 or 128 for each layer, and perhaps
for the layers of multi-token prediction behind them), `num_hash_layers` and `qk_rope_head_dim`, as
the model was published, and `layer_types`, `mlp_layer_types`, `compress_rates` and
`partial_rotary_factor`, as the transformers library writes them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Final

from freetokend.core.config_fields import ConfigFields

_MAX_SIZE: Final = 1 << 24
_DEFAULT_HASH_LAYERS_COUNT: Final = 3


class AttentionKind(StrEnum):
    """How a layer attends beyond its window; values are those of `layer_types`."""

    SLIDING = "sliding_attention"
    SPARSE = "compressed_sparse_attention"
    HEAVY = "heavily_compressed_attention"


_RATIOS: Final[Mapping[object, AttentionKind]] = MappingProxyType(
    {0: AttentionKind.SLIDING, 4: AttentionKind.SPARSE, 128: AttentionKind.HEAVY}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepseekV4Config:
    """Sizes are counts of elements.

    q_rank: between the two query projections; output_groups_count, output_rank: of the output
    projection in groups; rotary_size: of a head, the part that is rotated; streams_count: residual
    streams (hyper-connections); attention: of every layer; sparse_rate, heavy_rate: tokens that a
    compressed entry of such a layer stands for; hash_layer_indices: layers that choose experts by
    a table of token ids; shared_size: inner size of the expert that every token goes through.
    """

    q_rank: int
    output_groups_count: int
    output_rank: int
    rotary_size: int
    index_heads_count: int
    index_head_size: int
    streams_count: int
    attention: tuple[AttentionKind, ...]
    sparse_rate: int
    heavy_rate: int
    hash_layer_indices: tuple[int, ...]
    shared_size: int


def parse_deepseek_v4(
    fields: ConfigFields, *, layers_count: int, q_heads_count: int, head_size: int, expert_size: int
) -> DeepseekV4Config:
    """Raises as `ConfigFields`; MODEL_UNSUPPORTED for another router or more shared experts."""
    scoring = fields.text("scoring_func", "sqrtsoftplus")
    if scoring != "sqrtsoftplus":
        raise fields.unsupported(
            f"scoring_func {scoring!r} is not implemented in this family; sqrtsoftplus is."
        )
    if not fields.flag("norm_topk_prob", True):
        raise fields.unsupported("norm_topk_prob false is not implemented in this family.")
    shared = fields.integer("n_shared_experts", 1)
    if shared != 1:
        raise fields.unsupported(f"n_shared_experts {shared} is not implemented; 1 is.")
    groups = fields.integer("o_groups", 8, high=_MAX_SIZE)
    if q_heads_count * head_size % groups:
        raise fields.invalid(
            f"the {q_heads_count} heads of {head_size} do not fall into o_groups ({groups}) "
            f"equal parts."
        )
    rates = fields.nested("compress_rates")
    return DeepseekV4Config(
        q_rank=fields.integer("q_lora_rank", high=_MAX_SIZE),
        output_groups_count=groups,
        output_rank=fields.integer("o_lora_rank", high=_MAX_SIZE),
        rotary_size=_rotary_size(fields, head_size),
        index_heads_count=fields.integer("index_n_heads", 64, high=_MAX_SIZE),
        index_head_size=fields.integer("index_head_dim", 128, high=_MAX_SIZE),
        streams_count=fields.integer("hc_mult", 4, high=64),
        attention=_attention(fields, layers_count),
        sparse_rate=rates.integer(
            AttentionKind.SPARSE, fields.integer("compress_rate_csa", 4), high=1 << 16
        ),
        heavy_rate=rates.integer(
            AttentionKind.HEAVY, fields.integer("compress_rate_hca", 128), high=1 << 16
        ),
        hash_layer_indices=_hash_layers(fields, layers_count),
        shared_size=shared * expert_size,
    )


def _rotary_size(fields: ConfigFields, head_size: int) -> int:
    if fields.has("qk_rope_head_dim"):
        return fields.integer("qk_rope_head_dim", high=head_size)
    return int(head_size * min(fields.number("partial_rotary_factor", 64 / 512), 1.0))


def _attention(fields: ConfigFields, layers_count: int) -> tuple[AttentionKind, ...]:
    names = _per_layer(fields, "layer_types", layers_count)
    if names is not None:
        try:
            return tuple(AttentionKind(str(name)) for name in names)
        except ValueError as error:
            raise fields.unsupported(f"layer_types: {error}.") from None
    ratios = _per_layer(fields, "compress_ratios", layers_count)
    if ratios is None:
        raise fields.invalid(
            "compress_ratios and layer_types are missing; one of them must say how each layer "
            "attends."
        )
    unknown = [ratio for ratio in ratios if isinstance(ratio, bool) or ratio not in (0, 4, 128)]
    if unknown:
        raise fields.unsupported(
            f"compress_ratios holds {unknown[0]!r:.40}, which is not implemented; 0, 4 and 128 are."
        )
    return tuple(_RATIOS[ratio] for ratio in ratios)


def _hash_layers(fields: ConfigFields, layers_count: int) -> tuple[int, ...]:
    kinds = _per_layer(fields, "mlp_layer_types", layers_count)
    if kinds is None:
        count = fields.integer("num_hash_layers", _DEFAULT_HASH_LAYERS_COUNT, low=0)
        return tuple(range(min(count, layers_count)))
    unknown = [kind for kind in kinds if kind not in ("hash_moe", "moe")]
    if unknown:
        raise fields.unsupported(
            f"mlp_layer_types holds {unknown[0]!r:.40}, which is not implemented; hash_moe and moe "
            f"are."
        )
    return tuple(index for index, kind in enumerate(kinds) if kind == "hash_moe")


def _per_layer(fields: ConfigFields, name: str, layers_count: int) -> list[object] | None:
    """The first `layers_count` entries of a list, None when there is none."""
    if not fields.has(name):
        return None
    values = fields.raw(name)
    if not isinstance(values, list) or len(values) < layers_count:
        raise fields.invalid(f"{name} is not a list with an entry for each of the layers.")
    return values[:layers_count]
