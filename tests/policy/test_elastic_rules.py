"""Process rules and windows as the configuration writes them."""

from __future__ import annotations

import pytest

from freetokend.core.errors import ConfigError
from freetokend.core.units import GIB, MIB
from freetokend.policy.controller import ProcessRule, Window
from freetokend.policy.elastic_rules import parse_process_rules, parse_windows

WEEK = frozenset(range(7))


def test_no_text_is_no_rule() -> None:
    assert parse_process_rules("") == parse_process_rules(" , ") == ()
    assert parse_windows("") == parse_windows(" ; ") == ()


def test_rules_in_their_order() -> None:
    assert parse_process_rules("blender=8GiB, A b=512MiB") == (
        ProcessRule(name="blender", keep_free_bytes=8 * GIB),
        ProcessRule(name="A b", keep_free_bytes=512 * MIB),
    )


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("blender", '"blender" is no rule'),
        ("=8GiB", '"=8GiB" is no rule'),
        ("x=8GiB,X=1GiB", "X is named twice"),
        ("x=much", '"much" is not a size'),
        ("x=0", "0 keeps nothing free"),
    ],
)
def test_a_rule_that_says_nothing_is_refused(text: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told) as refused:
        parse_process_rules(text)
    assert refused.value.param == "elastic.process_rules"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "evening fri-sun 18:00-23:30 keep=8GiB",
            Window(
                name="evening",
                start_minute=18 * 60,
                end_minute=23 * 60 + 30,
                weekdays=frozenset({4, 5, 6}),
                keep_free_bytes=8 * GIB,
            ),
        ),
        (
            "night 23:30-7:00 sleep",
            Window(name="night", start_minute=23 * 60 + 30, end_minute=7 * 60, sleep=True),
        ),
        (
            "x sat-mon,Wed 0:00-24:00 sleep keep=1GiB",
            Window(
                name="x",
                start_minute=0,
                end_minute=24 * 60,
                weekdays=frozenset({5, 6, 0, 2}),
                keep_free_bytes=GIB,
                sleep=True,
            ),
        ),
    ],
)
def test_a_window(text: str, expected: Window) -> None:
    assert parse_windows(text) == (expected,)
    other = f"other 1:00-2:00 sleep; {text}"
    assert parse_windows(other)[1] == expected


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("night", '"night" is no window'),
        ("23:00-24:00 sleep", "is no window"),
        ("a b c 1:00-2:00 sleep", "is no window"),
        ("night someday 1:00-2:00 sleep", '"someday" names no days'),
        ("night mon- 1:00-2:00 sleep", '"mon-" names no days'),
        ("night 1:60-2:00 sleep", '"1:60-2:00" is no time of the day'),
        ("night 24:00-2:00 sleep", "no time of the day"),
        ("night 1:00-24:01 sleep", "no time of the day"),
        ("night 1:00-1:00 sleep", "no time of the day"),
        ("night 1:00-2:00", "nothing holds in the window night"),
        ("night 1:00-2:00 doze", '"doze" in the window night says nothing'),
        ("night 1:00-2:00 keep=lots", '"lots" is not a size'),
        ("a 1:00-2:00 sleep; a 3:00-4:00 sleep", "the window a is there twice"),
    ],
)
def test_a_window_that_says_nothing_is_refused(text: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told) as refused:
        parse_windows(text)
    assert refused.value.param == "elastic.windows"
