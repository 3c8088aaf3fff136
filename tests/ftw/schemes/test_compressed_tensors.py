"""compressed-tensors: integers in words, nvfp4 with its reciprocal factor, mxfp4."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from freetokend.core.errors import ModelDataError, Reason
from freetokend.ftw.checkpoint import Checkpoint
from freetokend.ftw.schemes.registry import open_scheme
from tests.ftw.schemes.checkpoints import (
    E2M1,
    Array,
    Quantise,
    Quantised,
    change_tensors,
    check_all,
    e4m3,
    edit_config,
    random_scales,
    read_all,
    table,
    to_bf16,
    write_quantised,
)
from tests.support.safetensors_files import Stored

Q = "model.layers.0.self_attn.q_proj.weight"
PACKED = Q + "_packed"


def config(form: str, **weights: object) -> dict[str, Any]:
    """A quantization_config of one group."""
    defaults = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group"}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": defaults | weights,
                "input_activations": None,
                "output_activations": None,
            }
        },
        "ignore": ["lm_head", "re:.*mlp.gate$"],
        "kv_cache_scheme": None,
        "sparsity_config": {},
        "transform_config": {},
    }


def words_of(elements: Array, bits: int) -> Array:
    """int32 words along the last axis, the first element in the lowest bits, one by one."""
    per_word = 32 // bits
    rows, columns = elements.shape
    words = np.zeros((rows, -(-columns // per_word)), np.uint32)
    for column in range(columns):
        shift = np.uint32(column % per_word * bits)
        words[:, column // per_word] |= elements[:, column].astype(np.uint32) << shift
    return words.view(np.int32)


def integers(bits: int, group: int, dtype: str, *, symmetric: bool) -> Quantise:
    def quantise(random: np.random.Generator, rows: int, columns: int) -> Quantised:
        low, high = -(1 << (bits - 1)), 1 << (bits - 1)
        signed = random.integers(low, high, (rows, columns))
        zeros = random.integers(low, high, (rows, columns // group))
        if symmetric:
            zeros[:] = 0
        scales = random_scales(random, (rows, columns // group), 0.3 / high)
        stored, exact = to_bf16(scales)
        if dtype == "F16":
            stored = scales.astype(np.float16)
            exact = stored.astype(np.float64)
        groups = np.arange(columns) // group
        made = Quantised((signed - zeros[:, groups]) * exact[:, groups])
        made.put("weight_packed", words_of(signed - low, bits))
        made.put("weight_scale", stored, dtype)
        made.put("weight_shape", np.array([rows, columns], np.int64))
        if not symmetric:
            made.put("weight_zero_point", words_of((zeros - low).T, bits).T)
        return made

    return quantise


def fp4(group: int) -> Quantise:
    """nvfp4 (group 16) or mxfp4 (group 32)."""
    factors = table(e4m3)

    def quantise(random: np.random.Generator, rows: int, columns: int) -> Quantised:
        packed = random.integers(0, 256, (rows, columns // 2), np.uint8)
        values = np.empty((rows, columns))
        values[:, 0::2] = np.array(E2M1)[packed % 16]
        values[:, 1::2] = np.array(E2M1)[packed // 16]
        grid = (rows, columns // group)
        groups = np.arange(columns) // group
        made = Quantised(values)
        made.put("weight_packed", packed)
        if group == 32:
            scales = random.integers(120, 127, grid, np.uint8)
            made.put("weight_scale", scales)
            made.values = values * (2.0 ** (scales - 127.0))[:, groups]
            return made
        scales = random.integers(1, 127, grid, np.uint8)
        divisor = np.float32(random.uniform(400, 900))
        made.put("weight_scale", scales, "F8_E4M3")
        made.put("weight_global_scale", np.array([divisor], np.float32))
        made.put("input_global_scale", np.array([77.0], np.float32))
        factor = np.float64(np.float32(1) / divisor)
        made.values = values * factors[scales][:, groups] * factor
        return made

    return quantise


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(
    ("bits", "group", "dtype"), [(4, 32, "BF16"), (4, 128, "F16"), (8, 64, "BF16")]
)
def test_integers(bits: int, group: int, dtype: str, symmetric: bool, tmp_path: Path) -> None:
    values = write_quantised(
        tmp_path / "source",
        integers(bits, group, dtype, symmetric=symmetric),
        config("pack-quantized", num_bits=bits, group_size=group, symmetric=symmetric),
        mixtral=bits == 8,
    )
    suffix = "" if symmetric else "_zp"
    check_all(tmp_path / "source", values, f"int{bits}_g{group}_{dtype.lower()}{suffix}")


@pytest.mark.parametrize("group", [16, 32])
def test_fp4(group: int, tmp_path: Path) -> None:
    form = "nvfp4" if group == 16 else "mxfp4"
    strategy = "tensor_group" if group == 16 else "group"
    values = write_quantised(
        tmp_path / "source",
        fp4(group),
        config(f"{form}-pack-quantized", type="float", group_size=group, strategy=strategy),
    )
    check_all(tmp_path / "source", values, form)


def test_modules_of_several_kinds(tmp_path: Path) -> None:
    """The tensors tell which of the declared kinds a module has."""
    eight, four = (integers(bits, 64, "BF16", symmetric=True) for bits in (8, 4))
    both = config("pack-quantized", num_bits=4, group_size=64)
    both["config_groups"]["group_1"] = config("pack-quantized", num_bits=8, group_size=64)[
        "config_groups"
    ]["group_0"]

    def one_or_the_other(random: np.random.Generator, rows: int, columns: int) -> Quantised:
        return (eight if random.random() < 0.5 else four)(random, rows, columns)

    values = write_quantised(tmp_path / "source", one_or_the_other, both)
    found = read_all(tmp_path / "source", values)
    assert {weight_format for weight_format, _ in found.values()} == {
        "int4_g64_bf16",
        "int8_g64_bf16",
    }
    for name, (_, meaning) in found.items():
        assert np.array_equal(meaning, values[name])


@pytest.fixture
def source(tmp_path: Path) -> Path:
    write_quantised(
        tmp_path / "source",
        integers(4, 32, "BF16", symmetric=False),
        config("pack-quantized", group_size=32, symmetric=False),
    )
    return tmp_path / "source"


def put(name: str, stored: Stored) -> Callable[[dict[str, Stored]], object]:
    return lambda all: all.update({name: stored})


DAMAGE: dict[str, tuple[Callable[[dict[str, Stored]], object], str]] = {
    "no scale": (lambda all: all.pop(Q + "_scale"), rf"lacks the tensor {Q}_scale"),
    "scale of another shape": (
        put(Q + "_scale", Stored("BF16", (256, 4), bytes(2048))),
        rf"{Q}_scale has the shape \[256, 4\]; .*\[256, 8\]",
    ),
    "scale of another type": (
        put(Q + "_scale", Stored("F32", (256, 8), bytes(8192))),
        rf"{Q}_scale is F32; .*F16 or BF16",
    ),
    "zero points lost": (
        lambda all: all.pop(Q + "_zero_point"),
        rf"lacks the tensor {Q}_zero_point",
    ),
    "words of another shape": (
        put(PACKED, Stored("I32", (256, 31), bytes(256 * 124))),
        rf"{PACKED} has the shape \[256, 31\]",
    ),
    "another shape recorded": (
        put(Q + "_shape", Stored("I64", (2,), np.array([256, 255]).tobytes())),
        rf"{Q}_shape says \[256, 255\]; config\.json says \[256, 256\]",
    ),
    "order of columns": (
        put(
            Q + "_g_idx",
            Stored("I32", (256,), (np.arange(256, dtype=np.int32)[::-1] // 32).tobytes()),
        ),
        rf"{Q}_g_idx puts columns into groups out of order",
    ),
    "a form that is not declared": (
        put(PACKED, Stored("U8", (256, 128), bytes(256 * 128))),
        "config_groups of quantization_config do not list",
    ),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_named(name: str, source: Path) -> None:
    change, message = DAMAGE[name]
    change_tensors(source, change)
    with Checkpoint(source) as checkpoint, pytest.raises(ModelDataError, match=message):
        open_scheme(checkpoint).matrix(Q, 256, 256)


def test_groups_that_do_not_divide_the_width(source: Path) -> None:
    with Checkpoint(source) as checkpoint:
        scheme = open_scheme(checkpoint)
        with pytest.raises(ModelDataError, match=rf"{Q}: 240 columns are not a multiple of 32"):
            scheme.matrix(Q, 256, 240)


def test_the_factor_of_nvfp4(tmp_path: Path) -> None:
    source = tmp_path / "source"
    declared = config("nvfp4-pack-quantized", type="float", group_size=16, strategy="tensor_group")
    write_quantised(source, fp4(16), declared)
    name = Q + "_global_scale"
    for value in (0.0, float("nan"), float("inf"), -1.0):
        raw = np.float32(value).tobytes()
        change_tensors(source, put(name, Stored("F32", (1,), raw)))
        with Checkpoint(source) as checkpoint, pytest.raises(ModelDataError, match=name):
            open_scheme(checkpoint).matrix(Q, 256, 256)
    change_tensors(source, lambda all: all.pop(name))
    lacking = pytest.raises(ModelDataError, match=f"lacks the tensor {name}")
    with Checkpoint(source) as checkpoint, lacking:
        open_scheme(checkpoint).matrix(Q, 256, 256)
    edit_config(source, quantization_config=None)
    with Checkpoint(source) as checkpoint:
        with pytest.raises(ModelDataError, match=r"reciprocal.*cannot be known") as caught:
            open_scheme(checkpoint)
        assert caught.value.reason is Reason.MODEL_UNSUPPORTED
