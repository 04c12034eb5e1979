"""The mistakes that can be planted: small edits of the source, found in its syntax tree.

An edit replaces as little text as possible, so that a survivor can be shown as the old and the
new line. Annotations and code without an effect on the behaviour are not changed: strings,
docstrings, log calls, `__repr__`, `assert`, `if TYPE_CHECKING`.
"""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import pairwise
from typing import Final


class Operator(StrEnum):
    """The kinds of mistakes."""

    COMPARISON = "comparison"
    INTEGER = "integer off by one"
    AND_OR = "and/or exchanged"
    NOT = "not removed"
    CONDITION = "condition forced"
    MIN_MAX = "min/max exchanged"
    PLUS_MINUS = "+=/-= exchanged"
    CALL = "call dropped"
    RAISE = "raise swallowed"
    RETURN = "None returned"


@dataclass(frozen=True, slots=True)
class Place:
    """The part of a mistake's location that the choice of its tests depends on.

    The lines are those of the statement. The body of a compound statement is not included.
    """

    first_line: int = 1
    last_line: int = 1
    in_function: bool = False
    """Whether the statement is in the body of a function, so that an import does not run it."""
    names: tuple[str, ...] = ()
    """The names that the statement defines, if it runs on import."""
    owner: str | None = None
    """The innermost class around the statement."""


@dataclass(frozen=True, slots=True)
class Mutation:
    """One edit: `text[start:end]` becomes `replacement`."""

    operator: Operator
    start: int
    end: int
    replacement: str
    line: int
    place: Place

    def apply(self, text: str) -> str:
        """Return the text with the mistake in it."""
        return text[: self.start] + self.replacement + text[self.end :]

    def old_and_new_line(self, text: str) -> tuple[str, str]:
        """Return the changed line before and after the edit. Several lines are joined into one."""
        start = text.rfind("\n", 0, self.start) + 1
        end = text.find("\n", self.end)
        old = text[start : end if end >= 0 else len(text)]
        new = text[start : self.start] + self.replacement + text[self.end : start + len(old)]
        return " ".join(old.split()), " ".join(new.split())


def mutations(text: str) -> list[Mutation]:
    """Return every mistake that can be planted in the source of a module, in order of position."""
    collector = _MutationCollector(text)
    collector.visit(ast.parse(text), Place())
    return sorted(
        collector.mutations,
        key=lambda mutation: (mutation.start, mutation.end, mutation.replacement),
    )


COMPARISONS: Final = {
    "<": ("<=", ">="),
    "<=": ("<", ">"),
    ">": (">=", "<="),
    ">=": (">", "<"),
    "==": ("!=",),
    "!=": ("==",),
    "is": ("is not",),
    "is not": ("is",),
    "in": ("not in",),
    "not in": ("in",),
}
EXCHANGED: Final = {"and": "or", "or": "and", "min": "max", "max": "min", "+=": "-=", "-=": "+="}
LOG_METHODS: Final = {"debug", "info", "warning", "error", "exception", "critical", "log"}
LOGGERS: Final = {"log", "logger", "logging"}
IGNORED_FIELDS: Final = {"annotation", "returns", "type_params"}

Function = ast.FunctionDef | ast.AsyncFunctionDef


class _MutationCollector:
    """Collects the edits of a syntax tree."""

    def __init__(self, text: str) -> None:
        self.mutations: list[Mutation] = []
        self._text = text
        self._lines = text.split("\n")
        self._line_starts = [0]
        for line in self._lines:
            self._line_starts.append(self._line_starts[-1] + len(line) + 1)
        self._tokens = [
            (self._line_starts[token.start[0] - 1] + token.start[1], token.string)
            for token in tokenize.generate_tokens(io.StringIO(text).readline)
            if token.type in (tokenize.OP, tokenize.NAME)
        ]

    def visit(self, node: ast.AST, place: Place) -> None:
        """Collect the edits of a node and of all nodes in it."""
        if _is_ignored(node):
            return
        place = _place_of(node, place)
        for operator, start, end, replacement in self._edits(node):
            line = self._text.count("\n", 0, start) + 1
            self.mutations.append(Mutation(operator, start, end, replacement, line, place))
        for field, value in ast.iter_fields(node):
            if field in IGNORED_FIELDS or (_is_never_true_in_tests(node) and field != "orelse"):
                continue
            inner = _place_in_body(node, place) if field == "body" else place
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    self.visit(child, inner)

    def _edits(self, node: ast.AST) -> Iterator[tuple[Operator, int, int, str]]:
        match node:
            case ast.Compare():
                yield from self._comparison_edits(node)
            case ast.Constant(value=int(value)) if not isinstance(value, bool):
                start, end = self._span(node)
                in_hex = self._text[start:end].lower().startswith("0x")
                yield Operator.INTEGER, start, end, hex(value + 1) if in_hex else str(value + 1)
            case ast.BoolOp(values=values):
                yield self._and_or_edit(values)
            case ast.UnaryOp(op=ast.Not()):
                start = self._span(node)[0]
                end = start + len("not")
                while self._text[end].isspace():
                    end += 1
                yield Operator.NOT, start, end, ""
            case ast.If(test=test) | ast.IfExp(test=test) if not _is_never_true_in_tests(node):
                yield from self._condition_edits(test)
            case ast.comprehension(ifs=tests):
                for test in tests:
                    yield from self._condition_edits(test)
            case ast.Call(func=ast.Name(id="min" | "max" as name) as function):
                yield Operator.MIN_MAX, *self._span(function), EXCHANGED[name]
            case ast.AugAssign(op=ast.Add() | ast.Sub()):
                for start, symbol in self._tokens_between(node.target, node.value):
                    if symbol in EXCHANGED:
                        end = start + len(symbol)
                        yield Operator.PLUS_MINUS, start, end, EXCHANGED[symbol]
            case ast.Expr(value=ast.Call() as call) | ast.Expr(value=ast.Await(value=call)) if (
                not _is_ignored(call)
            ):
                yield Operator.CALL, *self._span(node), "pass"
            case ast.Raise():
                yield Operator.RAISE, *self._span(node), "pass"
            case ast.Return(value=ast.expr() as value) if not _is_none(value):
                yield Operator.RETURN, *self._span(value), "None"

    def _comparison_edits(self, node: ast.Compare) -> Iterator[tuple[Operator, int, int, str]]:
        operands = [node.left, *node.comparators]
        for left, right in pairwise(operands):
            symbols = [
                (start, symbol)
                for start, symbol in self._tokens_between(left, right)
                if symbol in COMPARISONS or symbol == "not"
            ]
            start = symbols[0][0]
            end = symbols[-1][0] + len(symbols[-1][1])
            for replacement in COMPARISONS[" ".join(symbol for _, symbol in symbols)]:
                yield Operator.COMPARISON, start, end, replacement

    def _and_or_edit(self, values: list[ast.expr]) -> tuple[Operator, int, int, str]:
        """Return an edit of all operators in `a and b and c`, which are one node of the tree."""
        words = [
            (start, word)
            for left, right in pairwise(values)
            for start, word in self._tokens_between(left, right)
            if word in ("and", "or")
        ]
        begin = words[0][0]
        position, replacement = begin, ""
        for start, word in words:
            replacement += self._text[position:start] + EXCHANGED[word]
            position = start + len(word)
        return Operator.AND_OR, begin, position, replacement

    def _condition_edits(self, test: ast.expr) -> Iterator[tuple[Operator, int, int, str]]:
        start, end = self._span(test)
        for value in ("True", "False"):
            if self._text[start:end] != value:
                yield Operator.CONDITION, start, end, value

    def _tokens_between(self, left: ast.expr, right: ast.expr) -> Iterator[tuple[int, str]]:
        start, end = self._span(left)[1], self._span(right)[0]
        return (token for token in self._tokens if start <= token[0] < end)

    def _span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return (
            self._position(node.lineno, node.col_offset),
            self._position(node.end_lineno, node.end_col_offset),
        )

    def _position(self, line: int, column_bytes: int) -> int:
        """Convert a position of the tree, which counts columns in bytes of UTF-8."""
        before = self._lines[line - 1].encode()[:column_bytes].decode()
        return self._line_starts[line - 1] + len(before)


def _is_ignored(node: ast.AST) -> bool:
    match node:
        # Before Python 3.12 the positions inside an f-string are wrong, and most are messages.
        case ast.JoinedStr() | ast.Assert():
            return True
        case ast.FunctionDef(name="__repr__"):
            return True
        case ast.Subscript(value=ast.Name(id="Literal")):
            return True
        case ast.Call(func=ast.Attribute(attr=method, value=logger)) if method in LOG_METHODS:
            return _last_name(logger).strip("_").lower() in LOGGERS
        case ast.Expr(value=ast.Constant()):
            return True
    return False


def _is_never_true_in_tests(node: ast.AST) -> bool:
    """Return whether a condition is true only for type checkers or in a module run as a program."""
    match node:
        case ast.If(test=ast.Name() | ast.Attribute() as test):
            return _last_name(test) == "TYPE_CHECKING"
        case ast.If(test=ast.Compare(left=ast.Name(id="__name__"))):
            return True
    return False


def _is_none(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and value.value is None


def _last_name(node: ast.expr) -> str:
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
    return ""


def _place_of(node: ast.AST, outer_place: Place) -> Place:
    """Return the place of a statement. The place of an expression is that of its statement."""
    match node:
        case ast.match_case(pattern=pattern, body=[first, *_]):
            last_line = max(pattern.lineno, first.lineno - 1)
            return replace(outer_place, first_line=pattern.lineno, last_line=last_line)
        case ast.stmt():
            body: list[ast.stmt] | list[ast.match_case] = getattr(node, "body", [])
            if isinstance(node, ast.Match):
                body = node.cases
            last_line = node.end_lineno or node.lineno
            if body:
                last_line = max(node.lineno, _first_line(body[0]) - 1)
            names = outer_place.names if outer_place.in_function else _defined_names(node)
            return replace(outer_place, first_line=node.lineno, last_line=last_line, names=names)
    return outer_place


def _first_line(node: ast.stmt | ast.match_case) -> int:
    return node.pattern.lineno if isinstance(node, ast.match_case) else node.lineno


def _place_in_body(node: ast.AST, place: Place) -> Place:
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            return replace(place, in_function=True, names=())
        case ast.ClassDef(name=name):
            return replace(place, owner=name)
    return place


def _defined_names(node: ast.stmt) -> tuple[str, ...]:
    match node:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            return (name,)
        case ast.Assign(targets=targets):
            return tuple(name for target in targets if (name := _last_name(target)))
        case ast.AnnAssign(target=target) | ast.AugAssign(target=target):
            return (_last_name(target),)
    return ()
