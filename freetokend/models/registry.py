"""From a config.json to the step program of its model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

from freetokend.core.model_config import ModelConfig, parse_model_config, refuse_unserved
from freetokend.core.model_families import ModelFamily
from freetokend.models.decoder import decoder_program
from freetokend.tensor.program import StepProgram

_BUILDERS: Final[Mapping[ModelFamily, Callable[[ModelConfig], StepProgram]]] = MappingProxyType(
    {ModelFamily.MIXTRAL: decoder_program, ModelFamily.QWEN3_MOE: decoder_program}
)


def build_program(model_config: Mapping[str, object]) -> StepProgram:
    """The step program of the model that `model_config` (a config.json object) describes.

    ModelDataError when the config is not supported. Whether weights fit it is found when a runner
    binds the program to them.
    """
    config = parse_model_config(model_config)
    refuse_unserved(config.architecture)
    return _BUILDERS[config.family](config)
