"""Converted gpt-oss and DeepSeek-V4 experts, in the pool, against float64 and transformers."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

from freetokend.experts.bank import MappedBank
from freetokend.experts.cpu import CpuExpertDispatch
from freetokend.ftw.convert import convert
from freetokend.ftw.formats import parse_format
from freetokend.ftw.model import Wanted
from freetokend.ftw.reader import FtwDirectory
from freetokend.native.executor import Executor
from freetokend.native.loader import ShardFile
from freetokend.native.pool import PoolMapping, create_pool_file
from tests.ftw.published import DEEPSEEK_V4, Expert, Floats, Published, deepseek_v4, gpt_oss

transformers = pytest.importorskip("transformers")

TOKENS, TOP_K = 9, 2
# The activations between the matrices are rounded to bf16; nothing else is.
BOUND = 4e-3


@pytest.fixture(scope="module")
def executor() -> Iterator[Executor]:
    with Executor(sorted(os.sched_getaffinity(0))[:2]) as executor:
        yield executor


@contextmanager
def pooled(directory: FtwDirectory) -> Iterator[MappedBank]:
    """The bank of an FTW directory in a pool that was loaded as the engine loads it."""
    index = directory.index
    pool = create_pool_file("freetoken-published", index.region_bytes, index.identity)
    try:
        with PoolMapping(pool.fd) as mapping:
            shards = [
                ShardFile(
                    path=str(path),
                    offset_bytes=shard.offset_bytes,
                    length_bytes=shard.length_bytes,
                    block_checksums=shard.block_checksums,
                )
                for path, shard in zip(directory.shard_paths(), index.shards, strict=True)
            ]
            mapping.load(shards, verify=True)
            mapping.mark_filled()
            mapping.protect()
            yield MappedBank(bank=index.expert_bank, region_address=mapping.region_address)
    finally:
        pool.close()


def activations(made: Published, gain: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x bf16 [T, H], expert ids int32 and weights fp32 [T, k]."""
    generator = torch.Generator().manual_seed(1)
    experts = 1 + max(number for _, number in made.experts)
    x = (gain * torch.randn(TOKENS, made.hidden, generator=generator)).bfloat16()
    ids = torch.stack([torch.randperm(experts, generator=generator)[:TOP_K] for _ in range(TOKENS)])
    weights = torch.rand(TOKENS, TOP_K, generator=generator) + 0.1
    return x, ids.int(), weights


def exact(made: Published, expert: Expert, row: Floats, *, limit: float) -> Floats:
    """What the family's paper code computes, in float64, from what the checkpoint means."""
    of_gate, of_up, of_down = expert.biases or (np.zeros(1),) * 3
    gate = np.minimum(expert.gate @ row + of_gate, limit)
    up = np.clip(expert.up @ row + of_up, -limit, limit)
    if made.config["architectures"] == [DEEPSEEK_V4]:
        inner = gate / (1 + np.exp(-gate)) * up
    else:
        inner = (up + 1) * gate / (1 + np.exp(-1.702 * gate))
    return expert.down @ inner + of_down


def layer_output(
    made: Published,
    layer: int,
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    *,
    limit: float | None = None,
) -> Floats:
    x, ids, weights = (part.double().numpy() for part in inputs)
    limit = float(made.config["swiglu_limit"]) if limit is None else limit
    out = np.zeros((TOKENS, made.hidden))
    for token in range(TOKENS):
        for number, weight in zip(ids[token], weights[token], strict=True):
            expert = made.experts[layer, int(number)]
            out[token] += weight * exact(made, expert, x[token], limit=limit)
    return out


def difference(found: Floats, wanted: Floats) -> float:
    """Share of the norm, worst of all tokens."""
    norms = np.linalg.norm(wanted, axis=1)
    return float((np.linalg.norm(found - wanted, axis=1) / norms).max())


def dispatched(
    executor: Executor,
    mapped: MappedBank,
    layer: int,
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> Floats:
    out: Floats = CpuExpertDispatch(executor, mapped).dispatch(layer, *inputs).double().numpy()
    return out


@pytest.mark.parametrize(
    ("make", "gain"),
    [
        (gpt_oss, 6.0),
        (lambda: gpt_oss(plain=True), 3.0),
        (lambda: gpt_oss(hidden=160, inner=32), 4.0),
        (deepseek_v4, 10.0),
        (lambda: deepseek_v4(hidden=96, inner=160), 8.0),
    ],
    ids=["gpt-oss", "gpt-oss bf16", "gpt-oss narrow", "deepseek-v4", "deepseek-v4 wide"],
)
def test_what_is_served_is_what_the_checkpoint_means(
    make: Callable[[], Published], gain: float, tmp_path: Path, executor: Executor
) -> None:
    made = make()
    convert(made.write(tmp_path / "source"), tmp_path / "model")
    inputs = activations(made, gain)
    with pooled(FtwDirectory(tmp_path / "model")) as mapped:
        for layer in range(mapped.bank.moe_layers_count):
            wanted = layer_output(made, layer, inputs)
            assert difference(dispatched(executor, mapped, layer, inputs), wanted) < BOUND
            # The limit is one that these products reach.
            assert difference(layer_output(made, layer, inputs, limit=1e9), wanted) > 10 * BOUND


def test_quantised_again_the_biases_stay(tmp_path: Path, executor: Executor) -> None:
    made = gpt_oss()
    source = made.write(tmp_path / "source")
    convert(source, tmp_path / "model", wanted=Wanted(experts=parse_format("int8_g32_f16")))
    # Inputs of zeros leave the biases, which no format changes.
    x, ids, weights = activations(made, 0.0)
    with pooled(FtwDirectory(tmp_path / "model")) as mapped:
        assert mapped.bank.format == "int8_g32_f16"
        found = dispatched(executor, mapped, 1, (x, ids, weights))
        assert difference(found, layer_output(made, 1, (x, ids, weights))) < 1e-2
        inputs = activations(made, 6.0)
        found = dispatched(executor, mapped, 1, inputs)
        assert difference(found, layer_output(made, 1, inputs)) < 3e-2


@pytest.mark.parametrize("make", [gpt_oss, deepseek_v4])
def test_the_reference_is_that_of_transformers(make: Callable[[], Published]) -> None:
    made = make()
    x, ids, weights = activations(made, 6.0)
    count = 1 + max(number for _, number in made.experts)
    experts = [made.experts[1, number] for number in range(count)]
    if make is gpt_oss:
        from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

        theirs = GptOssExperts(
            transformers.GptOssConfig(
                hidden_size=made.hidden, intermediate_size=made.inner, num_local_experts=count
            )
        ).double()
        both = [np.stack((e.gate, e.up), axis=1).reshape(-1, made.hidden).T for e in experts]
        biases = [np.stack(e.biases[:2], axis=1).reshape(-1) for e in experts if e.biases]
        values = {
            "gate_up_proj": np.stack(both),
            "down_proj": np.stack([e.down.T for e in experts]),
            "gate_up_proj_bias": np.stack(biases),
            "down_proj_bias": np.stack([e.biases[2] for e in experts if e.biases]),
        }
    else:
        from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4Experts

        theirs = DeepseekV4Experts(
            transformers.DeepseekV4Config(
                hidden_size=made.hidden,
                moe_intermediate_size=made.inner,
                n_routed_experts=count,
            )
        ).double()
        values = {
            "gate_up_proj": np.stack([np.concatenate((e.gate, e.up)) for e in experts]),
            "down_proj": np.stack([e.down for e in experts]),
        }
    theirs.load_state_dict({name: torch.from_numpy(value) for name, value in values.items()})
    with torch.no_grad():
        found = theirs(x.double(), ids.long(), weights.double()).numpy()
    assert difference(found, layer_output(made, 1, (x, ids, weights))) < 1e-12
