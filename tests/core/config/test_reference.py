"""The manual of the keys, and its copy in the documentation."""

from __future__ import annotations

import os
from pathlib import Path

from freetokend.core.config import load_config
from freetokend.core.config.reference import reference_markdown, reference_text
from freetokend.core.config.schema import SCHEMA

DOCUMENT = Path(__file__).parents[3] / "docs" / "configuration.md"
BEGIN = "<!-- keys: written by tests/core/config/test_reference.py from the schema -->\n"
END = "<!-- end of keys -->\n"


def loaded(path: Path):  # type: ignore[no-untyped-def]
    return load_config(path, vendor_file=Path("/nonexistent")).settings


def test_the_commented_file_changes_nothing(tmp_path: Path) -> None:
    file = tmp_path / "freetokend.toml"
    file.write_text(reference_text())
    assert {str(setting.origin) for setting in loaded(file).values()} == {"default"}


def test_every_line_can_be_uncommented_to_its_default(tmp_path: Path) -> None:
    lines = reference_text().splitlines()
    file = tmp_path / "freetokend.toml"
    keys = [f"#{key.leaf} = " for key in SCHEMA.values()]
    bare = [line.removeprefix("#") if line.startswith(tuple(keys)) else line for line in lines]
    file.write_text("\n".join(bare))
    settings = loaded(file)
    assert all(setting.origin.file == str(file) for setting in settings.values())
    for key in SCHEMA.values():
        if key.default is not None:
            assert settings[key.name].value == key.default


def test_the_documentation_shows_the_schema() -> None:
    text = DOCUMENT.read_text()
    before, _, rest = text.partition(BEGIN)
    shown, _, after = rest.partition(END)
    expected = f"\n{reference_markdown()}\n"
    if os.environ.get("FREETOKEN_UPDATE_GOLDENS") == "1":
        DOCUMENT.write_text(before + BEGIN + expected + END + after)
        shown = expected
    assert shown == expected, "run this test with FREETOKEN_UPDATE_GOLDENS=1"
