"""`freetokenctl config keys`: the configuration's manual, from its schema."""

from __future__ import annotations

import argparse

from freetokend.core.config.reference import reference_text


def keys(arguments: argparse.Namespace) -> int:
    """Print every key with its default and meaning, as a commented TOML file."""
    print(reference_text(), end="")
    return 0
