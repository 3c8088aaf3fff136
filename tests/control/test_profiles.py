"""Bandwidth profiles: merged, atomic on disk, and no file can stop a daemon."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from freetokend.control.profiles import ProfileStore
from freetokend.core.errors import Reason, ResourceError
from freetokend.policy.bandwidth_profile import (
    MOST_ENTRIES,
    MOST_MEASUREMENTS,
    Figure,
    FigureName,
    Measurement,
    ProfileKey,
    ProfileSource,
    entry_of,
    known_figures,
    with_measurement,
)

KEY = ProfileKey(
    weight_format="mxfp4", expert_bytes=1_769_472, driver_version="580.1", kernel_build="avx512"
)
OTHER = ProfileKey(
    weight_format="bf16", expert_bytes=1_769_472, driver_version="580.1", kernel_build="avx512"
)
UUID = "GPU-6d7a1c30-0000-1111-2222-333344445555"


def measured(
    at_s: float,
    *figures: Figure,
    source: ProfileSource = ProfileSource.COMMAND,
) -> Measurement:
    return Measurement(at_s=at_s, source=source, figures=figures)


def figure(value: float, name: FigureName = FigureName.FILL, threads: int = 0) -> Figure:
    return Figure(name=name, value=value, threads_count=threads)


def test_what_was_added_is_read_by_another_daemon(tmp_path: Path) -> None:
    store = ProfileStore(tmp_path)
    assert store.read(UUID).entries == ()
    store.add(UUID, KEY, measured(10.5, figure(13e9), figure(2e-5, FigureName.FILL_FIXED)))
    store.add(UUID, OTHER, measured(11.0, figure(40e9, FigureName.CPU, 8)))
    again = ProfileStore(tmp_path).read(UUID)
    assert again.problem == ""
    assert {one.key for one in again.entries} == {KEY, OTHER}
    assert ProfileStore(tmp_path).read("").entries == ()
    assert sorted(path.name for path in (tmp_path / "bandwidth").iterdir()) == [f"{UUID}.json"]


def test_a_run_of_some_figures_leaves_the_others_with_their_age_and_source(tmp_path: Path) -> None:
    store = ProfileStore(tmp_path)
    disk = figure(3e9, FigureName.DISK_READ)
    store.add("", KEY, measured(5.0, figure(12e9), disk, source=ProfileSource.BOOT))
    entries = store.add("", KEY, measured(9.0, figure(13e9), source=ProfileSource.IDLE)).entries
    entry = entry_of(entries, KEY)
    assert entry is not None
    known = {one.figure.name: one for one in known_figures(entry)}
    assert known[FigureName.FILL].figure.value == 13e9
    assert (known[FigureName.FILL].at_s, known[FigureName.FILL].source) == (9.0, "idle")
    assert (known[FigureName.DISK_READ].at_s, known[FigureName.DISK_READ].source) == (5.0, "boot")
    assert entry.newest_s == 9.0


def test_figures_by_threads_are_different_figures() -> None:
    by_threads = [figure(1e9 * n, FigureName.CPU, n) for n in (4, 1, 2)]
    (entry,) = with_measurement((), KEY, measured(1.0, *by_threads))
    assert [one.figure.threads_count for one in known_figures(entry)] == [1, 2, 4]


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf"), 1e16])
def test_what_cannot_be_is_not_kept(value: float) -> None:
    assert with_measurement((), KEY, measured(1.0, figure(value))) == ()


def test_files_stay_small_for_ever(tmp_path: Path) -> None:
    entries = with_measurement((), OTHER, measured(0.5, figure(1.0)))
    for count in range(2 * MOST_MEASUREMENTS):
        entries = with_measurement(entries, KEY, measured(float(count), figure(1.0 + count)))
    entry = entry_of(entries, KEY)
    assert entry is not None
    assert len(entry.measurements) == MOST_MEASUREMENTS
    assert entry_of(entries, OTHER) is not None
    for size in range(2 * MOST_ENTRIES):
        key = ProfileKey(weight_format="x", expert_bytes=size, driver_version="", kernel_build="")
        entries = with_measurement(entries, key, measured(1.0, figure(1.0)))
    assert len(entries) == MOST_ENTRIES
    assert entries[-1].key.expert_bytes == 2 * MOST_ENTRIES - 1


def good_file(tmp_path: Path) -> tuple[ProfileStore, Path, dict[str, Any]]:
    store = ProfileStore(tmp_path)
    store.add(UUID, KEY, measured(10.0, figure(13e9)))
    path = store.path(UUID)
    return store, path, json.loads(path.read_text())


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda value: value.update(version=2), "has version 2 and this program knows 1"),
        (lambda value: value.pop("entries"), "entries is missing"),
        (lambda value: value.update(more=1), "unknown key 'more'"),
        (lambda value: value["entries"].append(value["entries"][0]), "two entries"),
        (lambda value: value["entries"][0].update(expert_bytes=-1), "outside"),
        (lambda value: value["entries"][0]["measurements"][0].update(source="x"), "does not match"),
        (
            lambda value: value["entries"][0]["measurements"][0]["figures"][0].update(value=0.0),
            "which cannot be",
        ),
    ],
)
def test_a_file_of_another_form_is_put_aside_with_a_sentence(
    tmp_path: Path, change: Any, text: str
) -> None:
    store, path, value = good_file(tmp_path)
    change(value)
    damaged = json.dumps(value).encode()
    path.write_bytes(damaged)
    found = store.read(UUID)
    assert found.entries == ()
    assert text in found.problem
    assert "put aside" in found.problem
    assert path.with_name(f"{path.name}.refused").read_bytes() == damaged
    assert not path.exists()
    store.add(UUID, KEY, measured(11.0, figure(1e9)))
    assert len(store.read(UUID).entries) == 1


@given(place=st.integers(0, 10_000), byte=st.none() | st.integers(0, 255))
def test_no_damage_raises(place: int, byte: int | None) -> None:
    with tempfile.TemporaryDirectory() as directory:
        store, path, _ = good_file(Path(directory))
        data = bytearray(path.read_bytes())
        place %= len(data)
        if byte is None:
            del data[place:]
        else:
            data[place] = byte
        path.write_bytes(bytes(data))
        found = store.read(UUID)
        assert bool(found.problem) != path.exists()


@pytest.mark.parametrize("kind", ["directory", "dangling", "fifo", "big"])
def test_what_is_no_file_is_put_aside(tmp_path: Path, kind: str) -> None:
    store = ProfileStore(tmp_path)
    path = store.path("")
    path.parent.mkdir()
    match kind:
        case "directory":
            path.mkdir()
        case "dangling":
            path.symlink_to(tmp_path / "nothing")
        case "fifo":
            os.mkfifo(path)
        case _:
            with path.open("wb") as file:
                file.truncate(5 << 20)
    assert store.read("").problem
    store.add("", KEY, measured(1.0, figure(1e9)))
    assert len(store.read("").entries) == 1


def test_a_writer_that_died_before_the_rename_leaves_the_old_file(tmp_path: Path) -> None:
    store, path, _ = good_file(tmp_path)
    path.with_name(f".{path.name}.new").write_bytes(b"{half")
    assert len(store.read(UUID).entries) == 1
    store.add(UUID, OTHER, measured(12.0, figure(1e9)))
    assert len(store.read(UUID).entries) == 2


def test_a_directory_that_cannot_be_written_is_told_with_its_key(tmp_path: Path) -> None:
    (tmp_path / "bandwidth").write_text("in the way")
    with pytest.raises(ResourceError, match=r"Make service\.state_dir a directory") as caught:
        ProfileStore(tmp_path).add(UUID, KEY, measured(1.0, figure(1e9)))
    assert caught.value.reason is Reason.IO_FAILED


@pytest.mark.parametrize("name", ["../../etc/passwd", "a/b", "", "\0", "x" * 300, "GPU ü"])
def test_no_name_leads_out_of_the_directory(tmp_path: Path, name: str) -> None:
    path = ProfileStore(tmp_path).path(name)
    assert path.parent == tmp_path / "bandwidth"
    assert len(path.name) < 100
