"""The row of a marker, and a checker that loses the race to insert it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import Connection, Engine, create_engine, event, insert, select

from escrowmq.errors import ConfigError
from escrowmq.message.transaction import Verdict
from escrowmq.sql.statements import (
    count_message,
    create_tables,
    finish_marker,
    insert_marker,
    marker_table,
    read_or_tombstone,
)

NOW_MS = 1_700_000_000_000


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    """Return a database with the tables of the binding, in a file that connections share."""
    engine = create_engine(f"sqlite:///{tmp_path / 'bank.db'}")
    with engine.connect() as connection:
        create_tables(connection)
    yield engine
    engine.dispose()


def stored_rows(engine: Engine) -> list[tuple[object, ...]]:
    with engine.connect() as connection:
        return [tuple(row) for row in connection.execute(select(marker_table))]


def stored_rows_without_time(engine: Engine) -> list[tuple[object, ...]]:
    """Return the rows without `at_ms`, which the database sets."""
    return [(row[0], row[1], *row[3:]) for row in stored_rows(engine)]


def insert_before_the_checker(
    checker: Connection, engine: Engine, row: dict[str, object]
) -> list[str]:
    """Commit `row` from another connection after the checker has read and before it inserts.

    Return a list to which the checker's statement is appended, so that a test can verify it.
    """
    statements: list[str] = []

    @event.listens_for(checker, "before_cursor_execute")
    def commit_row(*arguments: object) -> None:
        statement = str(arguments[2])
        if statement.startswith("INSERT"):
            statements.append(statement)
            with engine.begin() as other:
                other.execute(insert(marker_table), row)

    return statements


@pytest.mark.parametrize(
    ("outcome", "expected"),
    [("committed", Verdict.COMMIT), ("tombstone", Verdict.ROLLBACK)],
)
def test_a_checker_that_loses_the_race_returns_the_verdict_of_the_winner(
    engine: Engine, outcome: str, expected: Verdict
) -> None:
    winner = {
        "id": "t",
        "outcome": outcome,
        "at_ms": NOW_MS,
        "producer_group": "bank",
        "messages": 1,
    }
    with engine.connect() as checker:
        inserts = insert_before_the_checker(checker, engine, winner)
        verdict = read_or_tombstone(checker, "t", group="bank")
    assert len(inserts) == 1
    assert verdict is expected
    assert stored_rows(engine) == [tuple(winner.values())]


def test_a_marker_counts_messages_as_they_are_sent(engine: Engine) -> None:
    with engine.begin() as owner:
        proof = insert_marker(owner, "t", group="bank")
        assert count_message(owner, "t", proof, 1)
        assert count_message(owner, "t", proof, 2)
        assert not count_message(owner, "t", proof, 2)  # as if the second one was rolled back
    assert stored_rows_without_time(engine) == [("t", "committed", "bank", 2)]


def test_a_tombstone_has_no_messages(engine: Engine) -> None:
    with engine.connect() as checker:
        assert read_or_tombstone(checker, "t", group="bank") is Verdict.ROLLBACK
    assert stored_rows_without_time(engine) == [("t", "tombstone", "bank", 0)]


def test_an_owner_that_asks_leaves_no_tombstone(engine: Engine) -> None:
    with engine.connect() as owner:
        verdict = read_or_tombstone(owner, "t", group="bank", keep_tombstone=False)
    assert verdict is Verdict.ROLLBACK
    assert stored_rows(engine) == []


def test_a_proof_does_not_outlive_its_transaction(engine: Engine) -> None:
    with engine.begin() as first:
        proof = insert_marker(first, "t", group="bank")
        assert count_message(first, "t", proof, 1)
    with engine.begin() as second:
        assert not count_message(second, "t", proof, 2)
        assert not finish_marker(second, "t", proof, 1)


def test_a_session_that_commits_each_statement_is_refused(engine: Engine) -> None:
    autocommit = engine.execution_options(isolation_level="AUTOCOMMIT")
    with autocommit.connect() as connection, pytest.raises(ConfigError, match="AUTOCOMMIT"):
        insert_marker(connection, "t", group="bank")
