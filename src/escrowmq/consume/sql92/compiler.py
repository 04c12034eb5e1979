"""From the tree to closures that take the properties of one message.

A condition is True, False or None: unknown. RocketMQ's rules for what is missing:

    a > 1, a IN (…)         unknown
    a = x                   unknown if a is missing; false if only x is; true if both are
    a IS NULL               true
    a CONTAINS 'x'          false, and so is a NOT CONTAINS 'x'; also if 'x' is empty
    AND, OR, NOT            three-valued: unknown AND false is false, unknown OR true is true

A message matches if the whole is True. What cannot be compared raises NotComparable, which ends
the evaluation: such a message does not match, whatever else the expression says after it.

How strings become numbers, and numbers are compared: as Java does it.

A property that is compared with a number must be written the way that number is. Beside `0` it is
an int (32 bits), beside `3000000000` a long, beside `0.5` a double. `1.0` is no int: compared
with `1` it can only fail.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Mapping
from functools import lru_cache
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

_INTEGER: Final = re.compile(r"[+-]?\d{1,40}")
_DOUBLE: Final = re.compile(
    r"(?P<decimal>[+-]?(?:(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?))[fFdD]?"
    r"|(?P<hex>[+-]?0[xX](?:[0-9a-fA-F]+\.?[0-9a-fA-F]*|\.[0-9a-fA-F]+)[pP][+-]?[0-9]+)[fFdD]?"
    r"|(?P<word>[+-]?(?:NaN|Infinity))"
)
_JAVA_WHITESPACE: Final = "".join(map(chr, range(0x21)))  # what Java's trim takes away


def to_int(text: str) -> int:
    return _to_integer(text, INT_MAX)


def to_long(text: str) -> int:
    return _to_integer(text, LONG_MAX)


def to_double(text: str) -> float:
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


def compare_doubles(left: float, right: float) -> int:
    """Java's order of doubles: NaN is the largest and equals itself, -0.0 is less than 0.0."""
    left_key, right_key = _double_sort_key(left), _double_sort_key(right)
    return (left_key > right_key) - (left_key < right_key)


def _double_sort_key(value: float) -> tuple[bool, float, float]:
    if math.isnan(value):
        return True, 0.0, 0.0
    return False, value, math.copysign(1.0, value) if value == 0 else 0.0


def compare_numbers(left: int | float, right: int | float) -> int:
    """Two numbers; as doubles if one of them is one."""
    if isinstance(left, int) and isinstance(right, int):
        return (left > right) - (left < right)
    return compare_doubles(float(left), float(right))


Properties = Mapping[str, str]
Predicate = Callable[[Properties], bool | None]
ValueGetter = Callable[[Properties], Any]  # a string, a number, a truth or None

DEPTH_MAX: Final = 200  # of a tree: evaluation is that deep in calls
SMALL_CHARS_MAX: Final = 512
CACHE_SIZE: Final = 1_024  # of small ones
LARGE_CACHE_SIZE: Final = 64
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


class CompiledFilter:
    """One expression, ready for use."""

    def __init__(self, expression: str) -> None:
        """Raises BadExpression."""
        compiler = _Compiler()
        self.expression = expression
        self._predicate = compiler.compile_condition(parse(expression), 0)
        self.cost = compiler.node_count  # what an evaluation may cost, in comparisons or so

    def matches(self, properties: Properties) -> bool:
        try:
            return self._predicate(properties) is True
        except NotComparable:
            return False

    def matches_encoded(self, encoded: bytes) -> bool:
        """The same, of properties as they lie in a record."""
        return self.matches(decode_properties(encoded))


def compile_filter(expression: str) -> CompiledFilter:
    """The filter of an expression, which is compiled when somebody first pulls by it. Raises
    BadExpression."""
    return (_compile_small if len(expression) <= SMALL_CHARS_MAX else _compile_large)(expression)


_compile_small = lru_cache(maxsize=CACHE_SIZE)(CompiledFilter)
_compile_large = lru_cache(maxsize=LARGE_CACHE_SIZE)(CompiledFilter)


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
            case InList(PropertyRef(name), texts, negated):
                return _in_list(name, texts, negated)
            case TextSearch():
                return self._text_search(node, depth)
            case Not(operand):
                return _not(self.compile_condition(operand, depth + 1))
            case And(parts):
                return _all([self.compile_condition(part, depth + 1) for part in parts])
            case Or(parts):
                return _any([self.compile_condition(part, depth + 1) for part in parts])

    def _count_node(self, depth: int) -> None:
        self.node_count += 1
        if depth > DEPTH_MAX:
            raise InvalidExpression(1, f"more than {DEPTH_MAX} operators, each applied to the last")

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
                return _compare_with_number(name, number, lambda way: holds(way, 0))
            case Number() as number, PropertyRef(name):
                return _compare_with_number(name, number, lambda way: holds(0, way))
            case PropertyRef(left), PropertyRef(right):
                return _compare_properties(left, right, lambda way: holds(way, 0))
            case Number(left_value), Number(right_value):
                answer = holds(compare_numbers(left_value, right_value), 0)
                return lambda properties: answer
            case _:  # Nothing on one side
                return lambda properties: None

    def _equal(self, node: Equal, depth: int) -> Predicate:
        match node:
            case Equal(PropertyRef(name), StringLiteral(text)):
                return _equals_text(name, text)
            case Equal(PropertyRef(name), Number() as number):
                return _compare_with_number(name, number, lambda way: way == 0)
            case Equal(PropertyRef(name), BooleanLiteral(None)):
                return lambda properties: name not in properties
        left, right = self._value(node.left, depth), self._value(node.right, depth)
        kinds = [side.kind for side in (node.left, node.right) if isinstance(side, Number)]
        read = NUMBER_PARSERS[kinds[0]] if kinds else to_double
        return lambda properties: _equals(left(properties), right(properties), read)

    def _text_search(self, node: TextSearch, depth: int) -> Predicate:
        value, text, negated = self._value(node.operand, depth), node.text, node.is_negated
        finds = _SEARCH_FUNCTIONS[node.operator]

        def test(properties: Properties) -> bool:
            found = value(properties)
            if not text or not isinstance(found, str):
                return False
            return finds(found, text) is not negated

        return test


def _compare_with_number(name: str, number: Number, accepts: Callable[[int], bool]) -> Predicate:
    read, wanted = NUMBER_PARSERS[number.kind], number.value

    def test(properties: Properties) -> bool | None:
        text = properties.get(name)
        return None if text is None else accepts(compare_numbers(read(text), wanted))

    return test


def _compare_properties(left: str, right: str, accepts: Callable[[int], bool]) -> Predicate:
    def test(properties: Properties) -> bool | None:
        left_text, right_text = properties.get(left), properties.get(right)
        if left_text is None or right_text is None:
            return None
        return accepts(compare_doubles(to_double(left_text), to_double(right_text)))

    return test


def _equals_text(name: str, text: str) -> Predicate:
    def test(properties: Properties) -> bool | None:
        found = properties.get(name)
        return None if found is None else found == text

    return test


def _equals(left: Any, right: Any, parse_number: Callable[[str], int | float]) -> bool | None:
    if left is None or right is None:
        # Which side is missing makes a difference to RocketMQ.
        return True if left is right else None if left is None else False
    match left, right:
        case (str(), str()) | (bool(), bool()):
            return bool(left == right)
        case bool(), str():
            raise NotComparable  # RocketMQ fails to convert the wrong one of the two
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
        found = properties.get(name)
        return None if found is None else (found in texts) is not is_negated

    return test


def _not(operand: Predicate) -> Predicate:
    def test(properties: Properties) -> bool | None:
        answer = operand(properties)
        return None if answer is None else not answer

    return test


def _all(parts: list[Predicate]) -> Predicate:
    def test(properties: Properties) -> bool | None:
        answer: bool | None = True
        for part in parts:
            found = part(properties)
            if found is False:
                return False
            if found is None:
                answer = None
        return answer

    return test


def _any(parts: list[Predicate]) -> Predicate:
    def test(properties: Properties) -> bool | None:
        answer: bool | None = False
        for part in parts:
            found = part(properties)
            if found:
                return True
            if found is None:
                answer = None
        return answer

    return test
