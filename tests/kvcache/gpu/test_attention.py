"""Attention on a GPU: interpreted beside float64, compiled, pretended; and FlashInfer's calls."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from freetokend.core.errors import InternalError
from freetokend.kvcache.gpu.flashinfer_store import Spans
from freetokend.kvcache.gpu.pages import DevicePages
from freetokend.kvcache.gpu.triton_store import TritonKvStore, part_tokens_of
from freetokend.policy.kernel_choice import CAPABILITIES
from freetokend.policy.kv_sizing import KvShape
from tests.fakes.cuda_guard import pretend_cuda
from tests.support.device_model import OnlyOn, decode_batch, on_device

SHAPE = KvShape(layers_count=2, kv_heads_count=2, head_size=64, element_bytes=2, page_tokens=16)
# Head sizes and groups of models there are; the others with --full.
FEW = ("86:128:8", "89:64:8", "90:256:8", "100:128:4", "120:128:16")
HEADS = ("64:8", "80:1", "96:3", "128:4", "128:16", "192:1", "256:4", "256:8")


def run_module(name: str, *arguments: str, **environment: str) -> str:
    """What a module says, in a process of its own: how Triton works is settled at its import."""
    done = subprocess.run(
        [sys.executable, "-m", f"tests.kvcache.gpu.{name}", *arguments],
        env=os.environ | environment,
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def check_errors(said: str) -> None:
    rows = json.loads(said)
    assert len(rows) == 5
    for row in rows:
        # The nearest bf16, but for what is lost by cancelling.
        assert max(row["prompt"], row["token"], row["tokens"]) < 0.51, row


@pytest.mark.slow
def test_interpreted_kernels_are_float64_and_invariant() -> None:
    check_errors(run_module("interpreted", "1", TRITON_INTERPRET="1"))


@pytest.mark.full
@pytest.mark.parametrize("seed", range(2, 6))
def test_more_interpreted_inputs(seed: int) -> None:
    check_errors(run_module("interpreted", str(seed), TRITON_INTERPRET="1"))


@pytest.mark.slow
def test_flashinfer_behind_the_same_interface() -> None:
    assert run_module("interpreted_flashinfer", TRITON_INTERPRET="1") == "attended\n"


def check_compiled(cases: list[str], folder: Path) -> None:
    said = run_module("compiled", *cases, TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(folder))
    rows = json.loads(said)
    kernels = ("store_kv", "attend_tiles", "attend_parts", "merge_parts")
    # One kernel each, whatever the numbers of tokens and pages.
    assert [(row["case"], row["kernel"]) for row in rows] == [
        (case, kernel) for case in cases for kernel in kernels
    ]
    for row in rows:
        attends = row["kernel"].startswith("attend")
        assert row["target"] == int(row["case"].split(":")[0]), row
        assert row["shared_bytes"] <= 99 << 10, row
        assert (row["spilled_bytes"], row["local"]) == (0, 0), row
        wide = {"token"} if row["kernel"] == "merge_parts" else {"page", "token", "table_width"}
        assert wide <= set(row["widened"]), row
        # The same instructions in both, whatever else a GPU has for larger tiles; and the warps
        # side by side, each with all rows, so that a row's numbers are added up alike.
        assert row["products"] == (["mma.sync"] if attends else []), row
        warps = [[1, 8 if row["case"].split(":")[1] in ("80", "96", "128") else 4]]
        assert row["product_warps"] == (warps if attends else []), row
        assert row["loads_16"] > 0 or row["kernel"] == "merge_parts", row


@pytest.mark.slow
def test_kernels_compile_for_every_gpu(tmp_path: Path) -> None:
    check_compiled(list(FEW), tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("heads", HEADS)
def test_every_head_compiles_for_every_gpu(heads: str, tmp_path: Path) -> None:
    capabilities = [10 * major + minor for major, minor in CAPABILITIES]
    check_compiled([f"{one}:{heads}" for one in capabilities], tmp_path)


def test_the_matrix_is_that_of_the_table() -> None:
    assert [case.split(":")[0] for case in FEW] == [f"{a}{b}" for a, b in CAPABILITIES]


@pytest.mark.parametrize("tokens", [1, 3])
def test_a_step_on_a_pretended_gpu(tokens: int, tmp_path: Path) -> None:
    device = pretend_cuda(tmp_path)
    with FakeTensorMode():
        store = TritonKvStore(DevicePages.take(SHAPE, 8, device), context_tokens=64)
        batch = decode_batch([20, 9], page_tokens=16, tokens=lambda _: tokens)
        view = store.view(on_device(batch, device))
        q = torch.zeros(2 * tokens, 6, 64, device=device)
        k = torch.zeros(2 * tokens, 2, 64, device=device)
        with OnlyOn("cuda") as mode:
            out = view.attend(1, q, k, k, 0.1)
        kind = "parts" if tokens == 1 else "tiles"
        assert {"freetokend::store_kv", f"freetokend::attend_pages_{kind}"} <= mode.names
        assert (out.shape, out.dtype, out.device) == ((2 * tokens, 384), torch.bfloat16, device)
        moved = store.view(batch)  # from the host
        assert moved.attend(0, q, k, k, 0.1).device == device
        for wrong in (q[:, :5], q.bfloat16(), q.transpose(0, 1)):
            with pytest.raises(InternalError):
                view.attend(1, wrong, k, k, 0.1)
        for wrong in (k[:, :1], k.half(), k[:1]):
            with pytest.raises(InternalError):
                view.attend(1, q, wrong, k, 0.1)


def test_parts_are_whole_pages_and_never_too_many() -> None:
    for page_tokens, context, tokens in (
        (32, 1, 256),
        (32, 32_768, 256),
        (32, 32_769, 512),
        (32, 262_144, 2048),
        (48, 1000, 288),
    ):
        assert part_tokens_of(context, page_tokens) == tokens
        assert tokens % page_tokens == 0


def test_a_step_in_flashinfers_words() -> None:
    batch = decode_batch([33, 16, 7], page_tokens=16, tokens=lambda row: row + 1)
    spans = Spans.of(batch, 16)
    assert spans.query_starts.tolist() == [0, 1, 3, 6]
    assert spans.page_starts.tolist() == [0, 3, 4, 5]
    assert spans.pages.tolist() == [0, 1, 2, 3, 4]
    assert spans.last_page_tokens.tolist() == [1, 16, 7]
    assert {
        getattr(spans, name).dtype
        for name in ("query_starts", "page_starts", "pages", "last_page_tokens")
    } == {torch.int32}
