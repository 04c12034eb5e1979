"""An expression, cut into tokens. Each knows where it stands, for the sake of errors.

What an expression consists of.

`Property`, `Text`, `Number` and `Nothing` are values; the others are true, false or unknown.

RocketMQ's grammar, by recursive descent. What binds looser stands first:

    or          and (OR and)*
    and         equality (AND equality)*
    equality    comparison (= comparison | <> comparison | IS [NOT] NULL)*
    comparison  unary ( > >= < <= unary
                      | [NOT] BETWEEN unary AND unary
                      | [NOT] IN ( text, … )
                      | [NOT] CONTAINS, STARTSWITH, ENDSWITH text )*
    unary       + unary | - unary | NOT unary | primary
    primary     text | number | TRUE | FALSE | NULL | property | ( or )

So NOT binds tighter than a comparison: `NOT a = 1` is `(NOT a) = 1`. RocketMQ also refuses what
cannot be compared while it reads, and so do we. One thing is stricter here: after the expression
there must be nothing. RocketMQ's parser stops where it has understood enough and forgets the rest.
"""

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


DEPTH_MAX: Final = 64  # of parentheses and signs, one inside the other
_ORDERS: Final[dict[str, Order]] = {order: order for order in (">", ">=", "<", "<=")}
_SEARCHES: Final[dict[str, Search]] = {how: how for how in ("CONTAINS", "STARTSWITH", "ENDSWITH")}
_TRUTHS: Final = {"TRUE": Truth(True), "FALSE": Truth(False), "NULL": Truth(None)}
_AFTER_NOT: Final = ("BETWEEN", "IN", *_SEARCHES)


def parse(expression: str) -> Condition:
    """Raises BadExpression."""
    return _Parser(expression).whole()


class _Parser:
    def __init__(self, expression: str) -> None:
        self._tokens = tokens_of(expression)
        self._next = 0
        self._depth = 0

    @property
    def _token(self) -> Token:
        return self._tokens[self._next]

    def whole(self) -> Condition:
        found = _condition(self._or(), at=1)
        if self._token.kind != "end":
            raise BadExpression(self._token.at, f"{self._token} is too much, or AND or OR missing")
        return found

    # --- by precedence ---------------------------------------------------------------------------

    def _or(self) -> Node:
        at = self._token.at
        first = self._and()
        parts = [first]
        while self._take("OR"):
            parts.append(_condition(self._and(), self._tokens[self._next - 1].at))
        return first if len(parts) == 1 else Either((_condition(first, at), *parts[1:]))  # type: ignore[arg-type]

    def _and(self) -> Node:
        at = self._token.at
        first = self._equality()
        parts = [first]
        while self._take("AND"):
            parts.append(_condition(self._equality(), self._tokens[self._next - 1].at))
        return first if len(parts) == 1 else Both((_condition(first, at), *parts[1:]))  # type: ignore[arg-type]

    def _equality(self) -> Node:
        left = self._comparison()
        while True:
            at = self._token.at
            if self._take("="):
                left = _equal(left, self._comparison(), at)
            elif self._take("<>"):
                left = Not(_equal(left, self._comparison(), at))
            elif self._take("IS"):
                negated = self._take("NOT")
                self._want("NULL")
                is_null = Equal(left, Truth(None))
                left = Not(is_null) if negated else is_null
            else:
                return left

    def _comparison(self) -> Node:
        left = self._unary()
        while True:
            token = self._token
            if token.kind == "sign" and token.value in _ORDERS:
                self._next += 1
                left = _compare(_ORDERS[token.value], left, self._unary(), token.at)
            elif token.kind == "word" and (token.value == "NOT" or token.value in _AFTER_NOT):
                left = self._worded(left, token.at)
            else:
                return left

    def _worded(self, left: Node, at: int) -> Condition:
        negated = self._take("NOT")
        token = self._token
        if token.kind != "word" or token.value not in _AFTER_NOT:
            raise BadExpression(token.at, f"NOT must be followed by {_list(_AFTER_NOT)} here")
        self._next += 1
        if token.value == "BETWEEN":
            low = self._unary()
            self._want("AND")
            return _between(left, low, self._unary(), at, negated=negated)
        if token.value in _SEARCHES:
            return Searched(_SEARCHES[token.value], left, self._text(), negated)
        if not isinstance(left, Property):
            raise BadExpression(at, "IN needs a property before it")
        return Among(left, frozenset(self._texts()), negated)

    def _unary(self) -> Node:
        self._depth += 1
        if self._depth > DEPTH_MAX:
            raise BadExpression(self._token.at, f"nested more than {DEPTH_MAX} deep")
        at = self._token.at
        found: Node
        if self._take("+"):
            found = self._unary()
        elif self._take("-"):
            found = _negated(self._unary())
        elif self._take("NOT"):
            found = Not(_condition(self._unary(), at))
        else:
            found = self._primary()
        self._depth -= 1
        return found

    def _primary(self) -> Node:
        token = self._token
        self._next += 1
        match token.kind:
            case "text":
                return Text(token.value)
            case "int":
                return _integer(token)
            case "float":
                return _double(token)
            case "name":
                return Property(token.value)
            case "word" if token.value in _TRUTHS:
                return _TRUTHS[token.value]
            case "sign" if token.value == "(":
                found = self._or()
                self._want(")")
                return found
        raise BadExpression(token.at, f"a property or a value is missing before {token}")

    # --- small pieces ----------------------------------------------------------------------------

    def _take(self, value: str) -> bool:
        token = self._token
        if token.kind not in ("word", "sign") or token.value != value:
            return False
        self._next += 1
        return True

    def _want(self, value: str) -> None:
        if not self._take(value):
            raise BadExpression(self._token.at, f"{value} is missing before {self._token}")

    def _text(self) -> str:
        token = self._token
        if token.kind != "text":
            raise BadExpression(token.at, f"a string in single quotes is missing before {token}")
        self._next += 1
        return token.value

    def _texts(self) -> list[str]:
        self._want("(")
        found = [self._text()]
        while self._take(","):
            found.append(self._text())
        self._want(")")
        return found


# --- what may be combined ------------------------------------------------------------------------


def _condition(node: Node, at: int) -> Condition:
    if isinstance(node, CONDITIONS):
        return node
    if isinstance(node, Property):
        return Cast(node)
    raise BadExpression(at, "a condition must stand here, not a value")


def _compare(order: Order, left: Node, right: Node, at: int) -> Compare:
    return Compare(order, _ordered(left, order, at), _ordered(right, order, at))


def _ordered(node: Node, order: str, at: int) -> Value:
    if isinstance(node, Text):
        raise BadExpression(at, f"{order} compares numbers, and '{node.value}' is a string")
    if isinstance(node, Truth):
        raise BadExpression(at, f"{order} compares numbers, not TRUE, FALSE or NULL")
    if isinstance(node, CONDITIONS):
        raise BadExpression(at, f"{order} compares numbers, not conditions")
    return node


def _between(value: Node, low: Node, high: Node, at: int, *, negated: bool) -> Condition:
    if negated:
        return Either((_compare("<", value, low, at), _compare(">", value, high, at)))
    both = Both((_compare(">=", value, low, at), _compare("<=", value, high, at)))
    if (
        isinstance(low, Number)
        and isinstance(high, Number)
        and low.is_literal
        and high.is_literal
        and high.value < low.value
    ):
        raise BadExpression(at, f"BETWEEN {low.value} AND {high.value} is empty: swap the two")
    return both


def _equal(left: Node, right: Node, at: int) -> Equal:
    if Truth(None) in (left, right):
        raise BadExpression(at, "nothing equals NULL; write IS NULL or IS NOT NULL")
    if isinstance(left, Truth) and (
        isinstance(right, Text) or (isinstance(right, Number) and right.is_literal)
    ):
        raise BadExpression(at, "TRUE or FALSE cannot be compared with a string or a number")
    return Equal(left, right)


def _negated(node: Node) -> Number | Nothing:
    return Number(-node.value, node.kind, False) if isinstance(node, Number) else Nothing()


def _integer(token: Token) -> Number:
    value = int(token.value.rstrip("lL"))
    if value > LONG_MAX:
        raise BadExpression(token.at, f"{token.value} is larger than {LONG_MAX}")
    return Number(value, "int" if value <= INT_MAX else "long")


def _double(token: Token) -> Number:
    value = float(token.value)
    if value == float("inf"):
        raise BadExpression(token.at, f"{token.value} is larger than a double can be")
    if value == 0.0:
        raise BadExpression(token.at, f"{token.value} is smaller than a double can be: write 0")
    return Number(value, "double")


def _list(words: tuple[str, ...]) -> str:
    return f"{', '.join(words[:-1])} or {words[-1]}"
