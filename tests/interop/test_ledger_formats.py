"""The ledger as a Delta and as an Iceberg table, with their jars from Maven Central."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Final

import pyspark
import pytest

from tests.interop.jars import Unavailable, find, library
from tests.support.ledgers import Bank
from tests.support.spark_session import ROOT, spark_environment

pytestmark = [pytest.mark.nightly, pytest.mark.slow, pytest.mark.timeout(900)]

JARS: Final = {
    "delta": ("io.delta:delta-spark_4.2_2.13:4.4.0", "io.delta:delta-storage:4.4.0"),
    "iceberg": ("org.apache.iceberg:iceberg-spark-runtime-4.1_2.13:1.12.0",),
}


# The Spark that they were made for. With a newer one they fail: its inner classes have changed.
SPARKS: Final = {"delta": "4.2", "iceberg": "4.1"}


@pytest.mark.parametrize("kind", JARS)
def test_the_copy_has_what_the_ledger_has(kind: str, tmp_path: Path) -> None:
    if why := find():
        pytest.skip(why)
    if not pyspark.__version__.startswith(SPARKS[kind]):
        pytest.skip(f"the newest jars are for Spark {SPARKS[kind]}, this is {pyspark.__version__}")
    try:
        jars = ",".join(str(library(one)) for one in JARS[kind])
    except Unavailable as error:
        pytest.skip(str(error))
    bank = Bank(tmp_path, transactions=500, seed=2)
    words = ["tests.interop.ledger_copies", kind, str(bank.data), str(tmp_path / "out"), jars]
    done = subprocess.run(
        [sys.executable, "-m", *words],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env={**os.environ, **spark_environment()},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["rows"] > 480
    assert told["days"] > 1
    assert (told["differ"], told["differ_after"]) == (0, 0)
