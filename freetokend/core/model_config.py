"""What a model is, read from its Hugging Face config.json; no torch, so that control can use it.

`parse_model_config` turns the JSON object into a checked `ModelConfig` (the architecture comes
from the file, never from tensor names); `model_facts` sums up what the rest of the service needs.
Options that would change the function the model computes and that are not implemented are
refused by name (MODEL_UNSUPPORTED), never ignored; of families that are converted but not served
only what the conversion and sizes of experts take is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from freetokend.core.config_fields import ConfigFields
from freetokend.core.deepseek_v4_config import DeepseekV4Config, parse_deepseek_v4
from freetokend.core.errors import ModelDataError, Reason
from freetokend.core.model_families import (
    FAMILIES,
    ExpertActivation,
    FamilyTraits,
    ModelFamily,
    WindowRule,
)
from freetokend.core.quantization_config import parse_quantization
from freetokend.core.rope_config import RopeConfig, RopeKind, parse_rope

_WHERE: Final = "config.json"
_MAX_LAYERS: Final = 4096
_MAX_SIZE: Final = 1 << 24
_KV_ELEMENT_BYTES: Final = 2  # keys and values are kept in bf16
DEFAULT_ALPHA: Final = 1.702


class RouterScoring(StrEnum):
    """What turns router logits into scores."""

    SOFTMAX = "softmax"
    SQRT_SOFTPLUS = "sqrtsoftplus"


class RouterSelection(StrEnum):
    """Which scores decide. BIASED: scores plus a bias, which is no part of the weights."""

    TOP_K = "top_k"
    BIASED_TOP_K = "biased_top_k"


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """How experts are chosen: score all, take the `top_k` best, perhaps rescale them to sum 1.

    weight_scale: what the weights are multiplied by in the end.
    """

    scoring: RouterScoring
    top_k: int
    renormalise: bool
    selection: RouterSelection = RouterSelection.TOP_K
    weight_scale: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A decoder-only mixture-of-experts language model.

    Sizes are counts of elements. `moe_layer_indices` are the layers with routed experts, in order;
    the position in it is the `moe_layer_index` of expert identities. `window_tokens` is None for
    full attention. `token_ids` may be any of [0, vocab_size). Experts clamp gate and up to
    activation_limit (0: they do not), and activation_alpha is the slope of swiglu_oai's sigmoid.

    Of families that are converted only (`is_served` is false) `rope` is the rotation of the layers
    that do not compress, and contexts and sizes of keys and values are not worked out.
    """

    architecture: str
    family: ModelFamily
    vocab_size: int
    hidden_size: int
    layers_count: int
    q_heads_count: int
    kv_heads_count: int
    head_size: int
    qk_norm: bool
    attention_bias: bool
    window_tokens: int | None
    rope: RopeConfig
    norm_epsilon: float
    moe_layer_indices: tuple[int, ...]
    experts_per_layer_count: int
    expert_size: int
    router: RouterConfig
    dense_size: int
    tied_embeddings: bool
    max_position_embeddings: int
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    activation: ExpertActivation = ExpertActivation.SILU
    activation_limit: float = 0.0
    activation_alpha: float = DEFAULT_ALPHA
    expert_bias: bool = False
    deepseek_v4: DeepseekV4Config | None = None

    @property
    def is_served(self) -> bool:
        """Whether this version computes the model."""
        return FAMILIES[self.architecture].is_served

    @property
    def max_context_tokens(self) -> int:
        """The longest sequence (prompt and answer) whose results are those of the model."""
        return self._context()[0]

    @property
    def max_context_reason(self) -> str:
        """Why `max_context_tokens` is what it is, for people."""
        return self._context()[1]

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of keys and values that one token takes over all layers."""
        return 2 * _KV_ELEMENT_BYTES * self.layers_count * self.kv_heads_count * self.head_size

    def _context(self) -> tuple[int, str]:
        tokens = self.max_position_embeddings
        reason = f"max_position_embeddings is {tokens}"
        stretched = self.rope.context_tokens
        if stretched is not None and stretched > tokens:
            tokens = stretched
            reason = (
                f"{self.rope.kind.value} scaling stretches {self.rope.original_context_tokens} "
                f"tokens by {self.rope.factor:g}"
            )
        if self.window_tokens is not None and self.window_tokens < tokens:
            # Within the window, windowed and full attention are the same function.
            tokens = self.window_tokens
            reason = f"the attention window is {tokens} tokens and longer contexts are not served"
        return tokens, reason


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What serving, control and the scheduler need to know of a model."""

    architecture: str
    model_type: str
    vocab_size: int
    hidden_size: int
    layers_count: int
    moe_layers_count: int
    q_heads_count: int
    kv_heads_count: int
    head_size: int
    experts_per_layer_count: int
    experts_per_token_count: int
    expert_size: int
    kv_bytes_per_token: int
    max_context_tokens: int
    max_context_reason: str
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]


def supported_architectures() -> tuple[str, ...]:
    """Names in `architectures` of a config.json that this version serves."""
    return tuple(name for name, traits in FAMILIES.items() if traits.is_served)


def refuse_unserved(architecture: str) -> None:
    """ModelDataError (MODEL_UNSUPPORTED) for an architecture that is at most converted."""
    served = supported_architectures()
    if architecture not in served:
        raise ModelDataError(
            f"the model is a {architecture}, which this version of freetokend "
            f"{'converts but does' if architecture in FAMILIES else 'does'} not serve yet; it "
            f"serves {', '.join(served)}. Serve one of those, or keep the directory for a version "
            f"that serves this one.",
            reason=Reason.MODEL_UNSUPPORTED,
        )


def parse_model_config(values: Mapping[str, object]) -> ModelConfig:
    """Read a config.json object.

    ModelDataError with MODEL_UNSUPPORTED names the architecture or options that are not
    implemented; with MODEL_INVALID the field that is missing or makes no sense.
    """
    fields = ConfigFields(values, _WHERE)
    architecture, family = _family(fields)
    _refuse_unsupported(fields, family)
    parse_quantization(values, _WHERE)
    hidden_size = fields.integer("hidden_size", high=_MAX_SIZE)
    layers_count = fields.integer("num_hidden_layers", high=_MAX_LAYERS)
    q_heads = fields.integer("num_attention_heads", high=_MAX_SIZE)
    kv_heads = fields.integer(
        "num_key_value_heads", family.default_kv_heads or q_heads, high=_MAX_SIZE
    )
    head_size = _head_size(fields, hidden_size, q_heads, kv_heads)
    max_positions = fields.integer("max_position_embeddings")
    experts = fields.integer(_first_present(fields, family.experts_fields), low=0, high=1 << 20)
    moe_layers = _moe_layers(fields, family, layers_count, experts)
    vocab_size = fields.integer("vocab_size", high=_MAX_SIZE)
    expert_size = fields.integer(family.expert_size_field, high=_MAX_SIZE) if moe_layers else 0
    deepseek_v4 = None
    if family.family is ModelFamily.DEEPSEEK_V4:
        deepseek_v4 = parse_deepseek_v4(
            fields,
            layers_count=layers_count,
            q_heads_count=q_heads,
            head_size=head_size,
            expert_size=expert_size,
        )
    return ModelConfig(
        architecture=architecture,
        family=family.family,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        layers_count=layers_count,
        q_heads_count=q_heads,
        kv_heads_count=kv_heads,
        head_size=head_size,
        qk_norm=family.qk_norm,
        attention_bias=_attention_bias(fields, family),
        window_tokens=_window(fields, family),
        rope=_rope(fields, family, max_positions),
        norm_epsilon=fields.number("rms_norm_eps", family.default_norm_epsilon),
        moe_layer_indices=moe_layers,
        experts_per_layer_count=experts if moe_layers else 0,
        expert_size=expert_size,
        router=_router(fields, family, experts if moe_layers else None),
        dense_size=(
            fields.integer("intermediate_size", high=_MAX_SIZE)
            if len(moe_layers) < layers_count
            else 0
        ),
        tied_embeddings=fields.flag("tie_word_embeddings", False),
        max_position_embeddings=max_positions,
        bos_token_id=_bos(fields, vocab_size),
        eos_token_ids=fields.integers("eos_token_id", low=0, high=vocab_size - 1),
        activation=family.activation,
        activation_limit=(
            fields.number("swiglu_limit", family.default_limit) if family.default_limit else 0.0
        ),
        activation_alpha=fields.number("swiglu_alpha", DEFAULT_ALPHA),
        expert_bias=family.expert_bias,
        deepseek_v4=deepseek_v4,
    )


def model_facts(
    values: Mapping[str, object], generation: Mapping[str, object] | None = None
) -> ModelFacts:
    """Facts of a config.json object; `generation` is generation_config.json, if there is one.

    Chat models often end a turn by an id that only generation_config.json lists, so both files'
    `eos_token_id` count. Raises as `parse_model_config`, and where the model is not served.
    """
    config = parse_model_config(values)
    refuse_unserved(config.architecture)
    eos_ids = config.eos_token_ids
    if generation is not None:
        fields = ConfigFields(generation, "generation_config.json")
        more = fields.integers("eos_token_id", low=0, high=config.vocab_size - 1)
        eos_ids = tuple(dict.fromkeys(more + eos_ids))
    return ModelFacts(
        architecture=config.architecture,
        model_type=config.family.value,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        layers_count=config.layers_count,
        moe_layers_count=len(config.moe_layer_indices),
        q_heads_count=config.q_heads_count,
        kv_heads_count=config.kv_heads_count,
        head_size=config.head_size,
        experts_per_layer_count=config.experts_per_layer_count,
        experts_per_token_count=config.router.top_k,
        expert_size=config.expert_size,
        kv_bytes_per_token=config.kv_bytes_per_token,
        max_context_tokens=config.max_context_tokens,
        max_context_reason=config.max_context_reason,
        bos_token_id=config.bos_token_id,
        eos_token_ids=eos_ids,
    )


def _family(fields: ConfigFields) -> tuple[str, FamilyTraits]:
    names = fields.raw("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise fields.invalid(f"architectures is {names!r}; expected a list of one name.")
    family = FAMILIES.get(names[0])
    if family is None:
        raise fields.unsupported(
            f"architecture {names[0]!r} is not implemented; implemented are {', '.join(FAMILIES)}."
        )
    return names[0], family


def _refuse_unsupported(fields: ConfigFields, family: FamilyTraits) -> None:
    found: list[str] = []
    activation = fields.text("hidden_act", "silu")
    if activation != "silu":
        found.append(f"hidden_act {activation!r} (silu is)")
    if family.attention_bias is False and fields.flag("attention_bias", False):
        found.append("attention_bias in this family")
    if fields.flag("mlp_bias", False):
        found.append("mlp_bias")
    layer_types = fields.raw("layer_types")
    if isinstance(layer_types, list):
        other = sorted({str(kind) for kind in layer_types} - family.layer_types)
        if other:
            known = ", ".join(sorted(family.layer_types))
            found.append(f"layer_types {', '.join(other)} ({known} {_verb(family.layer_types)})")
    if found:
        raise fields.unsupported("not implemented: " + "; ".join(found) + ".")


def _verb(names: frozenset[str]) -> str:
    return "is" if len(names) == 1 else "are"


def _attention_bias(fields: ConfigFields, family: FamilyTraits) -> bool:
    if family.attention_bias is None:
        return fields.flag("attention_bias", family.default_attention_bias)
    return family.attention_bias


def _rope(fields: ConfigFields, family: FamilyTraits, max_positions: int) -> RopeConfig:
    if family.family is ModelFamily.DEEPSEEK_V4:
        # Of its two rotations this is the plain one; heads are rotated in part.
        return RopeConfig(
            kind=RopeKind.DEFAULT,
            theta=fields.number("rope_theta", family.default_theta, above=1.0),
            factor=1.0,
            original_context_tokens=max_positions,
        )
    return parse_rope(
        fields, default_theta=family.default_theta, max_position_embeddings=max_positions
    )


def _head_size(fields: ConfigFields, hidden_size: int, q_heads: int, kv_heads: int) -> int:
    if q_heads % kv_heads:
        raise fields.invalid(
            f"num_attention_heads ({q_heads}) is not a multiple of num_key_value_heads "
            f"({kv_heads})."
        )
    if not fields.has("head_dim") and hidden_size % q_heads:
        raise fields.invalid(
            f"head_dim is missing and hidden_size ({hidden_size}) is not a multiple of "
            f"num_attention_heads ({q_heads})."
        )
    head_size = fields.integer("head_dim", max(hidden_size // q_heads, 1), high=1 << 16)
    if head_size % 2:
        raise fields.invalid(f"the head size ({head_size}) is odd and cannot be rotated in pairs.")
    return head_size


def _first_present(fields: ConfigFields, names: tuple[str, ...]) -> str:
    return next((name for name in names if fields.has(name)), names[0])


def _moe_layers(
    fields: ConfigFields, family: FamilyTraits, layers_count: int, experts: int
) -> tuple[int, ...]:
    if not family.dense_layers:
        if experts == 0:
            raise fields.invalid("the number of experts is 0 in a family without dense layers.")
        return tuple(range(layers_count))
    if experts == 0:
        return ()
    step = fields.integer("decoder_sparse_step", 1)
    dense = set(fields.integers("mlp_only_layers", low=0, high=_MAX_LAYERS))
    return tuple(
        index for index in range(layers_count) if index not in dense and (index + 1) % step == 0
    )


def _router(fields: ConfigFields, family: FamilyTraits, experts: int | None) -> RouterConfig:
    renormalise = (
        fields.flag("norm_topk_prob", False) if family.renormalise is None else family.renormalise
    )
    top_k = 0
    if experts is not None:
        top_k = fields.integer("num_experts_per_tok", family.default_top_k)
        if top_k > experts:
            raise fields.invalid(
                f"num_experts_per_tok ({top_k}) is above the number of experts ({experts})."
            )
    if family.family is ModelFamily.DEEPSEEK_V4:
        return RouterConfig(
            scoring=RouterScoring.SQRT_SOFTPLUS,
            top_k=top_k,
            renormalise=renormalise,
            selection=RouterSelection.BIASED_TOP_K,
            weight_scale=fields.number("routed_scaling_factor", 1.5),
        )
    # gpt-oss takes the best k and then the softmax of those: the same as all, rescaled.
    return RouterConfig(scoring=RouterScoring.SOFTMAX, top_k=top_k, renormalise=renormalise)


def _window(fields: ConfigFields, family: FamilyTraits) -> int | None:
    if family.window is WindowRule.SOME_LAYERS:
        return None
    if family.window is WindowRule.IF_FLAGGED and not fields.flag("use_sliding_window", False):
        return None
    if not fields.has("sliding_window"):
        return None
    return fields.integer("sliding_window")


def _bos(fields: ConfigFields, vocab_size: int) -> int | None:
    if not fields.has("bos_token_id"):
        return None
    return fields.integer("bos_token_id", low=0, high=vocab_size - 1)
