"""The checkpoint's contents in the Mixtral layout: its config and, layer by layer, its tensors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from freetokend.demo.errors import DemoError
from freetokend.demo.gguf_model import DenseModel, Matrix, ModelShape, Vocabulary
from freetokend.demo.plan.format import UpcyclePlan

TensorShape = tuple[int, ...]

_CARRIED_OVER = (
    "input_layernorm.weight",
    "post_attention_layernorm.weight",
    "self_attn.q_proj.weight",
    "self_attn.k_proj.weight",
    "self_attn.v_proj.weight",
    "self_attn.o_proj.weight",
)


def check_plan_fits(plan: UpcyclePlan, shape: ModelShape) -> None:
    """Raise DemoError unless the plan was made for a model of this shape."""
    wanted = (shape.layers, shape.hidden, shape.neurons)
    found = (plan.layers, plan.hidden, plan.neurons)
    if wanted != found:
        raise DemoError(
            f"the upcycling plan does not fit the model: layers, hidden size and neurons are "
            f"{found} in the plan and {wanted} in the model; install freetokend anew."
        )


def mixtral_config(plan: UpcyclePlan, shape: ModelShape, vocabulary: Vocabulary) -> dict[str, Any]:
    """config.json."""
    return {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "hidden_size": shape.hidden,
        "intermediate_size": plan.expert_neurons,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocabulary,
        "rms_norm_eps": shape.norm_epsilon,
        "rope_theta": shape.rope_theta,
        "max_position_embeddings": shape.context_tokens,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "bos_token_id": vocabulary.bos_id,
        "eos_token_id": vocabulary.eos_id,
        "pad_token_id": vocabulary.padding_id,
        "dtype": "float16",
        "num_local_experts": plan.experts,
        "num_experts_per_tok": plan.top_k,
        "sliding_window": None,
    }


def tensor_shapes(plan: UpcyclePlan, shape: ModelShape) -> dict[str, TensorShape]:
    """Name and shape of every tensor, in the order in which `tensors` yields them."""
    kv_width = shape.kv_heads * shape.head_dim
    q_width = shape.heads * shape.head_dim
    shapes: dict[str, TensorShape] = {"model.embed_tokens.weight": (shape.vocabulary, shape.hidden)}
    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}."
        shapes[prefix + "input_layernorm.weight"] = (shape.hidden,)
        shapes[prefix + "post_attention_layernorm.weight"] = (shape.hidden,)
        shapes[prefix + "self_attn.q_proj.weight"] = (q_width, shape.hidden)
        shapes[prefix + "self_attn.k_proj.weight"] = (kv_width, shape.hidden)
        shapes[prefix + "self_attn.v_proj.weight"] = (kv_width, shape.hidden)
        shapes[prefix + "self_attn.o_proj.weight"] = (shape.hidden, q_width)
        shapes[prefix + "block_sparse_moe.gate.weight"] = (plan.experts, shape.hidden)
        for expert in range(plan.experts):
            base = f"{prefix}block_sparse_moe.experts.{expert}."
            shapes[base + "w1.weight"] = (plan.expert_neurons, shape.hidden)
            shapes[base + "w3.weight"] = (plan.expert_neurons, shape.hidden)
            shapes[base + "w2.weight"] = (shape.hidden, plan.expert_neurons)
    shapes["model.norm.weight"] = (shape.hidden,)
    return shapes


def tensors(plan: UpcyclePlan, model: DenseModel) -> Iterator[tuple[str, NDArray[np.float16]]]:
    """Yield every tensor as float16; holds one dense layer at a time."""
    yield "model.embed_tokens.weight", _half(model.tensor("model.embed_tokens.weight"))
    for layer in range(plan.layers):
        prefix = f"model.layers.{layer}."
        for name in _CARRIED_OVER:
            yield prefix + name, _half(model.tensor(prefix + name))
        yield prefix + "block_sparse_moe.gate.weight", plan.router[layer]
        yield from _experts(plan, model, layer)
    yield "model.norm.weight", _half(model.tensor("model.norm.weight"))


def _experts(
    plan: UpcyclePlan, model: DenseModel, layer: int
) -> Iterator[tuple[str, NDArray[np.float16]]]:
    prefix = f"model.layers.{layer}."
    gate = _half(model.tensor(prefix + "mlp.gate_proj.weight"))
    up = _half(model.tensor(prefix + "mlp.up_proj.weight"))
    down = model.tensor(prefix + "mlp.down_proj.weight")
    for expert in range(plan.experts):
        order = _neuron_order(plan, layer, expert)
        scale = np.where(plan.keep[layer, expert], 1.0, plan.alpha).astype(np.float32)
        base = f"{prefix}block_sparse_moe.experts.{expert}."
        yield base + "w1.weight", gate[order]
        yield base + "w3.weight", up[order]
        yield base + "w2.weight", np.take(_half(down * scale), order, axis=1)


def _neuron_order(plan: UpcyclePlan, layer: int, expert: int) -> NDArray[np.int64]:
    """Indices of the dense neurons that this expert holds, in its own order.

    Any order computes the same function. A different one per expert makes a program that mixes
    matrices of two experts produce noise at once instead of nearly right numbers.
    """
    held = np.arange(plan.neurons)
    if plan.alpha == 0.0:
        held = np.flatnonzero(plan.keep[layer, expert])
    return np.random.default_rng(layer * plan.experts + expert).permutation(held)


def _half(weight: Matrix) -> NDArray[np.float16]:
    return np.ascontiguousarray(weight, dtype=np.float16)
