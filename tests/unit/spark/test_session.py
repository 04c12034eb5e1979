"""Checks of Java and PySpark: a missing or old version is reported in one sentence."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pyspark
import pytest

from escrowmq.errors import SparkNotAvailable
from escrowmq.spark.session import check_java, check_pyspark


def fake_java(directory: Path, output: str) -> dict[str, str]:
    """Create a `java` that prints this version, and return an environment that has it."""
    (directory / "bin").mkdir()
    program = directory / "bin" / "java"
    program.write_text(f"#!/bin/sh\necho '{output}' >&2\n")
    program.chmod(0o755)
    return {"JAVA_HOME": str(directory), "PATH": ""}


@pytest.mark.parametrize(
    ("output", "release"), [('openjdk version "17.0.15"', 17), ('java version "25" 2025-09-16', 25)]
)
def test_java_17_and_newer_are_accepted(tmp_path: Path, output: str, release: int) -> None:
    assert check_java(fake_java(tmp_path, output)) == release


@pytest.mark.parametrize(
    ("output", "reason"), [('java version "1.8.0_402"', "is Java 8;"), ("what?", "does not say")]
)
def test_an_old_or_unknown_java_is_refused(tmp_path: Path, output: str, reason: str) -> None:
    with pytest.raises(SparkNotAvailable, match=f"{reason}.*needs Java 17"):
        check_java(fake_java(tmp_path, output))


def test_missing_java_is_reported(tmp_path: Path) -> None:
    with pytest.raises(SparkNotAvailable, match=r"no Java on the PATH.*JAVA_HOME"):
        check_java({"PATH": str(tmp_path)})
    with pytest.raises(SparkNotAvailable, match="no Java at"):
        check_java({"JAVA_HOME": str(tmp_path), "PATH": ""})


def test_an_old_pyspark_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    check_pyspark()
    monkeypatch.setattr(pyspark, "__version__", "4.1.3")
    with pytest.raises(SparkNotAvailable, match=r"4\.1\.3 is too old, 4\.2 is needed"):
        check_pyspark()


def test_commands_without_pyspark_say_what_to_install(tmp_path: Path) -> None:
    # A None in sys.modules makes the import fail, as if the package were not installed.
    program = (
        "import sys\n"
        "sys.modules.update(pyspark=None, pyarrow=None, py4j=None, numpy=None, jinja2=None)\n"
        "from escrowmq.cli.main import main\n"
        "main()\n"
    )
    for command in (
        ("ledger", "-n", "127.0.0.1:1", "--out", str(tmp_path)),
        ("reconcile", "--ledger", str(tmp_path), "--database", "sqlite:///x.db"),
    ):
        result = subprocess.run(
            [sys.executable, "-c", program, "pipeline", *command],
            capture_output=True,
            text=True,
            check=False,
        )
        assert "pyarrow is not installed: pip install" in result.stderr
        assert "Traceback" not in result.stderr
