"""The scheduler's rules, one test each, on the echo engine."""

from __future__ import annotations

import sys

import pytest

from freetokend.core.errors import ConfigError, InternalError, Reason
from freetokend.link.messages import FinishReason, Sampling
from tests.scheduler.paged_echo import VOCAB_SIZE, PagedEchoEngine, solo_tokens
from tests.scheduler.support import Bench, request


@pytest.mark.parametrize("requests_count", range(1, 10))
def test_one_to_twice_the_batch_all_get_their_solo_tokens(requests_count: int) -> None:
    bench = Bench(max_running_count=4, max_waiting_count=8)
    prompts = {f"r{index}": tuple(range(index, index + 3 + 5 * index)) for index in range(9)}
    for index in range(requests_count):
        bench.submit(request(f"r{index}", prompts[f"r{index}"], 3 + index))
        bench.step()  # joins while others run
    bench.run()
    for index in range(requests_count):
        assert bench.tokens[f"r{index}"] == solo_tokens(prompts[f"r{index}"], 3 + index)
        end = bench.ends[f"r{index}"]
        assert end.finish_reason is FinishReason.LENGTH
        assert end.prompt_tokens == len(prompts[f"r{index}"])
        assert end.completion_tokens == 3 + index
    assert bench.allocator.used_count == 0


def test_a_step_mixes_a_prompt_chunk_with_decoding_within_its_budget() -> None:
    bench = Bench(step_tokens=8)
    bench.submit(request("talker", [1, 2], 30))
    bench.step()
    bench.submit(request("reader", range(40), 2))
    for _ in range(6):
        bench.step()
    mixed = [step for step in bench.engine.steps if len(step.sequences) == 2]
    assert mixed
    assert all(step.tokens_count == 8 for step in mixed[:5])
    # the talker got a token in every step that the long prompt took
    assert len(bench.tokens["talker"]) == 7
    bench.run()
    assert bench.tokens["reader"] == solo_tokens(tuple(range(40)), 2)


def test_the_youngest_is_preempted_and_its_tokens_are_the_same() -> None:
    bench = Bench(pages_count=8, page_tokens=4, step_tokens=16)
    for index in range(4):
        bench.submit(request(f"r{index}", [index] * 5, 20))
    bench.run()
    assert bench.scheduler.counts().preemptions_count > 0
    for index in range(4):
        assert bench.tokens[f"r{index}"] == solo_tokens((index,) * 5, 20)
    ends = list(bench.ends)
    assert ends == ["r0", "r1", "r2", "r3"], "the oldest ends first"
    assert bench.allocator.used_count == 0
    # the i-th token is drawn once, as the i-th, whatever was computed again for it
    draws: dict[int, list[int]] = {}
    for work in bench.engine.steps:
        for one in work.sequences:
            if one.draw_index is not None:
                draws.setdefault(one.key, []).append(one.draw_index)
    assert draws == {key: list(range(20)) for key in range(4)}


def test_a_prompt_that_does_not_fit_now_waits_and_preempts_nobody() -> None:
    bench = Bench(pages_count=8, page_tokens=4, step_tokens=32)
    bench.submit(request("holds", [1] * 20, 8))
    bench.submit(request("large", [2] * 20, 8))
    bench.submit(request("small", [3], 2))
    for _ in range(8):
        assert bench.scheduler.counts().running_count <= 1
        bench.step()
    assert list(bench.ends) == ["holds"]
    bench.run()
    assert bench.scheduler.counts().preemptions_count == 0
    assert set(bench.ends) == {"holds", "large", "small"}


def test_a_request_as_large_as_the_servable_context_is_served_and_one_more_is_refused() -> None:
    bench = Bench(pages_count=4, page_tokens=4)
    bench.submit(request("fits", [3] * 15, 100))
    bench.submit(request("fills", [3] * 16, 1))
    bench.run()
    assert bench.reason("fits") is FinishReason.LENGTH
    assert bench.ends["fits"].completion_tokens == 1, "clamped to what remains"
    refused = bench.ends["fills"]
    assert refused.error_reason is Reason.CONTEXT_LENGTH_EXCEEDED
    assert "16 tokens" in refused.error_message
    assert "16 tokens here" in refused.error_message


def test_the_queue_is_bounded_beyond_the_free_places() -> None:
    bench = Bench(max_running_count=2, max_waiting_count=3)
    for index in range(7):
        bench.submit(request(f"r{index}", [1], 2))
    assert list(bench.ends) == ["r5", "r6"]
    assert bench.ends["r5"].error_reason is Reason.QUEUE_FULL
    bench.run()
    assert all(bench.reason(f"r{index}") is FinishReason.LENGTH for index in range(5))


def test_stop_tokens_are_counted_but_not_told() -> None:
    expected = solo_tokens((5, 6), 4)
    bench = Bench(eos_token_ids=frozenset({expected[3]}))
    bench.submit(request("eos", [5, 6], 50))
    bench.submit(request("own", [5, 6], 50, stop_token_ids=(expected[1],)))
    bench.submit(request("on", [5, 6], 6, ignore_eos=True, stop_token_ids=(expected[0],)))
    bench.run()
    assert bench.tokens["eos"] == expected[:3]
    assert bench.reason("eos") is FinishReason.STOP
    assert bench.ends["eos"].completion_tokens == 4
    assert bench.tokens["own"] == expected[:1]
    assert bench.tokens["on"] == solo_tokens((5, 6), 6)


def test_cancel_frees_queued_mid_prefill_and_decoding_requests_at_once() -> None:
    bench = Bench(max_running_count=2, step_tokens=8)
    bench.submit(request("decoding", [1, 2], 50))
    bench.step()
    bench.submit(request("reading", range(60), 5))
    bench.submit(request("queued", [4], 5))
    bench.step()
    assert bench.allocator.used_count > 2
    for request_id in ("queued", "reading", "decoding", "never seen"):
        bench.cancel(request_id)
    assert bench.allocator.used_count == 0
    assert not bench.step()
    assert {bench.reason(name) for name in ("decoding", "reading", "queued")} == {
        FinishReason.CANCELLED
    }
    assert bench.ends["decoding"].completion_tokens == 2
    assert bench.ends["reading"].completion_tokens == 0
    assert "never seen" not in bench.ends


def test_an_id_that_is_being_served_is_not_taken_twice() -> None:
    bench = Bench()
    bench.submit(request("r", [1], 3))
    bench.submit(request("r", [2], 3))
    bench.run()
    assert bench.tokens["r"] == solo_tokens((1,), 3)


@pytest.mark.parametrize(
    ("what", "text"),
    [
        (request("r", []), "no tokens"),
        (request("r", [1], 0), "at least 1"),
        (request("r", [VOCAB_SIZE]), f"outside 0..{VOCAB_SIZE - 1}"),
        (request("r", [-1]), "Token id -1"),
        (request("r", [1], sampling=Sampling(temperature=float("nan"))), "temperature is nan"),
        (request("r", [1], sampling=Sampling(top_p=1.5)), "top_p is 1.5"),
        (request("r", [1], sampling=Sampling(min_p=-0.1)), "min_p is -0.1"),
        (request("r", [1], sampling=Sampling(top_k=-1)), "top_k is -1"),
    ],
)
def test_malformed_requests_are_refused_by_name(what: object, text: str) -> None:
    bench = Bench()
    bench.submit(what)  # type: ignore[arg-type]
    assert bench.ends["r"].error_reason is Reason.INVALID_REQUEST
    assert text in bench.ends["r"].error_message


def test_a_poisoned_request_fails_alone() -> None:
    bench = Bench(engine=PagedEchoEngine(4, poison_ids=frozenset({96})))
    bench.submit(request("good", [1, 2, 3], 6))
    bench.submit(request("bad", [96], 6))
    bench.submit(request("long", range(30), 6))
    bench.run()
    assert bench.reason("bad") is FinishReason.ERROR
    assert bench.ends["bad"].error_reason is Reason.ENGINE_FAILED
    assert "a poisoned token" in bench.ends["bad"].error_message
    assert bench.tokens["good"] == solo_tokens((1, 2, 3), 6)
    assert bench.tokens["long"] == solo_tokens(tuple(range(30)), 6)


def test_a_request_whose_logits_are_not_numbers_ends_alone() -> None:
    bench = Bench(engine=PagedEchoEngine(4, nan_ids=frozenset({96})))
    bench.submit(request("good", [1, 2, 3], 6))
    bench.submit(request("bad", [65, 96], 6))
    bench.run()
    assert bench.ends["bad"].error_reason is Reason.ENGINE_FAILED
    assert bench.tokens["good"] == solo_tokens((1, 2, 3), 6)
    assert bench.scheduler.counts().step_faults_count == 0


def test_a_step_too_large_for_the_memory_is_computed_in_smaller_ones() -> None:
    bench = Bench(
        pages_count=200, step_tokens=256, engine=PagedEchoEngine(4, largest_step_tokens=70)
    )
    prompts = [tuple((index * 7 + step) % VOCAB_SIZE for step in range(200)) for index in range(3)]
    for index, prompt in enumerate(prompts):
        bench.submit(request(f"r{index}", prompt, 4))
    bench.run()
    assert [bench.tokens[f"r{index}"] for index in range(3)] == [
        solo_tokens(prompt, 4) for prompt in prompts
    ]
    # 256 -> 128 -> 64: two faults, then every step fits
    assert bench.scheduler.counts().step_faults_count == 2


def test_drain_finishes_what_was_accepted_and_refuses_the_rest() -> None:
    bench = Bench(max_running_count=1)
    bench.submit(request("running", [1], 3))
    bench.submit(request("waiting", [2], 3))
    bench.step()
    bench.scheduler.drain()
    bench.submit(request("late", [3], 3))
    bench.run()
    assert bench.ends["late"].error_reason is Reason.DRAINING
    assert bench.tokens["waiting"] == solo_tokens((2,), 3)


def test_abandon_answers_everything_even_in_the_middle_of_a_step() -> None:
    bench = Bench(max_running_count=1)
    bench.submit(request("running", [1], 3))
    bench.submit(request("waiting", [2], 3))
    assert bench.scheduler.plan() is not None
    bench.scheduler.abandon(Reason.DRAINING, "stopping")
    bench.collect()
    assert [bench.ends[name].error_reason for name in ("running", "waiting")] == [
        Reason.DRAINING,
        Reason.DRAINING,
    ]
    assert bench.allocator.used_count == 0


def test_calls_out_of_order_are_faults_of_ours() -> None:
    bench = Bench()
    bench.submit(request("r", [1], 3))
    bench.scheduler.plan()
    for call in (
        lambda: bench.scheduler.submit(request("s", [1])),
        lambda: bench.scheduler.cancel("r"),
        bench.scheduler.plan,
    ):
        with pytest.raises(InternalError, match="while a step"):
            call()


def test_bounds_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ConfigError, match="step_tokens = 4"):
        Bench(step_tokens=4, max_running_count=4)
    with pytest.raises(ConfigError, match="does not fit"):
        Bench(pages_count=4, page_tokens=4, servable_context_tokens=17)


def test_seeds_are_the_requests_own_or_fresh() -> None:
    bench = Bench()
    bench.submit(request("own", [1], sampling=Sampling(seed=5)))
    bench.submit(request("none", [2], sampling=Sampling(top_p=0.0)))
    bench.step()
    first, second = bench.engine.steps[0].sequences
    assert (first.sampling.seed, second.sampling.seed) == (5, 11)
    assert second.sampling.top_p == 1.0, "0 means off on the wire"


def test_the_scheduler_needs_no_torch() -> None:
    import subprocess

    code = (
        "import sys, freetokend.scheduler.scheduler, freetokend.policy.kv_sizing;"
        "sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
