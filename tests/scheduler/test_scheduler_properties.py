"""Random arrivals, cancellations, faults and page pressure: the promises hold all the same."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from freetokend.link.messages import FinishReason, GenerateRequest
from tests.scheduler.paged_echo import VOCAB_SIZE, PagedEchoEngine, next_token, solo_tokens
from tests.scheduler.support import Bench, request

POISON = 96
NAN = 95


@dataclass(frozen=True)
class Move:
    """One thing that happens between steps: an arrival or a cancellation, after some steps."""

    steps_before: int
    arrival: tuple[tuple[int, ...], int] | None
    cancelled_index: int


prompts = st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=40).map(tuple)
moves = st.lists(
    st.builds(
        Move,
        steps_before=st.integers(0, 4),
        arrival=st.one_of(st.none(), st.tuples(prompts, st.integers(1, 24))),
        cancelled_index=st.integers(0, 30),
    ),
    max_size=30,
)


@st.composite
def benches(draw: st.DrawFn) -> Bench:
    page_tokens = draw(st.sampled_from([1, 4, 16]))
    max_running_count = draw(st.integers(1, 5))
    return Bench(
        pages_count=draw(st.integers(-(-48 // page_tokens), 160 // page_tokens)),
        page_tokens=page_tokens,
        max_running_count=max_running_count,
        max_waiting_count=draw(st.integers(0, 30)),
        step_tokens=max_running_count + draw(st.integers(1, 40)),
        eos_token_ids=frozenset({13, 14, 15}),
        engine=PagedEchoEngine(
            page_tokens, poison_ids=frozenset({POISON}), nan_ids=frozenset({NAN})
        ),
    )


def expected_tokens(what: GenerateRequest, bench: Bench) -> list[int]:
    room = bench.allocator.pages_count * bench.engine._page_tokens - len(what.prompt_token_ids)
    history = solo_tokens(what.prompt_token_ids, min(what.max_new_tokens, room))
    for index, token in enumerate(history):
        if token in {13, 14, 15}:
            return history[:index]
    return history


def expect_fault(what: GenerateRequest, bench: Bench) -> bool:
    """Whether the echo engine fails for this request when it is computed alone, to the end."""
    history = list(what.prompt_token_ids)
    room = bench.allocator.pages_count * bench.engine._page_tokens - len(history)
    for _ in range(min(what.max_new_tokens, room)):
        if POISON in history or NAN in history:
            return True
        history.append(next_token(history))
        if history[-1] in {13, 14, 15}:
            return False
    return False


@settings(max_examples=300, deadline=None)
@given(bench=benches(), script=moves)
def test_every_request_is_answered_once_with_its_own_tokens(
    bench: Bench, script: list[Move]
) -> None:
    asked: dict[str, GenerateRequest] = {}
    cancelled: set[str] = set()
    for move in script:
        for _ in range(move.steps_before):
            bench.step()
        if move.arrival is not None:
            prompt, max_new_tokens = move.arrival
            what = request(f"r{len(asked)}", prompt, max_new_tokens)
            asked[what.request_id] = what
            bench.submit(what)
        else:
            name = f"r{move.cancelled_index}"
            if name in asked and name not in bench.ends:
                cancelled.add(name)
            bench.cancel(name)
            if name in asked:
                assert name in bench.ends, "a cancelled request is answered at once"
    # no starvation: what is left ends within its own work, one after another, plus one isolated
    # step for each request of each faulty step
    left = [what for name, what in asked.items() if name not in bench.ends]
    work = sum(2 * (len(what.prompt_token_ids) + what.max_new_tokens) + 2 for what in left)
    bench.run(most_steps=3 * work + 10)
    assert set(bench.ends) == set(asked)
    assert bench.allocator.used_count == 0
    for name, what in asked.items():
        end = bench.ends[name]
        if end.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
            assert bench.tokens[name] == expected_tokens(what, bench)
            assert not expect_fault(what, bench)
        elif end.finish_reason is FinishReason.CANCELLED:
            assert name in cancelled
            count = len(bench.tokens[name])
            assert bench.tokens[name] == solo_tokens(what.prompt_token_ids, count)
        else:
            assert end.error_reason is not None
            if end.error_reason.value == "engine_failed":
                assert expect_fault(what, bench)


@settings(max_examples=50, deadline=None)
@given(script=moves)
def test_the_same_history_gives_the_same_steps(script: list[Move]) -> None:
    def play() -> list[object]:
        bench = Bench(pages_count=20, page_tokens=4, max_running_count=3, step_tokens=12)
        for index, move in enumerate(script):
            for _ in range(move.steps_before):
                bench.step()
            if move.arrival is not None:
                bench.submit(request(f"r{index}", *move.arrival))
            else:
                bench.cancel(f"r{move.cancelled_index}")
        bench.run()
        return [
            [(one.key, tuple(one.token_ids), one.first_position) for one in step.sequences]
            for step in bench.engine.steps
        ]

    assert play() == play()
