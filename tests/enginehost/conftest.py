"""Converted tiny models, once per session."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from freetokend.ftw.reader import FtwDirectory
from tests.enginehost.local_engine import CONTEXT_TOKENS, converted
from tests.support.tiny_checkpoints import write_tiny_mixtral, write_tiny_qwen3_moe


@pytest.fixture(scope="session")
def mixtral_source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = tmp_path_factory.mktemp("mixtral") / "hf"
    write_tiny_mixtral(source)
    # Long enough that a request for all of it is still running when a test acts on it: a tiny
    # model makes thousands of tokens a second.
    config = source / "config.json"
    values = json.loads(config.read_text()) | {"max_position_embeddings": CONTEXT_TOKENS}
    config.write_text(json.dumps(values))
    return source


@pytest.fixture(scope="session")
def mixtral(mixtral_source: Path) -> FtwDirectory:
    return converted(mixtral_source, mixtral_source.with_name("ftw"))


@pytest.fixture(scope="session")
def qwen3_source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = tmp_path_factory.mktemp("qwen3") / "hf"
    write_tiny_qwen3_moe(source, mlp_only_layers=(1,))
    return source


@pytest.fixture(scope="session")
def qwen3(qwen3_source: Path) -> FtwDirectory:
    return converted(qwen3_source, qwen3_source.with_name("ftw"))


@pytest.fixture(scope="session")
def deep(tmp_path_factory: pytest.TempPathFactory) -> FtwDirectory:
    """Four MoE layers of eight experts and a dense one between them, two experts per token."""
    source = tmp_path_factory.mktemp("deep") / "hf"
    write_tiny_qwen3_moe(source, layers=5, mlp_only_layers=(1,), seed=3)
    return converted(source, source.with_name("ftw"))
