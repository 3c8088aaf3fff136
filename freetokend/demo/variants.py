"""The variants of the demo model and the plan that each is built from (package data)."""

from __future__ import annotations

from enum import StrEnum
from importlib import resources

from freetokend.demo.errors import DemoError


class Variant(StrEnum):
    """`DEMO` is for looking at text, `STRESS` for catching routing bugs; see plans/README.md."""

    DEMO = "demo"
    STRESS = "stress"


def plan_bytes(variant: Variant) -> bytes:
    """The plan file of a variant, unparsed."""
    resource = resources.files("freetokend.demo") / "plans" / f"{variant}.npz"
    try:
        return resource.read_bytes()
    except OSError as error:
        raise DemoError(
            f"the plan of the {variant} variant cannot be read ({error.strerror}); "
            "install freetokend anew."
        ) from error
