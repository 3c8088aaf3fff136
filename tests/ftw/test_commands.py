"""`freetokenctl ftw ...`: answers, progress and exit codes."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from freetokend.ctl import ftw_commands
from freetokend.ctl.ftw_commands import register
from freetokend.ftw.index import read_index


def run(*words: str | Path) -> int:
    parser = argparse.ArgumentParser()
    register(parser.add_subparsers(required=True))
    arguments = parser.parse_args(["ftw", *map(str, words)])
    code: int = arguments.handler(arguments)
    return code


def test_convert_verify_info(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "model"
    assert run("convert", source, target, "--threads", "1") == 0
    index = read_index(target)
    answer = capsys.readouterr()
    assert index.identity in answer.out
    assert "converted" in answer.err
    assert "(100 %)" in answer.err

    assert run("convert", source, target) == 0
    assert "already holds this conversion" in capsys.readouterr().err

    assert run("verify", target) == 0
    assert capsys.readouterr().out == f"{target}: every byte is as it was written.\n"

    assert run("info", target) == 0
    text = capsys.readouterr().out
    assert "Qwen3MoeForCausalLM" in text
    assert f"{index.region_bytes} (" in text
    assert "moe_layer_indices        0 2" in text

    assert run("info", target, "-o", "json", "--tensors") == 0
    document = json.loads(capsys.readouterr().out)
    assert document["identity"] == index.identity
    assert document["expert_bank"]["record_bytes"] == index.expert_bank.record_bytes
    assert document["tensors"].keys() == index.tensors.keys()


def test_quantising_is_told_in_text_and_json(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "model"
    options = ("--quantize", "nvfp4", "--quantize-dense", "q8_0", "-o", "json")
    assert run("convert", source, target, *options) == 0
    answer = capsys.readouterr()
    document = json.loads(answer.out)
    assert document["expert_bank"]["format"] == "nvfp4"
    assert document["dense_formats"] == ["int8_g32_f16"]
    errors = document["quantisation"]["layer_errors"]
    assert [layer["layer_index"] for layer in errors] == [0, 2]
    assert all(0.02 < layer["down"] < 0.12 for layer in errors)
    assert f"layer 2: experts in nvfp4 differ by {errors[1]['gate']:.4f} (gate)" in answer.err
    assert run("verify", target) == 0
    assert "every byte" in capsys.readouterr().out
    assert run("info", target) == 0
    assert f"layer_index 0 gate {errors[0]['gate']}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--quantize", "fp5"), "no weight format is called 'fp5'; there are bf16, fp8_block"),
        (("--quantize-dense", "int4"), "no weight format is called 'int4'; there are bf16"),
    ],
)
def test_formats_are_checked_by_the_parser(
    words: tuple[str, str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        run("convert", "x", "y", *words)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_a_checkpoint_without_tokenizer_is_converted_with_a_warning(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("convert", source, tmp_path / "whole") == 0
    assert "warning" not in capsys.readouterr().err
    (source / "tokenizer.json").unlink()
    assert run("convert", source, tmp_path / "model") == 0
    warnings = [line for line in capsys.readouterr().err.splitlines() if "warning" in line]
    assert len(warnings) == 1
    assert "no tokenizer.json" in warnings[0]
    assert run("verify", tmp_path / "model") == 0


def test_damage_is_printed_with_exit_code_1(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with open(model / "00000.ftw", "r+b") as file:
        file.write(b"\xff\xff\xff\xff")
    assert run("verify", model) == 1
    out = capsys.readouterr().out
    assert "00000.ftw block 0" in out
    assert "1 damaged place. Copy these files again" in out
    assert run("verify", model, "-o", "json") == 1
    (damage,) = json.loads(capsys.readouterr().out)["damage"]
    assert (damage["file"], damage["block_index"]) == ("00000.ftw", 0)
    assert damage["experts"][0]["layer_index"] == 0


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (("info", "nowhere"), 65, "freetoken_weight.json is missing"),
        (("verify", "nowhere"), 65, "freetoken_weight.json is missing"),
        (("convert", "nowhere", "model"), 65, "config.json is missing"),
        (("convert", "SOURCE", "SOURCE/inside"), 64, "must not contain one another"),
        (("convert", "SOURCE", "model", "--shard-bytes", "5"), 64, "too small"),
        (("convert", "SOURCE", "/proc/model"), 74, "cannot create"),
    ],
)
def test_errors_have_exit_codes_and_a_sentence(
    words: tuple[str, ...],
    code: int,
    message: str,
    source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(*(word.replace("SOURCE", str(source)) for word in words)) == code
    err = capsys.readouterr().err
    assert err.startswith("freetokenctl: ")
    assert message in err


def test_force(source: Path, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.utime(source / "model.safetensors", ns=(7, 7))
    assert run("convert", source, model) == 64
    assert "--force" in capsys.readouterr().err
    assert run("convert", source, model, "--force") == 0


def test_interrupt_says_that_the_work_is_kept(
    source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(ftw_commands, "convert", interrupted)
    assert run("convert", source, tmp_path / "model") == 130
    assert "run the same command again" in capsys.readouterr().err


@pytest.mark.parametrize("value", ["0", "-1", "many"])
def test_counts_are_checked_by_the_parser(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        run("verify", "x", f"--threads={value}")
    assert caught.value.code == 2
    assert "--threads" in capsys.readouterr().err


def test_progress_on_a_terminal_is_one_line(
    source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    assert run("convert", source, tmp_path / "model") == 0
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert err.startswith("\r")
    assert "100 %" in err.rsplit("\r", maxsplit=1)[-1]


def test_the_verbs_import_no_torch(pristine: Path) -> None:
    program = (
        "import sys, argparse; from freetokend.ctl.ftw_commands import register; "
        "p = argparse.ArgumentParser(); register(p.add_subparsers()); "
        "a = p.parse_args(sys.argv[1:]); assert a.handler(a) == 0; "
        "assert not {'torch', 'transformers', 'grpc'} & sys.modules.keys()"
    )
    subprocess.run(
        [sys.executable, "-c", program, "ftw", "info", str(pristine / "model")],
        check=True,
        stdout=subprocess.DEVNULL,
    )
