"""Copy the ledger to a Delta table and to an Iceberg table, with jars from Maven Central."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Final

import pyspark
import pytest

from tests.interop.jars import fetch_jar
from tests.interop.skipping import call_or_skip
from tests.support.ledgers import Bank
from tests.support.spark_session import ROOT, environment

pytestmark = [pytest.mark.nightly, pytest.mark.slow, pytest.mark.timeout(900)]

JARS: Final = {
    "delta": ("io.delta:delta-spark_4.2_2.13:4.4.0", "io.delta:delta-storage:4.4.0"),
    "iceberg": ("org.apache.iceberg:iceberg-spark-runtime-4.1_2.13:1.12.0",),
}
# The Spark release that the jars need. They use its internal classes and fail with a newer one.
SPARKS: Final = {"delta": "4.2", "iceberg": "4.1"}


@pytest.mark.parametrize("kind", JARS)
def test_the_copy_equals_the_ledger(kind: str, tmp_path: Path) -> None:
    if not pyspark.__version__.startswith(SPARKS[kind]):
        pytest.skip(f"the jars need Spark {SPARKS[kind]}, this is {pyspark.__version__}")
    jars = call_or_skip(kind, lambda: ",".join(str(fetch_jar(jar)) for jar in JARS[kind]))
    bank = Bank(tmp_path, transactions=500, seed=2)
    arguments = ["tests.interop.ledger_copies", kind, str(bank.data), str(tmp_path / "out"), jars]
    result = subprocess.run(
        [sys.executable, "-m", *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env={**os.environ, **environment()},
    )
    assert result.returncode == 0, result.stderr[-4000:]
    report = json.loads(result.stdout.splitlines()[-1])
    assert report["rows"] > 480
    assert report["days"] > 1
    assert (report["differing"], report["differing_after_rebuild"]) == (0, 0)
