"""What is fixed about the architectures that are known: data, read by `core.model_config`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, StrEnum, auto
from types import MappingProxyType
from typing import Final


class ModelFamily(StrEnum):
    """Families of architectures; values are the `model_type` of their configs."""

    MIXTRAL = "mixtral"
    QWEN3_MOE = "qwen3_moe"
    GPT_OSS = "gpt_oss"
    DEEPSEEK_V4 = "deepseek_v4"


class ExpertActivation(StrEnum):
    """What experts compute between their matrices; values are those of an FTW expert bank."""

    SILU = "silu"
    SWIGLU_OAI = "swiglu_oai"


class WindowRule(Enum):
    """What `sliding_window` of a config says."""

    EVERY_LAYER = auto()
    IF_FLAGGED = auto()
    SOME_LAYERS = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyTraits:
    """Where a family keeps its fields and what it fixes. None: read the config field.

    default_limit: what gate and up are clamped to where `swiglu_limit` does not say it, 0 for a
    family without; is_served: whether this version computes it; families that it does not are
    converted only, and of their configs only what that takes is read.
    """

    family: ModelFamily
    experts_fields: tuple[str, ...]
    expert_size_field: str
    default_theta: float
    default_norm_epsilon: float
    default_top_k: int
    default_kv_heads: int | None
    window: WindowRule
    qk_norm: bool = False
    attention_bias: bool | None = False
    default_attention_bias: bool = False
    renormalise: bool | None = True
    dense_layers: bool = False
    layer_types: frozenset[str] = frozenset({"full_attention"})
    activation: ExpertActivation = ExpertActivation.SILU
    default_limit: float = 0.0
    expert_bias: bool = False
    is_served: bool = True


FAMILIES: Final[Mapping[str, FamilyTraits]] = MappingProxyType(
    {
        "MixtralForCausalLM": FamilyTraits(
            family=ModelFamily.MIXTRAL,
            experts_fields=("num_local_experts", "num_experts"),
            expert_size_field="intermediate_size",
            default_theta=1e6,
            default_norm_epsilon=1e-5,
            default_top_k=2,
            default_kv_heads=None,
            window=WindowRule.EVERY_LAYER,
        ),
        "Qwen3MoeForCausalLM": FamilyTraits(
            family=ModelFamily.QWEN3_MOE,
            experts_fields=("num_experts", "num_local_experts"),
            expert_size_field="moe_intermediate_size",
            default_theta=1e4,
            default_norm_epsilon=1e-6,
            default_top_k=8,
            default_kv_heads=4,
            window=WindowRule.IF_FLAGGED,
            qk_norm=True,
            attention_bias=None,
            renormalise=None,
            dense_layers=True,
        ),
        "GptOssForCausalLM": FamilyTraits(
            family=ModelFamily.GPT_OSS,
            experts_fields=("num_local_experts", "num_experts"),
            expert_size_field="intermediate_size",
            default_theta=150000.0,
            default_norm_epsilon=1e-5,
            default_top_k=4,
            default_kv_heads=8,
            window=WindowRule.SOME_LAYERS,
            attention_bias=None,
            default_attention_bias=True,
            layer_types=frozenset({"full_attention", "sliding_attention"}),
            activation=ExpertActivation.SWIGLU_OAI,
            default_limit=7.0,
            expert_bias=True,
            is_served=False,
        ),
        "DeepseekV4ForCausalLM": FamilyTraits(
            family=ModelFamily.DEEPSEEK_V4,
            experts_fields=("n_routed_experts", "num_local_experts"),
            expert_size_field="moe_intermediate_size",
            default_theta=1e4,
            default_norm_epsilon=1e-6,
            default_top_k=6,
            default_kv_heads=1,
            window=WindowRule.SOME_LAYERS,
            layer_types=frozenset(
                {
                    "sliding_attention",
                    "compressed_sparse_attention",
                    "heavily_compressed_attention",
                }
            ),
            default_limit=10.0,
            is_served=False,
        ),
    }
)
