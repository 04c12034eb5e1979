"""House rules of the source that a machine can check. Failures name file:line for a click.

The rules about papers (links, make targets, changelog) are in tests/test_docs.py.
"""

from __future__ import annotations

import ast
import builtins
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "escrowmq"
TESTS = ROOT / "tests"
FILE_LINES_MAX = 800
FUNCTION_LINES_MAX = 70
SMALL_MODULE_LINES = 60
CLOCK = SOURCE / "clock.py"
CLOCK_MODULES = {"time", "datetime"}
NATIVE_IMPORTERS = {"broker/native_turn.py", "escrow/half_table.py"}
# The same face in another world: a user of blocking, sql or django expects the same name.
FACE_MODULES = {"blocking.py", "sql", "django"}
# Found by name: Django loads these, and Python runs these.
FOUND_BY_NAME = {"__init__.py", "__main__.py", "apps.py", "models.py", "0001_initial.py"}
NOT_A_SENTENCE = re.compile(r"test_?\d*|test_[^_]+(_\d+)?")
LEFT_TO_DO = re.compile(r"#.*\b(TOD[O]|FIXM[E]|XX[X]|HAC[K])\b")

Function = ast.FunctionDef | ast.AsyncFunctionDef
Rule = Callable[[Path, ast.Module], Iterator[str]]


def modules(root: Path) -> list[Path]:
    return sorted(root.rglob("*.py"))


def finding(path: Path, line: int, text: str) -> str:
    return f"{path.relative_to(ROOT)}:{line}: {text}"


@cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_bytes())


def apply_rule(root: Path, rule: Rule) -> list[str]:
    return [line for path in modules(root) for line in rule(path, parse(path))]


def expect_none(findings: list[str]) -> None:
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
        yield finding(path, 1, "no module docstring")


def test_every_module_has_a_docstring() -> None:
    empty = [finding(path, 1, "empty") for path in modules(SOURCE) if not path.read_text().strip()]
    expect_none(empty + apply_rule(SOURCE, missing_docstring))


def test_every_test_file_has_a_docstring() -> None:
    expect_none(apply_rule(TESTS, missing_docstring))


def test_a_package_page_names_every_module_of_its_package() -> None:
    findings = []
    for page in SOURCE.rglob("__init__.py"):
        if page.parent.name == "migrations" or page.parent == SOURCE:
            continue
        text = ast.get_docstring(parse(page)) or ""
        members = [p.name for p in page.parent.glob("*.py") if not p.name.startswith("__")]
        members += [f"{p.parent.name}/" for p in page.parent.glob("*/__init__.py")]
        findings += [
            finding(page, 1, f"the page does not name {member}")
            for member in members
            if member not in text and member != "migrations/"
        ]
    expect_none(findings)


def test_no_file_is_too_long() -> None:
    expect_none(
        [
            finding(path, FILE_LINES_MAX, f"{lines} lines, at most {FILE_LINES_MAX}")
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
            yield finding(path, function.lineno, text)


def test_no_function_is_too_long() -> None:
    expect_none(apply_rule(SOURCE, long_functions))


def test_a_small_module_has_more_than_one_importer() -> None:
    # A module of a few lines that a single neighbour needs is a file to open for nothing.
    names = {path: module_name(path) for path in modules(SOURCE)}
    importers: dict[str, set[Path]] = defaultdict(set)
    for path in [*names, *modules(SOURCE.parent / "pyspark_escrowmq")]:
        for _, name in imported_modules(parse(path)):
            importers[name].add(path)
    expect_none(
        [
            finding(path, 1, f"{lines} lines and a single importer: merge it into {importer.name}")
            for path, name in names.items()
            if path.name not in FOUND_BY_NAME
            and (lines := path.read_text().count("\n")) < SMALL_MODULE_LINES
            and len(importers[name]) == 1
            for importer in importers[name]
        ]
    )


def module_name(path: Path) -> str:
    parts = path.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def test_a_public_class_name_means_one_thing() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for path in modules(SOURCE):
        face = path.relative_to(SOURCE).parts[0] in FACE_MODULES
        for node in parse(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_") and not face:
                places[node.name].append(finding(path, node.lineno, node.name))
    expect_none([place for same in places.values() if len(same) > 1 for place in same])


# --- what code may not do -------------------------------------------------------------------------


def ambient_clocks(path: Path, tree: ast.Module) -> Iterator[str]:
    for line, module in imported_modules(tree):
        if module in CLOCK_MODULES and path != CLOCK:
            yield finding(path, line, f"imports {module}: take a Clock, or a reading of it")


def test_time_is_an_argument() -> None:
    expect_none(apply_rule(SOURCE, ambient_clocks))


def native_imports(path: Path, tree: ast.Module) -> Iterator[str]:
    for line, module in imported_modules(tree):
        is_seam = path.relative_to(SOURCE).as_posix() in NATIVE_IMPORTERS
        if module.partition(".")[0] == "escrowmq_native" and not is_seam:
            yield finding(path, line, "imports escrowmq_native: only its two seams do")


def test_the_native_module_has_two_seams() -> None:
    expect_none(apply_rule(SOURCE, native_imports))


def shadowed_builtins(path: Path, tree: ast.Module) -> Iterator[str]:
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name in dir(builtins):
            yield finding(path, node.lineno, f"{node.name} is a builtin")


def test_no_class_takes_the_name_of_a_builtin() -> None:
    expect_none(apply_rule(SOURCE, shadowed_builtins))


def left_to_do(path: Path, tree: ast.Module) -> Iterator[str]:
    for number, text in enumerate(path.read_text().splitlines(), 1):
        if LEFT_TO_DO.search(text):
            yield finding(path, number, "do it, or write down why not")


def test_no_comment_leaves_work_for_later() -> None:
    expect_none(apply_rule(SOURCE, left_to_do) + apply_rule(TESTS, left_to_do))


def exceptions_elsewhere(path: Path, tree: ast.Module) -> Iterator[str]:
    """Private exceptions never leave their module, so they may stay there."""
    if path.name == "errors.py":
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            bases = {base.id for base in node.bases if isinstance(base, ast.Name)}
            if any(base == "Exception" or base.endswith("Error") for base in bases):
                yield finding(path, node.lineno, f"{node.name} belongs into errors.py")


def test_every_public_exception_is_in_errors_py() -> None:
    expect_none(apply_rule(SOURCE, exceptions_elsewhere))


def test_the_tree_in_errors_py_names_every_exception() -> None:
    tree = parse(SOURCE / "errors.py")
    drawn = set(re.findall(r"^ *(\w+)", ast.get_docstring(tree) or "", re.MULTILINE))
    expect_none(
        [
            finding(SOURCE / "errors.py", node.lineno, f"{node.name} is not in the drawn tree")
            for node in tree.body
            if isinstance(node, ast.ClassDef) and node.name not in drawn
        ]
    )


# --- tests ----------------------------------------------------------------------------------------


def poor_test_names(path: Path, tree: ast.Module) -> Iterator[str]:
    for function in functions(tree):
        if function.name.startswith("test") and NOT_A_SENTENCE.fullmatch(function.name):
            yield finding(path, function.lineno, f"{function.name} is not a sentence")


def test_the_names_of_tests_are_sentences() -> None:
    expect_none(apply_rule(TESTS, poor_test_names))


def hidden_tests(path: Path, tree: ast.Module) -> Iterator[str]:
    """The second of two tests with one name replaces the first."""
    lines: dict[str, int] = {}
    for node in tree.body:
        if isinstance(node, Function) and node.name.startswith("test_"):
            if node.name in lines:
                text = f"{node.name} hides the one in line {lines[node.name]}"
                yield finding(path, node.lineno, text)
            lines[node.name] = node.lineno


def test_no_test_hides_another() -> None:
    expect_none(apply_rule(TESTS, hidden_tests))


def mocks_and_sleeps(path: Path, tree: ast.Module) -> Iterator[str]:
    for line, module in imported_modules(tree):
        if module == "unittest.mock":
            yield finding(path, line, "a mock: write a fake that keeps the promises")
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name(id="time"), attr="sleep")) if (
                "interop" not in path.parts
            ):
                yield finding(path, node.lineno, "a sleep: poll for the condition itself")


def test_tests_neither_mock_nor_sleep() -> None:
    expect_none(apply_rule(TESTS, mocks_and_sleeps))


PUBLIC_UNDERSCORE_NAMES = {"_replace", "_asdict", "_fields", "_exit"}


def unexplained_private_names(path: Path, tree: ast.Module) -> Iterator[str]:
    """A private name of something else needs a comment, in its line or in the line above."""
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
                    yield finding(path, node.lineno, f"uses {name}: say why in a comment")


def test_a_test_that_uses_a_private_name_says_why() -> None:
    expect_none(apply_rule(TESTS, unexplained_private_names))


def test_every_folder_of_tests_is_a_package() -> None:
    # Two test files of the same name in different folders would clash otherwise.
    folders = {path.parent for path in modules(TESTS)}
    pages = (folder / "__init__.py" for folder in folders)
    expect_none([finding(page, 1, "missing") for page in pages if not page.exists()])
