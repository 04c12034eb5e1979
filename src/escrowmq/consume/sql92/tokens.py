"""An expression, cut into tokens. Each knows where it stands, for the sake of errors."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, Literal

from escrowmq.errors import BadExpression

Kind = Literal["word", "name", "text", "int", "float", "sign", "end"]

WORDS: Final = frozenset(
    {"NOT", "AND", "OR", "BETWEEN", "IN", "TRUE", "FALSE", "NULL", "IS"}
    | {"CONTAINS", "STARTSWITH", "ENDSWITH"}
)

# In this order: a float begins like an integer. A comment up to the end of the line needs that
# end; without one, its two signs are two minus signs, as in RocketMQ.
_TOKEN: Final = re.compile(
    r"""(?P<space>[ \t\n\r\f]+|--[^\n\r]*[\n\r]|/\*.*?\*/)
    |(?P<float>[0-9]+\.[0-9]*(?:[eE][+-]?[0-9]+)?|\.[0-9]+(?:[eE][+-]?[0-9]+)?|[0-9]+[eE][+-]?[0-9]+)
    |(?P<int>0|[1-9][0-9]*[lL]?)
    |(?P<text>'(?:''|[^'])*')
    |(?P<name>[A-Za-z_$][A-Za-z0-9_$]*)
    |(?P<sign><>|>=|<=|[=<>(),+\-])""",
    re.VERBOSE | re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class Token:
    kind: Kind
    value: str  # a word in capitals; a text without its quotes
    at: int  # counted from 1

    def __str__(self) -> str:
        match self.kind:
            case "end":
                return "the end"
            case "text":
                return f"the string '{self.value}'"
            case _:
                return self.value


def tokens_of(expression: str) -> list[Token]:
    """The last one is the end. Raises BadExpression."""
    found: list[Token] = []
    at = 0
    while at < len(expression):
        match = _TOKEN.match(expression, at)
        if match is None:
            raise BadExpression(at + 1, _reason(expression[at]))
        if match.lastgroup != "space":
            found.append(_token(str(match.lastgroup), match.group(), at + 1))
        at = match.end()
    found.append(Token("end", "", len(expression) + 1))
    return found


def _token(kind: str, value: str, at: int) -> Token:
    match kind:
        case "name" if value.upper() in WORDS:
            return Token("word", value.upper(), at)
        case "name":
            return Token("name", value, at)
        case "text":
            return Token("text", value[1:-1].replace("''", "'"), at)
        case "int":
            return Token("int", value, at)
        case "float":
            return Token("float", value, at)
        case _:
            return Token("sign", value, at)


def _reason(character: str) -> str:
    if character == "'":
        return "a string that does not end; a quote inside a string is written twice"
    if character == '"':
        return "a double quote; strings stand in single quotes, properties in none"
    return f"{character!r} means nothing here"
