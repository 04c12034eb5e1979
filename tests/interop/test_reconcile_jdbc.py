"""Reconcile over JDBC, as people run it: the command, a driver's jar from Maven Central, a server.

What it says must be what it says of the same tables in SQLite, which is read through SQLAlchemy.
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
from tests.interop.jars import Unavailable, find, library
from tests.support.databases import DatabaseServer, MariaDB, Postgres
from tests.support.ledgers import Bank
from tests.support.spark_session import ROOT, spark_environment

pytestmark = [pytest.mark.nightly, pytest.mark.slow, pytest.mark.timeout(900)]

BOOKS: Final = "SELECT transaction_id, cents AS amount, at_ms FROM transfer"
DRIVERS: Final = {
    "postgresql": "org.postgresql:postgresql:42.7.14",
    "mariadb": "org.mariadb.jdbc:mariadb-java-client:3.5.11",
}
SERVERS: Final[dict[str, type[DatabaseServer]]] = {"postgresql": Postgres, "mariadb": MariaDB}
# As JDBC has it, and as SQLAlchemy has it: for its default drivers, which are not installed, so
# that nothing but the jar can read it.
ADDRESSES: Final = {
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
    return reconciled(bank, f"sqlite:///{bank.bob}", f"sqlite:///{bank.smith}")


@pytest.fixture(scope="module", params=SERVERS)
def served(request: pytest.FixtureRequest, bank: Bank) -> Iterator[tuple[str, list[list[str]]]]:
    """Which one, and the addresses of both banks in each way to write them."""
    kind: str = request.param
    if why := SERVERS[kind].unavailable_reason() or find():
        pytest.skip(why)
    with SERVERS[kind]() as server:
        urls = [server.new_database() for _ in range(2)]
        for url, path in zip(urls, (bank.bob, bank.smith), strict=True):
            copy(path, url)
        names = [url.rpartition("/")[2].partition("?")[0] for url in urls]
        yield (
            kind,
            [
                [address.format(port=server.port, name=name) for name in names]
                for address in ADDRESSES[kind]
            ],
        )


def copy(path: Path, url: str) -> None:
    """All tables of a bank into a database of a server."""
    engine = create_engine(url)
    source = sqlite3.connect(path)
    with engine.connect() as connection:
        create_tables(connection)
        transfers.create(connection)
        for table in (marker_table, inbox_table, transfers):
            names = [column.name for column in table.columns]
            rows = source.execute(f"SELECT {', '.join(names)} FROM {table.name}").fetchall()
            if rows:
                connection.execute(insert(table), [dict(zip(names, r, strict=True)) for r in rows])
        connection.commit()
    source.close()
    engine.dispose()


def reconciled(bank: Bank, sender: str, receiver: str, *words: str) -> dict[str, Any]:
    command = [
        *(sys.executable, "-m", "escrowmq.cli.main", "pipeline", "reconcile", "--json"),
        *("--ledger", str(bank.ledger), "--since", "all", "--amount"),
        *("--database", sender, "--sql", BOOKS, "--receiver", receiver, "--receiver-sql", BOOKS),
        *("--master", "local[2]", *words),
    ]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env={**os.environ, **spark_environment()},
    )
    assert done.returncode == 1, done.stdout + done.stderr
    told: dict[str, Any] = json.loads(done.stdout)
    del told["at"]
    return told


@pytest.mark.parametrize("way", [0, 1], ids=["jdbc", "sqlalchemy"])
def test_a_server_is_read_over_jdbc(
    bank: Bank, expected: dict[str, Any], served: tuple[str, list[list[str]]], way: int
) -> None:
    kind, addresses = served
    try:
        jar = library(DRIVERS[kind])
    except Unavailable as error:
        pytest.skip(str(error))
    found = reconciled(bank, *addresses[way], "--conf", f"spark.jars={jar}")
    assert found == expected
    assert sum(found["differences"].values()) > 10
