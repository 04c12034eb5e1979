"""SQL92 expressions: what they match, and which are refused. tests/interop asks RocketMQ too."""

from __future__ import annotations

import pytest

from escrowmq.consume.sql92 import CompiledFilter
from escrowmq.errors import InvalidExpression

MESSAGE = {
    "a": "5",
    "b": "-3",
    "long": "3000000000",
    "half": "0.5",
    "one": "1.0",
    "word": "red",
    "yes": "true",
    "Yes": "TRUE",
    "quoted": "it's",
    "nan": "NaN",
    "spaced": " 7 ",
    "$x_1": "odd",
}

MATCHES = """
    a = 5
    a <> 6
    a > 4 AND a < 6
    a >= 5 AND a <= 5
    5 = a
    4 < a
    b = -3
    b < 0
    b BETWEEN -5 AND 0
    a BETWEEN 5 AND 5
    a NOT BETWEEN 6 AND 9
    a not between 6 and 1
    long = 3000000000
    long > 2999999999L
    half < 0.6
    half = .5
    half = 5E-1
    one = 1.
    word = 'red'
    word <> 'blue'
    word IN ('blue', 'red')
    word NOT IN ('blue')
    (word) IN ('red')
    quoted = 'it''s'
    yes = TRUE
    Yes = true
    word = FALSE
    word IS NOT NULL
    missing IS NULL
    NOT missing IS NULL
    missing = missing
    'x' <> missing
    word CONTAINS 'e'
    word STARTSWITH 're'
    word ENDSWITH 'ed'
    word NOT CONTAINS 'x'
    word NOT STARTSWITH 'x'
    word NOT ENDSWITH 'x'
    NOT (missing CONTAINS 'x')
    NOT (word CONTAINS '')
    missing > 1 OR a = 5
    NOT (missing > 1 AND a = 6)
    NOT word
    (NOT word) = TRUE
    a > 1 = TRUE
    nan > 0.5
    nan > long
    spaced > half
    $x_1 = 'odd'
    a /* a comment */ = 5
    TRUE
    NULL OR TRUE
    NULL IS NULL
    a > +4
    a > - - 4
    a = --5
    1 < 2
    2 = 2.
    -5 < 3000000000
    'x' = 'x'
    'red' CONTAINS 'e'
"""

DOES_NOT = """
    a = 6
    A = 5
    missing = 5
    missing <> 5
    missing > 1
    NOT (missing > 1)
    missing IN ('x')
    missing NOT IN ('x')
    missing BETWEEN 1 AND 2
    missing NOT BETWEEN 1 AND 2
    missing NOT CONTAINS 'x'
    word NOT CONTAINS ''
    word CONTAINS ''
    missing = 'x'
    missing <> 'x'
    'x' = missing
    a IS NULL
    word > 1
    word > 1 OR a = 5
    NOT (word > 1)
    one = 1
    half > 0
    long > 5
    spaced > 5
    word > word
    yes
    NOT missing
    NOT a = 5
    -a = -5
    - a < 0
    TRUE = yes
    'x' = TRUE
    1 = TRUE
    (a > 1) = 1
    a = '5.0'
    NULL
    NULL AND TRUE
    FALSE
    a = 5 AND missing = 1
    a CONTAINS 'x' OR missing = 1
"""

REFUSED = {
    "": (1, "missing before the end"),
    "a = ": (5, "missing before the end"),
    "a = 5 b": (7, "AND or OR missing"),
    "a == 5": (4, "missing before ="),
    'a = "x"': (5, "single quotes"),
    "a = 'x": (5, "does not end"),
    "a = 'it's'": (10, "does not end"),
    "a = 5 -- a comment without an end": (7, "AND or OR missing"),
    "a ; b": (3, "';'"),
    "a > 'x'": (3, "a string"),
    "'x' < a": (5, "a string"),
    "a > TRUE": (3, "TRUE"),
    "a > NULL": (3, "NULL"),
    "a > 1 > 2": (7, "conditions"),
    "NOT a > 1": (7, "conditions"),
    "a = NULL": (3, "IS NULL"),
    "NULL <> a": (6, "IS NULL"),
    "TRUE = 'x'": (6, "cannot be compared"),
    "FALSE <> 1": (7, "cannot be compared"),
    "5": (1, "condition"),
    "'x' AND a": (1, "condition"),
    "a AND 5": (7, "condition"),
    "-a": (1, "condition"),
    "NOT 5": (1, "condition"),
    "a IN ()": (7, "string"),
    "a IN (1)": (7, "string"),
    "a IN ('x'": (10, ")"),
    "'x' IN ('x')": (5, "property"),
    "a IS 5": (6, "NULL"),
    "a NOT 5": (7, "BETWEEN, IN, CONTAINS, STARTSWITH or ENDSWITH"),
    "a CONTAINS b": (12, "string"),
    "a BETWEEN 5": (12, "AND"),
    "a BETWEEN 5 AND 1": (3, "swap"),
    "a BETWEEN 'a' AND 'b'": (3, "string"),
    "(a = 1": (7, ")"),
    "a = 1)": (6, "AND or OR missing"),
    "a = 9223372036854775808": (5, "larger"),
    "a = 1e999": (5, "larger"),
    "a = 0.0": (5, "write 0"),
    "a = 012": (6, "AND or OR missing"),
    "(" * 80 + "a = 1" + ")" * 80: (65, "deep"),
    "a" + " = a" * 300: (1, "nested more than 200"),
}


def lines(table: str) -> list[str]:
    """Return the expressions of a table."""
    return [line.strip() for line in table.strip().splitlines()]


@pytest.mark.parametrize("expression", lines(MATCHES))
def test_an_expression_matches(expression: str) -> None:
    assert CompiledFilter(expression).matches(MESSAGE)


@pytest.mark.parametrize("expression", lines(DOES_NOT))
def test_an_expression_does_not_match(expression: str) -> None:
    assert not CompiledFilter(expression).matches(MESSAGE)


@pytest.mark.parametrize("expression", list(REFUSED))
def test_an_invalid_expression_is_refused_with_its_position(expression: str) -> None:
    position, reason = REFUSED[expression]
    with pytest.raises(InvalidExpression) as refused:
        CompiledFilter(expression)
    assert reason in refused.value.reason
    assert refused.value.position == position
    assert f"at character {position}" in str(refused.value)


def test_a_comment_ends_with_its_line() -> None:
    assert CompiledFilter("a = 5 -- AND a = 6\n AND b = -3").matches(MESSAGE)


def test_encoded_properties_are_matched() -> None:
    assert CompiledFilter("a = 5").matches_encoded(b"b\x011\x02a\x015\x02")
    assert not CompiledFilter("a = 5").matches_encoded(b"")


def test_a_long_chain_of_or_is_not_refused_as_nested() -> None:
    expression = " OR ".join(f"a = {number}" for number in range(1000))
    message_filter = CompiledFilter(expression)
    assert message_filter.matches({"a": "999"})
    assert message_filter.cost > 1000
