"""Run `escrowmq pipeline reconcile` over JDBC, with servers and with drivers from Maven Central.

The result must equal that for the same tables in SQLite, which is read with SQLAlchemy.
"""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from sqlalchemy import BigInteger, Column, MetaData, String, Table, create_engine, insert

from escrowmq.sql.statements import create_tables, inbox_table, marker_table
from tests.interop.jars import fetch_jar, unavailable_reason
from tests.interop.skipping import call_or_skip
from tests.support.databases import DatabaseServer, Maria, Postgres
from tests.support.ledgers import Bank
from tests.support.spark_session import ROOT, environment

pytestmark = [pytest.mark.nightly, pytest.mark.slow, pytest.mark.timeout(900)]

BOOKS: Final = "SELECT transaction_id, cents AS amount, at_ms FROM transfer"
DRIVERS: Final = {
    "postgresql": "org.postgresql:postgresql:42.7.14",
    "mariadb": "org.mariadb.jdbc:mariadb-java-client:3.5.11",
}
SERVERS: Final[dict[str, type[DatabaseServer]]] = {"postgresql": Postgres, "mariadb": Maria}
# URLs of JDBC and of SQLAlchemy. The latter name default drivers that are not installed, so only
# the jar can read the tables.
URLS: Final = {
    "postgresql": (
        "jdbc:postgresql://127.0.0.1:{port}/{name}?user=escrow",
        "postgresql://escrow@127.0.0.1:{port}/{name}",
    ),
    "mariadb": (
        "jdbc:mariadb://127.0.0.1:{port}/{name}?user=root",
        "mysql://root@127.0.0.1:{port}/{name}",
    ),
}
transfers = Table(
    "transfer",
    MetaData(),
    Column("transaction_id", String(64)),
    Column("cents", BigInteger),
    Column("at_ms", BigInteger),
)


@pytest.fixture(scope="module")
def bank(tmp_path_factory: pytest.TempPathFactory) -> Bank:
    return Bank(tmp_path_factory.mktemp("bank"), transactions=3_000, seed=11)


@pytest.fixture(scope="module")
def expected(bank: Bank) -> dict[str, Any]:
    return run_reconcile(bank, f"sqlite:///{bank.bob}", f"sqlite:///{bank.smith}")


@pytest.fixture(scope="module", params=SERVERS)
def databases(request: pytest.FixtureRequest, bank: Bank) -> Iterator[tuple[str, list[list[str]]]]:
    """Copy both databases of the bank to a server.

    Yields the kind of the server, and the URLs of both databases in each form of `URLS`.
    """
    kind: str = request.param
    if reason := SERVERS[kind].lack() or unavailable_reason():
        pytest.skip(reason)
    with SERVERS[kind]() as server:
        urls = [server.new_database() for _ in range(2)]
        for url, path in zip(urls, (bank.bob, bank.smith), strict=True):
            copy(path, url)
        names = [url.rpartition("/")[2].partition("?")[0] for url in urls]
        yield (
            kind,
            [
                [template.format(port=server.port, name=name) for name in names]
                for template in URLS[kind]
            ],
        )


def copy(path: Path, url: str) -> None:
    """Copy the tables of an SQLite file to a database of a server."""
    engine = create_engine(url)
    source = sqlite3.connect(path)
    with engine.connect() as connection:
        create_tables(connection)
        transfers.create(connection)
        for table in (marker_table, inbox_table, transfers):
            names = [column.name for column in table.columns]
            rows = source.execute(f"SELECT {', '.join(names)} FROM {table.name}").fetchall()
            if rows:
                connection.execute(
                    insert(table), [dict(zip(names, row, strict=True)) for row in rows]
                )
        connection.commit()
    source.close()
    engine.dispose()


def run_reconcile(bank: Bank, sender: str, receiver: str, *options: str) -> dict[str, Any]:
    """Run the command, which must find differences, and return its report."""
    command = [
        *(sys.executable, "-m", "escrowmq.cli.main", "pipeline", "reconcile", "--json"),
        *("--ledger", str(bank.ledger), "--since", "all", "--amount"),
        *("--database", sender, "--sql", BOOKS, "--receiver", receiver, "--receiver-sql", BOOKS),
        *("--master", "local[2]", *options),
    ]
    result = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env={**os.environ, **environment()},
    )
    assert result.returncode == 1, result.stdout + result.stderr
    report: dict[str, Any] = json.loads(result.stdout)
    del report["at"]
    return report


@pytest.mark.parametrize("url_form", [0, 1], ids=["jdbc", "sqlalchemy"])
def test_a_server_is_read_over_jdbc(
    bank: Bank, expected: dict[str, Any], databases: tuple[str, list[list[str]]], url_form: int
) -> None:
    kind, urls = databases
    jar = call_or_skip(f"driver of {kind}", lambda: fetch_jar(DRIVERS[kind]))
    report = run_reconcile(bank, *urls[url_form], "--conf", f"spark.jars={jar}")
    assert report == expected
    assert sum(report["differences"].values()) > 10
