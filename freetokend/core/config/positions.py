"""Line numbers of the keys of a TOML text, which tomllib does not report.

A scanner for texts that tomllib has accepted: it follows tables, dotted and quoted keys, every
kind of string, arrays and inline tables, and notes where each key and table begins.
"""

from __future__ import annotations

from typing import Final

Path = tuple[str, ...]

_BARE: Final = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-")
_SPACE: Final = " \t"
_BLANK: Final = " \t\r\n"


def key_lines(text: str) -> dict[Path, int]:
    """The line (from 1) at which each key or table of valid TOML `text` is first written."""
    return _Scanner(text).scan()


class _Scanner:
    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._lines: dict[Path, int] = {}

    def scan(self) -> dict[Path, int]:
        """One expression per turn: a table header or a key with its value."""
        table: Path = ()
        while self._skip_blank(_BLANK):
            start = self._at
            if self._peek() == "[":
                self._at += 2 if self._text.startswith("[[", self._at) else 1
                table = self._key()
                self._note(table, start)
                self._at = self._text.index("]", self._at)
                self._at += 2 if self._text.startswith("]]", self._at) else 1
            else:
                self._pair(table)
        return self._lines

    def _peek(self) -> str:
        return self._text[self._at : self._at + 1]

    def _note(self, path: Path, start: int) -> None:
        line = self._text.count("\n", 0, start) + 1
        for length in range(1, len(path) + 1):
            self._lines.setdefault(path[:length], line)

    def _skip_blank(self, blanks: str) -> bool:
        """Moves over `blanks` and comments; False at the end of the text."""
        while self._at < len(self._text):
            if self._text[self._at] in blanks:
                self._at += 1
            elif self._text[self._at] == "#":
                end = self._text.find("\n", self._at)
                self._at = len(self._text) if end < 0 else end
            else:
                return True
        return False

    def _pair(self, prefix: Path) -> None:
        start = self._at
        path = prefix + self._key()
        self._note(path, start)
        self._at = self._text.index("=", self._at) + 1
        self._skip_blank(_SPACE)
        self._value(path)

    def _key(self) -> Path:
        parts: list[str] = []
        while True:
            self._skip_blank(_SPACE)
            parts.append(self._key_part())
            self._skip_blank(_SPACE)
            if self._peek() != ".":
                return tuple(parts)
            self._at += 1

    def _key_part(self) -> str:
        if self._peek() in ('"', "'"):
            start = self._at + 1
            self._string()
            return self._text[start : self._at - 1]
        start = self._at
        while self._peek() and self._peek() in _BARE:
            self._at += 1
        return self._text[start : self._at]

    def _string(self) -> None:
        quote = self._peek()
        delimiter = quote * 3 if self._text.startswith(quote * 3, self._at) else quote
        self._at += len(delimiter)
        while not self._text.startswith(delimiter, self._at):
            # In literal strings ('...') a backslash is itself.
            self._at += 2 if quote == '"' and self._peek() == "\\" else 1
        self._at += len(delimiter)
        # """a"" ends with up to two quotes of its own before the delimiter.
        while len(delimiter) == 3 and self._peek() == quote:
            self._at += 1

    def _value(self, path: Path) -> None:
        first = self._peek()
        if first in ('"', "'"):
            self._string()
        elif first == "[":
            self._at += 1
            while self._skip_blank(_BLANK + ",") and self._peek() != "]":
                self._value(path)
            self._at += 1
        elif first == "{":
            self._at += 1
            while self._skip_blank(_BLANK + ",") and self._peek() != "}":
                self._pair(path)
            self._at += 1
        else:
            while self._peek() and self._peek() not in ",]}#\n":
                self._at += 1
