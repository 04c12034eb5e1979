"""What an expression consists of.

`Property`, `Text`, `Number` and `Nothing` are values; the others are true, false or unknown.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

NumberKind = Literal["int", "long", "double"]
Order = Literal[">", ">=", "<", "<="]
Search = Literal["CONTAINS", "STARTSWITH", "ENDSWITH"]

INT_MAX: Final = 2**31 - 1
LONG_MAX: Final = 2**63 - 1


@dataclass(frozen=True, slots=True)
class Property:
    name: str


@dataclass(frozen=True, slots=True)
class Text:
    value: str


@dataclass(frozen=True, slots=True)
class Number:
    value: int | float
    kind: NumberKind  # a property that is compared with it must be written as one of these
    is_literal: bool = True  # -5 is none: it is a 5 that was negated


@dataclass(frozen=True, slots=True)
class Nothing:
    """What minus makes of anything but a number."""


@dataclass(frozen=True, slots=True)
class Truth:
    value: bool | None  # TRUE, FALSE, NULL


@dataclass(frozen=True, slots=True)
class Cast:
    """A property where a truth is expected: never true, as properties are strings."""

    operand: Property


@dataclass(frozen=True, slots=True)
class Compare:
    order: Order
    left: Value
    right: Value


@dataclass(frozen=True, slots=True)
class Equal:
    left: Node
    right: Node


@dataclass(frozen=True, slots=True)
class Among:
    operand: Property
    texts: frozenset[str]
    negated: bool


@dataclass(frozen=True, slots=True)
class Searched:
    how: Search
    operand: Node
    text: str
    negated: bool


@dataclass(frozen=True, slots=True)
class Not:
    operand: Condition


@dataclass(frozen=True, slots=True)
class Both:
    """AND. A long chain of them is one: a tree must not be as deep as an expression is long."""

    parts: tuple[Condition, ...]


@dataclass(frozen=True, slots=True)
class Either:
    parts: tuple[Condition, ...]


Value = Property | Number | Nothing
Condition = Truth | Cast | Compare | Equal | Among | Searched | Not | Both | Either
Node = Value | Text | Condition
CONDITIONS: Final = (Truth, Cast, Compare, Equal, Among, Searched, Not, Both, Either)
