"""Checkpoints as transformers itself writes them, and tiny ones as it reads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from freetokend.ftw.convert import convert
from freetokend.ftw.reader import FtwDirectory
from tests.support.tiny_checkpoints import write_tiny_mixtral, write_tiny_qwen3_moe

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "vocab_size": 64,
    "num_experts_per_tok": 2,
}
MODELS: dict[str, Any] = {
    "mixtral": lambda: transformers.MixtralForCausalLM(
        transformers.MixtralConfig(**SIZES, intermediate_size=48, num_local_experts=3)
    ),
    "qwen3_moe": lambda: transformers.Qwen3MoeForCausalLM(
        transformers.Qwen3MoeConfig(
            **SIZES,
            intermediate_size=80,
            moe_intermediate_size=48,
            num_experts=3,
            mlp_only_layers=[1],
            attention_bias=True,
        )
    ),
}


@pytest.mark.parametrize("original_format", [True, False])
@pytest.mark.parametrize("family", MODELS)
def test_saved_by_transformers(family: str, original_format: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = MODELS[family]()
    model.save_pretrained(tmp_path / "source", save_original_format=original_format)
    convert(tmp_path / "source", tmp_path / "model")
    directory = FtwDirectory(tmp_path / "model")
    state = model.state_dict()
    for moe_layer, layer in enumerate(directory.index.expert_bank.moe_layer_indices):
        prefix = f"model.layers.{layer}.mlp.experts."
        gate_up = state[prefix + "gate_up_proj"].bfloat16().float().numpy()
        down = state[prefix + "down_proj"].bfloat16().float().numpy()
        for expert in range(3):
            gate, up, ours_down = directory.expert(moe_layer, expert)
            assert np.array_equal(np.concatenate((gate, up)), gate_up[expert])
            assert np.array_equal(ours_down, down[expert])
    names = set(directory.index.tensors) - {"experts"}
    for name in names:
        wanted = state[name.replace("block_sparse_moe", "mlp")]
        if directory.index.tensors[name].dtype == "bf16":
            wanted = wanted.bfloat16()
        assert np.array_equal(directory.tensor(name), wanted.float().numpy()), name
    assert len(names) == sum("experts" not in name for name in state)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("write", [write_tiny_mixtral, write_tiny_qwen3_moe])
def test_tiny_checkpoints_are_loud_models_with_a_tokenizer(
    write: Any, tied: bool, tmp_path: Path
) -> None:
    write(tmp_path, tied=tied, dtype="f32")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    text = "The thing — über 日本 \U0001f600\n\tin the end"
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": text}], add_generation_prompt=True, tokenize=False
    )
    assert prompt == f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
    ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(ids) == prompt
    assert max(ids) < model.config.vocab_size
    assert ids.count(model.config.eos_token_id) == 1, "<|im_end|> ends a turn"
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0]
    assert logits.std(dim=-1).min() >= 1.0
    # Every part of the model must matter: other words before it give other logits.
    other = torch.tensor([ids[1:]])
    with torch.no_grad():
        assert (model(other).logits[0, -1] - logits[-1]).std() > 0.05
