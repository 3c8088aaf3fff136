"""What a check says."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

GPU: Final = "a GPU"
# What an engine needs beyond the layers that are checked here.
OPTIONAL_PACKAGES: Final = ("nvidia-ml-py", "flashinfer")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What a check measured, and whether that keeps to its gate.

    missing: what was not there, so that it was not run; such a row has neither passed nor failed.
    """

    check: str
    measured: str
    gate: str
    passed: bool
    missing: str = ""

    @property
    def failed(self) -> bool:
        """It ran and missed its gate."""
        return not self.passed and not self.missing

    def __str__(self) -> str:
        word = "ok  " if self.passed else "FAIL" if self.failed else "----"
        return f"{word} {self.check}: {self.measured} ({self.gate})"


def not_run(check: str, missing: str, why: str) -> Row:
    """A check that was left out, and why."""
    return Row(
        check=check,
        measured=f"not run: {why}",
        gate=f"where there is {missing}",
        passed=False,
        missing=missing,
    )


def summary(rows: Sequence[Row], device: str, required: Sequence[str] = ()) -> tuple[str, int]:
    """How many passed, failed and were not run, and the exit status: 1 when one failed, or was not
    run for lack of something in `required`."""
    left_out = Counter(row.missing for row in rows if row.missing)
    run = [row for row in rows if not row.missing]
    text = f"{sum(row.passed for row in run)} of {len(run)} checks passed on {device}"
    if left_out:
        lacking = ", ".join(f"{count} for lack of {one}" for one, count in left_out.items())
        text += f"; {left_out.total()} not run ({lacking})"
    refused = [one for one in required if one in left_out]
    if refused:
        text += f"; required: {', '.join(refused)}"
    return text, 1 if refused or any(row.failed for row in run) else 0
