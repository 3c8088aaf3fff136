"""The manual of the configuration's keys, written by the schema itself."""

from __future__ import annotations

from freetokend.core.config.resolve import toml_literal
from freetokend.core.config.schema import SCHEMA, TABLES, Key


def reference_text() -> str:
    """A TOML file with every key at its default, commented out, and what it means.

    Reads back as an empty configuration; without its leading "#" each line is the default.
    """
    blocks = []
    for table in TABLES:
        lines = [f"[{table}]"]
        for key in SCHEMA.values():
            if key.table == table:
                lines += ["", f"# {key.doc}", f"# Allowed: {key.allowed()}.", _default_line(key)]
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks) + "\n"


def reference_markdown() -> str:
    """One Markdown table per TOML table."""
    blocks = []
    for table in TABLES:
        lines = [f"### [{table}]", "", "| key | default | allowed | meaning |", "|---|---|---|---|"]
        for key in SCHEMA.values():
            if key.table == table:
                default = "must be set" if key.default is None else f"`{toml_literal(key.default)}`"
                lines.append(f"| `{key.leaf}` | {default} | {key.allowed()} | {key.doc} |")
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks) + "\n"


def _default_line(key: Key) -> str:
    if key.default is None:
        return f'#{key.leaf} = "..."  # must be set'
    return f"#{key.leaf} = {toml_literal(key.default)}"
