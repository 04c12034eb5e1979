"""The mutation tester: which mutations it makes, and that it changes only a copy."""

from __future__ import annotations

import ast
import json
import textwrap
from pathlib import Path

import pytest

from tests.mutants.__main__ import main
from tests.mutants.coverage_map import fingerprint_of
from tests.mutants.operators import Operator, mutations
from tests.mutants.selection import Mutant, mutants_of, packages, sample
from tests.mutants.workspace import workspace


def mutated(source: str) -> list[str]:
    return [mutation.apply(source) for mutation in mutations(source)]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("a < b", ["a <= b", "a >= b"]),
        ("a >= b", ["a < b", "a > b"]),
        ("a == b", ["a != b"]),
        ("a is not b", ["a is b"]),
        ("a not in (b)", ["a in (b)"]),
        ("x = (a) in (b)", ["x = (a) not in (b)"]),
        ("a == b != c", ["a != b != c", "a == b == c"]),
        ("é = 'ü' == b", ["é = 'ü' != b"]),
        ("x = 7", ["x = 8"]),
        ("x = -1", ["x = -2"]),
        ("x = 1_000", ["x = 1001"]),
        ("x = 0xFF", ["x = 0x100"]),
        ("x = True", []),
        ("x = 'text'", []),
        ("x = 1.5", []),
        ("a and b and c", ["a or b or c"]),
        ("a or (b and c)", ["a and (b and c)", "a or (b or c)"]),
        ("x = not a", ["x = a"]),
        ("x = not(a)", ["x = (a)"]),
        ("if a: b", ["if False: b", "if True: b"]),
        ("x = b if a else c", ["x = b if False else c", "x = b if True else c"]),
        ("[a for a in b if c]", ["[a for a in b if False]", "[a for a in b if True]"]),
        ("x = min(a, b)", ["x = max(a, b)"]),
        ("x = max(a)", ["x = min(a)"]),
        ("x += a", ["x -= a"]),
        ("x[a] -= b", ["x[a] += b"]),
        ("x *= a", []),
        ("a.b(c)", ["pass"]),
        ("a(\n    b,\n)", ["pass"]),
        ("raise A(b) from c", ["pass"]),
        ("def f(): return a", ["def f(): return None"]),
        ("def f(): return None", []),
        ("async def f(): await a()", ["async def f(): pass"]),
    ],
)
def test_each_mutation_changes_a_single_thing(source: str, expected: list[str]) -> None:
    assert sorted(mutated(source)) == sorted(expected)


@pytest.mark.parametrize(
    "source",
    [
        '"""A docstring."""',
        "log.warning('a %d', 1)",
        "self._logger.info(max(a, 1))",
        "logging.getLogger(a).x",
        "class A:\n    def __repr__(self):\n        return a < 1",
        "x: Literal[1]",
        "def f(a: Literal[1]) -> Literal[2]: ...",
        "Kind = Literal[1, 2]",
        "if TYPE_CHECKING:\n    f(1)",
        "if typing.TYPE_CHECKING:\n    f(1)",
        "if __name__ == '__main__':\n    f(1)",
        "assert a < 1",
        "x = f'{a + 1:>3}'",
    ],
)
def test_code_without_an_effect_on_the_program_is_not_mutated(source: str) -> None:
    assert mutated(source) == []


def test_the_other_branch_of_a_type_checking_block_is_mutated() -> None:
    assert mutated("if TYPE_CHECKING:\n    f(1)\nelse:\n    raise A") == [
        "if TYPE_CHECKING:\n    f(1)\nelse:\n    pass"
    ]


def test_every_mutation_of_this_file_is_valid_python_and_differs() -> None:
    source = Path(__file__).read_text()
    before = ast.dump(ast.parse(source))
    for text in mutated(source):
        assert ast.dump(ast.parse(text)) != before


def test_a_mutation_shows_the_old_and_the_new_line() -> None:
    source = "x = a\nif (a\n        and b):  # both\n    pass\n"
    (mutation,) = (
        mutation for mutation in mutations(source) if mutation.operator is Operator.AND_OR
    )
    assert mutation.line == 3
    assert mutation.old_and_new_line(source) == ("and b): # both", "or b): # both")


def test_a_mutation_has_its_place_in_the_source() -> None:
    source = textwrap.dedent("""\
        LIMIT = 1
        class A:
            size: int = 2
            def f(self, b=3):
                if (a and
                        4):
                    return
                match b:
                    case 5:
                        pass
        """)
    places = [
        mutation.place for mutation in mutations(source) if mutation.operator is Operator.INTEGER
    ]
    assert [(place.first_line, place.last_line, place.in_function) for place in places] == [
        (1, 1, False),
        (3, 3, False),
        (4, 4, False),
        (5, 6, True),
        (9, 9, True),
    ]
    assert [place.names for place in places] == [("LIMIT",), ("size",), ("f",), (), ()]
    assert [place.owner for place in places] == [None, "A", "A", "A", "A"]


# --- sampling ------------------------------------------------------------------------------------


def many_mutants(package: str, count: int) -> list[Mutant]:
    (mutation,) = mutations("x = 1")
    return [Mutant(package, f"{number}.py", mutation, "", "") for number in range(count)]


def test_a_sample_is_spread_evenly_over_the_packages() -> None:
    mutants = {"large": many_mutants("large", 100), "small": many_mutants("small", 3)}
    packages_of_sample = [mutant.package for mutant in sample(mutants, 10, seed=1)]
    assert packages_of_sample.count("large") == 7
    assert packages_of_sample.count("small") == 3


def test_a_larger_sample_contains_the_smaller_one_of_the_same_seed() -> None:
    mutants = {"a": many_mutants("a", 50), "b": many_mutants("b", 50)}
    assert set(sample(mutants, 11, seed=3)) < set(sample(mutants, 30, seed=3))
    assert sample(mutants, 11, seed=3) != sample(mutants, 11, seed=4)


def test_a_sample_larger_than_the_population_contains_everything() -> None:
    assert len(sample({"a": many_mutants("a", 5), "b": []}, 50, seed=1)) == 5


# --- a whole run ---------------------------------------------------------------------------------

SHOP = """\
SMALLEST = 10


def price(count):
    return max(count, SMALLEST)


def unused():
    return 1
"""
WAITING = """\
def wait(done):
    while not done:
        pass
"""
TESTS = """\
from shop.waiting import wait
from shop.till.prices import price


def test_a_large_price_is_kept():
    assert price(12) == 12


def test_a_wait_ends():
    wait(True)


def test_that_fails_anyway():
    assert price(1) == "cheap"
"""


def fake_project(root: Path) -> Path:
    files = {
        "pyproject.toml": "[tool.pytest.ini_options]\n",
        "src/shop/__init__.py": "",
        "src/shop/waiting.py": WAITING,
        "src/shop/till/__init__.py": "",
        "src/shop/till/prices.py": SHOP,
        "tests/__init__.py": "",
        "tests/test_prices.py": TESTS,
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def contents(root: Path) -> dict[str, tuple[bytes, int]]:
    return {
        path.relative_to(root).as_posix(): (path.read_bytes(), path.stat().st_mtime_ns)
        for path in root.rglob("*")
        if path.is_file() and ".mutants" not in path.parts
    }


@pytest.mark.slow
def test_a_run_reports_noticed_mutants_and_does_not_change_the_checkout(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root, report = fake_project(tmp_path / "project"), tmp_path / "report.json"
    arguments = ["--package", "till", "--tests", "tests/test_prices.py", "--json", str(report)]
    before = contents(root)

    assert main(arguments, root=root) == 0

    assert contents(root) == before
    verdicts = {
        (mutant["old"], mutant["new"]): mutant["verdict"]
        for mutant in json.loads(report.read_text())["mutants"]
    }
    assert verdicts == {
        ("SMALLEST = 10", "SMALLEST = 11"): "survived",
        ("return max(count, SMALLEST)", "return min(count, SMALLEST)"): "noticed",
        ("return max(count, SMALLEST)", "return None"): "noticed",
        ("return 1", "return 2"): "not covered",
        ("return 1", "return None"): "not covered",
    }
    printed = capsys.readouterr()
    assert "till           5        2         1            2" in printed.out
    assert "src/shop/till/prices.py:1: survived" in printed.out
    assert "  - SMALLEST = 10\n  + SMALLEST = 11\n" in printed.out
    assert "tests/test_prices.py::test_that_fails_anyway" in printed.err
    assert "Recording" in printed.err

    assert main([*arguments, "--count", "0"], root=root) == 0  # uses the recorded coverage
    assert "Recording" not in capsys.readouterr().err


@pytest.mark.slow
def test_a_mutant_that_hangs_is_stopped_and_removed(tmp_path: Path) -> None:
    root = fake_project(tmp_path)
    (hanging,) = mutants_of(root, "shop", packages(root)["shop"])
    test = "tests/test_prices.py::test_a_wait_ends"
    with workspace(root) as space:
        with space.planted(hanging):
            assert "while done:" in (space.tree / hanging.path).read_text()
            assert space.run([test], [test], seed=1, timeout_s=2).exit_code is None
        assert (space.tree / hanging.path).read_text() == WAITING
        assert space.run([test], [test], seed=1, timeout_s=60).exit_code == 0
    assert not space.tree.exists()


@pytest.mark.parametrize(
    ("name", "is_recorded_again"),
    [("src/shop/new.py", True), ("tests/new.py", True), ("docs/new.md", False)],
)
def test_coverage_is_recorded_again_when_source_or_tests_change(
    tmp_path: Path, name: str, is_recorded_again: bool
) -> None:
    root = fake_project(tmp_path)
    before = fingerprint_of(root, ["tests"])
    assert fingerprint_of(root, ["tests"]) == before
    (root / name).parent.mkdir(exist_ok=True)
    (root / name).touch()
    assert (fingerprint_of(root, ["tests"]) != before) == is_recorded_again


def test_the_packages_are_those_below_a_root_package(tmp_path: Path) -> None:
    root = fake_project(tmp_path)
    (root / "src/shop/till/drawer").mkdir()
    (root / "src/shop/till/drawer/__init__.py").touch()
    modules = packages(root)
    assert {name: [path.parent.name for path in paths] for name, paths in modules.items()} == {
        "shop": ["shop", "shop"],
        "till": ["till", "drawer", "till"],
    }
    assert {mutant.path for mutant in mutants_of(root, "till", modules["till"])} == {
        "src/shop/till/prices.py"
    }


def test_a_package_that_does_not_exist_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["--package", "cellar"], root=fake_project(tmp_path))
    assert "no package cellar in src; there are shop, till" in capsys.readouterr().err
