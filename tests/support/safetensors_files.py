"""Writing safetensors files, well-formed or not, without torch."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from freetokend.ftw.packing import f32_to_bf16

SAFETENSORS_DTYPES = {"bf16": "BF16", "f16": "F16", "f32": "F32"}


class Stored(NamedTuple):
    """A tensor as a safetensors file holds it."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


def stored(values: NDArray[np.float32], dtype: str) -> Stored:
    """`values` rounded to "bf16", "f16" or "f32"."""
    match dtype:
        case "bf16":
            data = f32_to_bf16(values).tobytes()
        case "f16":
            data = values.astype(np.float16).tobytes()
        case "f32":
            data = values.astype(np.float32).tobytes()
        case _:
            raise ValueError(f"unknown dtype {dtype}")
    return Stored(SAFETENSORS_DTYPES[dtype], values.shape, data)


def write_safetensors(path: Path, tensors: Mapping[str, Stored]) -> None:
    """One well-formed file."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, tensor in tensors.items():
        end = offset + len(tensor.data)
        header[name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    with open(path, "wb") as file:
        write_header(file.fileno(), header)
        file.seek(0, 2)
        for tensor in tensors.values():
            file.write(tensor.data)


def write_header(descriptor: int, header: Mapping[str, object]) -> int:
    """Write length and JSON at the start of an open file; returns where the data begins."""
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    os.pwrite(descriptor, len(text).to_bytes(8, "little") + text, 0)
    return 8 + len(text)


def write_checkpoint_files(
    directory: Path, tensors: Mapping[str, Stored], *, shards: int = 1
) -> None:
    """model.safetensors, or `shards` files with their index."""
    if shards == 1:
        write_safetensors(directory / "model.safetensors", tensors)
        return
    weight_map = {}
    names = list(tensors)
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        chosen = names[shard::shards]
        write_safetensors(directory / file, {name: tensors[name] for name in chosen})
        weight_map.update(dict.fromkeys(chosen, file))
    total = sum(len(tensor.data) for tensor in tensors.values())
    table = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(table))
