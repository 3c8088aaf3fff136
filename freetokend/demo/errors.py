"""The one error this tool shows to a person, and the check for packages it needs."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable

OWN_MODEL_HINT = "A model of your own, given with --model DIR, works without the demo."


class DemoError(Exception):
    """A failure whose text says what went wrong, why, and what to do; shown without a trace."""


class SourceError(DemoError):
    """The demo cannot be built here and now; adds that one's own model does not need it."""

    def __init__(self, message: str) -> None:
        super().__init__(f"{message} {OWN_MODEL_HINT}")


def require_packages(names: Iterable[str], purpose: str) -> None:
    """Raise DemoError naming every package of `names` that is not installed."""
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        listed = " ".join(missing)
        raise DemoError(
            f"cannot {purpose}: these Python packages are not installed: {', '.join(missing)}; "
            f"install them with `pip install {listed}` and try again."
        )
