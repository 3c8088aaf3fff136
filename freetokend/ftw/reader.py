"""Reading an FTW directory: index, configuration and, for tests and inspection, single tensors."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from freetokend.core.errors import ModelDataError
from freetokend.ftw.formats import parse_format
from freetokend.ftw.index import FtwIndex, read_index
from freetokend.ftw.layout import EXPERT_RECORDS, ROWS16
from freetokend.ftw.matrix import dequantise
from freetokend.ftw.packing import bf16_to_f32
from freetokend.ftw.packing_blocks import unpack_matrix
from freetokend.ftw.packing_record import unpack_record
from freetokend.ftw.strict_json import JsonObject, io_error, parse_json, read_file

CONFIG_FILE: Final = "config.json"
MAX_CONFIG_BYTES: Final = 4 * 1024 * 1024


class FtwDirectory:
    """A checked FTW directory. Holds no open files.

    Raises ModelDataError as `read_index` does.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.index: FtwIndex = read_index(self.path)

    def shard_paths(self) -> tuple[Path, ...]:
        """The shard files in region order."""
        return tuple(self.path / shard.file for shard in self.index.shards)

    def model_config(self) -> dict[str, object]:
        """config.json as it came with the checkpoint."""
        return read_json_object(self.path / CONFIG_FILE, "the model's configuration")

    def read_region(self, offset_bytes: int, length_bytes: int) -> NDArray[np.uint8]:
        """A copy of [offset, offset + length) of the region, across shards."""
        out = np.empty(length_bytes, dtype=np.uint8)
        view = out.data
        end_bytes = offset_bytes + length_bytes
        if offset_bytes < 0 or length_bytes < 0 or end_bytes > self.index.region_bytes:
            raise ValueError(f"[{offset_bytes}, {end_bytes}) is not within the region")
        for shard in self.index.shards:
            start = max(offset_bytes, shard.offset_bytes)
            end = min(end_bytes, shard.offset_bytes + shard.length_bytes)
            if start < end:
                part = view[start - offset_bytes : end - offset_bytes]
                _read_into(self.path / shard.file, start - shard.offset_bytes, part)
        return out

    def tensor(self, name: str) -> NDArray[np.generic]:
        """A tensor in its logical shape: fp32, whatever its format; u8 for expert records, i32
        for tables of expert ids.

        ModelDataError when there is no such tensor. Reads the whole tensor into memory.
        """
        entry = self.index.tensors.get(name)
        if entry is None:
            raise ModelDataError(f"{self.path} holds no tensor called {name}.")
        raw = self.read_region(entry.offset_bytes, entry.length_bytes)
        if entry.layout == EXPERT_RECORDS:
            return raw.reshape(entry.shape)
        if entry.dtype == "f32":
            return raw.view(np.float32).reshape(entry.shape)
        if entry.dtype == "i32":
            return raw.view(np.int32).reshape(entry.shape)
        if entry.layout == ROWS16:
            rows, columns = entry.shape
            matrix = unpack_matrix(raw, parse_format(entry.dtype), rows, columns)
            return dequantise(matrix, np.float32)
        return bf16_to_f32(raw.view(np.uint16).reshape(entry.shape))

    def expert(
        self, moe_layer_index: int, expert: int
    ) -> tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.float32]]:
        """gate [I, H], up [I, H] and down [H, I] of one expert, as fp32."""
        bank = self.index.expert_bank
        if not 0 <= moe_layer_index < bank.moe_layers_count:
            raise ValueError(f"no MoE layer {moe_layer_index}")
        if not 0 <= expert < bank.experts_per_layer_count:
            raise ValueError(f"no expert {expert}")
        offset_bytes = bank.record_offset_bytes(bank.expert_id(moe_layer_index, expert))
        record = self.read_region(offset_bytes, bank.record_bytes)
        expert_matrices = unpack_record(
            record,
            parse_format(bank.format),
            bank.hidden_size,
            bank.intermediate_size,
            has_bias=bank.has_bias,
        )
        gate, up, down = (
            dequantise(part, np.float32)
            for part in (expert_matrices.gate, expert_matrices.up, expert_matrices.down)
        )
        return gate, up, down


def read_json_object(path: Path, purpose: str) -> dict[str, object]:
    """The JSON object in a small file; ModelDataError when it is missing or damaged."""
    data = read_file(path, limit_bytes=MAX_CONFIG_BYTES, purpose=purpose)
    return JsonObject(parse_json(data, str(path)), str(path)).members()


def _read_into(path: Path, offset_bytes: int, out: memoryview) -> None:
    try:
        with open(path, "rb", buffering=0) as file:
            file.seek(offset_bytes)
            done = 0
            while done < len(out):
                count = file.readinto(out[done:])
                if not count:
                    raise ModelDataError(f"{path} ended early while it was read.")
                done += count
    except OSError as error:
        raise io_error(f"cannot read {path}", error) from error
