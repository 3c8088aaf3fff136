"""The real demo checkpoints for tests, built once per user and reused by every test run."""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import time
from pathlib import Path

import freetokend.demo
from freetokend.demo.build import BuildRequest, build
from freetokend.demo.variants import Variant, plan_bytes
from freetokend.demo.wheels import default_cache_dir
from freetokend.ftw.contents import FORMAT_VERSION, LAYOUT_VERSION
from freetokend.ftw.convert import convert
from freetokend.ftw.formats import Kind, parse_format
from freetokend.ftw.model import Wanted
from freetokend.ftw.quantise import QUANTISER_VERSION

# A checkpoint of an older plan or builder is 1.4 GB that nobody asks for again.
_UNUSED_AFTER_S = 12 * 3600


def demo_checkpoint(variant: str = "demo") -> Path:
    """Directory of the built variant ("demo" or "stress"); read only, shared between runs.

    It is keyed by the plan and by the builder's own source, so a change to either builds anew.
    The first call downloads 93 MB and takes seconds.
    """
    kind = Variant(variant)
    root = default_cache_dir() / "tests"
    directory = root / f"{kind}-{_build_key(kind)}"
    build(BuildRequest(out=directory, variant=kind), _report)
    os.utime(directory)
    _remove_unused(root)
    return directory


def _build_key(variant: Variant) -> str:
    package = Path(freetokend.demo.__file__).parent
    digest = hashlib.sha256(plan_bytes(variant))
    for source in [*sorted(package.glob("*.py")), package / "plan" / "format.py"]:
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]


def _remove_unused(root: Path) -> None:
    oldest = time.time() - _UNUSED_AFTER_S
    for directory in root.iterdir():
        if directory.stat().st_mtime < oldest:
            shutil.rmtree(directory, ignore_errors=True)


def _report(message: str) -> None:
    print(f"demo checkpoint: {message}", file=sys.stderr)


def demo_ftw(variant: str = "demo", experts: str = "bf16") -> Path:
    """The variant as an FTW directory, converted once and kept beside the checkpoint.

    experts: the weight format that routed experts are quantised into.
    """
    source = demo_checkpoint(variant)
    weight_format = parse_format(experts)
    # Directories of another version would be in the way, not replaced.
    version = f"v{FORMAT_VERSION}.{LAYOUT_VERSION}"
    if weight_format.kind is not Kind.BF16:
        version += f".{QUANTISER_VERSION}.{weight_format}"
    directory = source.with_name(f"{source.name}.{version}.ftw")
    convert(source, directory, progress=lambda _: None, wanted=Wanted(experts=weight_format))
    os.utime(directory)
    return directory
