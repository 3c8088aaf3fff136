"""`freetokenctl plan`: offline, in this process and in its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from freetokend.core.errors import InvalidInputError
from freetokend.ctl.main import main
from freetokend.ctl.plan import parse_rate
from freetokend.ctl.plan_models import model_shape
from freetokend.ftw.convert import convert
from freetokend.ftw.formats import parse_format
from freetokend.ftw.index import read_index
from freetokend.policy.known_models import KNOWN_MODELS
from freetokend.policy.machine_model import Range
from tests.ctl.conftest import Ctl
from tests.support.tiny_checkpoints import write_tiny_mixtral

MACHINE = {
    "--gpu-gib": "32",
    "--b-p": "52.7GB/s",
    "--b-h": "60GB/s",
    "--gpu-bandwidth": "1792GB/s",
    "--model": "deepseek-v4-flash",
}
QWEN3_30B: dict[str, object] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "intermediate_size": 6144,
    "norm_topk_prob": True,
    "max_position_embeddings": 40960,
    "vocab_size": 151936,
    "rope_theta": 1e6,
    "eos_token_id": 151645,
}


def arguments(**changed: str | None) -> list[str]:
    given = MACHINE | {f"--{name.replace('_', '-')}": value for name, value in changed.items()}
    words = ["plan"]
    for option, value in given.items():
        if value is not None:
            words += [option, value]
    return words


def document(capsys: pytest.CaptureFixture[str], **changed: str | None) -> dict[str, Any]:
    code = main([*arguments(**changed), "-o", "json"])
    said = capsys.readouterr()
    assert said.err == ""
    found: dict[str, Any] = json.loads(said.out)
    assert code == (0 if found["runs"] else 1)
    return found


@pytest.fixture
def config_dir(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_30B))
    return tmp_path


async def test_the_answer_for_people(ctl: Ctl) -> None:
    done = await ctl(*arguments(ram_gib="192"))
    assert (done.code, done.err) == (0, "")
    lines = done.out.splitlines()
    assert lines[0].startswith("DeepSeek-V4-Flash would run, at ")
    for words in (
        "does not serve DeepseekV4ForCausalLM",
        "43 layers of 256 experts of 12.8 MiB in mxfp4, 6 per token: 137.06 GiB",
        "B_P 52.7 GB/s, B_H 60 GB/s, RAM 192.00 GiB",
        "of 11008 slots of 12.8 MiB",
        "138.81 GiB needed, there are 192.00 GiB",
        "2.2 per layer, all of them filled",
        "missing experts, filled over the link (B_P)",
        "one pass of the pool over the link, 2.8 s",
        "a faster link to the GPU (B_P): of single changes it helps most",
    ):
        assert words in done.out


async def test_help_names_every_known_model(ctl: Ctl) -> None:
    done = await ctl("plan", "--help")
    assert done.code == 0
    assert ", ".join(KNOWN_MODELS) in " ".join(done.out.split())


def test_it_needs_no_tensors_and_no_daemon(environment: dict[str, str]) -> None:
    code = (
        "import sys; from freetokend.ctl.main import main; code = main(sys.argv[1:]); "
        "print(code, 'torch' in sys.modules, 'grpc' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments()],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines()[-1] == "0 False False"


def test_the_answer_for_programs(capsys: pytest.CaptureFixture[str]) -> None:
    found = document(capsys, ram_gib="192", context="32768", preset="agent")
    assert found["runs"] is True
    assert found["missing"] == []
    assert found["model"]["experts_count"] == 11_008
    assert found["model"]["served"] is False
    assert found["machine"]["rates"]["link"] == {"low": 52.7e9, "high": 52.7e9}
    assert found["machine"]["device_rate_assumed"] is False
    assert found["gpu_memory"]["servable_context_tokens"] >= 32_768
    rows = {row["name"]: row["size_bytes"] for row in found["gpu_memory"]["rows"]}
    assert sum(rows.values()) == 63 << 29
    speed = found["decode_tokens_per_s"]
    assert speed["low"] < found["decode"]["middle_tokens_per_s"] < speed["high"]
    assert found["prefill"]["chunk_tokens"] == 8192
    assert found["prefill"]["sweep_s"]["low"] == pytest.approx(147.17e9 / 52.7e9, rel=1e-3)
    gains = [change["gain_ratio"] for change in found["changes"]]
    assert gains == sorted(gains, reverse=True)
    assert found["changes"][0]["resource"] == found["limited_by"] == "link"


def test_what_does_not_run_says_what_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments(ram_gib="128", gpu_gib="8")) == 1
    said = capsys.readouterr().out
    assert "would not run: " in said
    assert "GPU memory and 10.81 GiB of host memory too little" in said
    assert "no single change of these makes it run" in said
    assert main(arguments(gpu_gib="8")) == 1
    assert 'engine.backend = "cpu"' in capsys.readouterr().out


def test_an_unknown_gpu_memory_makes_a_range(capsys: pytest.CaptureFixture[str]) -> None:
    known = document(capsys)["decode_tokens_per_s"]
    assumed = document(capsys, gpu_bandwidth=None)
    assert assumed["machine"]["device_rate_assumed"] is True
    assert assumed["decode_tokens_per_s"]["low"] < known["low"]
    assert main(arguments(gpu_bandwidth=None)) == 0
    assert "(assumed; --gpu-bandwidth narrows it)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("more", "less"),
    [
        ({"gpu_gib": "48"}, {"gpu_gib": "24"}),
        ({"b_p": "64GB/s"}, {"b_p": "12GB/s"}),
        ({"b_p": "12GB/s", "b_h": "90GB/s"}, {"b_p": "12GB/s", "b_h": "40GB/s"}),
        ({"gpu_bandwidth": "2TB/s"}, {"gpu_bandwidth": "900GB/s"}),
        ({"b_p": "9GB/s", "cores": "16"}, {"b_p": "9GB/s", "cores": "3"}),
    ],
)
def test_more_is_faster(
    capsys: pytest.CaptureFixture[str], more: dict[str, str], less: dict[str, str]
) -> None:
    fast = document(capsys, **more)["decode_tokens_per_s"]
    slow = document(capsys, **less)["decode_tokens_per_s"]
    assert fast["low"] > slow["low"]
    assert fast["high"] > slow["high"]


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"gpu_gib": "none"}, '--gpu-gib "none" must be a number from 0.5 to 4096'),
        ({"gpu_gib": "0"}, "--gpu-gib"),
        ({"gpu_gib": "nan"}, "--gpu-gib"),
        ({"ram_gib": "0.5"}, '--ram-gib "0.5" must be a number from 1 to 65536'),
        ({"b_p": "52.7"}, '--b-p "52.7" is not a rate; write one such as 52.7GB/s'),
        ({"b_p": "52.7Gbit/s"}, '"52.7Gbit" is no size'),
        ({"b_h": "1B/s"}, '--b-h "1B/s" is out of range; it must be from 10MB/s to 100TB/s'),
        ({"b_h": "80-60GB/s"}, '--b-h "80-60GB/s" goes down'),
        ({"gpu_bandwidth": "1.2.3GB/s"}, "--gpu-bandwidth"),
        ({"cores": "-1"}, '--cores "-1" must be a whole number from 1 to 4096'),
        ({"context": "2000000"}, '--context "2000000" must be a whole number from 1 to 1048576'),
        ({"context": "4k"}, "--context"),
        ({"model": "no-such"}, "neither a directory nor a known model; known are qwen3.6-35b-a3b"),
        ({"format": "int3"}, "--format: no weight format is called 'int3'"),
        ({"format": "bf16"}, "--format is for a directory with a config.json"),
    ],
)
def test_bad_input_is_named_with_its_range(
    capsys: pytest.CaptureFixture[str], changed: dict[str, str], told: str
) -> None:
    given = [
        f"{word}={value}"
        for word, value in (
            MACHINE | {f"--{name.replace('_', '-')}": text for name, text in changed.items()}
        ).items()
    ]
    assert main(["plan", *given]) == 64
    said = capsys.readouterr()
    assert said.out == ""
    assert told in said.err


@pytest.mark.parametrize(
    ("text", "low", "high"),
    [
        ("52.7GB/s", 52.7e9, 52.7e9),
        (" 60 GiB/s ", 60 * 2**30, 60 * 2**30),
        ("500MB/s", 5e8, 5e8),
        ("1.8TB/s", 1.8e12, 1.8e12),
        ("56.7-77.3GB/s", 56.7e9, 77.3e9),
        ("900 GB - 1.8 TB/s", 9e11, 1.8e12),
    ],
)
def test_rates(text: str, low: float, high: float) -> None:
    assert parse_rate("--b-p", text) == Range(low=low, high=high)


def test_a_config_without_weights_has_the_sizes_of_the_published_model(config_dir: Path) -> None:
    found, known = model_shape(str(config_dir), None), model_shape("Qwen3-30B-A3B", None)
    for name in (
        "architecture",
        "weight_format",
        "layers_count",
        "moe_layers_count",
        "experts_per_layer_count",
        "top_k",
        "record_bytes",
        "kv_bytes_per_token",
        "context_tokens",
    ):
        assert getattr(found, name) == getattr(known, name), name
    assert found.dense_bytes.middle == pytest.approx(known.dense_bytes.middle, rel=0.05)
    assert found.dense_read_bytes.middle == pytest.approx(known.dense_read_bytes.middle, rel=0.05)


def test_another_format_of_the_experts(
    config_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = document(capsys, model=str(config_dir), format="int4_g32_f16")
    large = document(capsys, model=str(config_dir))
    assert small["model"]["weight_format"] == "int4_g32_f16"
    assert small["model"]["pool_bytes"] * 3 < large["model"]["pool_bytes"]
    assert small["model"]["served"] is True


def test_a_quantised_config(config_dir: Path) -> None:
    values = QWEN3_30B | {"quantization_config": {"quant_method": "mxfp4"}}
    (config_dir / "config.json").write_text(json.dumps(values))
    found = model_shape(str(config_dir), None)
    assert found.weight_format == "mxfp4"
    assert found.dense_bytes.low < found.dense_bytes.high


@pytest.mark.parametrize(
    ("text", "code", "told"),
    [
        (None, 65, "config.json is missing"),
        ("[]", 65, "holds no JSON object"),
        ("{", 65, "config.json"),
        (json.dumps(QWEN3_30B | {"num_experts": 0}), 64, "without routed experts"),
        (json.dumps(QWEN3_30B | {"architectures": ["Other"]}), 65, "'Other'"),
    ],
)
def test_directories_that_describe_no_model(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    text: str | None,
    code: int,
    told: str,
) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    assert main(arguments(model=str(tmp_path))) == code
    assert told in capsys.readouterr().err


def test_a_format_that_the_sizes_do_not_allow(config_dir: Path) -> None:
    values = QWEN3_30B | {"moe_intermediate_size": 100}
    (config_dir / "config.json").write_text(json.dumps(values))
    assert model_shape(str(config_dir), None).weight_format == "bf16"
    with pytest.raises(InvalidInputError, match="cannot have the format nvfp4"):
        model_shape(str(config_dir), parse_format("nvfp4"))


def test_an_ftw_directory_has_its_own_sizes(tmp_path: Path) -> None:
    write_tiny_mixtral(tmp_path / "source")
    convert(tmp_path / "source", tmp_path / "ftw")
    index = read_index(tmp_path / "ftw")
    found = model_shape(str(tmp_path / "ftw"), None)
    assert found.pool_bytes == index.expert_bank.length_bytes
    assert found.dense_bytes.low == found.dense_bytes.high
    assert found.dense_bytes.low == index.region_bytes - index.expert_bank.length_bytes
    assert found.weight_format == index.expert_bank.format
