"""Conversion needs memory for a few pieces, not for the model."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.ftw.big_checkpoints import write_big_mixtral

CHILD = """
import sys
from freetokend.ftw.convert import convert
convert(sys.argv[1], sys.argv[2])
assert "torch" not in sys.modules
print(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1])
"""


@pytest.mark.slow
def test_three_gigabytes_in_a_fraction_of_their_size(tmp_path: Path) -> None:
    # fp32, so that twice as much is read as written; zeros in a sparse file cost no disk.
    source_bytes = write_big_mixtral(
        tmp_path / "source",
        layers=4,
        experts=8,
        hidden=2048,
        inter=3584,
        dtype="f32",
        random=False,
    )
    assert source_bytes > 3_000_000_000
    result = subprocess.run(
        [sys.executable, "-c", CHILD, str(tmp_path / "source"), str(tmp_path / "model")],
        check=True,
        capture_output=True,
        text=True,
    )
    for shard in (tmp_path / "model").glob("*.ftw"):
        shard.unlink()  # pytest keeps temporary directories for a while
    peak_bytes = int(result.stdout) * 1024
    assert peak_bytes < 400_000_000, "several times what was measured, a fraction of the model"
