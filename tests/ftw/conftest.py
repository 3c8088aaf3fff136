"""A small FTW directory and its checkpoint, made once, copied where a test changes them."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from freetokend.ftw.convert import convert
from tests.ftw.big_checkpoints import write_big_mixtral
from tests.support.tiny_checkpoints import write_tiny_qwen3_moe


@pytest.fixture(scope="session")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory holding a checkpoint "source" and its conversion "model"; not to be changed."""
    root = tmp_path_factory.mktemp("pristine")
    write_tiny_qwen3_moe(root / "source", layers=3, mlp_only_layers=[1])
    convert(root / "source", root / "model")
    return root


@pytest.fixture
def source(pristine: Path, tmp_path: Path) -> Path:
    """A checkpoint of one's own."""
    return Path(shutil.copytree(pristine / "source", tmp_path / "source"))


@pytest.fixture
def model(pristine: Path, tmp_path: Path) -> Path:
    """An FTW directory of one's own."""
    return Path(shutil.copytree(pristine / "model", tmp_path / "model"))


SHARD_BYTES = 128 * 1024 * 1024


@pytest.fixture(scope="session")
def big(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """As `pristine`, but of 206 MB in two shards and four checksum blocks."""
    root = tmp_path_factory.mktemp("big")
    write_big_mixtral(
        root / "source", layers=2, experts=8, hidden=1024, inter=1920, dtype="bf16", random=True
    )
    convert(root / "source", root / "model", max_shard_bytes=SHARD_BYTES)
    yield root
    shutil.rmtree(root)  # pytest keeps temporary directories of several runs
