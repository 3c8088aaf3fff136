"""Tokens of the whole engine: against transformers, and equal in every batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from freetokend.ftw.reader import FtwDirectory
from freetokend.link.messages import FinishReason, GenerateRequest, Sampling
from tests.enginehost.local_engine import CONTEXT_TOKENS, Served, ask, local_engine, serve, step

# Where two logits are closer than this, bf16 roundings decide, and both tokens are right. The
# logits of the tiny models have a standard deviation of about 2.
TIE_MARGIN = 0.12


def prompts(count: int, *, longest: int = 90, seed: int = 5) -> list[tuple[int, ...]]:
    random = np.random.default_rng(seed)
    return [
        tuple(random.integers(0, 300, size=random.integers(1, longest + 1)).tolist())
        for _ in range(count)
    ]


def logits_after(model: Any, prompt: tuple[int, ...], tokens: list[int]) -> torch.Tensor:
    """transformers' logits for each of `tokens`, given what comes before it: [tokens, vocab]."""
    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt, *tokens]])).logits[0].double()
    return logits[len(prompt) - 1 : -1]


def beyond_ties(exact: torch.Tensor, chosen: torch.Tensor) -> int:
    """How many chosen tokens are worse than the exact best by more than a tie."""
    gaps = exact.max(dim=-1).values - exact.gather(1, chosen[:, None])[:, 0]
    return int((gaps > TIE_MARGIN).sum())


@pytest.mark.parametrize("family", ["mixtral", "qwen3"])
def test_greedy_tokens_are_those_of_transformers(
    family: str, request: pytest.FixtureRequest
) -> None:
    source: Path = request.getfixturevalue(f"{family}_source")
    directory: FtwDirectory = request.getfixturevalue(family)
    exact_model, rounded_model = (
        AutoModelForCausalLM.from_pretrained(source, dtype=dtype).eval()
        for dtype in (torch.float32, torch.bfloat16)
    )
    asked = [ask(f"r{index}", prompt, 24) for index, prompt in enumerate(prompts(12))]
    with local_engine(directory) as built:
        served = serve(built, asked)
    ours = theirs = different = 0
    for one in asked:
        tokens = served.tokens[one.request_id]
        assert len(tokens) == 24
        exact = logits_after(exact_model, one.prompt_token_ids, tokens)
        rounded = logits_after(rounded_model, one.prompt_token_ids, tokens)
        ours += beyond_ties(exact, torch.tensor(tokens))
        theirs += beyond_ties(exact, rounded.argmax(dim=-1))
        different += int((exact.argmax(dim=-1) != torch.tensor(tokens)).sum())
    # A rounding that flips an expert changes logits by more than a tie: transformers in bf16 has
    # 2 to 3 such tokens of the 288 here.
    assert ours <= theirs + 1
    assert different <= 0.05 * 288


def seeded(request_id: str, prompt: tuple[int, ...], count: int, seed: int) -> GenerateRequest:
    sampling = Sampling(temperature=0.9, top_p=0.95, top_k=50, min_p=0.01, seed=seed)
    return ask(request_id, prompt, count, sampling)


def test_sixty_four_concurrent_requests_get_exactly_their_solo_tokens(
    mixtral: FtwDirectory,
) -> None:
    asked = [
        seeded(f"r{index}", prompt, 8 + index % 9, seed=index)
        if index % 2
        else ask(f"r{index}", prompt, 8 + index % 9)
        for index, prompt in enumerate(prompts(64))
    ]
    with local_engine(mixtral) as built:
        solo = {one.request_id: serve(built, [one]).tokens[one.request_id] for one in asked}
        together = serve(built, asked)
        assert built.scheduler.counts().preemptions_count == 0
    assert together.tokens == solo
    assert {end.finish_reason for end in together.ends.values()} == {FinishReason.LENGTH}


@pytest.mark.parametrize("requests_count", range(1, 6))
def test_joins_and_leaves_around_a_batch_of_four(qwen3: FtwDirectory, requests_count: int) -> None:
    asked = [
        ask(f"r{index}", prompt, 3 + 4 * index)
        for index, prompt in enumerate(prompts(requests_count, longest=40))
    ]
    with local_engine(qwen3, max_running_count=4, step_tokens=24) as built:
        solo = {one.request_id: serve(built, [one]).tokens[one.request_id] for one in asked}
        joined = serve(built, asked, steps_between=2)
        assert joined.tokens == solo
        # one leaves in the middle: the others do not notice
        served = Served()
        for one in asked:
            built.scheduler.submit(one)
        for _ in range(3):
            step(built, served)
        built.scheduler.cancel("r0")
        while step(built, served):
            pass
        served.take(built.scheduler.take_updates())
        assert served.ends["r0"].finish_reason in (FinishReason.CANCELLED, FinishReason.LENGTH)
        for one in asked[1:]:
            assert served.tokens[one.request_id] == solo[one.request_id]
        assert built.allocator.used_count == 0


def test_chunk_sizes_threads_and_preemption_change_no_token(mixtral: FtwDirectory) -> None:
    asked = [
        seeded(f"r{index}", prompt, 40, seed=100 + index)
        for index, prompt in enumerate(prompts(5, longest=200, seed=9))
    ]
    with local_engine(mixtral, max_running_count=5, step_tokens=1024) as built:
        expected = serve(built, asked).tokens
    # one thread, chunks of at most 21 - running tokens
    with local_engine(mixtral, threads_count=1, max_running_count=5, step_tokens=21) as built:
        assert serve(built, asked).tokens == expected
    # ten pages of 32 tokens for five requests of up to 240: the youngest make room again and again
    with local_engine(
        mixtral, max_running_count=5, step_tokens=64, kv_bytes=10 * 32 * 256
    ) as built:
        assert built.kv_plan.servable_context_tokens == 320
        assert any(f"320 of the model's {CONTEXT_TOKENS} tokens" in note for note in built.notes)
        assert serve(built, asked).tokens == expected
        assert built.scheduler.counts().preemptions_count > 0


def test_kv_memory_that_nobody_can_use_is_told(mixtral: FtwDirectory) -> None:
    with local_engine(mixtral, max_running_count=2, kv_bytes=1 << 40) as built:
        assert [note for note in built.notes if "asks for 1 TiB" in note] == [built.kv_plan.note]
    with local_engine(mixtral, max_running_count=2) as built:
        assert built.kv_plan.note == ""


def test_page_boundaries_then_decode(mixtral: FtwDirectory) -> None:
    base = tuple(range(70))
    asked = [ask(f"p{length}", base[:length], 4) for length in (31, 32, 33, 63, 64, 65)]
    with local_engine(mixtral) as built:
        for one in asked:
            whole = serve(built, [one]).tokens[one.request_id]
            # the same sequence, prompt one longer each time: prefill and decode agree
            history = list(one.prompt_token_ids)
            stepwise = []
            for _ in range(4):
                token = serve(built, [ask("s", history, 1)]).tokens["s"][0]
                stepwise.append(token)
                history.append(token)
            assert stepwise == whole


def test_end_of_sequence_ids_come_from_the_models_files(mixtral: FtwDirectory) -> None:
    with local_engine(mixtral) as built:
        (eos,) = built.facts.eos_token_ids
        asked = [
            seeded(f"r{index}", prompt, 160, seed=index) for index, prompt in enumerate(prompts(8))
        ]
        on = serve(built, asked)
        off = serve(
            built,
            [
                ask(one.request_id, one.prompt_token_ids, 160, one.sampling, ignore_eos=False)
                for one in asked
            ],
        )
    stopped = 0
    for one in asked:
        tokens = on.tokens[one.request_id]
        end = off.ends[one.request_id]
        if eos in tokens:
            stopped += 1
            assert off.tokens[one.request_id] == tokens[: tokens.index(eos)]
            assert end.finish_reason is FinishReason.STOP
            assert end.completion_tokens == tokens.index(eos) + 1
        else:
            assert off.tokens[one.request_id] == tokens
            assert end.finish_reason is FinishReason.LENGTH
    assert stopped > 0, "no request met the end-of-sequence id: the test shows nothing"


def test_executions_are_counted(mixtral: FtwDirectory) -> None:
    with local_engine(mixtral) as built:
        before = built.expert_executions()
        serve(built, [ask("r", (1, 2, 3, 4, 5), 3)])
        # 5 prompt tokens and 2 decoded ones, 2 experts each; in the second and last layer only the
        # three that want logits
        assert built.expert_executions() - before == (7 + 3) * 2
