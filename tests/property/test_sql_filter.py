"""SQL92 filters against a small reference evaluator of expression trees."""

from __future__ import annotations

import contextlib
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from escrowmq.consume.sql92 import CompiledFilter
from escrowmq.errors import InvalidExpression

NAMES = ("a", "b", "$c_1")
TEXTS = ("", "x", "X y", "it's", "5", "-7", "+5", "2.5", "1e1", "true", "FALSE", "3000000000", "ü")
INTS = (0, 1, 5, 7, 3_000_000_000)
FLOATS = (2.5, 10.0, 0.5)
VALUE_KINDS = ("name", "number", "text", "boolean")

properties = st.dictionaries(
    st.sampled_from(NAMES), st.sampled_from([text for text in TEXTS if text])
)
names = st.sampled_from(NAMES).map(lambda name: ("name", name))
numbers = (st.sampled_from(INTS) | st.sampled_from(FLOATS)).map(lambda value: ("number", value))
negatives = numbers.map(lambda number: ("number", -number[1]))
texts = st.sampled_from(TEXTS).map(lambda text: ("text", text))
operands = names | numbers | negatives
comparisons = st.sampled_from((">", ">=", "<", "<="))
searches = st.sampled_from(("CONTAINS", "STARTSWITH", "ENDSWITH"))

leaf_trees = (
    st.tuples(comparisons, operands, operands)
    | st.tuples(st.sampled_from(("=", "<>")), names | texts | numbers, names | texts | numbers)
    | st.tuples(st.sampled_from(("=", "<>")), names, st.just(("boolean", True)))
    | st.tuples(st.just("IS NULL"), names | texts)
    | st.tuples(st.just("IS NOT NULL"), names)
    | st.tuples(st.just("IN"), names, st.lists(st.sampled_from(TEXTS), min_size=1), st.booleans())
    | st.tuples(searches, names | texts, st.sampled_from(TEXTS), st.booleans())
    | st.tuples(st.just("NOT BETWEEN"), names, operands, operands)
    | st.tuples(st.just("BETWEEN"), names, names | negatives, operands)
    | st.sampled_from((("boolean", True), ("boolean", False), ("boolean", None)))
)
trees = st.recursive(
    leaf_trees,
    lambda inner: (
        st.tuples(st.just("NOT"), inner)
        | st.tuples(st.sampled_from(("AND", "OR")), inner, inner)
        | st.tuples(st.just("="), inner.filter(lambda tree: tree[0] != "boolean"), inner).filter(
            lambda tree: tree[2][0] != "boolean"
        )
    ),
    max_leaves=12,
)


class Incomparable(Exception):
    """Two values cannot be compared, so the filter does not match."""


# --- trees as SQL --------------------------------------------------------------------------------


def quote(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def render(tree: Any) -> str:
    """Return the SQL92 expression of a tree."""
    match tree:
        case "name", name:
            return str(name)
        case "number", value:
            return str(value)
        case "text", text:
            return quote(text)
        case "boolean", value:
            return {True: "TRUE", False: "false", None: "Null"}[value]
        case "NOT", inner:
            return f"NOT ({render(inner)})"
        case ("IS NULL" | "IS NOT NULL") as operator, inner:
            return f"{render(inner)} {operator}"
        case "IN", name, members, negated:
            member_list = ",".join(map(quote, members))
            return f"{render(name)} {'not ' if negated else ''}IN ({member_list})"
        case ("CONTAINS" | "STARTSWITH" | "ENDSWITH") as operator, inner, text, negated:
            return f"{render(inner)} {'NOT ' if negated else ''}{operator.lower()} {quote(text)}"
        case ("BETWEEN" | "NOT BETWEEN") as operator, inner, low, high:
            return f"{render(inner)} {operator} {render(low)} AND {render(high)}"
        case ("AND" | "OR") as operator, left, right:
            return f"({render(left)}) {operator} ({render(right)})"
        case operator, left, right:
            sides = [
                render(side) if side[0] in VALUE_KINDS else f"({render(side)})"
                for side in (left, right)
            ]
            return f"{sides[0]}{operator}{sides[1]}"
    raise AssertionError(tree)


# --- the reference evaluator ---------------------------------------------------------------------


def to_number(text: str, other: int | float) -> int | float:
    """Return a text as a number of the same type and range as the number it is compared with."""
    try:
        if isinstance(other, float):
            return float(text)
        value = int(text)
    except ValueError:
        raise Incomparable from None
    if abs(other) < 2**31 and not -(2**31) <= value < 2**31:
        raise Incomparable
    return value


def to_numbers(left: Any, right: Any) -> tuple[int | float, int | float]:
    if isinstance(left, str) and isinstance(right, str):
        return to_number(left, 0.5), to_number(right, 0.5)
    if isinstance(left, str):
        return to_number(left, right), right
    return left, to_number(right, left) if isinstance(right, str) else right


def equal(left: Any, right: Any) -> Any:
    """Return whether two values are equal; None if that is unknown."""
    if left is None and right is None:
        return True
    if left is None:
        return None
    if right is None:
        return False
    if type(left) is type(right):
        return bool(left == right)
    if isinstance(left, bool):
        if isinstance(right, str):
            raise Incomparable
        return False
    if isinstance(right, bool):
        return isinstance(left, str) and (left.lower() == "true") == right
    left, right = to_numbers(left, right)
    return bool(left == right)


def negate(value: Any) -> Any:
    return None if value is None else not value


def combine(left: Any, right: Any, deciding: bool, message: dict[str, str]) -> Any:
    """Evaluate AND (`deciding` is False) or OR (`deciding` is True). None means unknown."""
    first = evaluate(left, message)
    if first is deciding:
        return deciding
    second = evaluate(right, message)
    if second is deciding:
        return deciding
    return None if None in (first, second) else not deciding


def evaluate(tree: Any, message: dict[str, str]) -> Any:
    """Return the value of a tree for a message's properties; None means NULL or unknown."""
    match tree:
        case "name", name:
            return message.get(name)
        case (("number" | "text" | "boolean"), value):
            return value
        case "NOT", inner:
            return negate(evaluate(inner, message))
        case "IS NULL", inner:
            return evaluate(inner, message) is None
        case "IS NOT NULL", inner:
            return evaluate(inner, message) is not None
        case "IN", name, members, negated:
            value = evaluate(name, message)
            return None if value is None else (value in members) != negated
        case ("CONTAINS" | "STARTSWITH" | "ENDSWITH") as operator, inner, text, negated:
            value = evaluate(inner, message)
            if value is None or text == "":
                return False
            results = {"CONTAINS": text in value, "STARTSWITH": value[: len(text)] == text}
            return results.get(operator, value[-len(text) :] == text) != negated
        case "BETWEEN", inner, low, high:
            return combine((">=", inner, low), ("<=", inner, high), False, message)
        case "NOT BETWEEN", inner, low, high:
            return combine(("<", inner, low), (">", inner, high), True, message)
        case "AND", left, right:
            return combine(left, right, False, message)
        case "OR", left, right:
            return combine(left, right, True, message)
    operator, left, right = tree[0], evaluate(tree[1], message), evaluate(tree[2], message)
    if operator in ("=", "<>"):
        result = equal(left, right)
        return result if operator == "=" else negate(result)
    if left is None or right is None:
        return None
    left, right = to_numbers(left, right)
    return {">": left > right, ">=": left >= right, "<": left < right, "<=": left <= right}[
        operator
    ]


@given(tree=trees, message=properties)
def test_a_filter_matches_like_the_reference_evaluator(tree: Any, message: dict[str, str]) -> None:
    try:
        expected = evaluate(tree, message) is True
    except Incomparable:
        expected = False
    assert CompiledFilter(render(tree)).matches(message) is expected, render(tree)


FRAGMENTS = "a b 'x' '' 5 2.5 = <> > ( ) , + - -- /* */ NOT AND OR BETWEEN IN TRUE NULL IS CONTAINS"
fragments = st.sampled_from(FRAGMENTS.split())


@given(
    expression=st.text(max_size=60) | st.lists(fragments, max_size=25).map(" ".join),
    message=st.dictionaries(st.sampled_from(NAMES), st.text(min_size=1, max_size=12)),
)
def test_random_text_is_refused_with_a_position_or_is_an_expression(
    expression: str, message: dict[str, str]
) -> None:
    position = 1
    try:
        CompiledFilter(expression).matches(message)
    except InvalidExpression as error:
        position = error.position
    assert 1 <= position <= len(expression) + 1


@given(expression=st.text(alphabet="(-+a=NOT '<>", min_size=100, max_size=3000))
def test_a_deeply_nested_expression_is_compiled_or_refused(expression: str) -> None:
    # A RecursionError would fail the test.
    with contextlib.suppress(InvalidExpression):
        CompiledFilter(expression).matches({"a": "1"})
