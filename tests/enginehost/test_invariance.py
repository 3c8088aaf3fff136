"""Tokens do not depend on what is resident: every shape of the cache gives those of no cache."""

from __future__ import annotations

import pytest

from freetokend.engine.work import SweepEngine
from freetokend.experts.cache import ExpertCache
from freetokend.ftw.reader import FtwDirectory
from freetokend.link.messages import GenerateRequest
from tests.enginehost.cells import (
    NO_ROOM,
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
from tests.enginehost.local_engine import ask, local_engine, serve

NEW_TOKENS = 500
PROMPT = tuple(range(20, 60))
LONG_PROMPTS = (tuple(range(150)), tuple(range(250, 30, -1)))
BESIDE = tuple(range(80, 90))


@pytest.fixture(scope="module")
def expected(deep: FtwDirectory) -> list[int]:
    """Without a cache."""
    with local_engine(deep, backend="cpu") as built:
        assert built.cache is None
        tokens = serve(built, [ask("r", PROMPT, NEW_TOKENS)]).tokens["r"]
    assert len(set(tokens)) > 20, "tokens that repeat themselves show nothing"
    return tokens


@pytest.fixture(scope="module")
def expected_swept(deep: FtwDirectory) -> dict[str, list[int]]:
    """Without a cache, each alone."""
    running, prompts = swept_requests()
    with local_engine(deep, backend="cpu") as built:
        return {
            one.request_id: serve(built, [one]).tokens[one.request_id]
            for one in (*running, *prompts)
        }


def swept_requests() -> tuple[list[GenerateRequest], list[GenerateRequest]]:
    """One that decodes, and two prompts for one sweep."""
    prompts = [ask(f"p{index}", prompt, 12) for index, prompt in enumerate(LONG_PROMPTS)]
    return [ask("beside", BESIDE, 60)], prompts


@pytest.mark.parametrize("split", Split)
@pytest.mark.parametrize("pinned", Pinned)
def test_every_shape_gives_the_same_tokens(
    deep: FtwDirectory,
    expected: list[int],
    expected_swept: dict[str, list[int]],
    pinned: Pinned,
    split: Split,
) -> None:
    with shaped_engine(deep, pinned, split) as shaped:
        for cell in all_cells():
            if (cell.pinned, cell.split) != (pinned, split) or cell.name in VOID:
                continue
            shaped.start(cell.slots)
            if cell.swept:
                check_swept(shaped, cell.slots, expected_swept)
            else:
                tokens = serve_resized(shaped, ask("r", PROMPT, NEW_TOKENS), cell.slots)
                assert tokens == expected, cell.name
                shaped.check()


def check_swept(shaped: Shaped, slots: Slots, expected: dict[str, list[int]]) -> None:
    """Sweeps with decode steps between their layers: as large as it is, shrinking in the middle
    so far that the next layer has no room, and growing."""
    smaller, larger = shaped.resizes(slots)
    for first, second in ((None, None), (smaller, larger), (1, None), (0, larger)):
        shaped.start(slots)
        sizes = {0: first, 1: second}

        def between(layer: int, sizes: dict[int, int | None] = sizes) -> None:
            if (size := sizes.get(layer)) is not None:
                assert shaped.cache.resize(size).slots_count == size
            shaped.cache.check_integrity()

        streamed_before = shaped.cache.counters().streamed_count
        served, sweeps = serve_swept(shaped.built, *swept_requests(), between=between)
        assert served.tokens == expected
        assert sweeps == 1
        streamed = shaped.cache.counters().streamed_count - streamed_before
        fills = shaped.pinned is not Pinned.NONE and shaped.split is not Split.CPU
        assert (streamed > 0) is fills
        shaped.cache.check_integrity()
        assert shaped.cache.verify().differences == ()


def test_exactly_the_listed_cells_are_void(deep: FtwDirectory) -> None:
    void = set()
    for cell in all_cells():
        if not cell.swept or (cell.pinned, cell.split) != (Pinned.ALL, Split.BOTH):
            continue
        with shaped_engine(deep, cell.pinned, cell.split) as shaped:
            shaped.start(cell.slots)
            if not shaped.cache.can_sweep:
                void.add(cell.slots)
                engine = shaped.built.engine
                assert isinstance(engine, SweepEngine)
                assert engine.sweep_from_tokens == 0
    names = {cell.name for cell in all_cells() if cell.swept and cell.slots in void}
    assert names == set(VOID)
    assert set(VOID.values()) == {NO_ROOM}
    assert len(VOID) == 18
    assert len(list(all_cells())) == 72


@pytest.mark.parametrize(
    ("backend", "slots_count"), [("fused", 32), ("offload", 1), ("hybrid", 1), ("auto", 0)]
)
def test_what_the_engine_chooses_by_itself_changes_no_token_either(
    deep: FtwDirectory, expected: list[int], backend: str, slots_count: int
) -> None:
    """Measured table, measured crossover, more requests than one; fused loses slots on the way."""
    with local_engine(deep, device="host", backend=backend, slots_count=slots_count) as built:
        cache = built.cache
        assert serve(built, [ask("r", PROMPT, 200)]).tokens["r"] == expected[:200]
        if isinstance(cache, ExpertCache):
            cache.resize(max(slots_count // 3, 1))
        asked = [ask(f"r{index}", PROMPT, 60) for index in range(5)]
        served = serve(built, asked, steps_between=3)
        assert all(tokens == expected[:60] for tokens in served.tokens.values())
        if isinstance(cache, ExpertCache):
            cache.check_integrity()
            assert cache.verify().differences == ()
