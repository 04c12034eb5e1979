"""Compile the tree of an SQL92 expression to closures over the properties of one message.

A condition is True, False or None, which stands for unknown. RocketMQ's rules for missing
properties:

    a > 1, a IN (…)         unknown
    a = x                   unknown if a is missing; false if only x is; true if both are
    a IS NULL               true
    a CONTAINS 'x'          false, and so is a NOT CONTAINS 'x'; also if 'x' is empty
    AND, OR, NOT            three-valued: unknown AND false is false, unknown OR true is true

A message matches if the whole condition is True. Values that cannot be compared raise
NotComparable, which ends the evaluation: such a message does not match, whatever the remaining
part of the expression says.

Numbers follow Java. A property that is compared with a number must be written like that number: as
an int (32 bits) next to `0`, as a long next to `3000000000`, as a double next to `0.5`. `1.0` is
not an int, so comparing it with `1` raises NotComparable.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Mapping
from typing import Any, Final

from escrowmq.consume.sql92.parser import (
    INT_MAX,
    LONG_MAX,
    And,
    BooleanLiteral,
    Compare,
    Condition,
    Equal,
    InList,
    Node,
    Not,
    NotANumber,
    Number,
    NumberKind,
    Or,
    PropertyCondition,
    PropertyRef,
    SearchOperator,
    StringLiteral,
    TextSearch,
    parse,
)
from escrowmq.errors import InvalidExpression, NotComparable
from escrowmq.message.properties import decode_properties

Properties = Mapping[str, str]
Predicate = Callable[[Properties], bool | None]
ValueGetter = Callable[[Properties], Any]  # returns a string, a number, a boolean or None

# Evaluation recurses once per level of the tree, so a deep tree could exhaust Python's stack.
DEPTH_MAX: Final = 200
# In comparisons: an evaluation takes a fraction of a millisecond.
COST_MAX: Final = 2_000
TEXT_SEARCH_COST: Final = 10
NUMBER_LENGTH_MAX: Final = 1_000  # characters; a property that is longer is no number here


class CompiledFilter:
    """A compiled SQL92 expression."""

    def __init__(self, expression: str) -> None:
        """Compile `expression`. Raises InvalidExpression."""
        compiler = _Compiler()
        self.expression = expression
        self._predicate = compiler.compile_condition(parse(expression), 0)
        self.cost = compiler.node_count  # about the number of comparisons of one evaluation

    def matches(self, properties: Properties) -> bool:
        try:
            return self._predicate(properties) is True
        except NotComparable:
            return False

    def matches_encoded(self, encoded: bytes) -> bool:
        """Do the same with properties that are encoded as in a record."""
        return self.matches(decode_properties(encoded))


class _Compiler:
    def __init__(self) -> None:
        self.node_count = 0

    def compile_condition(self, node: Condition, depth: int) -> Predicate:
        self._count_node(depth)
        match node:
            case BooleanLiteral(value):
                return lambda properties: value
            case PropertyCondition(PropertyRef(name)):
                return lambda properties: False if name in properties else None
            case Compare():
                return self._compare(node)
            case Equal():
                return self._equal(node, depth)
            case InList(PropertyRef(name), texts, is_negated):
                return _in_list(name, texts, is_negated)
            case TextSearch():
                self._count_node(depth, cost=TEXT_SEARCH_COST - 1)
                return self._text_search(node, depth)
            case Not(operand):
                return _not(self.compile_condition(operand, depth + 1))
            case And(parts):
                return _all([self.compile_condition(part, depth + 1) for part in parts])
            case Or(parts):
                return _any([self.compile_condition(part, depth + 1) for part in parts])

    def _count_node(self, depth: int, cost: int = 1) -> None:
        self.node_count += cost
        if self.node_count > COST_MAX:
            raise InvalidExpression(
                1, f"more than {COST_MAX} conditions; one that searches in a text counts as ten"
            )
        if depth > DEPTH_MAX:
            raise InvalidExpression(1, f"operators are nested more than {DEPTH_MAX} deep")

    def _value(self, node: Node, depth: int) -> ValueGetter:
        match node:
            case PropertyRef(name):
                return lambda properties: properties.get(name)
            case StringLiteral(value) | Number(value):
                return lambda properties: value
            case NotANumber():
                return lambda properties: None
            case _:
                return self.compile_condition(node, depth + 1)

    def _compare(self, node: Compare) -> Predicate:
        holds = _ORDER_FUNCTIONS[node.operator]
        match node.left, node.right:
            case PropertyRef(name), Number() as number:
                return _compare_with_number(name, number, lambda order: holds(order, 0))
            case Number() as number, PropertyRef(name):
                return _compare_with_number(name, number, lambda order: holds(0, order))
            case PropertyRef(left), PropertyRef(right):
                return _compare_properties(left, right, lambda order: holds(order, 0))
            case Number(left_value), Number(right_value):
                result = holds(compare_numbers(left_value, right_value), 0)
                return lambda properties: result
            case _:  # one side is NotANumber
                return lambda properties: None

    def _equal(self, node: Equal, depth: int) -> Predicate:
        # The common cases are compiled to a closure of their own, which is faster.
        match node:
            case Equal(PropertyRef(name), StringLiteral(text)):
                return _equals_text(name, text)
            case Equal(PropertyRef(name), Number() as number):
                return _compare_with_number(name, number, lambda order: order == 0)
            case Equal(PropertyRef(name), BooleanLiteral(None)):
                return lambda properties: name not in properties
        left, right = self._value(node.left, depth), self._value(node.right, depth)
        kinds = [side.kind for side in (node.left, node.right) if isinstance(side, Number)]
        parse_number = NUMBER_PARSERS[kinds[0]] if kinds else to_double
        return lambda properties: _equals(left(properties), right(properties), parse_number)

    def _text_search(self, node: TextSearch, depth: int) -> Predicate:
        get_value, text, is_negated = self._value(node.operand, depth), node.text, node.is_negated
        contains = _SEARCH_FUNCTIONS[node.operator]

        def test(properties: Properties) -> bool:
            value = get_value(properties)
            if not text or not isinstance(value, str):
                return False
            return contains(value, text) is not is_negated

        return test


# --- conditions as closures ----------------------------------------------------------------------

_ORDER_FUNCTIONS: Final[dict[str, Callable[[Any, Any], bool]]] = {
    ">": operator.gt,
    ">=": operator.ge,
    "<": operator.lt,
    "<=": operator.le,
}
_SEARCH_FUNCTIONS: Final[dict[SearchOperator, Callable[[str, str], bool]]] = {
    "CONTAINS": operator.contains,
    "STARTSWITH": str.startswith,
    "ENDSWITH": str.endswith,
}


def _compare_with_number(name: str, number: Number, holds: Callable[[int], bool]) -> Predicate:
    parse_number, value = NUMBER_PARSERS[number.kind], number.value

    def test(properties: Properties) -> bool | None:
        text = properties.get(name)
        return None if text is None else holds(compare_numbers(parse_number(text), value))

    return test


def _compare_properties(left: str, right: str, holds: Callable[[int], bool]) -> Predicate:
    def test(properties: Properties) -> bool | None:
        left_text, right_text = properties.get(left), properties.get(right)
        if left_text is None or right_text is None:
            return None
        return holds(compare_doubles(to_double(left_text), to_double(right_text)))

    return test


def _equals_text(name: str, text: str) -> Predicate:
    def test(properties: Properties) -> bool | None:
        value = properties.get(name)
        return None if value is None else value == text

    return test


def _equals(left: Any, right: Any, parse_number: Callable[[str], int | float]) -> bool | None:
    if left is None or right is None:
        # In RocketMQ the result depends on which side is missing.
        return True if left is right else None if left is None else False
    match left, right:
        case (str(), str()) | (bool(), bool()):
            return bool(left == right)
        case bool(), str():
            raise NotComparable  # RocketMQ tries to convert the boolean instead of the string
        case str(), bool():
            return (left.lower() == "true") is right
        case (bool(), _) | (_, bool()):
            return False
        case str(), _:
            return compare_numbers(parse_number(left), right) == 0
        case _, str():
            return compare_numbers(left, parse_number(right)) == 0
    return compare_numbers(left, right) == 0


def _in_list(name: str, texts: frozenset[str], is_negated: bool) -> Predicate:
    def test(properties: Properties) -> bool | None:
        value = properties.get(name)
        return None if value is None else (value in texts) is not is_negated

    return test


def _not(operand: Predicate) -> Predicate:
    def test(properties: Properties) -> bool | None:
        result = operand(properties)
        return None if result is None else not result

    return test


def _all(parts: list[Predicate]) -> Predicate:
    def test(properties: Properties) -> bool | None:
        result: bool | None = True
        for part in parts:
            partial = part(properties)
            if partial is False:
                return False
            if partial is None:
                result = None
        return result

    return test


def _any(parts: list[Predicate]) -> Predicate:
    def test(properties: Properties) -> bool | None:
        result: bool | None = False
        for part in parts:
            partial = part(properties)
            if partial:
                return True
            if partial is None:
                result = None
        return result

    return test


# --- Java's numbers ------------------------------------------------------------------------------

_INTEGER: Final = re.compile(r"[+-]?\d{1,40}")
_DOUBLE: Final = re.compile(
    r"(?P<decimal>[+-]?(?:(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?))[fFdD]?"
    r"|(?P<hex>[+-]?0[xX](?:[0-9a-fA-F]+\.?[0-9a-fA-F]*|\.[0-9a-fA-F]+)[pP][+-]?[0-9]+)[fFdD]?"
    r"|(?P<word>[+-]?(?:NaN|Infinity))"
)
_JAVA_WHITESPACE: Final = "".join(map(chr, range(0x21)))  # the characters that String.trim removes


def to_int(text: str) -> int:
    """Parse like Integer.parseInt. Raises NotComparable."""
    return _to_integer(text, INT_MAX)


def to_long(text: str) -> int:
    """Parse like Long.parseLong. Raises NotComparable."""
    return _to_integer(text, LONG_MAX)


def to_double(text: str) -> float:
    """Parse like Double.parseDouble. Raises NotComparable."""
    if len(text) > NUMBER_LENGTH_MAX:
        raise NotComparable
    match = _DOUBLE.fullmatch(text.strip(_JAVA_WHITESPACE))
    if match is None:
        raise NotComparable
    if match["hex"] is None:
        return float(match["decimal"] or match["word"])
    try:
        return float.fromhex(match["hex"])
    except OverflowError:
        return -math.inf if text.lstrip(_JAVA_WHITESPACE).startswith("-") else math.inf


def _to_integer(text: str, maximum: int) -> int:
    if not _INTEGER.fullmatch(text):
        raise NotComparable
    value = int(text)
    if not -maximum - 1 <= value <= maximum:
        raise NotComparable
    return value


NUMBER_PARSERS: Final[dict[NumberKind, Callable[[str], int | float]]] = {
    "int": to_int,
    "long": to_long,
    "double": to_double,
}


def compare_numbers(left: int | float, right: int | float) -> int:
    """Return -1, 0 or 1. The numbers are compared as doubles if one of them is a double."""
    if isinstance(left, int) and isinstance(right, int):
        return (left > right) - (left < right)
    return compare_doubles(float(left), float(right))


def compare_doubles(left: float, right: float) -> int:
    """Compare in Java's order: NaN is the largest and equals itself, -0.0 is less than 0.0."""
    left_key, right_key = _double_sort_key(left), _double_sort_key(right)
    return (left_key > right_key) - (left_key < right_key)


def _double_sort_key(value: float) -> tuple[bool, float, float]:
    if math.isnan(value):
        return True, 0.0, 0.0
    return False, value, math.copysign(1.0, value) if value == 0 else 0.0
