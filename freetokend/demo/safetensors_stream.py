"""Writes a safetensors file tensor by tensor.

The library's `save_file` needs all tensors in memory twice (2.8 GB here); this needs one at a time,
so the demo also builds on the small machine that it is meant to be tried on.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

_DATA_ALIGNMENT_BYTES = 8
_F16_BYTES = 2


def safetensors_header(shapes: Mapping[str, tuple[int, ...]]) -> bytes:
    """Length word and JSON header for float16 tensors that lie in the order of `shapes`."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in shapes.items():
        end = offset + math.prod(shape) * _F16_BYTES
        entries[name] = {"dtype": "F16", "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    body = json.dumps(entries, separators=(",", ":")).encode()
    body += b" " * (-len(body) % _DATA_ALIGNMENT_BYTES)
    return len(body).to_bytes(8, "little") + body


def safetensors_bytes(shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Size of the file that `write_safetensors` will write."""
    values = sum(math.prod(shape) for shape in shapes.values())
    return len(safetensors_header(shapes)) + values * _F16_BYTES


def write_safetensors(
    path: Path,
    shapes: Mapping[str, tuple[int, ...]],
    tensors: Iterable[tuple[str, NDArray[np.float16]]],
) -> None:
    """Write and fsync the file. `tensors` must match `shapes` in names, order and shape."""
    with path.open("xb") as stream:
        stream.write(safetensors_header(shapes))
        for (name, shape), (given, tensor) in zip(shapes.items(), tensors, strict=True):
            if given != name or tensor.shape != shape or tensor.dtype != np.float16:
                raise ValueError(
                    f"expected {name} float16 {shape}, got {given} {tensor.dtype} {tensor.shape}"
                )
            stream.write(np.ascontiguousarray(tensor).data)
        stream.flush()
        os.fsync(stream.fileno())
