"""Line numbers of TOML keys, against texts whose lines are known by construction."""

from __future__ import annotations

import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from freetokend.core.config.positions import key_lines

NOISE = [
    "",
    "# a comment [with] = signs \"and 'quotes",
    "   \t",
]
# Values that would lead a naive scanner astray: keys, brackets and quotes inside strings.
VALUES = [
    "1",
    "true",
    "1979-05-27 07:32:00  # date",
    '"a # b [c] = \\" d"',
    "'lit \\'",
    '"""one\n[not.a.table]\nkey = 1\n"""',
    '"""x\\"""\ny"""""',
    "'''lit\n[t]\n'quoted' k = 2'''",
    '[1, 2,\n # in [array]\n "]", [ "a" ] ,\n]',
    '{ inner = "}", "q k" = { deep = 1 } }',
    "[ { a = 1 }, { b = ']' } ]",
]
NAMES = ["alpha", "be-ta", "g_1", '"quoted key"', "'lit.eral'", "42"]


def bare(name: str) -> str:
    return name.strip("\"'")


@given(data=st.data())
def test_every_key_is_found_on_its_line(data: st.DataObject) -> None:
    lines: list[str] = []
    expected: dict[tuple[str, ...], int] = {}
    tables = data.draw(st.lists(st.sampled_from(NAMES), max_size=4, unique=True))
    for table in tables:
        lines += data.draw(st.lists(st.sampled_from(NOISE), max_size=2))
        expected[(bare(table),)] = len(lines) + 1
        lines.append(f"[ {table} ]  # header")
        for name in data.draw(st.lists(st.sampled_from(NAMES), max_size=4, unique=True)):
            lines += data.draw(st.lists(st.sampled_from(NOISE), max_size=2))
            dotted = data.draw(st.booleans())
            expected[(bare(table), bare(name))] = len(lines) + 1
            if dotted:
                expected[(bare(table), bare(name), "sub")] = len(lines) + 1
            value = data.draw(st.sampled_from(VALUES))
            lines += f"{name}{' . sub' if dotted else ''} = {value}".split("\n")
    newline = data.draw(st.sampled_from(["\n", "\r\n"]))
    text = newline.join(lines)
    tomllib.loads(text)  # the generator must write valid TOML

    found = key_lines(text)

    assert {path: found[path] for path in expected} == expected


def test_top_level_keys_dotted_tables_and_arrays_of_tables() -> None:
    text = 'a.b.c = 1\n"x" = 2\n\n[t.u]\nv = 3\n[[w]]\ny = 4\n[[w]]\nz = 5\n'
    found = key_lines(text)
    assert found[("a",)] == found[("a", "b", "c")] == 1
    assert found[("x",)] == 2
    assert found[("t",)] == found[("t", "u")] == 4
    assert found[("t", "u", "v")] == 5
    assert found[("w",)] == 6
    assert found[("w", "y")] == 7
    assert found[("w", "z")] == 9


@pytest.mark.parametrize("text", ["", "\n\n", "# only a comment", "# last line without newline"])
def test_texts_without_keys(text: str) -> None:
    assert key_lines(text) == {}
