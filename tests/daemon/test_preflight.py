"""What is refused before a byte of the model is read, on recorded files of a machine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from freetokend.core.config import ResolvedConfig, gather_facts, load_config, resolve
from freetokend.core.errors import ConfigError, ModelDataError, Reason, ResourceError
from freetokend.core.host_facts import HostMemory
from freetokend.daemon.preflight import check_cache, check_memory, check_model, check_start
from freetokend.ftw.convert import convert
from freetokend.ftw.index import FtwIndex
from freetokend.native.pool import pool_length_bytes
from freetokend.policy.memory import DEFAULT_HEADROOM_BYTES
from tests.support.tiny_checkpoints import write_tiny_mixtral

GIB = 1 << 30


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = tmp_path_factory.mktemp("hf") / "tiny"
    write_tiny_mixtral(source)
    return source


@pytest.fixture(scope="module")
def index(checkpoint: Path) -> FtwIndex:
    return convert(checkpoint, checkpoint.with_name("ftw"), progress=lambda _: None)


def test_ftw_directory_is_read(checkpoint: Path, index: FtwIndex) -> None:
    assert check_model(checkpoint.with_name("ftw")).identity == index.identity


def test_what_is_no_model_is_named(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelDataError, match="does not exist"):
        check_model(tmp_path / "missing")
    with pytest.raises(ModelDataError, match=r"ftw convert .*tiny .*tiny\.ftw"):
        check_model(checkpoint)
    with pytest.raises(ModelDataError, match="holds no model"):
        check_model(tmp_path)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (
            {"layers": "0..1=cpu"},
            'command line: engine.layers: "0..1=cpu": it is not .*did you mean "0-1=cpu"',
        ),
        ({"layers": "0-99=cpu"}, "there is no MoE layer 99, the model has 0 to"),
        ({"slots_count": 9}, "command line: engine.slots_count = 9; the model has 8 experts"),
        (
            {"slots_count": 2, "device_bytes": "1MiB"},
            "slots_count = 2 takes 2 MiB, and engine.device_bytes is 1 MiB",
        ),
    ],
)
def test_a_cache_that_cannot_be_is_refused_before_a_start(
    index: FtwIndex, asked: dict[str, object], words: str
) -> None:
    asked = {
        "model.path": "/m",
        "engine.device": "host",
        **{f"engine.{key}": value for key, value in asked.items()},
    }
    nowhere = Path("/nonexistent")
    config = resolve(
        load_config(overrides=asked, vendor_file=nowhere, system_file=nowhere / "x.toml"),
        gather_facts(),
    )
    large = replace(index, expert_bank=replace(index.expert_bank, record_bytes=1 << 20))
    with pytest.raises(ConfigError, match=words):
        check_cache(config, large)


def test_memory_that_suffices_exactly_and_one_byte_less(index: FtwIndex) -> None:
    needed_bytes = pool_length_bytes(index.region_bytes) + DEFAULT_HEADROOM_BYTES
    check_memory(index, HostMemory(mem_available_bytes=needed_bytes))
    with pytest.raises(ResourceError, match="MemAvailable allows") as error:
        check_memory(index, HostMemory(mem_available_bytes=needed_bytes - 1))
    assert error.value.reason is Reason.HOST_MEMORY


@pytest.mark.parametrize(
    ("memory", "words"),
    [
        (
            HostMemory(mem_available_bytes=64 * GIB, cgroup_available_bytes=1 << 20),
            "the cgroup's memory limit allows 1.00 MiB",
        ),
        (HostMemory(mem_available_bytes=64 * GIB, cap_bytes=1 << 20), "pool.max_bytes allows"),
    ],
)
def test_tightest_limit_is_named_with_the_numbers(
    index: FtwIndex, memory: HostMemory, words: str
) -> None:
    with pytest.raises(ResourceError, match=words):
        check_memory(index, memory)


def configured(model: Path, runtime_dir: Path, **more: str) -> ResolvedConfig:
    values = {"model.path": str(model), "service.runtime_dir": str(runtime_dir), "http.port": 0}
    values |= {key.replace("__", "."): value for key, value in more.items()}
    return resolve(load_config(None, overrides=values), gather_facts())


def test_a_start_that_would_do_leaves_nothing(
    checkpoint: Path, index: FtwIndex, tmp_path: Path
) -> None:
    check_start(configured(checkpoint.with_name("ftw"), tmp_path / "a" / "run"), index)
    assert list(tmp_path.iterdir()) == []


def test_a_pool_directory_that_does_not_exist_is_named(
    checkpoint: Path, index: FtwIndex, tmp_path: Path
) -> None:
    config = configured(
        checkpoint.with_name("ftw"), tmp_path / "run", pool__directory=str(tmp_path / "none")
    )
    with pytest.raises(ConfigError, match=r"pool\.directory .*none is not a directory"):
        check_start(config, index)
    assert list(tmp_path.iterdir()) == []


def test_a_model_without_tokenizer_is_named(index: FtwIndex, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    with pytest.raises(ModelDataError, match=r"tokenizer\.json is missing"):
        check_start(configured(model, tmp_path / "run"), index)
