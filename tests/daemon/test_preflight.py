"""What is refused before a byte of the model is read, on recorded files of a machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from freetokend.core.errors import ModelDataError, Reason, ResourceError
from freetokend.daemon.preflight import check_memory, check_model, read_host_memory
from freetokend.ftw.convert import convert
from freetokend.ftw.index import FtwIndex
from freetokend.native.pool import pool_length_bytes
from freetokend.policy.memory import DEFAULT_HEADROOM_BYTES, HostMemory
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


def recorded(root: Path, *, limits: dict[str, tuple[str, str, int]]) -> tuple[Path, Path]:
    """/proc and /sys/fs/cgroup of a machine; `limits`: cgroup -> max, current, inactive_file."""
    proc, cgroups = root / "proc", root / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text("MemTotal: 32000000 kB\nMemAvailable:   20000000 kB\n")
    (proc / "self" / "cgroup").write_text("0::/system.slice/freetokend.service\n")
    for name, (maximum, current, inactive) in limits.items():
        directory = cgroups / name
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "memory.max").write_text(f"{maximum}\n")
        (directory / "memory.current").write_text(f"{current}\n")
        (directory / "memory.stat").write_text(f"anon 5\ninactive_file {inactive}\n")
    return proc, cgroups


def test_no_limit_is_none(tmp_path: Path) -> None:
    proc, cgroups = recorded(
        tmp_path, limits={"system.slice/freetokend.service": ("max", "1000", 0)}
    )
    memory = read_host_memory(0, proc=proc, cgroup_root=cgroups)
    assert memory == HostMemory(mem_available_bytes=20000000 * 1024)


def test_limit_of_an_ancestor_counts_and_clean_file_pages_do_not(tmp_path: Path) -> None:
    proc, cgroups = recorded(
        tmp_path,
        limits={
            "system.slice/freetokend.service": (str(8 * GIB), str(1 * GIB), 0),
            "system.slice": (str(6 * GIB), str(3 * GIB), 1 * GIB),
        },
    )
    memory = read_host_memory(5 * GIB, proc=proc, cgroup_root=cgroups)
    assert memory.cgroup_available_bytes == 4 * GIB
    assert memory.cap_bytes == 5 * GIB


def test_used_beyond_the_limit_leaves_nothing(tmp_path: Path) -> None:
    proc, cgroups = recorded(tmp_path, limits={"system.slice": (str(1 * GIB), str(2 * GIB), 0)})
    assert read_host_memory(0, proc=proc, cgroup_root=cgroups).cgroup_available_bytes == 0


def test_unreadable_meminfo_is_refused_not_guessed(tmp_path: Path) -> None:
    with pytest.raises(ResourceError, match="MemAvailable cannot be read"):
        read_host_memory(0, proc=tmp_path, cgroup_root=tmp_path)


def test_this_machine_has_some() -> None:
    assert read_host_memory(0).mem_available_bytes > 0
