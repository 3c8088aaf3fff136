"""GPTQ (both forms) and AWQ, which store matrices transposed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from freetokend.core.errors import ModelDataError, Reason
from freetokend.ftw.checkpoint import Checkpoint
from freetokend.ftw.schemes.registry import open_scheme
from tests.ftw.schemes.checkpoints import (
    Array,
    Quantise,
    Quantised,
    change_tensors,
    check_all,
    random_scales,
    write_quantised,
)
from tests.ftw.schemes.test_compressed_tensors import words_of
from tests.support.safetensors_files import Stored

Q = "model.layers.0.self_attn.q_proj"


def gptq_config(bits: int, group: int, **more: object) -> dict[str, Any]:
    return {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group,
        "desc_act": False,
        "sym": True,
        "checkpoint_format": "gptq",
    } | more


def awq_config(group: int, **more: object) -> dict[str, Any]:
    return {
        "quant_method": "awq",
        "bits": 4,
        "group_size": group,
        "zero_point": True,
        "version": "gemm",
    } | more


def awq_words(elements: Array) -> Array:
    """Eight columns to a word, of which the lowest bits hold 0 2 4 6 1 3 5 7."""
    rows, columns = elements.shape
    words = np.zeros((rows, columns // 8), np.uint32)
    for place, column in enumerate((0, 2, 4, 6, 1, 3, 5, 7)):
        words |= elements[:, column::8].astype(np.uint32) << np.uint32(4 * place)
    return words.view(np.int32)


def transposed(
    bits: int, group: int, *, zero_offset: int, symmetric: bool = False, awq: bool = False
) -> Quantise:
    def quantise(random: np.random.Generator, rows: int, columns: int) -> Quantised:
        top = 1 << bits
        elements = random.integers(0, top, (columns, rows))
        zeros = random.integers(zero_offset, top, (columns // group, rows))
        if symmetric:
            zeros[:] = top // 2
        scales = random_scales(random, (columns // group, rows), 0.6 / top).astype(np.float16)
        groups = np.arange(columns) // group
        made = Quantised(((elements - zeros[groups]) * scales.astype(np.float64)[groups]).T)
        made.put("scales", scales)
        if awq:
            made.put("qweight", awq_words(elements))
            made.put("qzeros", awq_words(zeros))
            return made
        made.put("qweight", words_of(elements.T, bits).T)
        made.put("qzeros", words_of(zeros - zero_offset, bits))
        made.put("g_idx", groups.astype(np.int32))
        return made

    return quantise


@pytest.mark.parametrize(
    ("bits", "group", "form", "symmetric"),
    [(4, 128, "gptq", True), (4, 32, "gptq", False), (4, 64, "gptq_v2", False),
     (8, 128, "gptq", True), (8, 32, "gptq_v2", False)],
)  # fmt: skip
def test_gptq(bits: int, group: int, form: str, symmetric: bool, tmp_path: Path) -> None:
    values = write_quantised(
        tmp_path / "source",
        transposed(bits, group, zero_offset=1 if form == "gptq" else 0, symmetric=symmetric),
        gptq_config(bits, group, sym=symmetric, checkpoint_format=form),
        mixtral=bits == 8,
    )
    suffix = "" if symmetric else "_zp"
    check_all(tmp_path / "source", values, f"int{bits}_g{group}_f16{suffix}")


@pytest.mark.parametrize("group", [32, 128])
def test_awq(group: int, tmp_path: Path) -> None:
    values = write_quantised(
        tmp_path / "source", transposed(4, group, zero_offset=0, awq=True), awq_config(group)
    )
    check_all(tmp_path / "source", values, f"int4_g{group}_f16_zp")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    write_quantised(
        tmp_path / "source",
        transposed(4, 32, zero_offset=1, symmetric=True),
        gptq_config(4, 32),
    )
    return tmp_path / "source"


def refused(source: Path, message: str, rows: int = 256, columns: int = 256) -> ModelDataError:
    def read(checkpoint: Checkpoint) -> None:
        matrix = open_scheme(checkpoint).matrix(Q + ".weight", rows, columns)
        assert matrix is not None
        matrix.read_rows(0, 16)

    with Checkpoint(source) as checkpoint, pytest.raises(ModelDataError, match=message) as caught:
        read(checkpoint)
    return caught.value


def test_columns_out_of_order_are_refused(source: Path) -> None:
    order = np.arange(256, dtype=np.int32) // 32
    order[[0, 40]] = order[[40, 0]]
    change_tensors(
        source, lambda all: all.update({Q + ".g_idx": Stored("I32", (256,), order.tobytes())})
    )
    error = refused(source, rf"{Q}\.g_idx puts columns into groups out of order \(act-order")
    assert error.reason is Reason.MODEL_UNSUPPORTED


def test_an_order_that_nothing_tells_is_refused(tmp_path: Path) -> None:
    source = tmp_path / "source"
    write_quantised(
        source,
        transposed(4, 32, zero_offset=1, symmetric=True),
        gptq_config(4, 32, desc_act=True),
    )
    with Checkpoint(source) as checkpoint:  # with the order it is taken: here columns are in line
        assert open_scheme(checkpoint).matrix(Q + ".weight", 256, 256) is not None
    change_tensors(source, lambda all: all.pop(Q + ".g_idx"))
    refused(source, rf"{Q}\.g_idx is missing: desc_act says")


def test_zero_points_that_contradict_the_config(source: Path) -> None:
    zeros = np.full((8, 32), 0x77777777, np.uint32)
    zeros[5, 1] = 0x77777767
    change_tensors(
        source, lambda all: all.update({Q + ".qzeros": Stored("I32", (8, 32), zeros.tobytes())})
    )
    refused(source, rf"{Q}\.qzeros holds zero points other than 8, but .* symmetric")


def test_a_zero_point_of_16_is_refused(tmp_path: Path) -> None:
    source = tmp_path / "source"
    write_quantised(source, transposed(4, 32, zero_offset=1), gptq_config(4, 32, sym=False))
    zeros = bytes([0xFF]) + bytes(8 * 32 * 4 - 1)
    change_tensors(source, lambda all: all.update({Q + ".qzeros": Stored("I32", (8, 32), zeros)}))
    refused(source, rf"{Q}\.qzeros holds a zero point of 16")


def test_damage_is_named(source: Path) -> None:
    refused(source, rf"{Q}\.qweight has the shape \[32, 256\]; .*\[32, 512\]", rows=512)
    refused(source, rf"{Q}\.weight: 250 columns are not a multiple of 32", columns=250)
    refused(source, rf"{Q}\.qzeros: 252 rows are not a multiple of 8", rows=252)
    change_tensors(source, lambda all: all.pop(Q + ".scales"))
    refused(source, rf"lacks the tensor {Q}\.scales")


def test_a_bias_of_zeros_has_no_meaning(source: Path) -> None:
    """AutoGPTQ writes one for every module."""
    for value, is_dropped in ((0, True), (1, False)):
        data = bytes(510) + value.to_bytes(2, "little")
        bias = {Q + ".bias": Stored("F16", (256,), data)}
        change_tensors(source, lambda all, bias=bias: all.update(bias))
        with Checkpoint(source) as checkpoint:
            scheme = open_scheme(checkpoint)
            assert scheme.matrix(Q + ".weight", 256, 256) is not None
            assert (Q + ".bias" in scheme.consumed) == is_dropped


@pytest.mark.parametrize("per_row", [0, 1 << 20])
@pytest.mark.parametrize("awq", [True, False])
def test_both_ways_of_reading_a_part(
    awq: bool, per_row: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of wide tensors only the part of each row is read, of others everything."""
    monkeypatch.setattr("freetokend.ftw.schemes.parts._ROW_OVERHEAD_BYTES", per_row)
    values = write_quantised(
        tmp_path / "source",
        transposed(4, 32, zero_offset=0, awq=awq),
        awq_config(32) if awq else gptq_config(4, 32, sym=False, checkpoint_format="gptq_v2"),
    )
    check_all(tmp_path / "source", values, "int4_g32_f16_zp")
