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
VALUES = ("name", "number", "text", "truth")

properties = st.dictionaries(
    st.sampled_from(NAMES), st.sampled_from([text for text in TEXTS if text])
)
names = st.sampled_from(NAMES).map(lambda name: ("name", name))
numbers = (st.sampled_from(INTS) | st.sampled_from(FLOATS)).map(lambda value: ("number", value))
negatives = numbers.map(lambda number: ("number", -number[1]))
texts = st.sampled_from(TEXTS).map(lambda text: ("text", text))
ordered = names | numbers | negatives
orders = st.sampled_from((">", ">=", "<", "<="))
searches = st.sampled_from(("CONTAINS", "STARTSWITH", "ENDSWITH"))

leaves = (
    st.tuples(orders, ordered, ordered)
    | st.tuples(st.sampled_from(("=", "<>")), names | texts | numbers, names | texts | numbers)
    | st.tuples(st.sampled_from(("=", "<>")), names, st.just(("truth", True)))
    | st.tuples(st.just("IS NULL"), names | texts)
    | st.tuples(st.just("IS NOT NULL"), names)
    | st.tuples(st.just("IN"), names, st.lists(st.sampled_from(TEXTS), min_size=1), st.booleans())
    | st.tuples(searches, names | texts, st.sampled_from(TEXTS), st.booleans())
    | st.tuples(st.just("NOT BETWEEN"), names, ordered, ordered)
    | st.tuples(st.just("BETWEEN"), names, names | negatives, ordered)
    | st.sampled_from((("truth", True), ("truth", False), ("truth", None)))
)
trees = st.recursive(
    leaves,
    lambda inner: (
        st.tuples(st.just("NOT"), inner)
        | st.tuples(st.sampled_from(("AND", "OR")), inner, inner)
        | st.tuples(st.just("="), inner.filter(lambda tree: tree[0] != "truth"), inner).filter(
            lambda tree: tree[2][0] != "truth"
        )
    ),
    max_leaves=12,
)


class Incomparable(Exception):
    pass


# --- the tree as text ----------------------------------------------------------------------------


def quote(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def written(tree: Any) -> str:
    match tree:
        case "name", name:
            return str(name)
        case "number", value:
            return str(value)
        case "text", text:
            return quote(text)
        case "truth", value:
            return {True: "TRUE", False: "false", None: "Null"}[value]
        case "NOT", inner:
            return f"NOT ({written(inner)})"
        case ("IS NULL" | "IS NOT NULL") as how, inner:
            return f"{written(inner)} {how}"
        case "IN", name, members, negated:
            listed = ",".join(map(quote, members))
            return f"{written(name)} {'not ' if negated else ''}IN ({listed})"
        case ("CONTAINS" | "STARTSWITH" | "ENDSWITH") as how, inner, text, negated:
            return f"{written(inner)} {'NOT ' if negated else ''}{how.lower()} {quote(text)}"
        case ("BETWEEN" | "NOT BETWEEN") as how, inner, low, high:
            return f"{written(inner)} {how} {written(low)} AND {written(high)}"
        case ("AND" | "OR") as how, left, right:
            return f"({written(left)}) {how} ({written(right)})"
        case how, left, right:
            sides = [
                written(side) if side[0] in VALUES else f"({written(side)})"
                for side in (left, right)
            ]
            return f"{sides[0]}{how}{sides[1]}"
    raise AssertionError(tree)


# --- the tree, evaluated -------------------------------------------------------------------------


def as_number(text: str, beside: int | float) -> int | float:
    try:
        if isinstance(beside, float):
            return float(text)
        value = int(text)
    except ValueError:
        raise Incomparable from None
    if abs(beside) < 2**31 and not -(2**31) <= value < 2**31:
        raise Incomparable
    return value


def both_numbers(left: Any, right: Any) -> tuple[int | float, int | float]:
    if isinstance(left, str) and isinstance(right, str):
        return as_number(left, 0.5), as_number(right, 0.5)
    if isinstance(left, str):
        return as_number(left, right), right
    return left, as_number(right, left) if isinstance(right, str) else right


def equal(left: Any, right: Any) -> Any:
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
    left, right = both_numbers(left, right)
    return bool(left == right)


def inverted(value: Any) -> Any:
    return None if value is None else not value


def both(left: Any, right: Any, stops: bool, message: dict[str, str]) -> Any:
    first = evaluated(left, message)
    if first is stops:
        return stops
    second = evaluated(right, message)
    if second is stops:
        return stops
    return None if None in (first, second) else not stops


def evaluated(tree: Any, message: dict[str, str]) -> Any:
    match tree:
        case "name", name:
            return message.get(name)
        case (("number" | "text" | "truth"), value):
            return value
        case "NOT", inner:
            return inverted(evaluated(inner, message))
        case "IS NULL", inner:
            return evaluated(inner, message) is None
        case "IS NOT NULL", inner:
            return evaluated(inner, message) is not None
        case "IN", name, members, negated:
            found = evaluated(name, message)
            return None if found is None else (found in members) != negated
        case ("CONTAINS" | "STARTSWITH" | "ENDSWITH") as how, inner, text, negated:
            found = evaluated(inner, message)
            if found is None or text == "":
                return False
            test = {"CONTAINS": text in found, "STARTSWITH": found[: len(text)] == text}
            return test.get(how, found[-len(text) :] == text) != negated
        case "BETWEEN", inner, low, high:
            return both((">=", inner, low), ("<=", inner, high), False, message)
        case "NOT BETWEEN", inner, low, high:
            return both(("<", inner, low), (">", inner, high), True, message)
        case "AND", left, right:
            return both(left, right, False, message)
        case "OR", left, right:
            return both(left, right, True, message)
    how, left, right = tree[0], evaluated(tree[1], message), evaluated(tree[2], message)
    if how in ("=", "<>"):
        answer = equal(left, right)
        return answer if how == "=" else inverted(answer)
    if left is None or right is None:
        return None
    left, right = both_numbers(left, right)
    return {">": left > right, ">=": left >= right, "<": left < right, "<=": left <= right}[how]


@given(tree=trees, message=properties)
def test_a_filter_matches_like_the_reference_evaluator(tree: Any, message: dict[str, str]) -> None:
    try:
        expected = evaluated(tree, message) is True
    except Incomparable:
        expected = False
    assert CompiledFilter(written(tree)).matches(message) is expected, written(tree)


PIECES = "a b 'x' '' 5 2.5 = <> > ( ) , + - -- /* */ NOT AND OR BETWEEN IN TRUE NULL IS CONTAINS"
pieces = st.sampled_from(PIECES.split())


@given(
    expression=st.text(max_size=60) | st.lists(pieces, max_size=25).map(" ".join),
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
def test_depth_is_bounded(expression: str) -> None:
    with contextlib.suppress(InvalidExpression):
        CompiledFilter(expression).matches({"a": "1"})
