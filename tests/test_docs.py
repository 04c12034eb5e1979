"""Rules of the documentation that a machine can check: links, make targets, versions, modules."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from docs.generate import PAGES as GENERATED_PAGES
from docs.generate import generate
from tests.test_house import ROOT, assert_no_findings, format_finding

PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for path in (
        *ROOT.glob("*.md"),
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "bench").rglob("*.md"),
        *(ROOT / "examples").rglob("*.md"),
    )
)
MODULE_PATH = re.compile(r"`(?:src/escrowmq/)?((?:[a-z0-9_]+/)+[a-z0-9_]+\.py)(?:`|:)")


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))


@pytest.mark.parametrize(
    "page_name", [*sorted(path.name for path in ROOT.glob("*.md")), ".ci/run", "Makefile"]
)
def test_every_make_target_that_is_named_exists(page_name: str) -> None:
    targets = make_targets()
    findings = []
    for number, line in enumerate((ROOT / page_name).read_text().splitlines(), 1):
        for command in re.findall(r"(?:^|`|\$ |&& )make ((?:[a-z-]+ ?)+)", line.strip()):
            findings += [
                format_finding(ROOT / page_name, number, f"there is no `make {target}`")
                for target in command.split()
                if target not in targets
            ]
    assert_no_findings(findings)


def test_every_make_target_has_a_description() -> None:
    makefile = (ROOT / "Makefile").read_text()
    described = set(re.findall(r"^([a-z][\w-]*):.*## ", makefile, re.MULTILINE))
    phony = re.search(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)
    assert phony is not None
    assert make_targets() == described == set(phony[1].split())


def test_the_changelog_and_the_version_agree() -> None:
    changelog = ROOT / "CHANGELOG.md"
    sections = re.findall(r"^## \[?([^\]\s]+)", changelog.read_text(), re.MULTILINE)
    assert sections[0] == "Unreleased", "CHANGELOG.md: Unreleased comes first"
    with (ROOT / "pyproject.toml").open("rb") as file:
        version = tomllib.load(file)["project"]["version"]
    assert sections[1:2] in ([], [version])


@pytest.mark.parametrize("page_name", PAGES)
def test_links_between_pages_have_a_target(page_name: str) -> None:
    page, findings = ROOT / page_name, []
    for number, line in enumerate(page.read_text().splitlines(), 1):
        for target, heading in re.findall(r"\]\(([^)#\s]*)#?([^)\s]*)\)", line):
            if "://" in target:
                continue
            path = page.parent / target if target else page
            if not path.exists():
                findings.append(format_finding(page, number, f"{target} does not exist"))
            elif heading and heading not in headings(path):
                findings.append(format_finding(page, number, f"{target} has no heading {heading}"))
    assert_no_findings(findings)


def headings(page: Path) -> set[str]:
    """Return the headings of a page in the form that GitHub uses in links."""
    lines = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", line.lower()).strip().replace(" ", "-") for line in lines}


@pytest.mark.parametrize(
    "page_name", [name for name in PAGES if not name.startswith("bench/results")]
)
def test_modules_that_a_page_names_exist(page_name: str) -> None:
    bases = (ROOT, ROOT / "src" / "escrowmq")
    findings = []
    for number, line in enumerate((ROOT / page_name).read_text().splitlines(), 1):
        findings += [
            format_finding(ROOT / page_name, number, f"there is no {module}")
            for module in MODULE_PATH.findall(line)
            if not any((base / module).exists() for base in bases)
        ]
    assert_no_findings(findings)


@pytest.mark.parametrize("name", GENERATED_PAGES)
def test_generated_tables_are_up_to_date(name: str) -> None:
    page = (ROOT / "docs" / name).read_text()
    assert page == generate(page, GENERATED_PAGES[name]()), "run `make docs`"


def texts_of_source() -> list[str]:
    """Return the texts in the source, with `…` for each value that is inserted."""
    texts = []
    for path in (ROOT / "src" / "escrowmq").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_bytes())):
            match node:
                case ast.Constant(value=str(text)):
                    texts.append(text)
                case ast.JoinedStr(values=parts):
                    texts.append("".join(_text_or_gap(part) for part in parts))
    return texts


def _text_or_gap(part: ast.expr) -> str:
    return str(part.value) if isinstance(part, ast.Constant) else "…"


def rows_with_messages(page: Path) -> Iterator[tuple[int, str]]:
    """Yield the first cells of the tables whose first column has messages, with line numbers."""
    has_messages = False
    for number, line in enumerate(page.read_text().splitlines(), 1):
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)]
        if len(cells) < 4:
            has_messages = False
        elif cells[1] in ("message", "line"):
            has_messages = True
        elif has_messages and cells[1] != "---":
            yield number, cells[1].replace("\\|", "|")


def test_every_message_of_the_troubleshooting_page_exists() -> None:
    page, texts = ROOT / "docs" / "troubleshooting.md", texts_of_source()
    findings = []
    for number, cell in rows_with_messages(page):
        message = re.sub(r" \((?:`\w+`|a .*|in .*)\)$", "", cell)  # what kind of message it is
        parts = [part.strip(" ,") for part in message.split("…")]
        if not any(all(part in text for part in parts) for text in texts):
            findings.append(format_finding(page, number, f"the source has no {message!r}"))
    assert_no_findings(findings)
