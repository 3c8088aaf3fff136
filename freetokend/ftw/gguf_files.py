"""The GGUF files of a directory: one model in one file, or in numbered parts."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from freetokend.core.errors import ModelDataError
from freetokend.ftw.gguf_header import GgufHeader, Value, read_gguf_header
from freetokend.ftw.safetensors import SourceFile, SourceTensor

_PART: Final = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
_SUFFIX: Final = ".gguf"


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufModel:
    """What the headers of all parts say together; values: of the first part."""

    files: tuple[SourceFile, ...]
    values: Mapping[str, Value]
    tensors: Mapping[str, SourceTensor]


def gguf_names(directory: Path) -> list[str]:
    """Names of the GGUF files in a directory, in order."""
    return sorted(path.name for path in directory.glob("*" + _SUFFIX))


def read_gguf_model(
    names: list[str], directory: Path, open_file: Callable[[Path], int]
) -> GgufModel:
    """The model in the files `names` of `directory`, which `open_file` opens.

    ModelDataError when they are not the parts of one model, or as `read_gguf_header`.
    """
    _check_names(names, directory)
    headers = [read_gguf_header(open_file(directory / name), directory / name) for name in names]
    first = headers[0].values
    tensors: dict[str, SourceTensor] = {}
    for number, header in enumerate(headers):
        _check_part(header, number, len(headers), directory)
        for tensor in header.tensors:
            other = tensors.get(tensor.name)
            if other is not None:
                raise ModelDataError(
                    f"{directory}: tensor {tensor.name} is in both {other.file} and "
                    f"{tensor.file}, or twice in one; it is not clear which one counts."
                )
            tensors[tensor.name] = tensor
    total = first.get("split.tensors.count", len(tensors))
    if total != len(tensors):
        raise ModelDataError(
            f"{directory}: the parts of the model hold {len(tensors)} tensors, and {names[0]} says "
            f"{total}. Download them again."
        )
    return GgufModel(files=tuple(header.file for header in headers), values=first, tensors=tensors)


def _check_names(names: list[str], directory: Path) -> None:
    if len(names) == 1 and _PART.fullmatch(names[0]) is None:
        return
    parts = [_PART.fullmatch(name) for name in names]
    stems = {(part[1], part[3]) if part else None for part in parts}
    if None in stems or len(stems) > 1:
        raise ModelDataError(
            f"{directory} holds several GGUF models ({', '.join(names[:3])}); keep the one to be "
            f"converted in a directory of its own."
        )
    numbers = [int(part[2]) for part in parts if part]
    count = next(int(part[3]) for part in parts if part)
    missing = sorted(set(range(1, count + 1)) - set(numbers))
    if missing or len(numbers) != count:
        raise ModelDataError(
            f"{directory}: part {missing[0] if missing else numbers[-1]} of {count} of the GGUF "
            f"model is missing or not wanted; download all parts."
        )


def _check_part(header: GgufHeader, number: int, count: int, directory: Path) -> None:
    found = (header.values.get("split.no", 0), header.values.get("split.count", count))
    # A single file may say 0 of 0 or nothing.
    if found != (number, count) and not (count == 1 and found == (0, 0)):
        raise ModelDataError(
            f"{directory / header.file.file}: it calls itself part {found[0]} of {found[1]} (from "
            f"0), not {number} of {count}. Download the parts again."
        )
