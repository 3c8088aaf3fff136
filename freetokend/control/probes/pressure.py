"""Pressure stall information: of the host, and of the control group that this process is in."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from freetokend.control.probes.ports import PressureReadings, ProbeError
from freetokend.core.host_facts import HostFiles, control_groups
from freetokend.policy.readings import PressureReading


class PsiProbe:
    """A `PressureProbe`. The higher of the two counts: the host's shows what the neighbours suffer,
    the group's what its own limit costs us. A kernel without PSI, or with it switched off, has
    none."""

    def __init__(self, files: HostFiles) -> None:
        self._files = files

    def read(self) -> PressureReadings:
        """See `PressureProbe`."""
        # Only groups of version 2 have pressure files, and there one path holds for all resources.
        groups = control_groups(self._files, "memory")
        return PressureReadings(
            memory=self._resource("memory", groups),
            cpu=self._resource("cpu", groups),
            io=self._resource("io", groups),
        )

    def _resource(self, resource: str, groups: Sequence[Path]) -> PressureReading | None:
        host = _read_file(self._files.proc / "pressure" / resource)
        for group in groups:
            own = _read_file(group / f"{resource}.pressure")
            if own is not None:
                return _higher(host, own)
        return host


def _read_file(path: Path) -> PressureReading | None:
    try:
        text = path.read_text()
    except OSError:  # also "not supported", when the kernel was started with psi=0
        return None
    shares: dict[str, float] = {}
    for line in filter(str.strip, text.splitlines()):
        kind, *fields = line.split()
        for field in fields:
            name, _, value = field.partition("=")
            if name == "avg10":
                shares[kind] = _share(path, value)
    if "some" not in shares:
        raise ProbeError(f"{path} does not have the kernel's form: {text[:80]!r}")
    return PressureReading(some_avg10=shares["some"], full_avg10=shares.get("full"))


def _share(path: Path, value: str) -> float:
    try:
        return float(value)
    except ValueError as error:
        raise ProbeError(f"{path}: avg10 is {value[:20]!r}, which is no number") from error


def _higher(host: PressureReading | None, own: PressureReading) -> PressureReading:
    if host is None:
        return own
    full = [share for share in (host.full_avg10, own.full_avg10) if share is not None]
    return PressureReading(
        some_avg10=max(host.some_avg10, own.some_avg10), full_avg10=max(full, default=None)
    )
