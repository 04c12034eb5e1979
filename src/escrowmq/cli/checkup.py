"""One thing that `escrowmq doctor` looked at: how it is, and what to do about it."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final


class Level(enum.Enum):
    OK = "ok"
    WARNING = "warning"  # it works, but look after it
    PROBLEM = "problem"  # something does not work, or will not for long


@dataclass(frozen=True, slots=True)
class Checkup:
    what: str
    level: Level
    detail: str
    remedy: str = ""

    def as_json(self) -> dict[str, Any]:
        return {
            "what": self.what,
            "level": self.level.value,
            "detail": self.detail,
            "remedy": self.remedy or None,
        }


def ok(what: str, detail: str) -> Checkup:
    return Checkup(what, Level.OK, detail)


def warning(what: str, detail: str, remedy: str) -> Checkup:
    return Checkup(what, Level.WARNING, detail, remedy)


def problem(what: str, detail: str, remedy: str) -> Checkup:
    return Checkup(what, Level.PROBLEM, detail, remedy)


_MARKS: Final = {Level.OK: "ok     ", Level.WARNING: "WARNING", Level.PROBLEM: "PROBLEM"}


def checkup_lines(checkups: Iterable[Checkup]) -> Iterator[str]:
    seen = list(checkups)
    width = max((len(one.what) for one in seen), default=0)
    for one in seen:
        yield f"{_MARKS[one.level]}  {one.what:<{width}}  {one.detail}"
        if one.remedy:
            yield f"{'':<{width + 11}}-> {one.remedy}"
    problems = sum(one.level is Level.PROBLEM for one in seen)
    warnings = sum(one.level is Level.WARNING for one in seen)
    if seen:
        yield ""
    if problems or warnings:
        yield f"{_count(problems, 'problem')}, {_count(warnings, 'warning')}"
    else:
        yield "nothing is wrong"


def _count(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"
