"""Tokens of the demo model, real weights and real routing, in every shape of the expert cache."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tokenizers import Tokenizer

from freetokend.demo.errors import DemoError
from freetokend.ftw.reader import FtwDirectory
from freetokend.link.messages import GenerateRequest
from tests.enginehost.cells import (
    VOID,
    Pinned,
    Shaped,
    Slots,
    Split,
    all_cells,
    serve_resized,
    serve_swept,
    shaped_engine,
)
from tests.enginehost.local_engine import Served, ask, local_engine, serve, step
from tests.support.demo_model import demo_ftw

pytestmark = pytest.mark.slow

NEW_TOKENS = 500
TEXT = "Here are the countries of Europe, each with its capital and its best known dish:\n1. "
LONG_TEXT = "The sea was calm that morning, and the boats came home one after the other. " * 8


@pytest.fixture(scope="module")
def demo() -> FtwDirectory:
    try:
        return FtwDirectory(demo_ftw("demo", "int4_g32_f16"))
    except DemoError as error:
        pytest.fail(f"the demo model is needed: {error}", pytrace=False)


def prompt(demo: FtwDirectory, text: str) -> tuple[int, ...]:
    tokenizer = Tokenizer.from_file(str(demo.path / "tokenizer.json"))
    return tuple(tokenizer.encode(text).ids)


@pytest.fixture(scope="module")
def asked(demo: FtwDirectory) -> GenerateRequest:
    return ask("r", prompt(demo, TEXT), NEW_TOKENS)


@pytest.fixture(scope="module")
def long_asked(demo: FtwDirectory) -> GenerateRequest:
    return ask("p", prompt(demo, LONG_TEXT), 8)


@pytest.fixture(scope="module")
def expected(demo: FtwDirectory, asked: GenerateRequest) -> list[int]:
    with local_engine(demo, backend="cpu") as built:
        tokens = serve(built, [asked]).tokens["r"]
    assert len(tokens) == NEW_TOKENS
    assert len(set(tokens)) > 20, "tokens that repeat themselves show nothing"
    return tokens


@pytest.fixture(scope="module")
def expected_swept(demo: FtwDirectory, long_asked: GenerateRequest) -> list[int]:
    with local_engine(demo, backend="cpu") as built:
        return serve(built, [long_asked]).tokens["p"]


@pytest.mark.parametrize(
    ("pinned", "split", "shapes"),
    [
        (Pinned.ALL, Split.FILL, (Slots.HALF, Slots.TOP_K_AND_ONE, Slots.ALL)),
        (Pinned.HALF, Split.BOTH, (Slots.ALL, Slots.TOP_K, Slots.HALF)),
    ],
)
def test_500_tokens_through_many_sizes(
    demo: FtwDirectory,
    asked: GenerateRequest,
    expected: list[int],
    pinned: Pinned,
    split: Split,
    shapes: tuple[Slots, ...],
) -> None:
    """One generation whose cache takes one size after the other, twice over."""
    with shaped_engine(demo, pinned, split) as shaped:
        shaped.start(shapes[0])
        served = Served()
        shaped.built.scheduler.submit(asked)
        sizes = [shaped.slots_count(slots) for slots in shapes]
        steps = 0
        while step(shaped.built, served):
            steps += 1
            if steps % 80 == 0:
                size = sizes[steps // 80 % len(sizes)]
                assert shaped.cache.resize(size).slots_count == size
        served.take(shaped.built.scheduler.take_updates())
        assert served.tokens["r"] == expected
        shaped.check()


def test_a_swept_prompt_with_a_resize_between_layers(
    demo: FtwDirectory,
    asked: GenerateRequest,
    expected: list[int],
    long_asked: GenerateRequest,
    expected_swept: list[int],
) -> None:
    with shaped_engine(demo, Pinned.ALL, Split.BOTH) as shaped:
        shaped.start(Slots.HALF)
        check_swept(shaped, {asked: expected, long_asked: expected_swept})


def check_swept(shaped: Shaped, expected: dict[GenerateRequest, list[int]]) -> None:
    asked, long_asked = expected
    smaller, larger = shaped.cache.slots_capacity // 4, shaped.cache.slots_count
    sizes = {5: smaller, 15: 1, 20: larger}

    def between(layer: int) -> None:
        if layer in sizes:
            shaped.cache.resize(sizes[layer])

    served, sweeps = serve_swept(
        shaped.built, [replace(asked, max_new_tokens=40)], [long_asked], between=between
    )
    assert sweeps == 1
    assert served.tokens["r"] == expected[asked][:40]
    assert served.tokens["p"] == expected[long_asked]
    shaped.cache.check_integrity()
    assert shaped.cache.verify().differences == ()


@pytest.mark.full
@pytest.mark.parametrize("split", Split)
@pytest.mark.parametrize("pinned", Pinned)
def test_every_shape_gives_the_same_tokens(
    demo: FtwDirectory,
    asked: GenerateRequest,
    expected: list[int],
    long_asked: GenerateRequest,
    expected_swept: list[int],
    pinned: Pinned,
    split: Split,
) -> None:
    with shaped_engine(demo, pinned, split) as shaped:
        for cell in all_cells():
            if (cell.pinned, cell.split) != (pinned, split) or cell.name in VOID:
                continue
            shaped.start(cell.slots)
            if cell.swept:
                check_swept(shaped, {asked: expected, long_asked: expected_swept})
                continue
            tokens = serve_resized(shaped, asked, cell.slots)
            assert tokens == expected, cell.name
            shaped.check()
