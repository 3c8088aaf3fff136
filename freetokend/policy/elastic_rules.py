"""What the configuration says of other programs and of times of the day, read from its texts.

`elastic.process_rules`: "blender=8GiB,steam=4GiB". `elastic.windows`: windows separated by ";",
each a name, the days it begins on (all, where none are named), the time, and what holds then:
"evening fri-sun 18:00-23:30 keep=8GiB; night 23:30-07:00 sleep".
"""

from __future__ import annotations

import re
from typing import Final

from freetokend.core.errors import ConfigError
from freetokend.core.units import parse_bytes
from freetokend.policy.controller.spec import ProcessRule, Window

RULES_KEY: Final = "elastic.process_rules"
WINDOWS_KEY: Final = "elastic.windows"

_DAYS: Final = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
_TIME: Final = re.compile(r"(\d{1,2}):(\d{2})-(\d{1,2}):(\d{2})", re.ASCII)
_MINUTES: Final = 24 * 60


def parse_process_rules(text: str) -> tuple[ProcessRule, ...]:
    """Raises ConfigError that names the key, what is wrong and how it is written."""
    rules: list[ProcessRule] = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, separator, size = part.rpartition("=")
        name = name.strip()
        if not separator or not name:
            raise _rules_error(f'"{part}" is no rule')
        if name.casefold() in {rule.name.casefold() for rule in rules}:
            raise _rules_error(f"{name} is named twice")
        rules.append(ProcessRule(name=name, keep_free_bytes=_size(RULES_KEY, size)))
    return tuple(rules)


def parse_windows(text: str) -> tuple[Window, ...]:
    """Raises ConfigError as `parse_process_rules` does."""
    windows: list[Window] = []
    for part in filter(None, (part.strip() for part in text.split(";"))):
        window = _window(part)
        if window.name in {known.name for known in windows}:
            raise _windows_error(f"the window {window.name} is there twice")
        windows.append(window)
    return tuple(windows)


def _window(text: str) -> Window:
    words = text.split()
    places = [index for index, word in enumerate(words) if _TIME.fullmatch(word)]
    if len(places) != 1 or places[0] not in (1, 2):
        raise _windows_error(f'"{text}" is no window')
    place = places[0]
    days = _weekdays(words[1]) if place == 2 else frozenset(range(len(_DAYS)))
    start_minute, end_minute = _times(words[place])
    keep_free_bytes, sleep = 0, False
    for word in words[place + 1 :]:
        if word == "sleep":
            sleep = True
        elif word.startswith("keep="):
            keep_free_bytes = _size(WINDOWS_KEY, word.removeprefix("keep="))
        else:
            raise _windows_error(f'"{word}" in the window {words[0]} says nothing')
    if not keep_free_bytes and not sleep:
        raise _windows_error(f"nothing holds in the window {words[0]}")
    return Window(
        name=words[0],
        start_minute=start_minute,
        end_minute=end_minute,
        weekdays=days,
        keep_free_bytes=keep_free_bytes,
        sleep=sleep,
    )


def _weekdays(text: str) -> frozenset[int]:
    """ "fri-sun", "mon", "sat,sun"; a span may go over the end of the week."""
    days: set[int] = set()
    for part in text.casefold().split(","):
        first, separator, last = part.partition("-")
        if first not in _DAYS or (separator and last not in _DAYS):
            raise _windows_error(f'"{text}" names no days')
        start = _DAYS.index(first)
        length = (_DAYS.index(last) - start) % len(_DAYS) + 1 if separator else 1
        days |= {(start + offset) % len(_DAYS) for offset in range(length)}
    return frozenset(days)


def _times(text: str) -> tuple[int, int]:
    match = _TIME.fullmatch(text)
    assert match is not None  # found by the same pattern
    hours, minutes = (int(match[1]), int(match[3])), (int(match[2]), int(match[4]))
    start, end = (hour * 60 + minute for hour, minute in zip(hours, minutes, strict=True))
    if max(minutes) > 59 or start >= _MINUTES or end > _MINUTES or start == end:
        raise _windows_error(f'"{text}" is no time of the day')
    return start, end


def _size(key: str, text: str) -> int:
    try:
        size_bytes = parse_bytes(text)
    except ValueError as error:
        raise ConfigError(f"{key}: {error}", param=key) from None
    if size_bytes < 1:
        raise ConfigError(f"{key}: {text} keeps nothing free; write a size above 0", param=key)
    return size_bytes


def _rules_error(what: str) -> ConfigError:
    return ConfigError(
        f'{RULES_KEY}: {what}; write NAME=SIZE, as in "blender=8GiB,steam=4GiB"', param=RULES_KEY
    )


def _windows_error(what: str) -> ConfigError:
    return ConfigError(
        f"{WINDOWS_KEY}: {what}; write NAME [DAYS] HH:MM-HH:MM and keep=SIZE, sleep or both, "
        'separated by ";", as in "evening fri-sun 18:00-23:30 keep=8GiB; night 23:30-07:00 sleep"',
        param=WINDOWS_KEY,
    )
