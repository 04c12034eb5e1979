"""Every behaviour is in the table of one module, and every test that a table names exists."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ARTICLES = Path(__file__).parent
TESTS = ARTICLES.parent
BEHAVIOURS = range(1, 157)
ENTRY = re.compile(r"^ *(\d+) (.*)$")
NO_TEST = "No test: "


class Entry(NamedTuple):
    """A behaviour, and the lines below it: a test, a file and a test, or why there is no test."""

    number: int
    behaviour: str
    reference: str


def modules() -> list[Path]:
    return sorted(path for path in ARTICLES.glob("test_*.py") if path != Path(__file__))


def entries(module: Path) -> Iterator[Entry]:
    """Yield the entries of the table in the docstring of a module."""
    docstring = ast.get_docstring(ast.parse(module.read_bytes()), clean=False) or ""
    blocks: list[list[str]] = []
    for line in docstring.splitlines():
        if ENTRY.match(line):
            blocks.append([line])
        elif blocks and line.strip():
            blocks[-1].append(line.strip())
    for first, *rest in blocks:
        number, behaviour = first.split(maxsplit=1)
        yield Entry(int(number), behaviour, " ".join(rest))


def names_of_tests(module: Path) -> set[str]:
    return set(re.findall(r"^(?:async )?def (test_\w+)", module.read_text(), re.MULTILINE))


def missing_test(module: Path, reference: str) -> str:
    """Return what is wrong with a reference, or an empty text."""
    if reference.startswith(NO_TEST):
        return ""
    *path, name = reference.split()
    file = TESTS / path[0] if path else module
    if not file.is_file():
        return f"there is no file {file.relative_to(TESTS)}"
    return "" if name in names_of_tests(file) else f"{file.relative_to(TESTS)} has no {name}"


def test_every_behaviour_is_in_one_table() -> None:
    numbers = Counter(entry.number for module in modules() for entry in entries(module))
    assert numbers == Counter(BEHAVIOURS)


@pytest.mark.parametrize("module", modules(), ids=lambda module: module.stem)
def test_every_test_that_a_table_names_exists(module: Path) -> None:
    problems = [
        f"{entry.number}: {problem}"
        for entry in entries(module)
        if (problem := missing_test(module, entry.reference))
    ]
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("module", modules(), ids=lambda module: module.stem)
def test_every_test_of_a_module_is_in_its_table(module: Path) -> None:
    table = {entry.reference for entry in entries(module)}
    assert names_of_tests(module) <= table
