"""Sizes of published models that need no files: data for `freetokenctl plan`.

From their public configs and descriptions. Routed experts are exact; the other weights are a range
where a checkpoint's mix of formats is not published.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from freetokend.policy.machine_model import ModelShape, Range, exactly

# 40 layers of hidden size 2048, 256 experts of 512; every fourth layer keeps keys and values, of 2
# heads of 256; 2.44e9 other weights, 0.51e9 of them embeddings that a token does not read.
_QWEN36: Final = ModelShape(
    name="Qwen3.6-35B-A3B",
    architecture="Qwen3_5MoeForConditionalGeneration",
    weight_format="bf16",
    layers_count=40,
    moe_layers_count=40,
    experts_per_layer_count=256,
    top_k=8,
    record_bytes=6_291_456,
    dense_bytes=exactly(4.9e9),
    dense_read_bytes=exactly(3.9e9),
    kv_bytes_per_token=20_480,
    context_tokens=262_144,
)
# The same with experts in NVFP4. Of the 23.5e9 bytes of the official checkpoint 18.2e9 are routed
# experts; of the rest vision and multi-token prediction, which are not served, take 1.4e9 to 2.6e9.
_QWEN36_NVFP4: Final = ModelShape(
    name="Qwen3.6-35B-A3B NVFP4",
    architecture="Qwen3_5MoeForConditionalGeneration",
    weight_format="nvfp4",
    layers_count=40,
    moe_layers_count=40,
    experts_per_layer_count=256,
    top_k=8,
    record_bytes=1_773_568,
    dense_bytes=Range(low=2.7e9, high=3.9e9),
    dense_read_bytes=Range(low=1.7e9, high=2.9e9),
    kv_bytes_per_token=20_480,
    context_tokens=262_144,
)
# 284e9 weights, 277e9 of them in 43 layers of 256 experts (hidden size 4096, 2048 inside); the rest
# in 8 to 16 bits, a token reads 6.5e9 of them. Keys and values are compressed 4 or 128 times.
_DEEPSEEK_V4_FLASH: Final = ModelShape(
    name="DeepSeek-V4-Flash",
    architecture="DeepseekV4ForCausalLM",
    weight_format="mxfp4",
    layers_count=43,
    moe_layers_count=43,
    experts_per_layer_count=256,
    top_k=6,
    record_bytes=13_369_344,
    dense_bytes=Range(low=7.5e9, high=14e9),
    dense_read_bytes=Range(low=6.5e9, high=13e9),
    kv_bytes_per_token=7_168,
    context_tokens=1_048_576,
)
# 78 layers, 75 with 256 experts (hidden size 6144, 2048 inside). 19e9 other weights; the checkpoint
# leaves them at most 25e9 bytes, so that a part of them is in 4 or 8 bits.
_GLM_52: Final = ModelShape(
    name="GLM-5.2",
    architecture="GlmMoeDsaForCausalLM",
    weight_format="nvfp4",
    layers_count=78,
    moe_layers_count=75,
    experts_per_layer_count=256,
    top_k=8,
    record_bytes=21_237_760,
    dense_bytes=Range(low=11e9, high=25e9),
    dense_read_bytes=Range(low=10e9, high=24e9),
    kv_bytes_per_token=109_824,
    context_tokens=202_752,
)
# 48 layers of hidden size 2048, 128 experts of 768.
_QWEN3_30B: Final = ModelShape(
    name="Qwen3-30B-A3B",
    architecture="Qwen3MoeForCausalLM",
    weight_format="bf16",
    layers_count=48,
    moe_layers_count=48,
    experts_per_layer_count=128,
    top_k=8,
    record_bytes=9_437_184,
    dense_bytes=exactly(3.1e9),
    dense_read_bytes=exactly(2.5e9),
    kv_bytes_per_token=98_304,
    context_tokens=40_960,
)

KNOWN_MODELS: Final[Mapping[str, ModelShape]] = MappingProxyType(
    {
        "qwen3.6-35b-a3b": _QWEN36,
        "qwen3.6-35b-a3b-nvfp4": _QWEN36_NVFP4,
        "qwen3-30b-a3b": _QWEN3_30B,
        "deepseek-v4-flash": _DEEPSEEK_V4_FLASH,
        "glm-5.2": _GLM_52,
    }
)
