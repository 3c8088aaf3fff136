"""config.json objects: what is read, what is refused and how the refusal is worded."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig

from freetokend.core.errors import ModelDataError, Reason
from freetokend.core.model_config import model_facts, parse_model_config, supported_architectures
from freetokend.core.rope_config import RopeKind
from tests.models.checkpoints import SHAPES, Shape

_MIXTRAL_SHAPE = next(shape for shape in SHAPES if shape.name == "mixtral-gqa-top2")
_QWEN3_SHAPE = next(shape for shape in SHAPES if shape.name == "qwen3-top4-normalised")

# As published, fields that do not matter left out.
_MIXTRAL_8X7B: dict[str, object] = {
    "architectures": ["MixtralForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mixtral",
    "num_attention_heads": 32,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 32000,
}
QWEN3_30B: dict[str, object] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 151643,
    "decoder_sparse_step": 1,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}


def test_facts_of_mixtral_8x7b() -> None:
    facts = model_facts(_MIXTRAL_8X7B)
    assert facts.model_type == "mixtral"
    assert (facts.layers_count, facts.moe_layers_count) == (32, 32)
    assert (facts.experts_per_layer_count, facts.experts_per_token_count) == (8, 2)
    assert facts.head_size == 128
    assert facts.kv_bytes_per_token == 131_072
    assert facts.max_context_tokens == 32768
    assert facts.eos_token_ids == (2,)


def test_facts_of_qwen3_30b_with_its_generation_config() -> None:
    facts = model_facts(QWEN3_30B, {"eos_token_id": [151645, 151643]})
    assert facts.model_type == "qwen3_moe"
    assert (facts.experts_per_layer_count, facts.experts_per_token_count) == (128, 8)
    assert facts.expert_size == 768
    assert facts.kv_bytes_per_token == 98_304
    assert facts.eos_token_ids == (151645, 151643)
    assert parse_model_config(QWEN3_30B).router.renormalise


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_sizes_are_read_as_transformers_reads_them(shape: Shape, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(shape.config()))
    theirs: Any = AutoConfig.from_pretrained(tmp_path)
    # What transformers writes back is the newer form of the same file.
    for values in (shape.config(), json.loads(theirs.to_json_string(use_diff=False))):
        ours = parse_model_config({**values, "architectures": [shape.architecture]})
        assert ours.hidden_size == theirs.hidden_size
        assert ours.kv_heads_count == theirs.num_key_value_heads
        assert ours.norm_epsilon == theirs.rms_norm_eps
        assert ours.rope.kind == theirs.rope_parameters["rope_type"]
        assert ours.rope.theta == theirs.rope_parameters["rope_theta"]
        assert ours.tied_embeddings == theirs.tie_word_embeddings
        assert ours.eos_token_ids == (theirs.eos_token_id,)


def test_dense_layers_take_no_place_among_moe_layers() -> None:
    config = parse_model_config(
        {**_QWEN3_SHAPE.config(), "num_hidden_layers": 6, "mlp_only_layers": [3]}
    )
    assert config.moe_layer_indices == (0, 1, 2, 4, 5)
    config = parse_model_config(
        {**_QWEN3_SHAPE.config(), "num_hidden_layers": 6, "decoder_sparse_step": 2}
    )
    assert config.moe_layer_indices == (1, 3, 5)


def test_a_window_caps_the_context_and_says_so() -> None:
    config = parse_model_config({**_MIXTRAL_SHAPE.config(), "sliding_window": 100})
    assert config.max_context_tokens == 100
    assert "window is 100 tokens" in config.max_context_reason
    wide = parse_model_config({**_MIXTRAL_SHAPE.config(), "sliding_window": 4096})
    assert wide.max_context_tokens == 512
    unused = parse_model_config({**_QWEN3_SHAPE.config(), "sliding_window": 100})
    assert unused.max_context_tokens == 512


def test_yarn_stretches_the_context() -> None:
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    facts = model_facts({**QWEN3_30B, "rope_scaling": scaling})
    assert facts.max_context_tokens == 131_072
    assert "yarn" in facts.max_context_reason


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "LlamaForCausalLM"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"attention_bias": True}, "attention_bias"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "longrope"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(change: dict[str, object], named: str) -> None:
    with pytest.raises(ModelDataError, match=named) as refusal:
        parse_model_config({**_MIXTRAL_SHAPE.config(), **change})
    assert refusal.value.reason is Reason.MODEL_UNSUPPORTED


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"architectures": None}, "architectures"),
        ({"architectures": []}, "architectures"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": "64"}, "hidden_size"),
        ({"hidden_size": True}, "hidden_size"),
        ({"num_hidden_layers": -3}, "num_hidden_layers is -3"),
        ({"num_hidden_layers": 10**12}, "num_hidden_layers"),
        ({"num_key_value_heads": 3}, "multiple of num_key_value_heads"),
        ({"head_dim": 15}, "odd"),
        ({"head_dim": None, "num_attention_heads": 6, "num_key_value_heads": 6}, "head_dim"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok"),
        ({"num_local_experts": 0}, "number of experts is 0"),
        ({"eos_token_id": 320}, "eos_token_id"),
        ({"eos_token_id": [1, "2"]}, "eos_token_id"),
        ({"rms_norm_eps": 0}, "rms_norm_eps"),
        ({"rope_theta": float("nan")}, "rope_theta"),
        ({"rope_scaling": {"type": "linear"}}, "factor is missing"),
        ({"rope_scaling": [1]}, "rope_scaling"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
    ],
)
def test_what_makes_no_sense_is_refused_with_the_field(
    change: dict[str, object], named: str
) -> None:
    with pytest.raises(ModelDataError, match=named) as refusal:
        parse_model_config({**_MIXTRAL_SHAPE.config(), **change})
    assert refusal.value.reason is Reason.MODEL_INVALID


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=6,
)


@given(data=st.data())
def test_any_value_in_any_field_is_read_or_refused(data: st.DataObject) -> None:
    shape = data.draw(st.sampled_from(SHAPES))
    values = shape.config()
    field = data.draw(st.sampled_from([*values, "rope_scaling", "rope_parameters"]))
    values[field] = data.draw(_JSON)
    with contextlib.suppress(ModelDataError):
        assert parse_model_config(values).max_context_tokens >= 1


def test_every_supported_architecture_has_a_shape_to_be_compared_on() -> None:
    assert {shape.architecture for shape in SHAPES} == set(supported_architectures())
    kinds = {parse_model_config(shape.config()).rope.kind for shape in SHAPES}
    assert kinds == set(RopeKind)
