"""Configuration: TOML layers -> `Config` (asked) -> `resolve` -> `ResolvedConfig` (decided)."""

from __future__ import annotations

from freetokend.core.config.asked import Config, Origin, Setting
from freetokend.core.config.facts import EnvironmentFacts, gather_facts
from freetokend.core.config.load import load_config, parse_override
from freetokend.core.config.resolve import resolve
from freetokend.core.config.resolved import ResolvedConfig, ResolvedValue

__all__ = [
    "Config",
    "EnvironmentFacts",
    "Origin",
    "ResolvedConfig",
    "ResolvedValue",
    "Setting",
    "gather_facts",
    "load_config",
    "parse_override",
    "resolve",
]
