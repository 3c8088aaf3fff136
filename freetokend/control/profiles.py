"""Bandwidth profiles in the state directory: one file per GPU, and one for a machine without.

A file is written beside its place and renamed, so that a crash leaves the old or the new one. One
that cannot be understood is kept aside under another name, said once, and begun anew: it decides
how fast something is, never whether it runs.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from freetokend.core import logs
from freetokend.core.errors import ModelDataError, Reason, ResourceError
from freetokend.ftw.strict_json import JsonObject, parse_json, read_file
from freetokend.policy.bandwidth_profile import (
    MOST_ENTRIES,
    MOST_FIGURES,
    MOST_MEASUREMENTS,
    Figure,
    FigureName,
    Measurement,
    ProfileEntry,
    ProfileKey,
    ProfileSource,
    with_measurement,
)

VERSION: Final = 1
NO_GPU: Final = "none"
_MOST_BYTES: Final = 4 << 20
_TEXT: Final = re.compile(r"[ -~]{0,200}")
_PLAIN_NAME: Final = re.compile(r"[A-Za-z0-9-]{1,80}")

_log = logs.logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredProfiles:
    """problem: what was wrong with the file, in a sentence; empty while all is well."""

    entries: tuple[ProfileEntry, ...] = ()
    problem: str = ""


class ProfileStore:
    """Owner of the files of one state directory. One writer at a time; may block on the disk."""

    def __init__(self, state_dir: Path) -> None:
        self._directory = state_dir / "bandwidth"

    def path(self, gpu_uuid: str) -> Path:
        """The file of a GPU; "" without one. A name that is none becomes one by its hash."""
        name = gpu_uuid or NO_GPU
        if not _PLAIN_NAME.fullmatch(name):
            name = "gpu-" + hashlib.sha256(name.encode("utf-8", "replace")).hexdigest()[:32]
        return self._directory / f"{name}.json"

    def read(self, gpu_uuid: str) -> StoredProfiles:
        """What is stored. A file that cannot be understood is put aside."""
        path = self.path(gpu_uuid)
        try:
            if not os.path.lexists(path):
                return StoredProfiles()
            data = read_file(path, limit_bytes=_MOST_BYTES, purpose="a bandwidth profile")
            return StoredProfiles(entries=_decoded(data, str(path)))
        except ModelDataError as error:
            problem = f"{error.message} {_put_aside(path)}"
            _log.warning("bandwidth-profile-refused", cause=problem)
            return StoredProfiles(problem=problem)

    def add(self, gpu_uuid: str, key: ProfileKey, measurement: Measurement) -> StoredProfiles:
        """Merge a measurement into what is stored. ResourceError when it cannot be written: what
        was there stays."""
        before = self.read(gpu_uuid)
        entries = with_measurement(before.entries, key, measurement)
        if entries != before.entries:
            self._write(self.path(gpu_uuid), _encoded(gpu_uuid or NO_GPU, entries))
        return StoredProfiles(entries=entries, problem=before.problem)

    def _write(self, path: Path, data: bytes) -> None:
        temporary = path.with_name(f".{path.name}.new")
        try:
            self._directory.mkdir(mode=0o750, parents=True, exist_ok=True)
            with contextlib.suppress(FileNotFoundError):
                temporary.unlink()
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
            with os.fdopen(os.open(temporary, flags, 0o640), "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
            descriptor = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise ResourceError(
                f"The bandwidth profile cannot be written to {path}: {error.strerror}. Make "
                "service.state_dir a directory that the service may write to, with some free "
                "space.",
                reason=Reason.IO_FAILED,
                param="service.state_dir",
            ) from error


def _put_aside(path: Path) -> str:
    """What became of the file. The one put aside last is kept."""
    aside = path.with_name(f"{path.name}.refused")
    try:
        os.replace(path, aside)
    except OSError as error:
        return f"It could not be put aside ({error.strerror}); the profile begins anew."
    return f"It was put aside as {aside}; the profile begins anew."


def _encoded(gpu: str, entries: tuple[ProfileEntry, ...]) -> bytes:
    value: dict[str, Any] = {
        "version": VERSION,
        "gpu": gpu if _TEXT.fullmatch(gpu) else "unprintable",
        "entries": [
            {
                "format": one.key.weight_format,
                "expert_bytes": one.key.expert_bytes,
                "driver": one.key.driver_version,
                "kernels": one.key.kernel_build,
                "measurements": [_measurement_json(each) for each in one.measurements],
            }
            for one in entries
        ],
    }
    return json.dumps(value, indent=1, allow_nan=False).encode() + b"\n"


def _measurement_json(measurement: Measurement) -> dict[str, Any]:
    return {
        "at_s": measurement.at_s,
        "source": measurement.source.value,
        "figures": [
            {"name": one.name.value, "value": one.value, "threads": one.threads_count}
            for one in measurement.figures
        ],
    }


def _decoded(data: bytes, where: str) -> tuple[ProfileEntry, ...]:
    """ModelDataError for anything but what `_encoded` gives."""
    top = JsonObject(parse_json(data, where), where)
    version = top.integer("version", 0, 1 << 31)
    if version != VERSION:
        raise ModelDataError(
            f"{where} has version {version} and this program knows {VERSION}: another version of "
            "freetokend wrote it."
        )
    top.text("gpu", _TEXT)
    entries = tuple(_entry(one, where) for one in top.items("entries", MOST_ENTRIES))
    top.finish()
    if len({one.key for one in entries}) != len(entries):
        raise ModelDataError(f"{where} has two entries of the same key.")
    return entries


def _entry(value: object, where: str) -> ProfileEntry:
    entry = JsonObject(value, f"{where}: an entry")
    key = ProfileKey(
        weight_format=entry.text("format", _TEXT),
        expert_bytes=entry.integer("expert_bytes", 0, 1 << 40),
        driver_version=entry.text("driver", _TEXT),
        kernel_build=entry.text("kernels", _TEXT),
    )
    measurements = tuple(
        _measurement(one, where) for one in entry.items("measurements", MOST_MEASUREMENTS)
    )
    entry.finish()
    return ProfileEntry(key=key, measurements=measurements)


def _measurement(value: object, where: str) -> Measurement:
    one = JsonObject(value, f"{where}: a measurement")
    at_s = one.number("at_s", 0.0, 1e12)
    source = one.text("source", re.compile("|".join(ProfileSource)))
    figures = tuple(_figure(each, where) for each in one.items("figures", MOST_FIGURES))
    one.finish()
    return Measurement(at_s=at_s, source=ProfileSource(source), figures=figures)


def _figure(value: object, where: str) -> Figure:
    one = JsonObject(value, f"{where}: a figure")
    figure = Figure(
        name=FigureName(one.text("name", re.compile("|".join(FigureName)))),
        value=one.number("value", 0.0, 1e15),
        threads_count=one.integer("threads", 0, 65_536),
    )
    one.finish()
    if not figure.is_possible():
        raise ModelDataError(f"{where}: {figure.name.value} is {figure.value}, which cannot be.")
    return figure
