"""What is refused before a byte of the model is read, on recorded files of a machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from freetokend.core.errors import ModelDataError, Reason, ResourceError
from freetokend.core.host_facts import HostMemory
from freetokend.daemon.preflight import check_memory, check_model
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
            "the cgroup's memory limit allows 0.00 GiB",
        ),
        (HostMemory(mem_available_bytes=64 * GIB, cap_bytes=1 << 20), "pool.max_bytes allows"),
    ],
)
def test_tightest_limit_is_named_with_the_numbers(
    index: FtwIndex, memory: HostMemory, words: str
) -> None:
    with pytest.raises(ResourceError, match=words):
        check_memory(index, memory)
