"""Parse an SQL92 expression: text to tokens, tokens to a tree.

The grammar is RocketMQ's, parsed by recursive descent. What binds loosest comes first:

    or          and (OR and)*
    and         equality (AND equality)*
    equality    comparison (= comparison | <> comparison | IS [NOT] NULL)*
    comparison  unary ( > >= < <= unary
                      | [NOT] BETWEEN unary AND unary
                      | [NOT] IN ( text, … )
                      | [NOT] CONTAINS, STARTSWITH, ENDSWITH text )*
    unary       + unary | - unary | NOT unary | primary
    primary     text | number | TRUE | FALSE | NULL | property | ( or )

NOT binds tighter than a comparison: `NOT a = 1` means `(NOT a) = 1`. Operands that can never be
compared are an error of the expression, as in RocketMQ. One rule is stricter than RocketMQ's:
nothing may follow the expression. RocketMQ's parser stops where a valid expression ends and ignores
the remaining text.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, Literal

from escrowmq.errors import InvalidExpression

# --- tokens --------------------------------------------------------------------------------------

TokenKind = Literal["word", "name", "text", "int", "float", "sign", "end"]

KEYWORDS: Final = frozenset(
    {"NOT", "AND", "OR", "BETWEEN", "IN", "TRUE", "FALSE", "NULL", "IS"}
    | {"CONTAINS", "STARTSWITH", "ENDSWITH"}
)

# The order of the alternatives matters: a float begins like an integer. A comment that starts with
# two minus signs needs the end of its line; without it they are two minus signs, as in RocketMQ.
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
    kind: TokenKind
    value: str  # keywords in upper case; strings without their quotes
    position: int  # counted from 1

    def __str__(self) -> str:
        match self.kind:
            case "end":
                return "the end"
            case "text":
                return f"the string '{self.value}'"
            case _:
                return self.value


# Parsing and compiling so many takes some ten milliseconds, for which all other clients wait.
TOKENS_MAX: Final = 4_096


def tokenize(expression: str) -> list[Token]:
    """Split an expression into tokens; the last has the kind "end". Raises InvalidExpression."""
    tokens: list[Token] = []
    begin = 0
    while begin < len(expression):
        match = _TOKEN.match(expression, begin)
        if match is None:
            raise InvalidExpression(begin + 1, _describe_invalid_character(expression[begin]))
        if len(tokens) >= TOKENS_MAX:
            raise InvalidExpression(begin + 1, f"more than {TOKENS_MAX} words, values and signs")
        if match.lastgroup != "space":
            tokens.append(_make_token(str(match.lastgroup), match.group(), begin + 1))
        begin = match.end()
    tokens.append(Token("end", "", len(expression) + 1))
    return tokens


def _make_token(kind: str, value: str, position: int) -> Token:
    match kind:
        case "name" if value.upper() in KEYWORDS:
            return Token("word", value.upper(), position)
        case "name":
            return Token("name", value, position)
        case "text":
            return Token("text", value[1:-1].replace("''", "'"), position)
        case "int":
            return Token("int", value, position)
        case "float":
            return Token("float", value, position)
        case _:
            return Token("sign", value, position)


def _describe_invalid_character(character: str) -> str:
    if character == "'":
        return "the string does not end; write a quote inside a string twice"
    if character == '"':
        return "unexpected double quote; write strings in single quotes, properties without quotes"
    return f"unexpected character {character!r}"


# --- the tree ------------------------------------------------------------------------------------
# PropertyRef, StringLiteral, Number and NotANumber are values. The others are conditions: true,
# false or unknown.

NumberKind = Literal["int", "long", "double"]
OrderOperator = Literal[">", ">=", "<", "<="]
SearchOperator = Literal["CONTAINS", "STARTSWITH", "ENDSWITH"]

INT_MAX: Final = 2**31 - 1
LONG_MAX: Final = 2**63 - 1


@dataclass(frozen=True, slots=True)
class PropertyRef:
    name: str


@dataclass(frozen=True, slots=True)
class StringLiteral:
    value: str


@dataclass(frozen=True, slots=True)
class Number:
    value: int | float
    kind: NumberKind  # a property must be written like this to be compared with it
    is_literal: bool = True  # False for -5, which is the literal 5 negated


@dataclass(frozen=True, slots=True)
class NotANumber:
    """The result of a minus in front of anything but a number."""


@dataclass(frozen=True, slots=True)
class BooleanLiteral:
    value: bool | None  # TRUE, FALSE, NULL


@dataclass(frozen=True, slots=True)
class PropertyCondition:
    """A property in place of a condition. It is never true, because properties are strings."""

    operand: PropertyRef


@dataclass(frozen=True, slots=True)
class Compare:
    operator: OrderOperator
    left: Value
    right: Value


@dataclass(frozen=True, slots=True)
class Equal:
    left: Node
    right: Node


@dataclass(frozen=True, slots=True)
class InList:
    operand: PropertyRef
    texts: frozenset[str]
    is_negated: bool


@dataclass(frozen=True, slots=True)
class TextSearch:
    operator: SearchOperator
    operand: Node
    text: str
    is_negated: bool


@dataclass(frozen=True, slots=True)
class Not:
    operand: Condition


@dataclass(frozen=True, slots=True)
class And:
    """A chain of ANDs. It is one node: the tree must not be as deep as the expression is long."""

    parts: tuple[Condition, ...]


@dataclass(frozen=True, slots=True)
class Or:
    """A chain of ORs, see And."""

    parts: tuple[Condition, ...]


Value = PropertyRef | Number | NotANumber
Condition = (
    BooleanLiteral | PropertyCondition | Compare | Equal | InList | TextSearch | Not | And | Or
)
Node = Value | StringLiteral | Condition
CONDITIONS: Final = (
    BooleanLiteral,
    PropertyCondition,
    Compare,
    Equal,
    InList,
    TextSearch,
    Not,
    And,
    Or,
)


# --- the grammar ---------------------------------------------------------------------------------

DEPTH_MAX: Final = 64  # of nested parentheses, signs and NOTs

_ORDER_OPERATORS: Final[dict[str, OrderOperator]] = {
    symbol: symbol for symbol in (">", ">=", "<", "<=")
}
_SEARCH_OPERATORS: Final[dict[str, SearchOperator]] = {
    word: word for word in ("CONTAINS", "STARTSWITH", "ENDSWITH")
}
_BOOLEANS: Final = {
    "TRUE": BooleanLiteral(True),
    "FALSE": BooleanLiteral(False),
    "NULL": BooleanLiteral(None),
}
_NEGATABLE: Final = ("BETWEEN", "IN", *_SEARCH_OPERATORS)


def parse(expression: str) -> Condition:
    """Parse an expression. Raises InvalidExpression, which says at which character."""
    return _Parser(expression).parse()


class _Parser:
    def __init__(self, expression: str) -> None:
        self._tokens = tokenize(expression)
        self._index = 0
        self._depth = 0

    @property
    def _token(self) -> Token:
        return self._tokens[self._index]

    def parse(self) -> Condition:
        condition = _as_condition(self._or(), position=1)
        if self._token.kind != "end":
            raise InvalidExpression(
                self._token.position, f"unexpected {self._token}; is AND or OR missing?"
            )
        return condition

    # One method per rule of the grammar, in the order of precedence.

    def _or(self) -> Node:
        position = self._token.position
        first = self._and()
        parts = [first]
        while self._accept("OR"):
            parts.append(_as_condition(self._and(), self._tokens[self._index - 1].position))
        return first if len(parts) == 1 else Or((_as_condition(first, position), *parts[1:]))  # type: ignore[arg-type]

    def _and(self) -> Node:
        position = self._token.position
        first = self._equality()
        parts = [first]
        while self._accept("AND"):
            parts.append(_as_condition(self._equality(), self._tokens[self._index - 1].position))
        return first if len(parts) == 1 else And((_as_condition(first, position), *parts[1:]))  # type: ignore[arg-type]

    def _equality(self) -> Node:
        left = self._comparison()
        while True:
            position = self._token.position
            if self._accept("="):
                left = _equal(left, self._comparison(), position)
            elif self._accept("<>"):
                left = Not(_equal(left, self._comparison(), position))
            elif self._accept("IS"):
                is_negated = self._accept("NOT")
                self._expect("NULL")
                is_null = Equal(left, BooleanLiteral(None))
                left = Not(is_null) if is_negated else is_null
            else:
                return left

    def _comparison(self) -> Node:
        left = self._unary()
        while True:
            token = self._token
            if token.kind == "sign" and token.value in _ORDER_OPERATORS:
                self._index += 1
                left = _compare(_ORDER_OPERATORS[token.value], left, self._unary(), token.position)
            elif token.kind == "word" and (token.value == "NOT" or token.value in _NEGATABLE):
                left = self._keyword_comparison(left, token.position)
            else:
                return left

    def _keyword_comparison(self, left: Node, position: int) -> Condition:
        is_negated = self._accept("NOT")
        token = self._token
        if token.kind != "word" or token.value not in _NEGATABLE:
            raise InvalidExpression(
                token.position, f"NOT must be followed by {_join_words(_NEGATABLE)} here"
            )
        self._index += 1
        if token.value == "BETWEEN":
            low = self._unary()
            self._expect("AND")
            return _between(left, low, self._unary(), position, is_negated=is_negated)
        if token.value in _SEARCH_OPERATORS:
            return TextSearch(_SEARCH_OPERATORS[token.value], left, self._text(), is_negated)
        if not isinstance(left, PropertyRef):
            raise InvalidExpression(position, "IN needs a property before it")
        return InList(left, frozenset(self._texts()), is_negated)

    def _unary(self) -> Node:
        self._depth += 1
        if self._depth > DEPTH_MAX:
            raise InvalidExpression(self._token.position, f"nested more than {DEPTH_MAX} deep")
        position = self._token.position
        node: Node
        if self._accept("+"):
            node = self._unary()
        elif self._accept("-"):
            node = _negate(self._unary())
        elif self._accept("NOT"):
            node = Not(_as_condition(self._unary(), position))
        else:
            node = self._primary()
        self._depth -= 1
        return node

    def _primary(self) -> Node:
        token = self._token
        self._index += 1
        match token.kind:
            case "text":
                return StringLiteral(token.value)
            case "int":
                return _integer(token)
            case "float":
                return _double(token)
            case "name":
                return PropertyRef(token.value)
            case "word" if token.value in _BOOLEANS:
                return _BOOLEANS[token.value]
            case "sign" if token.value == "(":
                node = self._or()
                self._expect(")")
                return node
        raise InvalidExpression(token.position, f"a property or a value is missing before {token}")

    # Helpers.

    def _accept(self, value: str) -> bool:
        token = self._token
        if token.kind not in ("word", "sign") or token.value != value:
            return False
        self._index += 1
        return True

    def _expect(self, value: str) -> None:
        if not self._accept(value):
            raise InvalidExpression(
                self._token.position, f"{value} is missing before {self._token}"
            )

    def _text(self) -> str:
        token = self._token
        if token.kind != "text":
            raise InvalidExpression(
                token.position, f"a string in single quotes is missing before {token}"
            )
        self._index += 1
        return token.value

    def _texts(self) -> list[str]:
        self._expect("(")
        texts = [self._text()]
        while self._accept(","):
            texts.append(self._text())
        self._expect(")")
        return texts


# --- operands that are allowed -------------------------------------------------------------------


def _as_condition(node: Node, position: int) -> Condition:
    if isinstance(node, CONDITIONS):
        return node
    if isinstance(node, PropertyRef):
        return PropertyCondition(node)
    raise InvalidExpression(position, "expected a condition, not a value")


def _compare(operator: OrderOperator, left: Node, right: Node, position: int) -> Compare:
    return Compare(
        operator,
        _check_comparable(left, operator, position),
        _check_comparable(right, operator, position),
    )


def _check_comparable(node: Node, operator: str, position: int) -> Value:
    if isinstance(node, StringLiteral):
        raise InvalidExpression(
            position, f"{operator} compares numbers, and '{node.value}' is a string"
        )
    if isinstance(node, BooleanLiteral):
        raise InvalidExpression(position, f"{operator} compares numbers, not TRUE, FALSE or NULL")
    if isinstance(node, CONDITIONS):
        raise InvalidExpression(position, f"{operator} compares numbers, not conditions")
    return node


def _between(value: Node, low: Node, high: Node, position: int, *, is_negated: bool) -> Condition:
    if is_negated:
        return Or((_compare("<", value, low, position), _compare(">", value, high, position)))
    both = And((_compare(">=", value, low, position), _compare("<=", value, high, position)))
    if (
        isinstance(low, Number)
        and isinstance(high, Number)
        and low.is_literal
        and high.is_literal
        and high.value < low.value
    ):
        raise InvalidExpression(
            position, f"BETWEEN {low.value} AND {high.value} matches nothing: swap the two numbers"
        )
    return both


def _equal(left: Node, right: Node, position: int) -> Equal:
    if BooleanLiteral(None) in (left, right):
        raise InvalidExpression(
            position, "= and <> do not work with NULL; write IS NULL or IS NOT NULL"
        )
    if isinstance(left, BooleanLiteral) and (
        isinstance(right, StringLiteral) or (isinstance(right, Number) and right.is_literal)
    ):
        raise InvalidExpression(
            position, "TRUE or FALSE cannot be compared with a string or a number"
        )
    return Equal(left, right)


def _negate(node: Node) -> Number | NotANumber:
    return Number(-node.value, node.kind, False) if isinstance(node, Number) else NotANumber()


def _integer(token: Token) -> Number:
    value = int(token.value.rstrip("lL"))
    if value > LONG_MAX:
        raise InvalidExpression(token.position, f"{token.value} is larger than {LONG_MAX}")
    return Number(value, "int" if value <= INT_MAX else "long")


def _double(token: Token) -> Number:
    value = float(token.value)
    if value == float("inf"):
        raise InvalidExpression(token.position, f"{token.value} is larger than a double can be")
    if value == 0.0:
        raise InvalidExpression(
            token.position, f"{token.value} is smaller than a double can be: write 0"
        )
    return Number(value, "double")


def _join_words(words: tuple[str, ...]) -> str:
    return f"{', '.join(words[:-1])} or {words[-1]}"
