"""From a config.json to a model that can run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

from freetokend.core.model_config import ModelConfig, ModelFamily, parse_model_config
from freetokend.models.decoder import DecoderModel
from freetokend.tensor.protocols import ExpertDispatch, StepProgram, WeightSource

_Builder = Callable[[ModelConfig, WeightSource, ExpertDispatch], StepProgram]

_BUILDERS: Final[Mapping[ModelFamily, _Builder]] = MappingProxyType(
    {ModelFamily.MIXTRAL: DecoderModel, ModelFamily.QWEN3_MOE: DecoderModel}
)


def build_model(
    model_config: Mapping[str, object], weights: WeightSource, experts: ExpertDispatch
) -> StepProgram:
    """Build the model that `model_config` (a config.json object) describes.

    ModelDataError when the config is not supported or the weights do not fit it: a tensor missing,
    of another shape, or left over.
    """
    config = parse_model_config(model_config)
    return _BUILDERS[config.family](config, weights, experts)
