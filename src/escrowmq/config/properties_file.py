r"""Java's properties files: `key=value` lines, as java.util.Properties reads them.

The key ends at the first `=`, `:` or blank. A line that begins with `#` or `!` is a comment. A line
that ends with a backslash continues in the next one, whose leading blanks are dropped.
`\t \n \r \f \uXXXX` are escapes; before any other character a backslash is dropped.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from escrowmq.errors import ConfigError

_BLANKS: Final = " \t\f"
_LINE_END: Final = re.compile(r"\r\n|\r|\n")
_KEY: Final = re.compile(r"(?:[^\\=: \t\f]|\\.)*", re.DOTALL)
_GAP: Final = re.compile(r"[ \t\f]*[=:]?[ \t\f]*")
_ESCAPE: Final = re.compile(r"\\(u.{0,4}|.)", re.DOTALL)
_CODE_UNIT: Final = re.compile(r"u[0-9A-Fa-f]{4}", re.ASCII)
_CONTROLS: Final = {"t": "\t", "n": "\n", "r": "\r", "f": "\f"}
_TO_ESCAPE: Final = re.compile(r"[\\\t\n\r\f]")
_ESCAPED: Final = {character: f"\\{letter}" for letter, character in _CONTROLS.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class FileProperty:
    key: str
    value: str
    line: int  # the line in which it begins, from 1


def read_properties(text: str) -> Iterator[FileProperty]:
    """Yield the properties in the order of the file. Raises ConfigError for an invalid escape."""
    for line, logical in _logical_lines(text):
        key = _KEY.match(logical)
        assert key is not None  # the pattern also matches an empty key
        gap = _GAP.match(logical, key.end())
        assert gap is not None
        value = logical[gap.end() :]
        yield FileProperty(key=_unescape(key[0], line), value=_unescape(value, line), line=line)


def write_property(key: str, value: str) -> str:
    """Return a line, without its end, that `read_properties()` reads as this key and value."""
    escaped = _escape(value)
    if value[:1] == " ":
        escaped = f"\\{escaped}"
    return f"{re.sub('[=: #!]', _backslash, _escape(key))}={escaped}"


def _logical_lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield line numbers and lines with their continuations; skip empty lines and comments."""
    unfinished: str | None = None
    first = 0
    for number, natural in enumerate(_LINE_END.split(text), 1):
        line = natural.lstrip(_BLANKS)
        if not unfinished:
            # A comment is also skipped after a lone backslash, as in Java.
            if line[:1] in ("#", "!") or (line == "" and unfinished is None):
                continue
            first = number if unfinished is None else first
        line = (unfinished or "") + line
        unfinished = None
        if is_continued(line):
            unfinished = line[:-1]
        elif line:
            yield first, line
    if unfinished:
        yield first, unfinished


def is_continued(line: str) -> bool:
    """Return whether a line, without its end, continues in the next one."""
    return (len(line) - len(line.rstrip("\\"))) % 2 == 1


def _unescape(text: str, line: int) -> str:
    if "\\" not in text:
        return text

    def unescaped(match: re.Match[str]) -> str:
        escape = match[1]
        if escape[0] != "u":
            return _CONTROLS.get(escape, escape)
        if _CODE_UNIT.fullmatch(escape) is None:
            raise ConfigError(f"line {line}: {match[0]!r} is not \\u and four hexadecimal digits")
        return chr(int(escape[1:], 16))

    units = _ESCAPE.sub(unescaped, text)
    try:  # a character beyond 16 bits is written as two escapes, a surrogate pair
        return units.encode("utf-16-le", "surrogatepass").decode("utf-16-le")
    except UnicodeDecodeError:
        raise ConfigError(f"line {line}: half of a \\uXXXX\\uXXXX pair is missing") from None


def _escape(text: str) -> str:
    return _TO_ESCAPE.sub(lambda match: _ESCAPED.get(match[0], f"\\{match[0]}"), text)


def _backslash(match: re.Match[str]) -> str:
    return f"\\{match[0]}"
