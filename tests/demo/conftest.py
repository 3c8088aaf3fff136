"""Fixtures: the real checkpoints, and a tiny one for everything that needs no real weights."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from freetokend.demo.errors import DemoError
from freetokend.demo.wheels import GENSIM_WHEEL, default_cache_dir, fetch_wheel
from tests.demo.tiny_model import TinySource, make_tiny_source, tiny_plan
from tests.support.demo_model import demo_checkpoint


def _checkpoint_or_fail(variant: str) -> Path:
    try:
        return demo_checkpoint(variant)
    except DemoError as error:
        pytest.fail(f"the {variant} checkpoint is needed: {error}", pytrace=False)


@pytest.fixture(scope="session")
def demo_dir() -> Path:
    """The demo variant, built from real weights."""
    return _checkpoint_or_fail("demo")


@pytest.fixture(scope="session")
def stress_dir() -> Path:
    """The stress variant, built from real weights."""
    return _checkpoint_or_fail("stress")


@pytest.fixture(scope="session")
def text_wheel() -> Path:
    """The wheel with the held-out text (28 MB, downloaded once per user)."""
    try:
        return fetch_wheel(GENSIM_WHEEL, default_cache_dir(), lambda m: print(m, file=sys.stderr))
    except DemoError as error:
        pytest.fail(f"the held-out text is needed: {error}", pytrace=False)


@pytest.fixture
def tiny(tmp_path: Path) -> TinySource:
    """A tiny source whose experts are full width."""
    return make_tiny_source(tmp_path / "source", tiny_plan())


@pytest.fixture
def silent() -> Callable[[str], None]:
    """A progress callback that shows nothing."""

    def ignore(message: str) -> None:
        del message

    return ignore
