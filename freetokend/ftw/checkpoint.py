"""A checkpoint on disk: config.json and safetensors files, or config.json and a GGUF model."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import numpy as np
from numpy.typing import NDArray

from freetokend.core.errors import ModelDataError
from freetokend.ftw.contents import SourceIdentity
from freetokend.ftw.gguf_files import gguf_names, read_gguf_model
from freetokend.ftw.gguf_header import Value
from freetokend.ftw.reader import CONFIG_FILE, read_json_object
from freetokend.ftw.safetensors import SourceFile, SourceTensor, read_exactly, read_header
from freetokend.ftw.strict_json import JsonObject, io_error, parse_json, read_file

SINGLE_FILE: Final = "model.safetensors"
WEIGHT_MAP_FILE: Final = "model.safetensors.index.json"
_MAX_WEIGHT_MAP_BYTES: Final = 64 * 1024 * 1024
_MAX_FILES_COUNT: Final = 10_000
_FILE: Final = re.compile(r"[A-Za-z0-9_\-][A-Za-z0-9_.\-]{0,200}\.safetensors")


class Checkpoint:
    """An open checkpoint: every header has been read and checked, the files stay open.

    tensors: by name; config: the object in config.json; gguf_values: metadata of a GGUF model,
    whose tensors have its own names and types, None for safetensors. Close it, or use it as a
    context.
    ModelDataError when files are missing, damaged or contradict each other.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = Path(directory)
        self.config: Mapping[str, object] = read_json_object(
            self.directory / CONFIG_FILE, "the model's configuration"
        )
        self.tensors: dict[str, SourceTensor] = {}
        self.files: tuple[SourceFile, ...] = ()
        self.gguf_values: Mapping[str, Value] | None = None
        self._descriptors: dict[str, int] = {}
        try:
            self._open_all()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the files; further reads are an error."""
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])

    def read(self, tensor: SourceTensor, offset_bytes: int, length_bytes: int) -> NDArray[np.uint8]:
        """Bytes of a tensor from `offset_bytes` within it. Safe from several threads at once."""
        path = self.directory / tensor.file
        descriptor = self._descriptors[tensor.file]
        return read_exactly(descriptor, length_bytes, tensor.offset_bytes + offset_bytes, path)

    def identity(self) -> SourceIdentity:
        """Covers config.json and every file's name, length, header and modification time.

        The time stands for the data: two trainings of one model differ in nothing else that can
        be seen without reading everything.
        """
        parts = [json.dumps(self.config, sort_keys=True)] + [
            json.dumps([file.file, file.length_bytes, file.header_checksum, file.modified_ns])
            for file in self.files
        ]
        return SourceIdentity(
            identity=hashlib.sha256("\n".join(parts).encode()).hexdigest(),
            files=tuple((file.file, file.length_bytes) for file in self.files),
        )

    def check_unchanged(self) -> None:
        """ModelDataError when a file's length or time is no longer what it was at the start."""
        for file in self.files:
            path = self.directory / file.file
            try:
                # By descriptor for writes into the file, by path for a file put in its place.
                states = (os.fstat(self._descriptors[file.file]), os.stat(path))
            except OSError as error:
                raise io_error(f"cannot examine {path}", error) from error
            for state in states:
                if (state.st_size, state.st_mtime_ns) != (file.length_bytes, file.modified_ns):
                    raise ModelDataError(
                        f"{path} changed while it was converted; the result would be a mixture. "
                        f"Wait until nothing writes to it and convert again."
                    )

    def _open_all(self) -> None:
        names = gguf_names(self.directory)
        if names:
            self._open_gguf(names)
        else:
            self._open_safetensors()

    def _open_gguf(self, names: list[str]) -> None:
        for name in (SINGLE_FILE, WEIGHT_MAP_FILE):
            if (self.directory / name).exists():
                raise ModelDataError(
                    f"{self.directory} holds both {name} and {names[0]}; keep the one to be "
                    f"converted in a directory of its own, beside its config.json."
                )
        model = read_gguf_model(names, self.directory, self._open)
        self.files = model.files
        self.tensors = dict(model.tensors)
        self.gguf_values = model.values

    def _open_safetensors(self) -> None:
        weight_map = self._weight_map()
        names = [SINGLE_FILE] if weight_map is None else sorted(set(weight_map.values()))
        files = []
        for name in names:
            path = self.directory / name
            file, tensors = read_header(self._open(path), path)
            files.append(file)
            for tensor in tensors:
                other = self.tensors.get(tensor.name)
                if other is not None:
                    raise ModelDataError(
                        f"{self.directory}: tensor {tensor.name} is in both {other.file} and "
                        f"{name}; it is not clear which one counts."
                    )
                self.tensors[tensor.name] = tensor
        self.files = tuple(files)
        if weight_map is not None:
            self._check_weight_map(weight_map)

    def _open(self, path: Path) -> int:
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except FileNotFoundError:
            hint = (
                f"expected {SINGLE_FILE}, or {WEIGHT_MAP_FILE} and the files it names, or a .gguf"
                if path.name == SINGLE_FILE
                else f"{WEIGHT_MAP_FILE} names it; download it again"
            )
            raise ModelDataError(f"{path} is missing: {hint}.") from None
        except OSError as error:
            raise io_error(f"cannot open {path}", error) from error
        self._descriptors[path.name] = descriptor
        return descriptor

    def _weight_map(self) -> dict[str, str] | None:
        path = self.directory / WEIGHT_MAP_FILE
        if not path.exists():
            return None
        data = read_file(
            path, limit_bytes=_MAX_WEIGHT_MAP_BYTES, purpose="the checkpoint's table of files"
        )
        table = JsonObject(parse_json(data, str(path)), str(path)).member("weight_map")
        result = {
            name: table.as_text(f"the file of {name:.200}", file, _FILE)
            for name, file in table.members().items()
        }
        if not result:
            table.fail("weight_map", "is empty")
        if len(set(result.values())) > _MAX_FILES_COUNT:
            table.fail("weight_map", f"names more than {_MAX_FILES_COUNT} files")
        return result

    def _check_weight_map(self, weight_map: dict[str, str]) -> None:
        for name, file in weight_map.items():
            found = self.tensors.get(name)
            if found is None or found.file != file:
                where = "in none of the files" if found is None else f"in {found.file}"
                raise ModelDataError(
                    f"{self.directory}: {WEIGHT_MAP_FILE} puts tensor {name:.200} into {file}, "
                    f"but it is {where}. Download the checkpoint again."
                )
        for name, tensor in self.tensors.items():
            if name not in weight_map:
                raise ModelDataError(
                    f"{self.directory}: {tensor.file} holds tensor {name}, which "
                    f"{WEIGHT_MAP_FILE} does not list. Download the checkpoint again."
                )
