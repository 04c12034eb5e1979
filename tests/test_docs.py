"""Rules of the papers that a machine can check: links, make targets, generated tables, the
changelog's version."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from docs.generate import PAGES, generate

ROOT = Path(__file__).parent.parent
PAPERS = sorted(
    path.relative_to(ROOT).as_posix()
    for path in (
        *ROOT.glob("*.md"),
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "bench").rglob("*.md"),
        *(ROOT / "examples").rglob("*.md"),
    )
)
MODULE_PATH = re.compile(r"`(?:src/escrowmq/)?((?:[a-z0-9_]+/)+[a-z0-9_]+\.py)(?:`|:)")


def finding(path: Path, line: int, text: str) -> str:
    return f"{path.relative_to(ROOT)}:{line}: {text}"


def expect_none(findings: list[str]) -> None:
    assert not findings, "\n" + "\n".join(findings)


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))


@pytest.mark.parametrize(
    "name", [*sorted(path.name for path in ROOT.glob("*.md")), ".ci/run", "Makefile"]
)
def test_every_make_target_that_is_named_exists(name: str) -> None:
    targets = make_targets()
    findings = []
    for number, line in enumerate((ROOT / name).read_text().splitlines(), 1):
        for command in re.findall(r"(?:^|`|\$ |&& )make ((?:[a-z-]+ ?)+)", line.strip()):
            findings += [
                finding(ROOT / name, number, f"there is no `make {target}`")
                for target in command.split()
                if target not in targets
            ]
    expect_none(findings)


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


@pytest.mark.parametrize("name", PAPERS)
def test_links_between_the_papers_lead_somewhere(name: str) -> None:
    paper, findings = ROOT / name, []
    for number, line in enumerate(paper.read_text().splitlines(), 1):
        for target, heading in re.findall(r"\]\(([^)#\s]*)#?([^)\s]*)\)", line):
            if "://" in target:
                continue
            path = paper.parent / target if target else paper
            if not path.exists():
                findings.append(finding(paper, number, f"{target} does not exist"))
            elif heading and heading not in headings(path):
                findings.append(finding(paper, number, f"{target} has no heading {heading}"))
    expect_none(findings)


def headings(paper: Path) -> set[str]:
    """Return the headings of a page as GitHub names them in links."""
    lines = re.findall(r"^#+ (.*)$", paper.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", line.lower()).strip().replace(" ", "-") for line in lines}


@pytest.mark.parametrize("name", [name for name in PAPERS if not name.startswith("bench/results")])
def test_modules_that_the_papers_name_exist(name: str) -> None:
    bases = (ROOT, ROOT / "src" / "escrowmq")
    findings = []
    for number, line in enumerate((ROOT / name).read_text().splitlines(), 1):
        findings += [
            finding(ROOT / name, number, f"there is no {module}")
            for module in MODULE_PATH.findall(line)
            if not any((base / module).exists() for base in bases)
        ]
    expect_none(findings)


@pytest.mark.parametrize("name", PAGES)
def test_generated_tables_are_up_to_date(name: str) -> None:
    page = (ROOT / "docs" / name).read_text()
    assert page == generate(page, PAGES[name]()), "run `make docs`"
