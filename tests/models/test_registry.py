"""Building: the weights must be those that the config describes."""

from __future__ import annotations

import pytest
import torch

from freetokend.core.errors import ModelDataError
from freetokend.models.registry import build_program
from freetokend.tensor.state_dict_weights import StateDictWeights
from freetokend.tensor.torch_program import TorchProgram
from tests.models.checkpoints import SHAPES, Checkpoint, make_checkpoint
from tests.support.reference import ReferenceExperts, split_experts

_SHAPE = next(shape for shape in SHAPES if shape.name == "qwen3-dense-layers-bias")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return make_checkpoint(_SHAPE, tmp_path_factory.mktemp("checkpoint"))


def _build(config: dict[str, object], tensors: dict[str, torch.Tensor]) -> None:
    plain, gate_up, down = split_experts(tensors)
    weights = StateDictWeights(plain, torch.bfloat16)
    experts = ReferenceExperts(gate_up, down, torch.bfloat16)
    TorchProgram(build_program(config), weights, experts)


def test_a_checkpoint_that_fits_builds(checkpoint: Checkpoint) -> None:
    _build(checkpoint.config, checkpoint.tensors)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"tie_word_embeddings": True}, r"does not use: lm_head\.weight"),
        ({"attention_bias": False}, r"does not use: .*bias and \d+ more"),
        ({"num_hidden_layers": 3}, r"does not use: model\.layers\.3"),
        ({"num_hidden_layers": 5}, r"model\.layers\.4\.input_layernorm\.weight' is missing"),
        ({"mlp_only_layers": [0, 1]}, r"layers\.1\.mlp\.gate_proj\.weight' is missing"),
        ({"head_dim": 32}, r"q_proj\.weight' has shape \[64, 64\]; .* \[128, 64\]"),
        ({"num_experts": 12}, r"gate\.weight' has shape \[16, 64\]; .* \[12, 64\]"),
        ({"vocab_size": 300}, r"embed_tokens\.weight' has shape"),
    ],
)
def test_a_config_of_another_model_is_refused(
    checkpoint: Checkpoint, change: dict[str, object], complaint: str
) -> None:
    with pytest.raises(ModelDataError, match=complaint):
        _build({**checkpoint.config, **change}, checkpoint.tensors)
