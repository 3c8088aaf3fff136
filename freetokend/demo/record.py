"""The record that a finished build leaves beside its files, to know itself by later."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

RECORD_NAME = "freetokend-demo.json"

# Raise it whenever the builder writes other bytes for the same plan and source.
BUILD_FORMAT = 1


@dataclass(frozen=True)
class BuildIdentity:
    """What determines the bytes of a build."""

    variant: str
    plan_sha256: str
    source_sha256: str
    build_format: int = BUILD_FORMAT


def record_text(identity: BuildIdentity, file_bytes: Mapping[str, int]) -> str:
    """The record's content: the identity and the size of every file."""
    document = {
        "variant": identity.variant,
        "plan_sha256": identity.plan_sha256,
        "source_sha256": identity.source_sha256,
        "build_format": identity.build_format,
        "file_bytes": dict(sorted(file_bytes.items())),
    }
    return json.dumps(document, indent=2) + "\n"


def why_not_this_build(directory: Path, identity: BuildIdentity) -> str:
    """Say why `directory` is not a complete build of `identity`; empty when it is one."""
    try:
        document = json.loads((directory / RECORD_NAME).read_text(encoding="utf-8"))
        found = BuildIdentity(
            variant=document["variant"],
            plan_sha256=document["plan_sha256"],
            source_sha256=document["source_sha256"],
            build_format=document["build_format"],
        )
        sizes = {str(name): int(size) for name, size in document["file_bytes"].items()}
    except FileNotFoundError:
        return "it holds other files"
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return f"its {RECORD_NAME} cannot be read"
    if found.variant != identity.variant:
        return f"it holds the {found.variant} variant"
    if found != identity:
        return "it holds the demo model of another freetokend version"
    for name, size in sizes.items():
        path = directory / name
        if not path.is_file() or path.stat().st_size != size:
            return f"its {name} is missing or cut short"
    return ""
