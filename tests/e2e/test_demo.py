"""The demo: its first part whole, its second part on small books."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from datetime import UTC, datetime
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from pyspark.sql import SparkSession
from rich.console import Console
from sqlalchemy import insert

from escrowmq.database.marker import COMMITTED
from escrowmq.sql.statements import inbox_table, marker_table
from examples.bank.__main__ import MARKER_FILE, main
from examples.bank.audit import audit, verdict_table
from examples.bank.banks import BOB, SMITH, book_transfer, compare_banks, create_bank, open_bank
from tests.support.ledgers import write_ledger
from tests.support.spark_session import QUIET, ROOT, spark  # noqa: F401

pytestmark = [pytest.mark.filterwarnings(rule) for rule in QUIET]

DEMO_S = 800


@pytest.mark.timeout(DEMO_S + 60)
def test_both_banks_agree_after_everything_that_was_done_to_them(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    arguments = ("--transfers", "300", "--no-spark", "--keep", str(kept))
    done = subprocess.run(
        [sys.executable, "-m", "examples.bank", *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=DEMO_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Both banks agree." in done.stdout
    text = " ".join(done.stdout.split())  # without the line breaks of the console
    assert "last: checker failed: ConnectionError('the database of the branch" in text
    for command in ("explain", "resume", "commit", "rollback"):
        assert f"$ escrowmq transaction {command} " in text
    assert {"bob.db", "smith.db", "broker.log", MARKER_FILE} <= {
        path.name for path in kept.iterdir()
    }


def test_a_directory_of_somebody_elses_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    done = CliRunner().invoke(main, ["--no-spark", "--keep", str(tmp_path)])
    assert done.exit_code == 2
    assert "is not empty" in done.output
    assert (tmp_path / "thesis.txt").read_text() == "mine"


@pytest.mark.parametrize(("version", "code"), [("1.8.0_2", 1), ("11.0.1", 1), ("21.0.2", 0)])
def test_a_java_that_is_too_old_is_said_in_one_line(
    tmp_path: Path, version: str, code: int
) -> None:
    java = tmp_path / "bin" / "java"
    java.parent.mkdir()
    java.write_text(f"#!/bin/sh\necho 'openjdk version \"{version}\"' >&2\n")
    java.chmod(0o755)
    done = subprocess.run(
        [ROOT / ".ci" / "java"],
        env={**os.environ, "JAVA_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == code
    lines = done.stderr.splitlines()
    assert len(lines) == code
    assert all("apt-get install openjdk-17-jre-headless" in line for line in lines)


class SmallBooks:
    """Ten transfers, as a story leaves them; `lost` of them never came to Smith."""

    def __init__(self, directory: Path, *, lost: int) -> None:
        self.directory = directory
        self.urls = [f"sqlite:///{directory / bank}.db" for bank in (BOB, SMITH)]
        for bank, url in zip((BOB, SMITH), self.urls, strict=True):
            create_bank(bank, url)
        self.bob, self.smith = map(open_bank, self.urls)
        for number in range(10):
            self._pay(number, comes=number >= lost)

    def _pay(self, number: int, *, comes: bool) -> None:
        transaction_id, at_ms = f"escrow-{number:032x}", 1_790_000_000_000 + number
        line: dict[str, Any] = {"transaction_id": transaction_id, "at_ms": at_ms}
        marker = {"id": transaction_id, "outcome": COMMITTED, "at_ms": at_ms}
        with self.bob.begin() as connection:
            connection.execute(
                insert(marker_table).values(**marker, producer_group="b", messages=1)
            )
            book_transfer(connection, BOB, number, -100 * number - 1, **line)
        if comes:
            taken = {"consumer_group": "s", "message_id": f"M{number}", "at_ms": at_ms}
            with self.smith.begin() as connection:
                connection.execute(insert(inbox_table).values(**taken))
                book_transfer(connection, SMITH, number, 100 * number + 1, **line)

    def ledger(self, _: object, __: str, out: Path) -> None:
        """What the pipeline would have made of it."""
        write_ledger(out, [self._row(number) for number in range(10)])

    def _row(self, number: int) -> dict[str, Any]:
        parked = datetime.fromtimestamp(1_790_000_000 + number, tz=UTC)
        name = f"escrow-{number:032x}"
        place = {"topic": "transfers", "broker": "a", "queue_id": 0, "queue_offset": number}
        return {
            "transaction_id": name,
            "marker_id": name,
            "group": "b",
            "topics": ["transfers"],
            "messages": 1,
            "message_ids": [f"M{number}"],
            "brokers": ["a"],
            "checks": 0,
            "parked_at": parked,
            "decided_at": parked,
            "outcome": "committed",
            "decision_ms": 7,
            "finals": [place],
            "day": parked.date(),
        }


@pytest.mark.timeout(DEMO_S)
@pytest.mark.parametrize("lost", [0, 2])
def test_spark_finds_what_the_books_do_not_say(
    spark: SparkSession,  # noqa: F811
    tmp_path: Path,
    lost: int,
) -> None:
    books = SmallBooks(tmp_path, lost=lost)
    told, report = audit(
        spark,
        servers="",
        bob_url=books.urls[0],
        smith_url=books.urls[1],
        directory=tmp_path,
        make_ledger=books.ledger,
    )
    compared = compare_banks(books.bob, books.smith)
    books.bob.dispose()
    books.smith.dispose()
    with StringIO() as shown:
        Console(file=shown, width=100).print(verdict_table(told, compared))
        table = shown.getvalue()
    assert told.transactions == 10
    assert told.is_consistent == (lost == 0) == compared.is_consistent
    assert told.differences["consumed_without_effect"] == lost
    assert sum(told.differences.values()) == lost
    assert told.sums["sent"] == "45.100000"
    assert re.search(rf"lost +│ +{lost} ", table)
    assert re.search(rf"money conserved +│ +{'no' if lost else 'yes'} ", table)
    assert "Bob pays Smith" in report.read_text()
