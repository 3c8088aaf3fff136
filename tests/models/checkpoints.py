"""Tiny random checkpoints whose activations and logits have the magnitudes of real ones."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """One checkpoint to compare on: a family and the config fields that differ from the base."""

    name: str
    architecture: str
    fields: Mapping[str, object] = field(default_factory=lambda: MappingProxyType({}))

    def config(self) -> dict[str, object]:
        """A whole config.json object."""
        base = _MIXTRAL if self.architecture == "MixtralForCausalLM" else _QWEN3
        return {"architectures": [self.architecture], **base, **self.fields}


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """What config.json says and the tensors by the names of the safetensors file."""

    config: dict[str, object]
    tensors: dict[str, torch.Tensor]
    directory: Path


_COMMON: Final[Mapping[str, object]] = MappingProxyType(
    {
        "vocab_size": 320,
        "hidden_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "hidden_act": "silu",
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
)
_MIXTRAL: Final[Mapping[str, object]] = MappingProxyType(
    {
        **_COMMON,
        "model_type": "mixtral",
        "intermediate_size": 96,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e4,
        "sliding_window": None,
    }
)
_QWEN3: Final[Mapping[str, object]] = MappingProxyType(
    {
        **_COMMON,
        "model_type": "qwen3_moe",
        "intermediate_size": 128,
        "moe_intermediate_size": 48,
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    }
)


def _mixtral(name: str, **fields: object) -> Shape:
    return Shape(name=name, architecture="MixtralForCausalLM", fields=MappingProxyType(fields))


def _qwen3(name: str, **fields: object) -> Shape:
    return Shape(name=name, architecture="Qwen3MoeForCausalLM", fields=MappingProxyType(fields))


SHAPES: Final[tuple[Shape, ...]] = (
    _mixtral("mixtral-gqa-top2"),
    # Prompts of the tests stay within this window, where it must make no difference.
    _mixtral(
        "mixtral-mha-top1-window", num_key_value_heads=4, num_experts_per_tok=1, sliding_window=96
    ),
    _mixtral("mixtral-tied-top4", tie_word_embeddings=True, num_experts_per_tok=4),
    _mixtral(
        "mixtral-linear-odd-sizes",
        vocab_size=333,
        hidden_size=72,
        head_dim=20,
        intermediate_size=88,
        num_local_experts=5,
        rope_scaling={"type": "linear", "factor": 4.0},
    ),
    _mixtral("mixtral-dynamic", rope_scaling={"type": "dynamic", "factor": 2.0}),
    _mixtral(
        "mixtral-llama3",
        num_key_value_heads=1,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 5e5,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ),
    _qwen3("qwen3-top4-normalised"),
    _qwen3("qwen3-top8-raw", num_experts_per_tok=8, norm_topk_prob=False),
    _qwen3("qwen3-top1-tied", num_experts_per_tok=1, tie_word_embeddings=True),
    _qwen3(
        "qwen3-dense-layers-bias",
        num_hidden_layers=4,
        mlp_only_layers=[0],
        decoder_sparse_step=2,
        attention_bias=True,
        intermediate_size=100,
    ),
    _qwen3(
        "qwen3-yarn",
        num_hidden_layers=2,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 4.0,
            "original_max_position_embeddings": 128,
        },
    ),
    _qwen3("qwen3-all-dense", num_experts=0),
)


def hf_model(checkpoint: Checkpoint, dtype: torch.dtype) -> Any:
    """The transformers model of the checkpoint's weights, converted to `dtype`.

    Its default kernels, except that its grouped expert kernel has no float64 form.
    """
    experts = "eager" if dtype is torch.float64 else "grouped_mm"
    model: Any = AutoModelForCausalLM.from_pretrained(
        checkpoint.directory, dtype=dtype, experts_implementation=experts
    )
    model.eval()
    return model


def make_checkpoint(
    shape: Shape, directory: Path, *, seed: int = 0, dtype: torch.dtype = torch.bfloat16
) -> Checkpoint:
    """Draw weights, write the checkpoint and read it back under the names of its file.

    Matrices are drawn so that every block changes the residual stream by its own size, router
    logits have a deviation of about 2 and output logits one above 1; norms and biases are not
    trivial, so that leaving one out shows.
    """
    values = shape.config()
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(values))
    config = AutoConfig.from_pretrained(directory)
    factory: Any = AutoModelForCausalLM
    model = factory.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(_scaled(name, noise))
    model.to(dtype).save_pretrained(directory)
    (directory / "config.json").write_text(json.dumps(values))
    tensors = load_file(directory / "model.safetensors")
    return Checkpoint(config=values, tensors=tensors, directory=directory)


def _scaled(name: str, noise: torch.Tensor) -> torch.Tensor:
    gain = float(noise.shape[-1]) ** -0.5
    if "norm" in name:
        return 1.0 + 0.2 * noise
    if name.endswith(".bias"):
        return 0.2 * noise
    if "embed_tokens" in name:
        return noise
    if name.endswith(".gate.weight") or name.startswith("lm_head"):
        gain *= 2.0
    else:
        gain *= 1.25
    return noise.mul(gain)


def prompt(length: int, vocab_size: int, seed: int) -> torch.Tensor:
    """Random token ids: int64 [length]."""
    generator = torch.Generator().manual_seed(1000 + seed)
    return torch.randint(0, vocab_size, (length,), generator=generator)
