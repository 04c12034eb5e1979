"""The house rules that a machine can check. Fails with file:line, so that it can be clicked."""

from __future__ import annotations

import ast
import builtins
import re
import tomllib
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "escrowmq"
TESTS = ROOT / "tests"
FILE_LINES_MAX = 800
FUNCTION_LINES_MAX = 70
CLOCK = SOURCE / "clock.py"
CLOCKS = {"time", "datetime"}
NO_SENTENCE = re.compile(r"test_?\d*|test_[^_]+(_\d+)?")
LEFT_TO_DO = re.compile(r"#.*\b(TOD[O]|FIXM[E]|XX[X]|HAC[K])\b")

Function = ast.FunctionDef | ast.AsyncFunctionDef
Rule = Callable[[Path, ast.Module], Iterator[str]]


def modules(root: Path) -> list[Path]:
    return sorted(root.rglob("*.py"))


def at(path: Path, line: int, what: str) -> str:
    return f"{path.relative_to(ROOT)}:{line}: {what}"


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_bytes())


def found_in(root: Path, rule: Rule) -> list[str]:
    return [line for path in modules(root) for line in rule(path, parsed(path))]


def report(found: list[str]) -> None:
    assert not found, "\n" + "\n".join(found)


def functions(tree: ast.Module) -> Iterator[Function]:
    for node in ast.walk(tree):
        if isinstance(node, Function):
            yield node


def lines_of(function: Function) -> int:
    """From its name to its end, without the docstring."""
    assert function.end_lineno is not None
    lines = function.end_lineno - function.lineno + 1
    first = function.body[0]
    if ast.get_docstring(function) is not None:
        assert first.end_lineno is not None
        lines -= first.end_lineno - first.lineno + 1
    return lines


def imported(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from ((node.lineno, alias.name) for alias in names)
            case ast.ImportFrom(module=str(module)):
                yield node.lineno, module


# --- source --------------------------------------------------------------------------------------


def no_docstring(path: Path, tree: ast.Module) -> Iterator[str]:
    if not ast.get_docstring(tree) and path.read_text().strip():
        yield at(path, 1, "no module docstring")


def test_every_module_says_what_it_is() -> None:
    empty = [at(path, 1, "empty") for path in modules(SOURCE) if not path.read_text().strip()]
    report(empty + found_in(SOURCE, no_docstring))


def test_every_test_file_says_what_it_checks() -> None:
    report(found_in(TESTS, no_docstring))


def test_a_file_fits_in_the_head() -> None:
    report(
        [
            at(path, FILE_LINES_MAX, f"{lines} lines, at most {FILE_LINES_MAX}")
            for path in modules(SOURCE)
            if (lines := path.read_text().count("\n")) > FILE_LINES_MAX
        ]
    )


def long_functions(path: Path, tree: ast.Module) -> Iterator[str]:
    for function in functions(tree):
        if (lines := lines_of(function)) > FUNCTION_LINES_MAX:
            what = f"{function.name} has {lines} lines, at most {FUNCTION_LINES_MAX}"
            yield at(path, function.lineno, what)


def test_a_function_fits_on_a_screen() -> None:
    report(found_in(SOURCE, long_functions))


def ambient_clocks(path: Path, tree: ast.Module) -> Iterator[str]:
    for line, module in imported(tree):
        if module.partition(".")[0] in CLOCKS and path != CLOCK:
            yield at(path, line, f"imports {module}: take a Clock, or a reading of it")


def test_time_is_handed_in() -> None:
    report(found_in(SOURCE, ambient_clocks))


def shadowed_builtins(path: Path, tree: ast.Module) -> Iterator[str]:
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name in dir(builtins):
            yield at(path, node.lineno, f"{node.name} is a builtin")


def test_no_class_takes_a_builtins_name() -> None:
    report(found_in(SOURCE, shadowed_builtins))


def leftovers(path: Path, tree: ast.Module) -> Iterator[str]:
    for number, text in enumerate(path.read_text().splitlines(), 1):
        if LEFT_TO_DO.search(text):
            yield at(path, number, "do it, or write down why not")


def test_nothing_is_left_to_do_in_comments() -> None:
    report(found_in(SOURCE, leftovers) + found_in(TESTS, leftovers))


def exceptions_elsewhere(path: Path, tree: ast.Module) -> Iterator[str]:
    """Private ones never leave their module; PowerCut is no exception of ours, but the end."""
    if path.name == "errors.py":
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            bases = {base.id for base in node.bases if isinstance(base, ast.Name)}
            if any(base == "Exception" or base.endswith("Error") for base in bases):
                yield at(path, node.lineno, f"{node.name} belongs into errors.py")


def test_every_exception_is_in_one_file() -> None:
    report(found_in(SOURCE, exceptions_elsewhere))


def test_the_tree_of_errors_names_them_all() -> None:
    tree = parsed(SOURCE / "errors.py")
    drawn = set(re.findall(r"^ *(\w+)", ast.get_docstring(tree) or "", re.MULTILINE))
    report(
        [
            at(SOURCE / "errors.py", node.lineno, f"{node.name} is not in the docstring's tree")
            for node in tree.body
            if isinstance(node, ast.ClassDef) and node.name not in drawn
        ]
    )


# --- tests ---------------------------------------------------------------------------------------


def poor_names(path: Path, tree: ast.Module) -> Iterator[str]:
    if path == Path(__file__):
        return
    for function in functions(tree):
        if function.name.startswith("test") and NO_SENTENCE.fullmatch(function.name):
            yield at(path, function.lineno, f"{function.name} is not a sentence")


def test_the_names_of_tests_are_sentences() -> None:
    report(found_in(TESTS, poor_names))


def hidden_tests(path: Path, tree: ast.Module) -> Iterator[str]:
    """The second of two tests with one name replaces the first."""
    seen: dict[str, int] = {}
    for node in tree.body:
        if isinstance(node, Function) and node.name.startswith("test_"):
            if node.name in seen:
                yield at(path, node.lineno, f"{node.name} hides the one in line {seen[node.name]}")
            seen[node.name] = node.lineno


def test_no_test_hides_another() -> None:
    report(found_in(TESTS, hidden_tests))


def mocks_and_sleeps(path: Path, tree: ast.Module) -> Iterator[str]:
    for line, module in imported(tree):
        if module.startswith("unittest.mock"):
            yield at(path, line, "a mock: write a fake that keeps the promises")
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name(id="time"), attr="sleep")) if (
                "interop" not in path.parts
            ):
                yield at(path, node.lineno, "a sleep: wait for the thing itself")


def test_tests_neither_mock_nor_sleep() -> None:
    report(found_in(TESTS, mocks_and_sleeps))


def test_every_folder_of_tests_is_a_package() -> None:
    # Or two test files of one name would clash.
    folders = {path.parent for path in modules(TESTS)}
    report(
        [at(f / "__init__.py", 1, "missing") for f in folders if not (f / "__init__.py").exists()]
    )


# --- papers --------------------------------------------------------------------------------------


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))


@pytest.mark.parametrize(
    "name", [*sorted(path.name for path in ROOT.glob("*.md")), ".ci/run", "Makefile"]
)
def test_every_make_target_that_is_named_exists(name: str) -> None:
    known = make_targets()
    found = []
    for number, line in enumerate((ROOT / name).read_text().splitlines(), 1):
        for command in re.findall(r"(?:^|`|\$ |&& )make ((?:[a-z-]+ ?)+)", line.strip()):
            found += [
                at(ROOT / name, number, f"there is no `make {target}`")
                for target in command.split()
                if target not in known
            ]
    report(found)


def test_every_make_target_says_what_it_does() -> None:
    makefile = (ROOT / "Makefile").read_text()
    described = set(re.findall(r"^([a-z][\w-]*):.*## ", makefile, re.MULTILINE))
    phony = set(re.search(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)[1].split())  # type: ignore[index]
    assert make_targets() == described == phony


def test_the_changelog_and_the_version_agree() -> None:
    changelog = ROOT / "CHANGELOG.md"
    if not changelog.exists():
        pytest.skip("there is no CHANGELOG.md yet")
    sections = re.findall(r"^## \[?([^\]\s]+)", changelog.read_text(), re.MULTILINE)
    assert sections, "CHANGELOG.md: no section"
    assert sections[0] == "Unreleased", "CHANGELOG.md: Unreleased comes first"
    with (ROOT / "pyproject.toml").open("rb") as file:
        version = tomllib.load(file)["project"]["version"]
    released = sections[1:]
    assert not released or released[0] == version, f"CHANGELOG.md: {released[0]} is not {version}"


PAPERS = sorted(
    path.relative_to(ROOT).as_posix()
    for path in (
        *ROOT.glob("*.md"),
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "bench").rglob("*.md"),
    )
)


@pytest.mark.parametrize("name", PAPERS)
def test_links_between_the_papers_lead_somewhere(name: str) -> None:
    paper, found = ROOT / name, []
    for number, line in enumerate(paper.read_text().splitlines(), 1):
        for target, heading in re.findall(r"\]\(([^)#\s]*)#?([^)\s]*)\)", line):
            if "://" in target:
                continue
            path = paper.parent / target if target else paper
            if not path.exists():
                found.append(at(paper, number, f"{target} does not exist"))
            elif heading and heading not in headings(path):
                found.append(at(paper, number, f"{target} has no heading {heading}"))
    report(found)


def headings(paper: Path) -> set[str]:
    """As GitHub names them in links."""
    lines = re.findall(r"^#+ (.*)$", paper.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", line.lower()).strip().replace(" ", "-") for line in lines}
