"""What is missing for Spark is said in words."""

from __future__ import annotations

from pathlib import Path

import pyspark
import pytest

from escrowmq.errors import SparkNotAvailable
from escrowmq.spark.data_source import check_java, check_pyspark


def java(directory: Path, says: str) -> dict[str, str]:
    (directory / "bin").mkdir()
    program = directory / "bin" / "java"
    program.write_text(f"#!/bin/sh\necho '{says}' >&2\n")
    program.chmod(0o755)
    return {"JAVA_HOME": str(directory), "PATH": ""}


@pytest.mark.parametrize(
    ("says", "release"), [('openjdk version "17.0.15"', 17), ('java version "25" 2025-09-16', 25)]
)
def test_a_new_java_will_do(tmp_path: Path, says: str, release: int) -> None:
    assert check_java(java(tmp_path, says)) == release


@pytest.mark.parametrize(
    ("says", "why"), [('java version "1.8.0_402"', "is Java 8;"), ("what?", "does not say")]
)
def test_an_old_or_strange_java_is_named(tmp_path: Path, says: str, why: str) -> None:
    with pytest.raises(SparkNotAvailable, match=f"{why}.*needs Java 17"):
        check_java(java(tmp_path, says))


def test_no_java_at_all_is_said(tmp_path: Path) -> None:
    with pytest.raises(SparkNotAvailable, match=r"no Java on the PATH.*JAVA_HOME"):
        check_java({"PATH": str(tmp_path)})
    with pytest.raises(SparkNotAvailable, match="no Java at"):
        check_java({"JAVA_HOME": str(tmp_path), "PATH": ""})


def test_an_old_pyspark_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    check_pyspark()
    monkeypatch.setattr(pyspark, "__version__", "4.1.3")
    with pytest.raises(SparkNotAvailable, match=r"4\.1\.3 is too old, 4\.2 is needed"):
        check_pyspark()
