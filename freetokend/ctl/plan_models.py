"""The model that `freetokenctl plan` is asked about: a known one, an FTW directory, or a directory
with a config.json, whose weights need not be there. Imports the arithmetic of FTW."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

from freetokend.core.deepseek_v4_config import AttentionKind
from freetokend.core.errors import InvalidInputError, ModelDataError
from freetokend.core.model_config import ModelConfig, parse_model_config
from freetokend.core.quantization_config import Coding, StoredWeights, parse_quantization
from freetokend.ftw.contents import INDEX_FILE, FtwIndex
from freetokend.ftw.families import EMBEDDING_NAME
from freetokend.ftw.formats import BF16, WeightFormat, parse_format, record_layout
from freetokend.ftw.schema import parse_index
from freetokend.ftw.strict_json import parse_json, read_file
from freetokend.policy.known_models import KNOWN_MODELS
from freetokend.policy.machine_model import ModelShape, Range, exactly

_CONFIG_FILE: Final = "config.json"
_MAX_CONFIG_BYTES: Final = 16 << 20
_BF16_BYTES: Final = 2


def model_shape(asked: str, weight_format: WeightFormat | None) -> ModelShape:
    """`asked`: a name or a directory; `weight_format` of the experts instead of the checkpoint's.

    InvalidInputError: it is neither, or cannot have this format; ModelDataError: a file cannot be
    used.
    """
    known = KNOWN_MODELS.get(asked.lower())
    directory = Path(asked)
    if known is None and not directory.is_dir():
        raise InvalidInputError(
            f"--model {asked} is neither a directory nor a known model; known are "
            f"{', '.join(KNOWN_MODELS)}.",
            param="model",
        )
    is_ftw = known is None and (directory / INDEX_FILE).exists()
    if weight_format is not None and (known is not None or is_ftw):
        raise InvalidInputError(
            f"--format is for a directory with a {_CONFIG_FILE}; the experts of {asked} have a "
            "format already. Leave it out.",
            param="format",
        )
    if known is not None:
        return known
    values = _config_values(directory)
    config = parse_model_config(values)
    if not config.moe_layer_indices:
        raise InvalidInputError(
            f"{directory / _CONFIG_FILE} describes a model without routed experts; this program "
            "serves mixtures of experts. Name one of those.",
            param="model",
        )
    if is_ftw:
        return _ftw_shape(directory, config, parse_index(directory))
    return _config_shape(directory, config, values, weight_format)


def _config_values(directory: Path) -> Mapping[str, object]:
    path = directory / _CONFIG_FILE
    data = read_file(path, limit_bytes=_MAX_CONFIG_BYTES, purpose="the description of a model")
    values = parse_json(data, str(path))
    if not isinstance(values, dict):
        raise ModelDataError(f"{path} holds no JSON object. Download it again.")
    return values


def _ftw_shape(directory: Path, config: ModelConfig, index: FtwIndex) -> ModelShape:
    """Every size as it lies in the files."""
    bank = index.expert_bank
    dense_bytes = index.region_bytes - bank.length_bytes
    embedding = index.tensors.get(EMBEDDING_NAME)
    unread_bytes = 0
    if embedding is not None and not index.tied_embeddings:
        unread_bytes = embedding.length_bytes
    return replace(
        _shape(directory, config, bank.format, bank.record_bytes),
        moe_layers_count=bank.moe_layers_count,
        experts_per_layer_count=bank.experts_per_layer_count,
        dense_bytes=exactly(dense_bytes),
        dense_read_bytes=exactly(dense_bytes - unread_bytes),
    )


def _config_shape(
    directory: Path,
    config: ModelConfig,
    values: Mapping[str, object],
    asked: WeightFormat | None,
) -> ModelShape:
    """Sizes worked out from those of the layers."""
    quantization = parse_quantization(values, _CONFIG_FILE)
    stored = BF16 if quantization is None else _stored_format(quantization.weights)
    weight_format = asked or stored
    try:
        layout = record_layout(
            weight_format, config.hidden_size, config.expert_size, has_bias=config.expert_bias
        )
    except ValueError as error:
        raise InvalidInputError(
            f"The experts of {directory} cannot have the format {weight_format}: {error}. "
            "Choose another with --format.",
            param="format",
        ) from None
    matrices = _dense_matrices_count(config)
    table = config.vocab_size * config.hidden_size
    # Quantised checkpoints say of no single matrix here whether it is quantised.
    least_bytes = matrices * (_BF16_BYTES if quantization is None else 1)
    read = Range(low=least_bytes + table * _BF16_BYTES, high=(matrices + table) * _BF16_BYTES)
    unread_bytes = 0 if config.tied_embeddings else table * _BF16_BYTES
    return replace(
        _shape(directory, config, str(weight_format), layout.record_bytes),
        dense_bytes=Range(low=read.low + unread_bytes, high=read.high + unread_bytes),
        dense_read_bytes=read,
    )


def _shape(
    directory: Path, config: ModelConfig, weight_format: str, record_bytes: int
) -> ModelShape:
    """What both kinds of directories have in common; the dense weights are filled in by them."""
    return ModelShape(
        name=directory.resolve().name,
        architecture=config.architecture,
        weight_format=weight_format,
        layers_count=config.layers_count,
        moe_layers_count=len(config.moe_layer_indices),
        experts_per_layer_count=config.experts_per_layer_count,
        top_k=config.router.top_k,
        record_bytes=record_bytes,
        dense_bytes=exactly(0),
        dense_read_bytes=exactly(0),
        kv_bytes_per_token=_kv_bytes_per_token(config),
        context_tokens=config.max_context_tokens,
    )


def _kv_bytes_per_token(config: ModelConfig) -> int:
    special = config.deepseek_v4
    if special is None:
        return config.kv_bytes_per_token
    sparse = special.attention.count(AttentionKind.SPARSE) / special.sparse_rate
    heavy = special.attention.count(AttentionKind.HEAVY) / special.heavy_rate
    elements = (sparse + heavy) * config.head_size + sparse * special.index_head_size
    return max(round(_BF16_BYTES * elements), 1)


def _dense_matrices_count(config: ModelConfig) -> int:
    """Elements of all matrices but routed experts, embedding and output projection."""
    hidden, heads = config.hidden_size, config.q_heads_count * config.head_size
    special = config.deepseek_v4
    shared = 0
    if special is None:
        attention = 2 * hidden * (heads + config.kv_heads_count * config.head_size)
    else:
        attention = special.q_rank * (hidden + heads) + hidden * config.head_size
        attention += special.output_rank * (heads + special.output_groups_count * hidden)
        shared = 3 * hidden * special.shared_size
    moe_layers = len(config.moe_layer_indices)
    dense_layers = config.layers_count - moe_layers
    return (
        config.layers_count * attention
        + moe_layers * (hidden * config.experts_per_layer_count + shared)
        + dense_layers * 3 * hidden * config.dense_size
    )


def _stored_format(weights: tuple[StoredWeights, ...]) -> WeightFormat:
    """Of the experts: of several kinds the smallest, as experts are most of a model."""
    formats = [_format_of(one) for one in weights]
    return min(formats, key=lambda one: record_layout(one, 1024, 1024).record_bytes)


def _format_of(stored: StoredWeights) -> WeightFormat:
    match stored.coding:
        case Coding.FP8:
            return parse_format("fp8_block")
        case Coding.MXFP4 | Coding.NVFP4:
            return parse_format(stored.coding.value)
        case Coding.INT4 | Coding.INT8:
            suffix = "_zp" if stored.zero_points else ""
            return parse_format(f"{stored.coding.value}_g{stored.group_columns}_bf16{suffix}")
