"""The first writer of a marker wins, on every database; a lock means that the owner still works."""

from __future__ import annotations

import threading

import pytest
from sqlalchemy import Engine, create_engine, event, select
from sqlalchemy.exc import DBAPIError, IntegrityError
from sqlalchemy.pool import StaticPool

from escrowmq import Verdict
from escrowmq.clock import ManualClock
from escrowmq.errors import ConfigError
from escrowmq.sql import Escrow
from escrowmq.sql.statements import (
    check_transaction_support,
    create_tables,
    insert_marker,
    marker_table,
    purge_before,
    read_or_tombstone,
    set_message_count,
)

pytestmark = pytest.mark.slow

NOW_MS = 1_700_000_000_000


def asked(engine: Engine, transaction_id: str, *, old: bool = False) -> Verdict:
    with engine.connect() as connection:
        return read_or_tombstone(
            connection, transaction_id, group="g", now_ms=NOW_MS, may_be_purged=old
        )


@pytest.fixture
def marked(engine: Engine) -> Engine:
    with engine.connect() as connection:
        create_tables(connection)
        create_tables(connection)
    return engine


def test_the_first_writer_wins(marked: Engine) -> None:
    with marked.connect() as owner:
        owner.begin()
        insert_marker(owner, "committed", group="g", now_ms=NOW_MS)
        assert asked(marked, "committed") is Verdict.UNKNOWN  # the owner still works
        owner.commit()
        assert asked(marked, "committed") is Verdict.COMMIT
        owner.begin()
        insert_marker(owner, "rolled back", group="g", now_ms=NOW_MS)
        owner.rollback()
        assert asked(marked, "rolled back") is Verdict.ROLLBACK
    assert asked(marked, "never begun") is Verdict.ROLLBACK
    assert asked(marked, "never begun") is Verdict.ROLLBACK
    with marked.begin() as late, pytest.raises(IntegrityError):
        insert_marker(late, "never begun", group="g", now_ms=NOW_MS)


@pytest.mark.parametrize("ends", ["commit", "rollback"])
def test_a_checker_that_waits_returns_what_the_owner_did(marked: Engine, ends: str) -> None:
    wanted = {"commit": Verdict.COMMIT, "rollback": Verdict.ROLLBACK}[ends]
    answers: list[Verdict] = []
    inserting = threading.Event()

    @event.listens_for(marked, "before_cursor_execute")
    def note(*given: object) -> None:
        if "INSERT" in str(given[2]) and threading.current_thread() is checker:
            inserting.set()

    def check() -> None:
        answers.append(asked(marked, "t"))

    checker = threading.Thread(target=check)
    with marked.connect() as owner:
        owner.begin()
        insert_marker(owner, "t", group="g", now_ms=NOW_MS)
        checker.start()
        assert inserting.wait(20)
        owner.commit() if ends == "commit" else owner.rollback()
        checker.join()
    # On a busy machine the wait may end before the owner does.
    assert answers[0] in (wanted, Verdict.UNKNOWN)
    assert asked(marked, "t") is wanted


def lock_wait(engine: Engine) -> object:
    query = {
        "sqlite": "PRAGMA busy_timeout",
        "postgresql": "SHOW lock_timeout",
        "mysql": "SELECT @@SESSION.innodb_lock_wait_timeout",
    }[engine.dialect.name]
    with engine.connect() as connection:
        return connection.exec_driver_sql(query).scalar()


def test_a_checker_leaves_its_connection_as_it_was(marked: Engine) -> None:
    one = create_engine(marked.url, pool_size=1, max_overflow=0)
    before = lock_wait(one)
    with marked.connect() as owner:
        owner.begin()
        insert_marker(owner, "t", group="g", now_ms=NOW_MS)
        assert asked(one, "t") is Verdict.UNKNOWN
        assert lock_wait(one) == before
        owner.commit()
    asked(one, "other")
    assert lock_wait(one) == before
    one.dispose()


def test_an_error_other_than_a_lock_is_raised(engine: Engine) -> None:
    with pytest.raises(DBAPIError, match="escrowmq_marker"):
        asked(engine, "there is no such table")


def test_a_marker_that_may_be_purged_gives_no_verdict(marked: Engine) -> None:
    assert asked(marked, "t", old=True) is Verdict.UNKNOWN
    with marked.begin() as late:
        insert_marker(late, "t", group="g", now_ms=NOW_MS)
    assert asked(marked, "t", old=True) is Verdict.COMMIT


def test_ids_and_groups_are_case_sensitive(marked: Engine) -> None:
    with marked.begin() as owner:
        insert_marker(owner, "abc", group="g", now_ms=NOW_MS)
    assert asked(marked, "ABC") is Verdict.ROLLBACK


def test_a_marker_stores_the_number_of_messages(marked: Engine) -> None:
    with marked.begin() as owner:
        for number in range(3):
            insert_marker(owner, f"t{number}", group="g", now_ms=NOW_MS)
            set_message_count(owner, f"t{number}", number)
    with marked.connect() as reader:
        rows = reader.execute(
            select(marker_table.c.id, marker_table.c.messages).order_by("id")
        ).all()
    assert [tuple(row) for row in rows] == [("t1", 1), ("t2", 2)]


def test_old_rows_are_purged_in_batches(marked: Engine) -> None:
    with marked.begin() as connection:
        for number in range(1203):
            insert_marker(connection, f"t{number}", group="g", now_ms=NOW_MS + number)
    with marked.connect() as connection:
        assert purge_before(connection, marker_table, NOW_MS + 1201) == 1201
        connection.rollback()
        left = connection.execute(select(marker_table.c.id).order_by("id")).scalars().all()
    assert left == ["t1201", "t1202"]


@pytest.mark.parametrize("level", ["READ UNCOMMITTED", "AUTOCOMMIT"])
def test_a_database_that_shows_uncommitted_rows_is_refused(marked: Engine, level: str) -> None:
    unsafe = create_engine(marked.url, isolation_level=level)
    with unsafe.connect() as connection, pytest.raises(ConfigError):
        check_transaction_support(connection)
    unsafe.dispose()
    with marked.connect() as connection:
        check_transaction_support(connection)


def test_a_database_in_memory_is_refused() -> None:
    for engine in (create_engine("sqlite://"), create_engine("sqlite://", poolclass=StaticPool)):
        with pytest.raises(ConfigError, match="file"):
            Escrow(engine, "127.0.0.1:1", group="g")


def test_a_retention_below_an_hour_is_refused(sqlite: Engine) -> None:
    with pytest.raises(ConfigError, match="3600000"):
        Escrow(sqlite, "127.0.0.1:1", group="g", retention_ms=1000, clock=ManualClock())
