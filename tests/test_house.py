"""House rules of the source that a machine can check. A failure names file and line.

The rules about the documentation (links, make targets, changelog) are in tests/test_docs.py.
"""

from __future__ import annotations

import ast
import builtins
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import cache
from itertools import chain
from pathlib import Path

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "escrowmq"
TESTS = ROOT / "tests"
FILE_LINES_MAX = 820  # a hint that a file may hold two concepts
FUNCTION_LINES_MAX = 70
SMALL_MODULE_LINES = 60
CLOCK = SOURCE / "clock.py"
CLOCK_MODULES = {"time", "datetime"}
NATIVE_IMPORTERS = {"native.py", "broker/native_requests.py"}
# These repeat public names on purpose: a user of blocking, sql or django expects the same names.
DUPLICATE_NAME_MODULES = {"blocking.py", "sql", "django"}
# Python or Django loads these files by name, without an import.
LOADED_BY_NAME = {
    *("__init__.py", "__main__.py", "admin.py", "apps.py", "models.py", "escrowmq_worker.py"),
    *("0001_initial.py", "0002_inbox_row.py"),
}
NOT_A_SENTENCE = re.compile(r"test_?\d*|test_[^_]+(_\d+)?")
TODO_COMMENT = re.compile(r"#.*\b(TOD[O]|FIXM[E]|XX[X]|HAC[K])\b")

Function = ast.FunctionDef | ast.AsyncFunctionDef
Rule = Callable[[Path, ast.Module], Iterator[str]]


def modules(root: Path) -> list[Path]:
    return sorted(root.rglob("*.py"))


def format_finding(path: Path, line: int, text: str) -> str:
    return f"{path.relative_to(ROOT)}:{line}: {text}"


@cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_bytes())


def apply_rule(root: Path, rule: Rule) -> list[str]:
    return [line for path in modules(root) for line in rule(path, parse(path))]


def assert_no_findings(findings: list[str]) -> None:
    assert not findings, "\n" + "\n".join(findings)


def functions(tree: ast.Module) -> Iterator[Function]:
    for node in ast.walk(tree):
        if isinstance(node, Function):
            yield node


def imported_modules(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the line and the full name of everything that is imported, modules and names alike."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from ((node.lineno, alias.name) for alias in names)
            case ast.ImportFrom(module=str(module), names=names):
                yield node.lineno, module
                yield from ((node.lineno, f"{module}.{alias.name}") for alias in names)


# --- the shape of modules and functions -----------------------------------------------------------


def missing_docstring(path: Path, tree: ast.Module) -> Iterator[str]:
    if not ast.get_docstring(tree) and path.read_text().strip():
        yield format_finding(path, 1, "no module docstring")


def test_every_module_has_a_docstring() -> None:
    empty = [
        format_finding(path, 1, "empty") for path in modules(SOURCE) if not path.read_text().strip()
    ]
    assert_no_findings(empty + apply_rule(SOURCE, missing_docstring))


def test_every_test_file_has_a_docstring() -> None:
    assert_no_findings(apply_rule(TESTS, missing_docstring))


def test_a_package_page_names_every_module_of_its_package() -> None:
    findings = []
    for init_file in SOURCE.rglob("__init__.py"):
        if init_file.parent.name == "migrations" or init_file.parent == SOURCE:
            continue
        text = ast.get_docstring(parse(init_file)) or ""
        members = [p.name for p in init_file.parent.glob("*.py") if not p.name.startswith("__")]
        members += [f"{p.parent.name}/" for p in init_file.parent.glob("*/__init__.py")]
        findings += [
            format_finding(init_file, 1, f"the page does not name {member}")
            for member in members
            if member not in text and member != "migrations/"
        ]
    assert_no_findings(findings)


def test_no_file_is_too_long() -> None:
    assert_no_findings(
        [
            format_finding(path, FILE_LINES_MAX, f"{lines} lines, at most {FILE_LINES_MAX}")
            for path in modules(SOURCE)
            if (lines := path.read_text().count("\n")) > FILE_LINES_MAX
        ]
    )


def body_lines(function: Function) -> int:
    """Count the lines from a function's name to its end, without the docstring."""
    assert function.end_lineno is not None
    lines = function.end_lineno - function.lineno + 1
    first = function.body[0]
    if ast.get_docstring(function) is not None:
        assert first.end_lineno is not None
        lines -= first.end_lineno - first.lineno + 1
    return lines


def long_functions(path: Path, tree: ast.Module) -> Iterator[str]:
    for function in functions(tree):
        if (lines := body_lines(function)) > FUNCTION_LINES_MAX:
            text = f"{function.name} has {lines} lines, at most {FUNCTION_LINES_MAX}"
            yield format_finding(path, function.lineno, text)


def test_no_function_is_too_long() -> None:
    assert_no_findings(apply_rule(SOURCE, long_functions))


def test_a_small_module_has_more_than_one_importer() -> None:
    # A few lines that a single module needs are easier to read in that module.
    names = {path: module_name(path) for path in modules(SOURCE)}
    importers: dict[str, set[Path]] = defaultdict(set)
    for path in [*names, *modules(SOURCE.parent / "pyspark_escrowmq")]:
        for _, name in imported_modules(parse(path)):
            importers[name].add(path)
    assert_no_findings(
        [
            format_finding(
                path, 1, f"{lines} lines and a single importer: merge it into {importer.name}"
            )
            for path, name in names.items()
            if path.name not in LOADED_BY_NAME
            and (lines := path.read_text().count("\n")) < SMALL_MODULE_LINES
            and len(importers[name]) == 1
            for importer in importers[name]
        ]
    )


def module_name(path: Path) -> str:
    parts = path.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def test_a_public_class_name_is_used_only_once() -> None:
    findings_by_name: dict[str, list[str]] = defaultdict(list)
    for path in modules(SOURCE):
        may_repeat_names = path.relative_to(SOURCE).parts[0] in DUPLICATE_NAME_MODULES
        for node in parse(path).body:
            if (
                isinstance(node, ast.ClassDef)
                and not node.name.startswith("_")
                and not may_repeat_names
            ):
                findings_by_name[node.name].append(format_finding(path, node.lineno, node.name))
    duplicates = [findings for findings in findings_by_name.values() if len(findings) > 1]
    assert_no_findings(list(chain.from_iterable(duplicates)))


# --- what code must not do ------------------------------------------------------------------------


def ambient_clocks(path: Path, tree: ast.Module) -> Iterator[str]:
    for line, module in imported_modules(tree):
        if module in CLOCK_MODULES and path != CLOCK:
            yield format_finding(
                path, line, f"imports {module}: take a Clock or a time as an argument"
            )


def test_time_is_an_argument() -> None:
    assert_no_findings(apply_rule(SOURCE, ambient_clocks))


def native_imports(path: Path, tree: ast.Module) -> Iterator[str]:
    for line, module in imported_modules(tree):
        is_allowed = path.relative_to(SOURCE).as_posix() in NATIVE_IMPORTERS
        if module.partition(".")[0] == "escrowmq_native" and not is_allowed:
            yield format_finding(path, line, "imports escrowmq_native: only NATIVE_IMPORTERS may")


def test_only_two_modules_import_the_native_module() -> None:
    assert_no_findings(apply_rule(SOURCE, native_imports))


def shadowed_builtins(path: Path, tree: ast.Module) -> Iterator[str]:
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name in dir(builtins):
            yield format_finding(path, node.lineno, f"{node.name} is a builtin")


def test_no_class_takes_the_name_of_a_builtin() -> None:
    assert_no_findings(apply_rule(SOURCE, shadowed_builtins))


def todo_comments(path: Path, tree: ast.Module) -> Iterator[str]:
    for number, text in enumerate(path.read_text().splitlines(), 1):
        if TODO_COMMENT.search(text):
            yield format_finding(path, number, "do the work now, or explain why it is not needed")


def test_no_comment_leaves_work_for_later() -> None:
    assert_no_findings(apply_rule(SOURCE, todo_comments) + apply_rule(TESTS, todo_comments))


def exceptions_elsewhere(path: Path, tree: ast.Module) -> Iterator[str]:
    """Yield public exceptions outside errors.py. Private ones never leave their module."""
    if path.name == "errors.py":
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            bases = {base.id for base in node.bases if isinstance(base, ast.Name)}
            if any(base == "Exception" or base.endswith("Error") for base in bases):
                yield format_finding(path, node.lineno, f"{node.name} belongs in errors.py")


def test_every_public_exception_is_in_errors_py() -> None:
    assert_no_findings(apply_rule(SOURCE, exceptions_elsewhere))


def test_the_docstring_of_errors_py_lists_every_exception() -> None:
    tree = parse(SOURCE / "errors.py")
    listed = set(re.findall(r"^ *(\w+)", ast.get_docstring(tree) or "", re.MULTILINE))
    assert_no_findings(
        [
            format_finding(
                SOURCE / "errors.py", node.lineno, f"{node.name} is not in the docstring"
            )
            for node in tree.body
            if isinstance(node, ast.ClassDef) and node.name not in listed
        ]
    )


# --- tests ----------------------------------------------------------------------------------------


def poor_test_names(path: Path, tree: ast.Module) -> Iterator[str]:
    for function in functions(tree):
        if function.name.startswith("test") and NOT_A_SENTENCE.fullmatch(function.name):
            yield format_finding(path, function.lineno, f"{function.name} is not a sentence")


def test_the_names_of_tests_are_sentences() -> None:
    assert_no_findings(apply_rule(TESTS, poor_test_names))


def hidden_tests(path: Path, tree: ast.Module) -> Iterator[str]:
    """Yield tests that replace an earlier test of the same name."""
    lines: dict[str, int] = {}
    for node in tree.body:
        if isinstance(node, Function) and node.name.startswith("test_"):
            if node.name in lines:
                text = f"{node.name} hides the test in line {lines[node.name]}"
                yield format_finding(path, node.lineno, text)
            lines[node.name] = node.lineno


def test_no_test_hides_another() -> None:
    assert_no_findings(apply_rule(TESTS, hidden_tests))


def mocks_and_sleeps(path: Path, tree: ast.Module) -> Iterator[str]:
    for line, module in imported_modules(tree):
        if module == "unittest.mock":
            yield format_finding(
                path, line, "a mock: write a fake with the behaviour of the real thing"
            )
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name(id="time"), attr="sleep")) if (
                "interop" not in path.parts
            ):
                yield format_finding(path, node.lineno, "a sleep: poll for the condition")


def test_tests_neither_mock_nor_sleep() -> None:
    assert_no_findings(apply_rule(TESTS, mocks_and_sleeps))


PUBLIC_UNDERSCORE_NAMES = {"_replace", "_asdict", "_fields", "_exit"}


def unexplained_private_names(path: Path, tree: ast.Module) -> Iterator[str]:
    """Yield uses of a private name of another object without a comment in the line or above it."""
    lines = path.read_text().split("\n")
    own_names = {function.name for function in functions(tree)}
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name):
                own_names.add(name)
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=value, attr=name) if (
                name.startswith("_")
                and not name.startswith("__")
                and name not in own_names | PUBLIC_UNDERSCORE_NAMES
                and not (isinstance(value, ast.Name) and value.id in ("self", "cls"))
            ):
                comments = lines[max(0, node.lineno - 2) : node.lineno]
                if not any("#" in line for line in comments):
                    yield format_finding(path, node.lineno, f"uses {name}: say why in a comment")


def test_a_test_that_uses_a_private_name_says_why() -> None:
    assert_no_findings(apply_rule(TESTS, unexplained_private_names))


def test_every_file_with_a_nightly_test_is_in_a_long_run() -> None:
    makefile = (ROOT / "Makefile").read_text()
    commands = "\n".join(re.findall(r"^(?:LONG_TESTS :=|\t).*$", makefile, re.MULTILINE))
    long_runs = set(re.findall(r"tests/[\w/]+(?:\.py)?", commands))
    # `make spark-crash` runs its cases without pytest.
    long_runs.add("tests/e2e/spark/test_crash.py")
    assert_no_findings(
        [
            format_finding(path, 1, "has a nightly test, and no make target runs it")
            for path in modules(TESTS)
            if path.name.startswith("test_") or path.name == "conftest.py"
            if "pytest.mark.nightly" in path.read_text() and path != Path(__file__)
            if not any((ROOT / long_run) in (path, *path.parents) for long_run in long_runs)
        ]
    )


def test_every_folder_of_tests_is_a_package() -> None:
    # Two test files of the same name in different folders would clash otherwise.
    folders = {path.parent for path in modules(TESTS)}
    init_files = (folder / "__init__.py" for folder in folders)
    assert_no_findings(
        [
            format_finding(init_file, 1, "missing")
            for init_file in init_files
            if not init_file.exists()
        ]
    )
