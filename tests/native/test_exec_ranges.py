"""Activations that lie far apart, element by element against what docs/ftw.md states.

Where sums are integers, 32 activations have a power of two in common: one that is less than 2^-14
of the largest is rounded to 2^-22 of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest

from freetokend.native import executor as native
from freetokend.native.executor import Executor
from tests.native.exec_support import Bf16, Doubles, from_bf16, to_bf16
from tests.native.format_support import FORMATS, FormatMatrix
from tests.native.test_exec_formats import rng as rng  # noqa: PLC0414 - a fixture

ROWS, COLUMNS, TOKENS, SHARED = 48, 1024, 9, 32
STEP = 2.0**-22  # of the largest of 32 that have a power of two in common
SUMS = 2.0**-19  # of the sum of magnitudes: fp32, less the three bits that AVX2 cancels
ZERO = 2.0**-104  # smaller ones may count as zero


@pytest.fixture(scope="module")
def executors() -> Iterator[list[Executor]]:
    opened = [Executor([0], isa=isa) for isa in native.available_isas()]
    yield opened
    for executor in opened:
        executor.close()


def outliers(rng: np.random.Generator) -> Doubles:
    x = rng.normal(size=(TOKENS, COLUMNS))
    x[:, ::SHARED] *= 2.0**12
    return x


def all_exponents(rng: np.random.Generator) -> Doubles:
    return rng.normal(size=(TOKENS, COLUMNS)) * 2.0 ** rng.integers(-30, 3, (TOKENS, COLUMNS))


def most_bits(rng: np.random.Generator) -> Doubles:
    """The largest mantissa that bf16 has, which carries into every digit."""
    signs = rng.choice([-1.0, 1.0], (TOKENS, COLUMNS))
    return signs * 255 / 128 * 2.0 ** rng.integers(-14, 1, (TOKENS, COLUMNS))


def with_zeros(rng: np.random.Generator) -> Doubles:
    x = rng.normal(size=(TOKENS, COLUMNS))
    x[:, : 3 * SHARED] = 0
    x[0] = 0
    return x


def tiny(rng: np.random.Generator) -> Doubles:
    return rng.normal(size=(TOKENS, COLUMNS)) * 2.0 ** rng.integers(-112, -98, (TOKENS, COLUMNS))


def allowed(x: Doubles, meaning: Doubles) -> Doubles:
    """[token][row] of what may be missing."""
    groups = COLUMNS // SHARED
    largest = np.abs(x).reshape(TOKENS, groups, SHARED).max(axis=2)
    weights = np.abs(meaning).reshape(ROWS, groups, SHARED).sum(axis=2)
    rounding = (STEP * largest + ZERO) @ weights.T
    return np.asarray(rounding + SUMS * np.abs(x) @ np.abs(meaning).T)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("draw", [outliers, all_exponents, most_bits, with_zeros, tiny])
def test_far_apart_activations_lose_what_is_stated(
    name: str,
    draw: Callable[[np.random.Generator], Doubles],
    rng: np.random.Generator,
    executors: list[Executor],
) -> None:
    matrix = FormatMatrix(rng, name, ROWS, COLUMNS)
    words: Bf16 = to_bf16(draw(rng))
    x = from_bf16(words)
    bound = allowed(x, matrix.meaning)
    for executor in executors:
        y = matrix.run(executor, words)
        missing = np.abs(y - x @ matrix.meaning.T)
        worst = float((missing / np.maximum(bound, ZERO)).max())
        assert worst <= 1.0, (name, executor.isa, worst)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_what_is_not_a_number_shows_in_every_row(
    name: str, value: float, rng: np.random.Generator, executors: list[Executor]
) -> None:
    matrix = FormatMatrix(rng, name, ROWS, COLUMNS)
    x = rng.normal(size=(2, COLUMNS))
    x[1, int(rng.integers(COLUMNS))] = value
    with np.errstate(invalid="ignore"):
        words = to_bf16(x)
    for executor in executors:
        y = matrix.run(executor, words)
        assert np.isfinite(y[0]).all(), executor.isa
        assert not np.isfinite(y[1]).any(), executor.isa
