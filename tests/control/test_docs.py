"""The documentation shows the catalogue and the registry as they are."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from freetokend.control.metrics.catalogue import CATALOGUE
from freetokend.policy.health import CODES

DOCUMENT = Path(__file__).parents[2] / "docs" / "metrics.md"
SOURCES = {"metrics": "catalogue", "warnings": "registry"}


def table(section: str) -> str:
    if section == "metrics":
        head = "| name | type | labels | meaning |\n|---|---|---|---|\n"
        rows = [
            f"| `{entry.name}` | {entry.kind.value} | {', '.join(entry.labels)} | {entry.help} |"
            for entry in CATALOGUE.values()
        ]
    else:
        head = "| code | severity |\n|---|---|\n"
        rows = [f"| `{code}` | {severity.value} |" for code, severity in CODES.items()]
    return "\n" + head + "\n".join(rows) + "\n\n"


@pytest.mark.parametrize("section", SOURCES)
def test_the_documentation_is_current(section: str) -> None:
    begin = (
        f"<!-- {section}: written by tests/control/test_docs.py from the {SOURCES[section]} -->\n"
    )
    end = f"<!-- end of {section} -->\n"
    before, _, rest = DOCUMENT.read_text().partition(begin)
    shown, _, after = rest.partition(end)
    if os.environ.get("FREETOKEN_UPDATE_GOLDENS") == "1":
        shown = table(section)
        DOCUMENT.write_text(before + begin + shown + end + after)
    assert shown == table(section), "run this test with FREETOKEN_UPDATE_GOLDENS=1"


def test_alerts_name_metrics_that_exist() -> None:
    import re

    text = DOCUMENT.read_text()
    named = set(re.findall(r"freetoken_[a-z_]+[a-z]", text.partition("## Worth an alert")[2]))
    assert named
    assert named <= set(CATALOGUE)
