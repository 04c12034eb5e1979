"""The first writer of a marker decides, on every database; a lock shows that the owner runs."""

from __future__ import annotations

import threading

import pytest
from sqlalchemy import Connection, Engine, create_engine, event, insert, select, update
from sqlalchemy.exc import DBAPIError, IntegrityError
from sqlalchemy.pool import StaticPool

from escrowmq import Verdict
from escrowmq.clock import ManualClock, SystemClock
from escrowmq.database.marker import HOUR_MS, DatabaseTime
from escrowmq.errors import ConfigError
from escrowmq.sql import Escrow
from escrowmq.sql.statements import (
    check_transaction_support,
    count_message,
    create_tables,
    finish_marker,
    insert_marker,
    marker_table,
    now_ms,
    purge_before,
    purge_older,
    read_or_tombstone,
)

pytestmark = pytest.mark.slow

NOW_MS = 1_700_000_000_000


def check(engine: Engine, transaction_id: str, *, may_be_purged: bool = False) -> Verdict:
    """Return the verdict of a check on a connection of its own."""
    with engine.connect() as connection:
        return read_or_tombstone(
            connection, transaction_id, group="g", may_be_purged=lambda _: may_be_purged
        )


@pytest.fixture
def with_tables(engine: Engine) -> Engine:
    """Return an engine whose database has our tables. Creating them twice is not an error."""
    with engine.connect() as connection:
        create_tables(connection)
        create_tables(connection)
    return engine


def test_the_first_writer_of_a_marker_decides(with_tables: Engine) -> None:
    with with_tables.connect() as owner:
        owner.begin()
        insert_marker(owner, "committed", group="g")
        assert check(with_tables, "committed") is Verdict.UNKNOWN  # the owner still runs
        owner.commit()
        assert check(with_tables, "committed") is Verdict.COMMIT
        owner.begin()
        insert_marker(owner, "rolled back", group="g")
        owner.rollback()
        assert check(with_tables, "rolled back") is Verdict.ROLLBACK
    assert check(with_tables, "never started") is Verdict.ROLLBACK
    assert check(with_tables, "never started") is Verdict.ROLLBACK
    with with_tables.begin() as late, pytest.raises(IntegrityError):
        insert_marker(late, "never started", group="g")


@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_a_checker_that_waits_returns_the_owners_verdict(with_tables: Engine, end: str) -> None:
    expected = {"commit": Verdict.COMMIT, "rollback": Verdict.ROLLBACK}[end]
    verdicts: list[Verdict] = []
    is_inserting = threading.Event()

    @event.listens_for(with_tables, "before_cursor_execute")
    def watch_inserts(*arguments: object) -> None:
        statement = str(arguments[2])
        if "INSERT" in statement and threading.current_thread() is checker:
            is_inserting.set()

    checker = threading.Thread(target=lambda: verdicts.append(check(with_tables, "t")))
    with with_tables.connect() as owner:
        owner.begin()
        insert_marker(owner, "t", group="g")
        checker.start()
        assert is_inserting.wait(20)
        owner.commit() if end == "commit" else owner.rollback()
        checker.join()
    # On a busy machine the checker may give up before the owner ends.
    assert verdicts[0] in (expected, Verdict.UNKNOWN)
    assert check(with_tables, "t") is expected


def lock_timeout(engine: Engine) -> object:
    query = {
        "sqlite": "PRAGMA busy_timeout",
        "postgresql": "SHOW lock_timeout",
        "mysql": "SELECT @@SESSION.innodb_lock_wait_timeout",
    }[engine.dialect.name]
    with engine.connect() as connection:
        return connection.exec_driver_sql(query).scalar()


def test_a_checker_restores_the_lock_timeout_of_its_connection(with_tables: Engine) -> None:
    single = create_engine(with_tables.url, pool_size=1, max_overflow=0)
    original = lock_timeout(single)
    with with_tables.connect() as owner:
        owner.begin()
        insert_marker(owner, "t", group="g")
        assert check(single, "t") is Verdict.UNKNOWN
        assert lock_timeout(single) == original
        owner.commit()
    check(single, "other")
    assert lock_timeout(single) == original
    single.dispose()


def test_an_error_other_than_a_lock_is_raised(engine: Engine) -> None:
    with pytest.raises(DBAPIError, match="escrowmq_marker"):
        check(engine, "there is no such table")


def test_a_marker_that_may_be_purged_gives_no_verdict(with_tables: Engine) -> None:
    assert check(with_tables, "t", may_be_purged=True) is Verdict.UNKNOWN
    with with_tables.begin() as late:
        insert_marker(late, "t", group="g")
    assert check(with_tables, "t", may_be_purged=True) is Verdict.COMMIT


def test_ids_and_groups_are_case_sensitive(with_tables: Engine) -> None:
    with with_tables.begin() as owner:
        insert_marker(owner, "abc", group="g")
    assert check(with_tables, "ABC") is Verdict.ROLLBACK


def test_a_marker_stores_the_number_of_messages(with_tables: Engine) -> None:
    with with_tables.begin() as owner:
        for number in range(3):
            proof = insert_marker(owner, f"t{number}", group="g", savepoint=f"proof_{number}")
            assert all(
                count_message(owner, f"t{number}", proof, count) for count in range(1, number + 1)
            )
            assert finish_marker(owner, f"t{number}", proof, number)
    with with_tables.connect() as reader:
        rows = reader.execute(
            select(marker_table.c.id, marker_table.c.messages).order_by("id")
        ).all()
    assert [tuple(row) for row in rows] == [("t1", 1), ("t2", 2)]


def test_a_marker_has_the_time_of_the_database(with_tables: Engine) -> None:
    with with_tables.connect() as connection:
        before_ms = now_ms(connection)
        with connection.begin():
            insert_marker(connection, "t", group="g")
        after_ms = now_ms(connection)
        at_ms = connection.execute(select(marker_table.c.at_ms)).scalar_one()
    assert before_ms <= at_ms <= after_ms
    assert abs(before_ms - SystemClock().now_ms()) < HOUR_MS  # the database runs on this machine


def test_old_rows_are_purged_in_batches(with_tables: Engine) -> None:
    with with_tables.begin() as connection:
        rows = [
            {"id": f"t{number}", "outcome": "committed", "at_ms": NOW_MS + number}
            for number in range(1203)
        ]
        connection.execute(insert(marker_table).values(producer_group="g", messages=1), rows)
    with with_tables.connect() as connection:
        assert purge_before(connection, marker_table, NOW_MS + 1201) == 1201
        connection.rollback()
        remaining = connection.execute(select(marker_table.c.id).order_by("id")).scalars().all()
    assert remaining == ["t1201", "t1202"]


def age_rows(connection: Connection, age_ms: int) -> None:
    """Make all markers older, as if the time had passed in the database."""
    with connection.begin():
        connection.execute(update(marker_table).values(at_ms=marker_table.c.at_ms - age_ms))


@pytest.mark.parametrize("skew_ms", [97 * HOUR_MS, -97 * HOUR_MS, 10**12])
def test_a_wrong_clock_of_the_process_removes_nothing_that_is_needed(
    with_tables: Engine, skew_ms: int
) -> None:
    clock = ManualClock(SystemClock().now_ms() + skew_ms)
    with Escrow(with_tables, "127.0.0.1:1", group="g", clock=clock) as escrow:
        with with_tables.begin() as owner:
            insert_marker(owner, "young", group="g")
        assert escrow.purge() == 0
        clock.advance(ms=2 * HOUR_MS)
        escrow.clean_up()
        clock.step_wall_clock(ms=97 * HOUR_MS)
        assert escrow.purge() == 0
        with with_tables.connect() as connection:
            age_rows(connection, 96 * HOUR_MS + 1000)
        assert escrow.purge() == 1


def test_a_database_whose_clock_was_set_forward_removes_nothing(
    with_tables: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    database_time = DatabaseTime(ManualClock())
    with with_tables.connect() as connection:
        database_time.observe(now_ms(connection) - 97 * HOUR_MS)  # 97 hours in no time
        with connection.begin():
            insert_marker(connection, "young", group="g")
        age_rows(connection, 97 * HOUR_MS)  # it was inserted before the clock was set
        assert purge_older(connection, marker_table, 96 * HOUR_MS, database_time) == 0
    assert "set forward" in caplog.text


@pytest.mark.parametrize("level", ["READ UNCOMMITTED", "AUTOCOMMIT"])
def test_a_database_that_shows_uncommitted_rows_is_refused(with_tables: Engine, level: str) -> None:
    unsafe = create_engine(with_tables.url, isolation_level=level)
    with unsafe.connect() as connection, pytest.raises(ConfigError):
        check_transaction_support(connection)
    unsafe.dispose()
    with with_tables.connect() as connection:
        check_transaction_support(connection)


def test_a_database_in_memory_is_refused() -> None:
    for engine in (create_engine("sqlite://"), create_engine("sqlite://", poolclass=StaticPool)):
        with pytest.raises(ConfigError, match="file"):
            Escrow(engine, "127.0.0.1:1", group="g")


def test_a_retention_below_an_hour_is_refused(sqlite: Engine) -> None:
    with pytest.raises(ConfigError, match="3600000"):
        Escrow(sqlite, "127.0.0.1:1", group="g", retention_ms=1000, clock=ManualClock())
