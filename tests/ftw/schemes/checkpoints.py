"""Tiny checkpoints whose matrices are quantised by the caller, and what those matrices mean."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from freetokend.ftw.checkpoint import Checkpoint
from freetokend.ftw.matrix import dequantise
from freetokend.ftw.schemes.registry import open_scheme
from tests.support.safetensors_files import Stored, write_checkpoint_files
from tests.support.tiny_checkpoints import write_tiny_mixtral, write_tiny_qwen3_moe

Floats = NDArray[np.float64]
Values = NDArray[Any]
Array = NDArray[Any]
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]
DTYPES = {
    np.dtype(np.uint8): "U8",
    np.dtype(np.int8): "I8",
    np.dtype(np.int32): "I32",
    np.dtype(np.int64): "I64",
    np.dtype(np.float16): "F16",
    np.dtype(np.float32): "F32",
}


@dataclass
class Quantised:
    """What stands in the place of `name`.weight: tensors by their last names, and its meaning."""

    values: Floats
    tensors: dict[str, Stored] = field(default_factory=dict)

    def put(self, last_name: str, array: Array, dtype: str | None = None) -> None:
        """dtype: of the safetensors file, where numpy has none of its own."""
        name = DTYPES[array.dtype] if dtype is None else dtype
        self.tensors[last_name] = Stored(name, array.shape, np.ascontiguousarray(array).tobytes())


Quantise = Callable[[np.random.Generator, int, int], Quantised]
SIZES = {"hidden": 256, "inter": 256, "experts": 4, "layers": 1, "heads": 4, "kv_heads": 2}


def is_quantised(name: str) -> bool:
    """Linear layers but the router and the output projection, as is usual."""
    return name.endswith(("_proj.weight", ".w1.weight", ".w2.weight", ".w3.weight"))


def write_quantised(
    directory: Path,
    quantise: Quantise,
    config: Mapping[str, object] | None,
    *,
    mixtral: bool = False,
    chosen: Callable[[str], bool] = is_quantised,
    **sizes: int,
) -> dict[str, Floats]:
    """A checkpoint in which matrices that are `chosen` are what `quantise` makes. Their meaning.

    config: the quantization_config; sizes as those of the writers of tiny checkpoints.
    """
    plain = directory.with_name(directory.name + ".plain")
    write = write_tiny_mixtral if mixtral else write_tiny_qwen3_moe
    write(plain, head_dim=64, **(SIZES | sizes))
    random = np.random.default_rng(11)
    tensors: dict[str, Stored] = {}
    values = {}
    with Checkpoint(plain) as checkpoint:
        for name, tensor in checkpoint.tensors.items():
            if chosen(name):
                made = quantise(random, *tensor.shape)
                base = name.removesuffix(".weight")
                tensors |= {f"{base}.{last}": part for last, part in made.tensors.items()}
                values[name] = made.values
            else:
                raw = checkpoint.read(tensor, 0, tensor.length_bytes)
                tensors[name] = Stored(tensor.dtype, tensor.shape, raw.tobytes())
    (plain / "model.safetensors").unlink()
    plain.rename(directory)
    write_checkpoint_files(directory, tensors)
    edit_config(directory, quantization_config=config)
    return values


def edit_config(directory: Path, **values: object) -> None:
    """Change config.json; None removes a field."""
    path = directory / "config.json"
    config = json.loads(path.read_text()) | values
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


def change_tensors(directory: Path, change: Callable[[dict[str, Stored]], object]) -> None:
    """Rewrite model.safetensors after `change`."""
    with Checkpoint(directory) as checkpoint:
        tensors = {
            name: Stored(
                tensor.dtype,
                tensor.shape,
                checkpoint.read(tensor, 0, tensor.length_bytes).tobytes(),
            )
            for name, tensor in checkpoint.tensors.items()
        }
    change(tensors)
    write_checkpoint_files(directory, tensors)


def read_all(directory: Path, names: Mapping[str, Floats]) -> dict[str, tuple[str, Floats]]:
    """Format and meaning of the matrices `names`, read through their scheme in two parts."""
    result = {}
    with Checkpoint(directory) as checkpoint:
        scheme = open_scheme(checkpoint)
        for name, values in names.items():
            assert scheme.has(name)
            source = scheme.matrix(name, *values.shape)
            assert source is not None, name
            assert (source.rows_count, source.columns_count) == values.shape
            split = 32
            parts = [
                dequantise(source.read_rows(first, count))
                for first, count in ((0, split), (split, source.rows_count - split))
            ]
            result[name] = str(source.format), np.concatenate(parts)
    return result


def check_all(directory: Path, values: Mapping[str, Floats], weight_format: str) -> None:
    """Every matrix means what it should, to the last bit of fp32, and has the format."""
    assert len(values) == 16  # 4 of attention, 3 each of 4 experts
    for name, (found_format, found) in read_all(directory, values).items():
        assert found_format == weight_format, name
        assert np.array_equal(found.astype(np.float32), values[name].astype(np.float32)), name
        assert np.abs(found).max() > 0.01, name


def e4m3(code: int) -> float:
    """The value of an fp8 code that is not NaN."""
    sign = -1.0 if code & 0x80 else 1.0
    exponent, mantissa = code >> 3 & 15, code & 7
    if exponent == 0:
        return sign * mantissa / 8 * 2.0**-6
    return sign * (1 + mantissa / 8) * 2.0 ** (exponent - 7)


def table(function: Callable[[int], float]) -> Floats:
    """The values of all bytes; NaN where there is none."""
    return np.array([function(code) for code in range(256)])


def random_fp8(random: np.random.Generator, rows: int, columns: int) -> Array:
    """fp8 codes without NaN: u8 [rows, columns]."""
    codes = random.integers(0, 256, (rows, columns), np.uint8)
    return np.where(codes & 0x7F == 0x7F, 0x7E, codes).astype(np.uint8)


def random_scales(random: np.random.Generator, shape: tuple[int, ...], typical: float) -> Array:
    """Positive fp32 numbers within a factor of two of `typical`."""
    return (typical * random.uniform(0.5, 2.0, shape)).astype(np.float32)


def to_bf16(values: Array) -> tuple[Array, Floats]:
    """Bits of the nearest bf16 below in magnitude, and their values."""
    bits = (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return bits, (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
