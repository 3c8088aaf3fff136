"""The engine process as control sees it: contract, life, death, refusals."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path

import pytest
import pytest_asyncio

from freetokend.core.errors import ConfigError, Reason
from freetokend.enginehost.process import BackgroundImport
from freetokend.ftw.reader import FtwDirectory
from freetokend.link.messages import EngineSettings, EngineState, FinishReason
from freetokend.native.pool import create_pool_file
from freetokend.policy.restart import RestartBudget
from tests.enginehost.engine_process import native_engine
from tests.enginehost.local_engine import CONTEXT_TOKENS, ask, local_engine, serve
from tests.link.contract import LinkContract, token_ids
from tests.support.scripted import EngineHarness, engine_environment, greedy


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def harness(mixtral: FtwDirectory) -> AsyncIterator[EngineHarness]:
    async with native_engine(mixtral) as harness:
        await harness.wait_state(EngineState.READY)
        yield harness


@pytest.mark.asyncio(loop_scope="module")
class TestComputingEngine:
    """What only an engine that computes can be asked."""

    prompt = (11, 12, 13)

    async def test_the_pool_is_pinned_in_the_background_of_an_idle_engine(
        self, harness: EngineHarness, mixtral: FtwDirectory
    ) -> None:
        snapshot = await harness.wait_until(lambda now: now.stats.pin_done)
        stats = snapshot.stats
        assert stats.steps_count == 0
        assert stats.pool_bytes == mixtral.index.region_bytes
        # all of it, or a note that says why not
        assert (stats.pool_pinned_bytes >= stats.pool_bytes) == (stats.pin_note == "")

    async def test_the_thread_that_steps_is_on_the_first_of_its_cpus(
        self, harness: EngineHarness
    ) -> None:
        # a heartbeat that has the pool pinned was sent by a loop that runs
        snapshot = await harness.wait_until(lambda now: now.stats.pin_done)
        assert snapshot.description is not None
        assert snapshot.pid is not None
        first, *others = snapshot.description.cpus
        tasks = [int(name) for name in os.listdir(f"/proc/{snapshot.pid}/task")]
        assert os.sched_getaffinity(snapshot.pid) == {first}
        masks = [os.sched_getaffinity(task) for task in tasks if task != snapshot.pid]
        assert all({cpu} in masks for cpu in others)

    async def test_its_numbers_are_told(
        self, harness: EngineHarness, mixtral: FtwDirectory
    ) -> None:
        description = harness.supervisor.snapshot().description
        assert description is not None
        assert (description.device, description.backend) == ("cpu", "cpu")
        assert description.device_name
        assert description.kernel
        assert description.threads_count == len(description.cpus) >= 1
        assert description.threads_reason
        assert description.numerics == "exact"
        assert description.expert_format == "bf16"
        assert description.dense_formats == ("bf16",)
        assert description.servable_context_tokens == CONTEXT_TOKENS
        assert description.kv_bytes == 4 * CONTEXT_TOKENS * 256
        assert description.pool_bytes == mixtral.index.region_bytes
        # what this machine promises to a pool is what the engine finds once it has read it
        with closing(create_pool_file("probe", 1 << 20, mixtral.index.identity)) as probe:
            assert description.pool_page_bytes == probe.page_bytes
        assert description.first_token_s > 0
        assert description.layers_count == description.moe_layers_count == 2
        assert description.experts_per_layer_count == 4
        assert description.bytes_per_expert == mixtral.index.expert_bank.record_bytes

    async def test_its_tokens_are_those_of_an_engine_in_process(
        self, harness: EngineHarness, mixtral: FtwDirectory
    ) -> None:
        with local_engine(mixtral) as built:
            expected = serve(built, [ask("r", self.prompt, 20)]).tokens["r"]
        updates = await harness.collect(greedy("r", self.prompt, 20, ignore_eos=True))
        assert list(token_ids(updates)) == expected

    async def test_a_prompt_that_does_not_fit_is_refused_with_both_numbers(
        self, harness: EngineHarness
    ) -> None:
        (refusal,) = await harness.collect(greedy("long", (1,) * CONTEXT_TOKENS, 1))
        assert refusal.error_reason is Reason.CONTEXT_LENGTH_EXCEEDED
        numbers = f"{CONTEXT_TOKENS} tokens, but one request can have {CONTEXT_TOKENS}"
        assert numbers in refusal.error_message


@pytest.mark.asyncio(loop_scope="module")
class TestNativeEngine(LinkContract):
    """Everything in `LinkContract`; its last test ends the engine."""


async def test_a_killed_engine_finds_its_pool_again(mixtral: FtwDirectory, tmp_path: Path) -> None:
    copy = tmp_path / "ftw"
    shutil.copytree(mixtral.path, copy)
    directory = FtwDirectory(copy)
    budget = RestartBudget(restarts_count=3, first_delay_s=0.01)
    async with native_engine(directory, budget=budget) as harness:
        first = await harness.wait_state(EngineState.READY)
        assert first.description is not None
        assert first.pid is not None
        assert not first.description.pool_reattached
        assert first.description.load_bytes_per_s > 0
        before = await harness.collect(greedy("r", (1, 2, 3), 8, ignore_eos=True))
        os.kill(first.pid, signal.SIGKILL)
        second = await harness.wait_until(
            lambda now: now.state is EngineState.READY and now.pid not in (None, first.pid)
        )
        assert second.description is not None
        assert second.description.pool_reattached
        assert any("engine-ready" in line for line in harness.lines)
        assert second.cause == "died with signal 9 (SIGKILL)", "info lines explain no death"
        assert second.description.attach_s < 1.0
        assert second.description.load_s == 0.0
        after = await harness.collect(greedy("r", (1, 2, 3), 8, ignore_eos=True))
        assert token_ids(after) == token_ids(before)


async def test_a_backend_that_is_not_there_is_not_restarted(mixtral: FtwDirectory) -> None:
    settings = EngineSettings(model="tiny", backend="hybrid")
    async with native_engine(mixtral, settings=settings) as harness:
        snapshot = await harness.wait_state(EngineState.FAILED)
        assert 'engine.backend = "hybrid"' in snapshot.cause
        assert snapshot.restarts_count == 0


async def test_a_damaged_model_is_named_and_not_restarted(
    mixtral: FtwDirectory, tmp_path: Path
) -> None:
    copy = tmp_path / "ftw"
    shutil.copytree(mixtral.path, copy)
    directory = FtwDirectory(copy)
    os.truncate(directory.shard_paths()[0], 4096)
    async with native_engine(directory) as harness:
        snapshot = await harness.wait_state(EngineState.FAILED)
        assert "00000.ftw" in snapshot.cause
        assert snapshot.restarts_count == 0


async def test_sigterm_ends_it_with_its_requests_answered(mixtral: FtwDirectory) -> None:
    async with native_engine(mixtral) as harness:
        ready = await harness.wait_state(EngineState.READY)
        assert ready.pid is not None
        stream = harness.supervisor.generate(greedy("r", (1, 2), 4000, ignore_eos=True))
        updates = [await anext(stream)]
        os.kill(ready.pid, signal.SIGTERM)
        updates += [update async for update in stream]
        assert updates[-1].finish_reason is FinishReason.ERROR
        ended = await harness.wait_until(lambda now: now.pid != ready.pid)
        assert "exit code 0" in ended.cause


def test_a_scripted_engine_imports_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys; from freetokend.enginehost.main import main\n"
        "try: main(['--scripted', 'nothing', '--link', 'unix:/nothing', '--lifeline-fd', '0'])\n"
        "except BaseException: pass\n"
        "sys.exit(5 if 'torch' in sys.modules else 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        check=False,
        stdin=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=engine_environment(),
        cwd=tmp_path,
    )
    assert done.returncode == 0


def test_libraries_that_are_missing_are_a_fault_of_the_installation() -> None:
    with pytest.raises(ConfigError, match=r"No module named 'freetokend.nothing'.*engine extra"):
        BackgroundImport("freetokend.nothing").builder()


@pytest.mark.parametrize(
    ("level", "log_format", "expected"),
    [
        ("error", "text", []),
        (
            "info",
            "journal",
            ["<6>enginehost.process kv-sized", "<6>enginehost.process engine-ready"],
        ),
    ],
)
async def test_it_logs_as_control_is_told_to(
    mixtral: FtwDirectory, level: str, log_format: str, expected: list[str]
) -> None:
    settings = EngineSettings(
        model="tiny", max_running_count=4, log_level=level, log_format=log_format
    )
    async with native_engine(mixtral, settings=settings) as harness:
        ready = await harness.wait_state(EngineState.READY)
        await harness.collect(greedy("r", (1, 2), 3, ignore_eos=True))
        assert ready.pid is not None
        os.kill(ready.pid, signal.SIGTERM)
        await harness.wait_until(lambda now: now.pid != ready.pid)
    assert [" ".join(line.split()[:2]) for line in harness.lines] == expected
