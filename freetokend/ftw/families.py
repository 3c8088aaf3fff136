"""What the checkpoints of each family call their tensors: data, read by `freetokend.ftw.model`.

A rule's first name is the one that the tensor gets in the FTW index; the others are what other
writers call the same thing. `{layer}` and `{expert}` are decimal numbers.

Names of gpt-oss and of DeepSeek-V4 are those of the published checkpoints as the `transformers`
library reads them (for DeepSeek-V4 its table of renamings); shapes are those of its models. It
writes DeepSeek-V4 back under names of its own, which are the alternatives here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Final


class Kind(StrEnum):
    """What a tensor is to the model, which decides how it is stored.

    EXACT: a matrix that steers and is kept in fp32, as routers are; IDS: a table of experts.
    """

    EMBEDDING = "embedding"
    LINEAR = "linear"
    VECTOR = "vector"
    ROUTER = "router"
    EXACT = "exact"
    IDS = "ids"


class Scope(StrEnum):
    """Where a tensor occurs.

    Of DeepSeek-V4: SPARSE_LAYER and HEAVY_LAYER compress keys and values, by little and by much;
    HASH_LAYER chooses experts by a table, SCORED_LAYER by scores.
    """

    MODEL = "model"
    LAYER = "layer"
    MOE_LAYER = "moe_layer"
    DENSE_LAYER = "dense_layer"
    SPARSE_LAYER = "sparse_layer"
    HEAVY_LAYER = "heavy_layer"
    HASH_LAYER = "hash_layer"
    SCORED_LAYER = "scored_layer"


class When(StrEnum):
    """What must hold for a tensor to exist."""

    ALWAYS = "always"
    ATTENTION_BIAS = "attention_bias"
    UNTIED = "untied"


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRule:
    """A tensor that is no routed expert. shape: names of sizes, see `freetokend.ftw.rule_sizes`."""

    names: tuple[str, ...]
    kind: Kind
    scope: Scope
    shape: tuple[str, ...]
    when: When = When.ALWAYS


@dataclass(frozen=True, slots=True, kw_only=True)
class SeparateExperts:
    """One tensor per matrix and expert: gate and up [I, H], down [H, I]."""

    gate: str
    up: str
    down: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedExperts:
    """One tensor per layer: gate above up [E, 2 I, H], and down [E, H, I]."""

    gate_up: str
    down: str


@dataclass(frozen=True, slots=True, kw_only=True)
class InterleavedExperts:
    """gpt-oss: the tensors of a layer's experts begin with `prefix`; gate and up alternate.

    In full precision `gate_up_proj` [E, H, 2 I] and `down_proj` [E, I, H], the other way round than
    other matrices; mxfp4 as `freetokend.ftw.schemes.gpt_oss` says. With biases either way.
    """

    prefix: str


ExpertNaming = SeparateExperts | FusedExperts | InterleavedExperts


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One architecture. experts: the namings in use; ignorable: tensors that nothing uses."""

    architecture: str
    rules: tuple[TensorRule, ...]
    experts: tuple[ExpertNaming, ...]
    ignorable: tuple[re.Pattern[str], ...]

    @property
    def embedding(self) -> TensorRule:
        """The rule of the embedding."""
        return next(rule for rule in self.rules if rule.kind is Kind.EMBEDDING)


EMBEDDING_NAME: Final = "model.embed_tokens.weight"
HEAD_NAME: Final = "lm_head.weight"
_LAYER: Final = "model.layers.{layer}."


def _linear(name: str, rows: str, columns: str, scope: Scope = Scope.LAYER) -> TensorRule:
    return TensorRule(
        names=(_LAYER + name + ".weight",), kind=Kind.LINEAR, scope=scope, shape=(rows, columns)
    )


def _vector(name: str, size: str, when: When = When.ALWAYS) -> TensorRule:
    return TensorRule(
        names=(_LAYER + name,), kind=Kind.VECTOR, scope=Scope.LAYER, shape=(size,), when=when
    )


def _router(*names: str) -> TensorRule:
    return TensorRule(
        names=tuple(_LAYER + name + ".weight" for name in names),
        kind=Kind.ROUTER,
        scope=Scope.MOE_LAYER,
        shape=("experts", "hidden"),
    )


_ENDS: Final = (
    TensorRule(
        names=(EMBEDDING_NAME,), kind=Kind.EMBEDDING, scope=Scope.MODEL, shape=("vocab", "hidden")
    ),
    TensorRule(
        names=("model.norm.weight",), kind=Kind.VECTOR, scope=Scope.MODEL, shape=("hidden",)
    ),
    TensorRule(
        names=(HEAD_NAME,),
        kind=Kind.LINEAR,
        scope=Scope.MODEL,
        shape=("vocab", "hidden"),
        when=When.UNTIED,
    ),
)

_ATTENTION: Final = (
    _vector("input_layernorm.weight", "hidden"),
    _linear("self_attn.q_proj", "q_width", "hidden"),
    _linear("self_attn.k_proj", "kv_width", "hidden"),
    _linear("self_attn.v_proj", "kv_width", "hidden"),
    _linear("self_attn.o_proj", "hidden", "q_width"),
    _vector("self_attn.q_proj.bias", "q_width", When.ATTENTION_BIAS),
    _vector("self_attn.k_proj.bias", "kv_width", When.ATTENTION_BIAS),
    _vector("self_attn.v_proj.bias", "kv_width", When.ATTENTION_BIAS),
    _vector("self_attn.o_proj.bias", "hidden", When.ATTENTION_BIAS),
    _vector("post_attention_layernorm.weight", "hidden"),
)

# Old exporters saved this buffer; it follows from the configuration.
_ROTARY_BUFFER: Final = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")

_FUSED: Final = FusedExperts(
    gate_up=_LAYER + "mlp.experts.gate_up_proj", down=_LAYER + "mlp.experts.down_proj"
)

_MIXTRAL: Final = Family(
    architecture="MixtralForCausalLM",
    rules=(*_ENDS, *_ATTENTION, _router("block_sparse_moe.gate", "mlp.gate")),
    experts=(
        SeparateExperts(
            gate=_LAYER + "block_sparse_moe.experts.{expert}.w1.weight",
            up=_LAYER + "block_sparse_moe.experts.{expert}.w3.weight",
            down=_LAYER + "block_sparse_moe.experts.{expert}.w2.weight",
        ),
        _FUSED,
    ),
    ignorable=(_ROTARY_BUFFER,),
)

_QWEN3_MOE: Final = Family(
    architecture="Qwen3MoeForCausalLM",
    rules=(
        *_ENDS,
        *_ATTENTION,
        _vector("self_attn.q_norm.weight", "head"),
        _vector("self_attn.k_norm.weight", "head"),
        _router("mlp.gate"),
        _linear("mlp.gate_proj", "dense", "hidden", Scope.DENSE_LAYER),
        _linear("mlp.up_proj", "dense", "hidden", Scope.DENSE_LAYER),
        _linear("mlp.down_proj", "hidden", "dense", Scope.DENSE_LAYER),
    ),
    experts=(
        SeparateExperts(
            gate=_LAYER + "mlp.experts.{expert}.gate_proj.weight",
            up=_LAYER + "mlp.experts.{expert}.up_proj.weight",
            down=_LAYER + "mlp.experts.{expert}.down_proj.weight",
        ),
        _FUSED,
    ),
    ignorable=(_ROTARY_BUFFER,),
)

_GPT_OSS: Final = Family(
    architecture="GptOssForCausalLM",
    rules=(
        *_ENDS,
        *_ATTENTION,
        _vector("self_attn.sinks", "q_heads"),
        _router("mlp.router"),
        _vector("mlp.router.bias", "experts"),
    ),
    experts=(InterleavedExperts(prefix=_LAYER + "mlp.experts."),),
    ignorable=(_ROTARY_BUFFER,),
)


def _named(
    name: str,
    kind: Kind,
    *shape: str,
    scope: Scope = Scope.LAYER,
    other: str = "",
    when: When = When.ALWAYS,
) -> TensorRule:
    """A tensor of DeepSeek-V4. other: where transformers does not just put `model.` before it."""
    if scope is not Scope.MODEL:
        name, other = "layers.{layer}." + name, other and "layers.{layer}." + other
    return TensorRule(
        names=(name, "model." + name, *(("model." + other,) if other else ())),
        kind=kind,
        scope=scope,
        shape=shape,
        when=when,
    )


def _streams(name: str) -> tuple[TensorRule, ...]:
    """What mixes the residual streams before and after a block."""
    return (
        _named(name + "_fn", Kind.EXACT, "mixes", "streams_width"),
        _named(name + "_base", Kind.VECTOR, "mixes"),
        _named(name + "_scale", Kind.VECTOR, "three"),
    )


def _compressor(
    name: str, width: str, head: str, rate: str, scope: Scope
) -> tuple[TensorRule, ...]:
    return (
        _named(name + ".wkv.weight", Kind.LINEAR, width, "hidden", scope=scope),
        _named(name + ".wgate.weight", Kind.LINEAR, width, "hidden", scope=scope),
        _named(name + ".ape", Kind.EXACT, rate, width, scope=scope),
        _named(name + ".norm.weight", Kind.VECTOR, head, scope=scope),
    )


_DEEPSEEK_V4: Final = Family(
    architecture="DeepseekV4ForCausalLM",
    rules=(
        _named(
            "embed.weight",
            Kind.EMBEDDING,
            "vocab",
            "hidden",
            scope=Scope.MODEL,
            other="embed_tokens.weight",
        ),
        _named("norm.weight", Kind.VECTOR, "hidden", scope=Scope.MODEL),
        _named("head.weight", Kind.LINEAR, "vocab", "hidden", scope=Scope.MODEL, when=When.UNTIED),
        _named(
            "hc_head_fn",
            Kind.EXACT,
            "streams",
            "streams_width",
            scope=Scope.MODEL,
            other="hc_head.hc_fn",
        ),
        _named("hc_head_base", Kind.VECTOR, "streams", scope=Scope.MODEL, other="hc_head.hc_base"),
        _named("hc_head_scale", Kind.VECTOR, "one", scope=Scope.MODEL, other="hc_head.hc_scale"),
        *_streams("hc_attn"),
        _named("attn_norm.weight", Kind.VECTOR, "hidden"),
        _named("attn.wq_a.weight", Kind.LINEAR, "q_rank", "hidden"),
        _named("attn.q_norm.weight", Kind.VECTOR, "q_rank"),
        _named("attn.wq_b.weight", Kind.LINEAR, "q_width", "q_rank"),
        _named("attn.wkv.weight", Kind.LINEAR, "head", "hidden"),
        _named("attn.kv_norm.weight", Kind.VECTOR, "head", other="attn.norm.weight"),
        _named("attn.wo_a.weight", Kind.LINEAR, "output_ranks", "output_group"),
        _named("attn.wo_b.weight", Kind.LINEAR, "hidden", "output_ranks"),
        _named("attn.attn_sink", Kind.VECTOR, "q_heads"),
        *_compressor("attn.compressor", "head_twice", "head", "sparse_rate", Scope.SPARSE_LAYER),
        *_compressor("attn.compressor", "head", "head", "heavy_rate", Scope.HEAVY_LAYER),
        _named(
            "attn.indexer.wq_b.weight",
            Kind.LINEAR,
            "index_width",
            "q_rank",
            scope=Scope.SPARSE_LAYER,
        ),
        _named(
            "attn.indexer.weights_proj.weight",
            Kind.LINEAR,
            "index_heads",
            "hidden",
            scope=Scope.SPARSE_LAYER,
        ),
        *_compressor(
            "attn.indexer.compressor",
            "index_head_twice",
            "index_head",
            "sparse_rate",
            Scope.SPARSE_LAYER,
        ),
        *_streams("hc_ffn"),
        _named("ffn_norm.weight", Kind.VECTOR, "hidden"),
        _named("ffn.gate.weight", Kind.ROUTER, "experts", "hidden"),
        _named("ffn.gate.bias", Kind.VECTOR, "experts", scope=Scope.SCORED_LAYER),
        _named("ffn.gate.tid2eid", Kind.IDS, "vocab", "top_k", scope=Scope.HASH_LAYER),
        _named("ffn.shared_experts.w1.weight", Kind.LINEAR, "shared", "hidden"),
        _named("ffn.shared_experts.w3.weight", Kind.LINEAR, "shared", "hidden"),
        _named("ffn.shared_experts.w2.weight", Kind.LINEAR, "hidden", "shared"),
    ),
    experts=tuple(
        SeparateExperts(
            gate=start + "layers.{layer}.ffn.experts.{expert}.w1.weight",
            up=start + "layers.{layer}.ffn.experts.{expert}.w3.weight",
            down=start + "layers.{layer}.ffn.experts.{expert}.w2.weight",
        )
        for start in ("", "model.")
    ),
    # Layers that guess further tokens; and in layers with a table, the bias that it replaces.
    ignorable=(
        re.compile(r"(model\.)?mtp\..*"),
        re.compile(r"(model\.)?layers\.\d+\.ffn\.gate\.bias"),
    ),
)

FAMILIES: Final[Mapping[str, Family]] = MappingProxyType(
    {family.architecture: family for family in (_MIXTRAL, _QWEN3_MOE, _GPT_OSS, _DEEPSEEK_V4)}
)

_LAYER_NAME: Final = re.compile(r"(?:model\.)?layers\.(\d+)\.")


def layer_of(name: str) -> int | None:
    """The layer that a tensor of the FTW index belongs to; None for those outside the layers."""
    found = _LAYER_NAME.match(name)
    return None if found is None else int(found[1])
