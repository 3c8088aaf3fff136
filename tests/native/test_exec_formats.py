"""Every weight format, instruction set and activation of the executor against float64.

Weights, activations, sizes and routing are new in every run. A failure shows the seed they came
from; FREETOKEND_TEST_SEED set to it repeats them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Final

import numpy as np
import pytest

from freetokend.core.errors import InternalError
from freetokend.ftw.formats import parse_format
from freetokend.ftw.packing_record import ExpertMatrices
from freetokend.ftw.quantise import quantise
from freetokend.native import executor as native
from freetokend.native.executor import Executor, Numerics
from tests.native.exec_support import Bf16, Floats, Ints, from_bf16, to_bf16
from tests.native.format_support import (
    ALL_FORMATS,
    FORMATS,
    FormatBank,
    FormatMatrix,
    Glu,
    activations,
    is_fast,
    rounded_to_int8,
    routing,
    worst_row,
)

HIDDEN, INNER = 2048, 768
NUMERICS: Final[tuple[Numerics, ...]] = ("exact", "fast")

# Bounds of ||ours - float64|| / ||float64|| of any row; docs/ftw.md ("Numerics") states them.
# Linear layers with exact numerics. AVX2 decodes 4-bit codes to numbers that are too large by a
# constant and takes its part off at the end of a group, which cancels about three bits.
LINEAR = {
    "bf16": 1e-6,
    "fp8_block": 3e-7,
    "mxfp4": 5e-6,
    "nvfp4": 7e-6,
    "int4": 7e-6,
    "int8": 5e-7,
    "q4_K": 5e-6,
    "q6_K": 5e-6,
}
# With fast numerics: what rounding the activations to int8 costs, in every format the same; and
# against products of the rounded activations, fp32 sums alone.
LINEAR_FAST = 9e-3
LINEAR_FAST_SUMS = 5e-7
# Experts: the product of gate and up is rounded to bf16. With that rounding in the reference, what
# remains are products next to a boundary that land on its other side.
EXPERTS, EXPERTS_ROUNDED, EXPERTS_FAST = 3e-3, 1.5e-3, 2e-2
# Rows of a few dozen elements, of which one can be much of the norm.
FEW_ELEMENTS = 3


def linear_bound(name: str) -> float:
    return next(bound for start, bound in LINEAR.items() if name.startswith(start))


@pytest.fixture
def rng() -> np.random.Generator:
    seed = int(os.environ.get("FREETOKEND_TEST_SEED") or int.from_bytes(os.urandom(6), "big"))
    print(f"FREETOKEND_TEST_SEED={seed}")
    return np.random.default_rng(seed)


@pytest.fixture(scope="module")
def executors() -> Iterator[list[Executor]]:
    """One for each instruction set that this machine runs."""
    cpus = sorted(os.sched_getaffinity(0))[:2]
    opened = [Executor(cpus, isa=isa) for isa in native.available_isas()]
    yield opened
    for executor in opened:
        executor.close()


def check_linear(
    executor: Executor, matrix: FormatMatrix, x: Bf16, batches: list[int], slack: float = 1.0
) -> None:
    values, where = from_bf16(x), (matrix.name, executor.isa)
    exact = values @ matrix.meaning.T
    y = matrix.run(executor, x)
    assert worst_row(y, exact) < linear_bound(matrix.name) * slack, where
    quick = matrix.run(executor, x, "fast")
    if is_fast(matrix.name, executor.isa):
        rounded = rounded_to_int8(values) @ matrix.meaning.T
        assert worst_row(quick, rounded) < LINEAR_FAST_SUMS * slack, where
        assert worst_row(quick, exact) < LINEAR_FAST * slack, where
    else:
        assert np.array_equal(quick, y), where
    for count in batches:
        assert np.array_equal(matrix.run(executor, x[:count]), y[:count]), (*where, count)
        assert np.array_equal(matrix.run(executor, x[-count:], "fast"), quick[-count:]), where
    bias = np.linspace(-3, 3, len(matrix.meaning), dtype=np.float32)
    assert np.array_equal(matrix.run(executor, x, "exact", bias), y + bias), where


def check_experts(
    executor: Executor,
    bank: FormatBank,
    call: tuple[Bf16, Ints, Floats],
    batches: list[int],
    *,
    glu: Glu | None = None,
    slack: float = 1.0,
) -> None:
    x, ids, weights = call
    glu, where = glu or Glu(), (bank.name, executor.isa, glu)
    chosen = ids >= 0
    y = bank.run(executor, x, ids, weights, glu)
    quick = bank.run(executor, x, ids, weights, glu, "fast")
    exact = bank.reference(x, ids, weights, glu, rounded=False)[chosen]
    rounded = bank.reference(x, ids, weights, glu, rounded=True)[chosen]
    assert worst_row(y[chosen], exact) < EXPERTS * slack, where
    assert worst_row(y[chosen], rounded) < EXPERTS_ROUNDED * slack, where
    if is_fast(bank.name, executor.isa):
        assert worst_row(quick[chosen], exact) < EXPERTS_FAST * slack, where
    else:
        assert np.array_equal(quick, y), where
    assert not y[~chosen].any()
    assert not quick[~chosen].any()
    for count in batches:
        part = slice(count), slice(len(x) - count, None)
        for numerics, whole, rows in zip(NUMERICS, (y, quick), part, strict=True):
            again = bank.run(executor, x[rows], ids[rows], weights[rows], glu, numerics)
            assert np.array_equal(again, whole[rows]), (*where, count, numerics)


@pytest.mark.parametrize("name", FORMATS)
def test_linear_layers_of_a_real_size(
    name: str, rng: np.random.Generator, executors: list[Executor]
) -> None:
    matrix = FormatMatrix(rng, name, INNER, HIDDEN)
    x = activations(rng, 12, HIDDEN)
    for executor in executors:
        check_linear(executor, matrix, x, [1, 6])


@pytest.mark.parametrize("name", FORMATS)
def test_experts_of_a_real_size(
    name: str, rng: np.random.Generator, executors: list[Executor]
) -> None:
    bank = FormatBank(rng, name, experts_count=2, hidden_size=HIDDEN, intermediate_size=INNER)
    x = activations(rng, 64, HIDDEN)
    ids, weights = routing(rng, 64, 2, 2)
    for executor in executors:
        # Portable code would take half a minute for 64 tokens.
        count = 5 if executor.isa == "portable" else 64
        call = x[:count], ids[:count], weights[:count]
        check_experts(executor, bank, call, [1, int(rng.integers(2, count))], slack=1.5)


@pytest.mark.full
@pytest.mark.parametrize("name", ALL_FORMATS)
def test_every_batch_of_a_real_size(
    name: str, rng: np.random.Generator, executors: list[Executor]
) -> None:
    matrix = FormatMatrix(rng, name, INNER, HIDDEN)
    bank = FormatBank(rng, name, experts_count=6, hidden_size=HIDDEN, intermediate_size=INNER)
    x = activations(rng, 64, HIDDEN)
    ids, weights = routing(rng, 64, 2, 6)
    for executor in executors:
        # Portable code would take minutes for all of them.
        batches = [1, 3, 48] if executor.isa == "portable" else list(range(1, 65))
        check_linear(executor, matrix, x, batches, slack=1.5)
        check_experts(executor, bank, (x, ids, weights), batches, slack=1.5)


def random_sizes(rng: np.random.Generator, name: str) -> tuple[int, int]:
    """Hidden and intermediate size: odd ones, or few groups, which leave headers part empty."""
    multiple = parse_format(name).column_multiple
    if multiple == 1:
        hidden, inner = rng.integers(32, 290, 2).tolist()
        return hidden, inner
    fewest = -(-64 // multiple)
    hidden, inner = rng.integers(fewest, max(fewest + 2, 256 // multiple), 2).tolist()
    return hidden * multiple, inner * multiple


@pytest.mark.parametrize("name", ALL_FORMATS)
def test_any_size_and_routing(
    name: str, rng: np.random.Generator, executors: list[Executor]
) -> None:
    """An expert met twice by one token, experts that nobody meets, holes, and any batch."""
    hidden, inner = random_sizes(rng, name)
    bank = FormatBank(
        rng,
        name,
        experts_count=4,
        hidden_size=hidden,
        intermediate_size=inner,
        spread=0.9 * hidden**-0.5,
        has_bias=bool(rng.integers(2)),
    )
    x = activations(rng, 64, hidden)
    ids = rng.choice([-1, 0, 2, 2, 3], (64, 3)).astype(np.int32)
    ids[0], ids[1], ids[2] = 2, (0, 3, 0), -1
    weights = rng.uniform(-1, 1, ids.shape).astype(np.float32)
    matrix = FormatMatrix(rng, name, inner, hidden)
    for executor in executors:
        batches = rng.permutation(63)[:3] + 1
        check_experts(executor, bank, (x, ids, weights), batches.tolist(), slack=FEW_ELEMENTS)
        check_linear(executor, matrix, x, batches.tolist(), slack=FEW_ELEMENTS)
        y = bank.run(executor, x, ids, np.ones_like(weights))
        assert np.array_equal(y[0, 0], y[0, 2])
        assert np.array_equal(y[1, 0], y[1, 2])


GLUS = [
    (Glu(activation=activation, limit=limit, alpha=alpha), spread)
    for activation, alpha in (("silu", 0), ("gelu", 0), ("gelu_tanh", 0), ("swiglu_oai", 1.702))
    for limit, spread in ((0.0, 1.0), (0.75, 1.0), (7.0, 8.0), (10.0, 12.0))
] + [(Glu(activation="swiglu_oai", limit=2.5, alpha=0.9), 3.0)]


@pytest.mark.parametrize("name", FORMATS)
def test_every_activation_with_biases(
    name: str, rng: np.random.Generator, executors: list[Executor]
) -> None:
    multiple = parse_format(name).column_multiple
    hidden, inner = -(-96 // multiple) * multiple, -(-64 // multiple) * multiple
    bank = FormatBank(
        rng,
        name,
        experts_count=1,
        hidden_size=hidden,
        intermediate_size=inner,
        spread=0.9 * hidden**-0.5,
        has_bias=True,
    )
    ids, weights = routing(rng, 6, 1, 1)
    for glu, spread in GLUS:
        x = activations(rng, 6, hidden, spread)
        if glu.limit:
            free = bank.middle(x, 0, Glu(activation=glu.activation, alpha=glu.alpha))
            assert not np.allclose(free, bank.middle(x, 0, glu)), "the limit must matter"
        for executor in executors:
            check_experts(executor, bank, (x, ids, weights), [1], glu=glu, slack=FEW_ELEMENTS)


@pytest.mark.parametrize("name", FORMATS)
def test_every_activation_of_a_real_size(
    name: str, rng: np.random.Generator, executors: list[Executor]
) -> None:
    """Each activation, with one of its limits and biases."""
    bank = FormatBank(
        rng,
        name,
        experts_count=1,
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        spread=0.9 * HIDDEN**-0.5,
        has_bias=True,
    )
    ids, weights = routing(rng, 3, 1, 1)
    for activation in dict.fromkeys(glu.activation for glu, _ in GLUS):
        of_this = [pair for pair in GLUS if pair[0].activation == activation]
        glu, spread = of_this[rng.integers(len(of_this))]
        x = activations(rng, 3, HIDDEN, spread)
        for executor in executors:
            check_experts(executor, bank, (x, ids, weights), [1], glu=glu)


def passing(rng: np.random.Generator, size: int) -> FormatBank:
    """An expert whose matrices pass everything on: x is gate and up, the product is the result."""
    one = quantise(np.eye(size, dtype=np.float32), parse_format("bf16"))
    return FormatBank.of("bf16", [ExpertMatrices(gate=one, up=one, down=one)])


@pytest.mark.parametrize("limit", [0.0, 1.5])
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "swiglu_oai"])
def test_activations_are_rounded_once(
    activation: str, limit: float, rng: np.random.Generator, executors: list[Executor]
) -> None:
    """Nearly every product is float64's, rounded to bf16: a constant wrong in its third digit would
    move a good part of them, where norms of rows would hide it."""
    size = 256
    glu = Glu(activation=activation, limit=limit)
    bank = passing(rng, size)
    # Left of that fp32 loses digits of 1 + erf(x): small numbers, which norms of rows do not see.
    x = to_bf16(np.maximum(rng.normal(size=(64, size)) * 1.5, -1.5))
    ids, weights = np.zeros((64, 1), np.int32), np.ones((64, 1), np.float32)
    values = from_bf16(x)
    expected = from_bf16(to_bf16(glu.of(values, values)))
    for executor in executors:
        found = bank.run(executor, x, ids, weights, glu)[:, 0]
        moved = found != expected
        assert moved.mean() < 2e-3, (executor.isa, float(moved.mean()))
        assert np.allclose(found, expected, rtol=2**-7, atol=0), "by more than the last digit"


@pytest.mark.parametrize("name", FORMATS)
def test_bits_do_not_depend_on_the_number_of_threads(name: str, rng: np.random.Generator) -> None:
    cpus = sorted(os.sched_getaffinity(0))[:2]
    multiple = parse_format(name).column_multiple
    hidden, inner = (330, 200) if multiple == 1 else (256, 512)
    bank = FormatBank(rng, name, experts_count=3, hidden_size=hidden, intermediate_size=inner)
    matrix = FormatMatrix(rng, name, inner, hidden)
    x = activations(rng, 13, hidden)
    ids, weights = routing(rng, 13, 2, 3)
    for isa in native.available_isas():
        found = []
        for crowd in (cpus[:1], cpus, (cpus * 5)[:5]):
            with Executor(crowd, isa=isa) as executor:
                for numerics in NUMERICS:
                    y = bank.run(executor, x, ids, weights, numerics=numerics)
                    found.append((numerics, y, matrix.run(executor, x, numerics)))
        for numerics, experts, linear in found:
            first = found[NUMERICS.index(numerics)]
            assert np.array_equal(experts, first[1]), (isa, numerics)
            assert np.array_equal(linear, first[2]), (isa, numerics)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("numerics", NUMERICS)
def test_an_expert_out_of_range_is_refused_before_anything_is_written(
    name: str, numerics: Numerics, rng: np.random.Generator, executors: list[Executor]
) -> None:
    size = max(parse_format(name).column_multiple, 16)
    bank = FormatBank(rng, name, experts_count=2, hidden_size=size, intermediate_size=size)
    x = activations(rng, 3, size)
    weights = np.ones((3, 1), np.float32)
    for executor in executors:
        for expert in (2, -2, 2**31 - 1, -(2**31)):
            ids = np.array([[0], [expert], [1]], np.int32)
            with pytest.raises(InternalError, match=f"expert id {expert} is out of range"):
                bank.run(executor, x, ids, weights, numerics=numerics)
        y = bank.run(executor, x, np.zeros((3, 1), np.int32), weights, numerics=numerics)
        assert np.isfinite(y).all()


@pytest.mark.parametrize("name", [n for n in FORMATS if parse_format(n).column_multiple > 1])
def test_sizes_that_the_group_does_not_divide_are_refused(
    name: str, executors: list[Executor]
) -> None:
    multiple = parse_format(name).column_multiple
    sound, broken = 2 * multiple, 2 * multiple + multiple // 2
    memory = np.zeros(1 << 20, np.uint8)
    address = -(-memory.ctypes.data // 64) * 64
    for executor in executors:
        for hidden, inner, which in (
            (broken, sound, "hidden_size"),
            (sound, broken, "intermediate_size"),
        ):
            with pytest.raises(InternalError, match=f"{which} {broken} is not a multiple"):
                executor.experts(
                    *[address] * 4,
                    tokens=1,
                    top_k=1,
                    hidden_size=hidden,
                    intermediate_size=inner,
                    bank=address,
                    record_bytes=1 << 19,
                    experts_count=1,
                    weight_format=name,
                )
        with pytest.raises(InternalError, match=f"in_features {broken} is not a multiple"):
            executor.linear(
                *[address] * 3,
                tokens=1,
                in_features=broken,
                out_features=16,
                weight_format=name,
            )
    assert not memory.any()


def test_nvfp4_factors_belong_to_their_matrices(
    rng: np.random.Generator, executors: list[Executor]
) -> None:
    """The test data would show factors of gate, up and down in each other's place."""
    bank = FormatBank(rng, "nvfp4", experts_count=1, hidden_size=160, intermediate_size=96)
    expert = bank.experts[0]
    factors = [part.global_scale for part in (expert.gate, expert.up, expert.down)]
    assert factors[0] > 1.5 * factors[1]
    assert factors[2] > 1.5 * factors[0]
    x = activations(rng, 4, 160, spread=8.0)
    ids, weights = routing(rng, 4, 1, 1)
    exact = bank.reference(x, ids, weights, Glu(), rounded=True)
    trailer = bank.records[: bank.record_bytes].view(np.float32)
    (places,) = np.nonzero(trailer == np.float32(factors[0]))
    place = int(places[-1])
    assert trailer[place : place + 3].tolist() == pytest.approx(factors)
    for executor in executors:
        sound = bank.run(executor, x, ids, weights)
        assert worst_row(sound, exact) < EXPERTS_ROUNDED * FEW_ELEMENTS
        trailer[[place, place + 1]] = trailer[[place + 1, place]]
        swapped = bank.run(executor, x, ids, weights)
        trailer[[place, place + 1]] = trailer[[place + 1, place]]
        assert worst_row(swapped, exact) > 0.1
