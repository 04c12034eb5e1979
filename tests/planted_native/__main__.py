"""The command line: `python -m tests.planted_native [WORD …]` plants those with all these words."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from tests.planted_native.mistakes import MISTAKES, Mistake

ROOT: Final = Path(__file__).parents[2]
TESTS: Final = (
    "tests/contract/test_half_table.py",
    "tests/property/test_native_path.py",
    "tests/property/test_native_pulls.py",
    "tests/property/test_native_index.py",
    "tests/property/test_native_reads.py",
    "tests/property/test_restored_halves.py",
)
# A debug build would find overflows that a release build does not; a release build as it is takes
# three times as long.
QUICK_BUILD: Final = {
    "CARGO_PROFILE_RELEASE_LTO": "off",
    "CARGO_PROFILE_RELEASE_OPT_LEVEL": "1",
    "RUSTFLAGS": "-Awarnings",  # a mistake may leave something unused
}
TIMEOUT_S: Final = 300


def main(words: Sequence[str]) -> int:
    """Plant all chosen mistakes. Return 1 if one of them is not found."""
    chosen = [each for each in MISTAKES if all(word in each.name for word in words)]
    survivors = []
    with tempfile.TemporaryDirectory(prefix="planted-") as name:
        copy = Path(name)
        for folder in ("native", "src"):
            ignored = shutil.ignore_patterns("target", "fuzz", "__pycache__")
            shutil.copytree(ROOT / folder, copy / folder, ignore=ignored)
        if failing := _failing_test(copy):
            sys.stderr.write(f"the tests fail without a mistake: {failing}\n")
            return 2
        for mistake in chosen:
            failing = _plant(copy, mistake)
            survivors += [] if failing else [mistake.name]
            sys.stdout.write(f"{mistake.name}: {failing or 'NOT FOUND'}\n")
            sys.stdout.flush()
    sys.stdout.write(f"{len(chosen) - len(survivors)} of {len(chosen)} mistakes found\n")
    return 1 if survivors else 0


def _plant(copy: Path, mistake: Mistake) -> str:
    """Return the first test that finds a mistake; nothing if none does."""
    path = copy / mistake.path
    original = path.read_text(encoding="utf-8")
    path.write_text(original.replace(mistake.old, mistake.new), encoding="utf-8")
    try:
        return _failing_test(copy)
    finally:
        path.write_text(original, encoding="utf-8")


def _failing_test(copy: Path) -> str:
    environment = {**os.environ, **QUICK_BUILD, "PYTHONDONTWRITEBYTECODE": "1"}
    environment |= {"PYO3_BUILD_EXTENSION_MODULE": "1", "PYO3_PYTHON": sys.executable}
    environment |= {"CARGO_TARGET_DIR": str(copy / "target")}
    build = ["cargo", "build", "--quiet", "--release", "--locked"]
    subprocess.run(build, cwd=copy / "native", env=environment, check=True, stderr=None)
    library = copy / "target/release/libescrowmq_native.so"
    if not library.exists():
        library = library.with_suffix(".dylib")
    site = copy / "site"
    site.mkdir(exist_ok=True)
    shutil.copy(library, site / "escrowmq_native.abi3.so")
    environment["PYTHONPATH"] = os.pathsep.join(map(str, (site, copy / "src", ROOT)))
    # Examples are neither made smaller nor kept: one that has found a mistake must not help to
    # find the next one.
    environment["HYPOTHESIS_PROFILE"] = "find"
    options = ["-q", "-x", "--tb=no", "-p", "no:cacheprovider", "--hypothesis-seed=1"]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *TESTS],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    if run.returncode == 0:
        return ""
    failed = [line for line in run.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return failed[0].split(" - ")[0] if failed else f"pytest ended with {run.returncode}"


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
