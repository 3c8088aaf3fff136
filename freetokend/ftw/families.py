"""What the checkpoints of each family call their tensors: data, read by `freetokend.ftw.model`.

A rule's first name is the one that the tensor gets in the FTW index; the others are what other
writers call the same thing. `{layer}` and `{expert}` are decimal numbers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Final


class Kind(StrEnum):
    """What a tensor is to the model, which decides how it is stored."""

    EMBEDDING = "embedding"
    LINEAR = "linear"
    VECTOR = "vector"
    ROUTER = "router"


class Scope(StrEnum):
    """Where a tensor occurs."""

    MODEL = "model"
    LAYER = "layer"
    MOE_LAYER = "moe_layer"
    DENSE_LAYER = "dense_layer"


class When(StrEnum):
    """What must hold for a tensor to exist."""

    ALWAYS = "always"
    ATTENTION_BIAS = "attention_bias"
    UNTIED = "untied"


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRule:
    """A tensor that is no routed expert. shape: names of sizes (see `freetokend.ftw.model`)."""

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
class Family:
    """One architecture. head: the output projection; experts: the namings in use."""

    architecture: str
    rules: tuple[TensorRule, ...]
    experts: tuple[SeparateExperts | FusedExperts, ...]
    ignorable: tuple[re.Pattern[str], ...]
    weight_scale: float = 1.0


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

FAMILIES: Final[Mapping[str, Family]] = MappingProxyType(
    {family.architecture: family for family in (_MIXTRAL, _QWEN3_MOE)}
)
