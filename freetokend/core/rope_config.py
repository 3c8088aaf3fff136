"""Rotary position parameters of a checkpoint, from either generation of Hugging Face configs.

Older files have `rope_theta` and `rope_scaling` at the top level, newer ones a `rope_parameters`
object. Where both speak, the order of precedence is that of the transformers library: the scaling
object first, then top-level fields, then the family's default.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from freetokend.core.config_fields import ConfigFields


class RopeKind(StrEnum):
    """How the rotation frequencies are derived. Values are the names used in config files."""

    DEFAULT = "default"
    LINEAR = "linear"
    DYNAMIC = "dynamic"
    YARN = "yarn"
    LLAMA3 = "llama3"


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Parameters of the rotary embedding, all defaults resolved.

    Fields that a kind does not use hold a neutral value. `original_context_tokens` is the context
    the model was trained with before its frequencies were stretched; `attention_factor` multiplies
    the cosines and sines.
    """

    kind: RopeKind
    theta: float
    factor: float
    original_context_tokens: int
    attention_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0

    @property
    def context_tokens(self) -> int | None:
        """The context that the stretched frequencies were made for, where the kind says it."""
        if self.kind is RopeKind.YARN:
            return int(self.original_context_tokens * self.factor)
        return None


def parse_rope(
    fields: ConfigFields, *, default_theta: float, max_position_embeddings: int
) -> RopeConfig:
    """Read the rotary parameters; ModelDataError when they are wrong or of an unknown kind."""
    nested_name = "rope_scaling" if fields.raw("rope_scaling") else "rope_parameters"
    nested = fields.nested(nested_name)
    kind_name = nested.text("rope_type", nested.text("type", RopeKind.DEFAULT.value))
    try:
        kind = RopeKind(kind_name)
    except ValueError:
        known = ", ".join(member.value for member in RopeKind)
        raise fields.unsupported(
            f"{nested_name} asks for rope_type {kind_name!r}, which is not implemented; "
            f"implemented are {known}."
        ) from None
    partial = nested.number("partial_rotary_factor", fields.number("partial_rotary_factor", 1.0))
    if partial != 1.0:
        raise fields.unsupported(
            f"partial_rotary_factor is {partial:g}; only whole heads can be rotated (1)."
        )
    theta = nested.number("rope_theta", fields.number("rope_theta", default_theta))
    if theta <= 1.0:
        raise fields.invalid(f"rope_theta is {theta:g}; expected a number above 1.")
    original = fields.integer(
        "original_max_position_embeddings",
        nested.integer("original_max_position_embeddings", max_position_embeddings),
    )
    if kind is RopeKind.DEFAULT:
        return RopeConfig(kind=kind, theta=theta, factor=1.0, original_context_tokens=original)
    if kind is RopeKind.YARN:
        return _parse_yarn(nested, theta, original, max_position_embeddings)
    factor = nested.number("factor")
    if kind is RopeKind.LLAMA3:
        low = nested.number("low_freq_factor")
        high = nested.number("high_freq_factor")
        if high <= low:
            raise nested.invalid(
                f"high_freq_factor ({high:g}) must be above low_freq_factor ({low:g})."
            )
        return RopeConfig(
            kind=kind,
            theta=theta,
            factor=factor,
            original_context_tokens=original,
            low_frequency_factor=low,
            high_frequency_factor=high,
        )
    return RopeConfig(kind=kind, theta=theta, factor=factor, original_context_tokens=original)


def _parse_yarn(
    nested: ConfigFields, theta: float, original: int, max_position_embeddings: int
) -> RopeConfig:
    factor = nested.number("factor", max_position_embeddings / original)
    return RopeConfig(
        kind=RopeKind.YARN,
        theta=theta,
        factor=factor,
        original_context_tokens=original,
        attention_factor=_yarn_attention_factor(nested, factor),
        beta_fast=nested.number("beta_fast", 32.0),
        beta_slow=nested.number("beta_slow", 1.0),
        truncate=nested.flag("truncate", True),
    )


def _yarn_attention_factor(nested: ConfigFields, factor: float) -> float:
    if nested.has("attention_factor"):
        return nested.number("attention_factor")
    # A literal 0 counts as absent, as in the reference implementation.
    if nested.raw("mscale") and nested.raw("mscale_all_dim"):
        return _yarn_mscale(factor, nested.number("mscale")) / _yarn_mscale(
            factor, nested.number("mscale_all_dim")
        )
    return _yarn_mscale(factor, 1.0)


def _yarn_mscale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1.0 else 0.1 * weight * math.log(factor) + 1.0
