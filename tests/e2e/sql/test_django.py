"""Django's atomic blocks with messages: on SQLite (`default`), PostgreSQL and MariaDB."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from io import StringIO
from pathlib import Path

import django
import pymysql
import pytest
from django.conf import settings
from django.core.management import call_command
from django.db import DatabaseError, IntegrityError, connections, transaction
from sqlalchemy import create_engine, inspect, make_url

from escrowmq import Message, ReceivedMessage, Rollback, Verdict
from escrowmq.clock import ManualClock
from escrowmq.database.marker import HOUR_MS
from escrowmq.database.transaction import TransactionMessages
from escrowmq.django import Escrow, Inbox
from escrowmq.django import escrow as shared
from escrowmq.errors import ConfigError, SessionEndedInBlock, TransportError
from escrowmq.sql import metadata
from tests.e2e.sql.conftest import url_of
from tests.support.brokers import LocalServer
from tests.support.databases import DatabaseServer, MariaDB, Postgres
from tests.support.sql_bank import delivered_bodies, new_topic, open_halves, received_message

pytestmark = pytest.mark.slow

ALIASES = ("default", "second", "third")
SERVER_ALIASES: dict[str, tuple[str, type[DatabaseServer]]] = {
    "second": ("postgresql", Postgres),
    "third": ("mariadb", MariaDB),
}


@pytest.fixture(scope="module")
def databases(
    tmp_path_factory: pytest.TempPathFactory,
    database_servers: dict[str, DatabaseServer],
    server: LocalServer,
) -> Iterator[None]:
    """Configure Django. Settings belong to the process and are set once."""
    directory = tmp_path_factory.mktemp("django")
    database_settings: dict[str, dict[str, object]] = {
        "default": {"ENGINE": "django.db.backends.sqlite3", "NAME": str(directory / "bank.db")}
    }
    pymysql.install_as_MySQLdb()  # Django's backend for MariaDB has no driver of its own
    for alias, (kind, server_type) in SERVER_ALIASES.items():
        if server_type.unavailable_reason():
            continue
        url = make_url(url_of(kind, database_servers, directory))
        database_settings[alias] = {
            "ENGINE": f"django.db.backends.{url.get_backend_name()}",
            "NAME": url.database,
            "HOST": url.host,
            "PORT": url.port,
            "USER": url.username,
        }
    settings.configure(
        INSTALLED_APPS=["escrowmq.django"],
        DATABASES=database_settings,
        USE_TZ=True,
        ESCROWMQ={
            "servers": server.namesrv_address,
            "group": "django",
            "databases": list(database_settings),
        },
    )
    django.setup()
    for alias in database_settings:
        call_command("migrate", database=alias, verbosity=0)
        with connections[alias].cursor() as cursor:
            cursor.execute("CREATE TABLE transfer (id varchar(64) PRIMARY KEY)")
    yield
    shared.close()
    connections.close_all()


@pytest.fixture(params=ALIASES)
def alias(request: pytest.FixtureRequest, databases: None) -> str:
    name = str(request.param)
    if name not in settings.DATABASES:
        kind, server_type = SERVER_ALIASES[name]
        pytest.skip(f"{kind}: {server_type.unavailable_reason()}")
    with connections[name].cursor() as cursor:
        for table in ("transfer", "escrowmq_marker", "escrowmq_inbox"):
            cursor.execute(f"DELETE FROM {table}")
    return name


def save(alias: str, name: str) -> None:
    with connections[alias].cursor() as cursor:
        cursor.execute("INSERT INTO transfer (id) VALUES (%s)", [name])


def first_column(alias: str, query: str = "SELECT id FROM transfer ORDER BY id") -> list[object]:
    with connections[alias].cursor() as cursor:
        cursor.execute(query)
        return [row[0] for row in cursor.fetchall()]


def pay(
    alias: str, topic: str, name: str, *, error: Exception | None = None
) -> TransactionMessages:
    """Insert a row and send a message in one block, which raises the error if one is given."""
    with shared.atomic(using=alias) as tx:
        save(alias, name)
        tx.send(Message(topic, name.encode()))
        if error is not None:
            raise error
    return tx


def test_row_and_message_are_both_committed_or_neither(server: LocalServer, alias: str) -> None:
    topic = new_topic("django")
    tx = pay(alias, topic, "a")
    assert tx.outcome is not None
    assert tx.outcome.acknowledged
    with pytest.raises(ZeroDivisionError):
        pay(alias, topic, "b", error=ZeroDivisionError())
    pay(alias, topic, "c", error=Rollback())
    with pytest.raises(IntegrityError):
        pay(alias, topic, "a")
    assert first_column(alias) == ["a"]
    server.assert_delivered(topic, [b"a"])
    assert server.open_transactions() == []
    assert first_column(alias, "SELECT outcome FROM escrowmq_marker") == ["committed"]


def test_a_block_inside_a_block_waits_for_the_outermost(server: LocalServer, alias: str) -> None:
    topic = new_topic("nested")
    with transaction.atomic(using=alias):
        tx = pay(alias, topic, "a")
        with pytest.raises(ZeroDivisionError):
            # The block rolls back to its savepoint, and its messages too.
            pay(alias, topic, "b", error=ZeroDivisionError())
        with shared.atomic(using=alias) as outer:
            pay(alias, topic, "c")
            outer.send(Message(topic, b"outer"))
        assert tx.outcome is None
        server.assert_delivered(topic, [])
    assert tx.outcome is not None
    assert first_column(alias) == ["a", "c"]
    server.assert_delivered(topic, [b"a", b"c", b"outer"])
    assert server.open_transactions() == []


def test_the_messages_of_an_outer_block_that_fails_are_rolled_back_by_a_check(
    server: LocalServer, alias: str
) -> None:
    topic = new_topic("outer")
    with pytest.raises(ZeroDivisionError):
        _pay_and_fail_in_outer_block(alias, topic)
    server.assert_settled()
    assert first_column(alias) == []
    server.assert_delivered(topic, [])
    assert first_column(alias, "SELECT outcome FROM escrowmq_marker") == ["tombstone"]


def _pay_and_fail_in_outer_block(alias: str, topic: str) -> None:
    with transaction.atomic(using=alias):
        pay(alias, topic, "a")
        raise ZeroDivisionError


def test_set_rollback_also_rolls_the_messages_back(server: LocalServer, alias: str) -> None:
    topic = new_topic("quiet")
    with shared.atomic(using=alias) as tx:
        save(alias, "a")
        tx.send(Message(topic, b"a"))
        transaction.set_rollback(True, using=alias)
    assert tx.outcome is not None
    assert (tx.outcome.verdict, tx.outcome.acknowledged) == (Verdict.ROLLBACK, True)
    assert first_column(alias) == []
    server.assert_delivered(topic, [])


def test_hooks_of_the_application_run_after_the_messages_are_ended(
    server: LocalServer, alias: str
) -> None:
    topic = new_topic("hooks")
    seen: list[list[ReceivedMessage]] = []
    with shared.atomic(using=alias) as tx:
        transaction.on_commit(lambda: seen.append(server.messages(topic)), using=alias)
        tx.send(Message(topic, b"a"))
    assert [[message.body for message in messages] for messages in seen] == [[b"a"]]


def test_without_autocommit_an_explicit_commit_delivers_the_messages(
    server: LocalServer, alias: str
) -> None:
    topic = new_topic("explicit")
    transaction.set_autocommit(False, using=alias)
    try:
        pay(alias, topic, "a")
        server.assert_delivered(topic, [])
        transaction.commit(using=alias)
    finally:
        transaction.set_autocommit(True, using=alias)
    server.assert_delivered(topic, [b"a"])


def test_a_commit_that_fails_is_resolved_by_the_marker(server: LocalServer, alias: str) -> None:
    """SQLite and PostgreSQL check deferred constraints only at the commit."""
    if connections[alias].vendor == "mysql":
        pytest.skip("MariaDB has no deferred constraints")
    topic = new_topic("deferred")
    with connections[alias].cursor() as cursor:
        cursor.execute("DROP TABLE IF EXISTS child")
        cursor.execute(
            "CREATE TABLE child (id varchar(64) REFERENCES transfer (id) "
            "DEFERRABLE INITIALLY DEFERRED)"
        )
    with pytest.raises(IntegrityError):
        _send_an_orphan(alias, topic)
    assert server.open_transactions() == []
    server.assert_delivered(topic, [])
    with connections[alias].cursor() as cursor:
        cursor.execute("DROP TABLE child")


def _send_an_orphan(alias: str, topic: str) -> None:
    with shared.atomic(using=alias) as tx:
        with connections[alias].cursor() as cursor:
            cursor.execute("INSERT INTO child (id) VALUES ('orphan')")
        tx.send(Message(topic, b"a"))


def test_an_unknown_database_is_named(databases: None) -> None:
    with pytest.raises(ConfigError, match="elsewhere"), shared.atomic(using="elsewhere"):
        pass


def test_an_unknown_setting_is_named(databases: None) -> None:
    original = settings.ESCROWMQ
    try:
        settings.ESCROWMQ = {"servers": "127.0.0.1:9876", "gruop": "x"}
        with pytest.raises(ConfigError, match="gruop"):
            Escrow().start()
    finally:
        settings.ESCROWMQ = original


def test_old_markers_are_purged_by_the_clock_of_their_database(
    server: LocalServer, alias: str
) -> None:
    pay(alias, new_topic("old"), "a")
    clock = ManualClock()
    escrow = Escrow(clock)
    assert escrow.purge() == 0
    clock.advance(ms=200_000 * HOUR_MS)
    assert escrow.purge() == 0
    assert Escrow(clock).purge() == 0
    with connections[alias].cursor() as cursor:
        cursor.execute("UPDATE escrowmq_marker SET at_ms = at_ms - %s", [97 * HOUR_MS])
    assert Escrow(ManualClock()).purge() == 1
    assert first_column(alias, "SELECT id FROM escrowmq_marker") == []


def agree(server: LocalServer, alias: str, topic: str) -> None:
    """Assert that exactly the messages of saved rows are delivered."""
    server.assert_settled()
    server.assert_delivered(topic, [str(name).encode() for name in first_column(alias)])


def test_messages_follow_their_savepoint(server: LocalServer, alias: str) -> None:
    topic = new_topic("savepoint")
    with shared.atomic(using=alias) as tx:
        save(alias, "a")
        tx.send(Message(topic, b"a"))
        for name in ("b", "c"):
            with contextlib.suppress(ZeroDivisionError), transaction.atomic(using=alias):
                save(alias, name)
                tx.send(Message(topic, name.encode()))
                if name == "c":
                    raise ZeroDivisionError
        with transaction.atomic(using=alias, savepoint=False):
            save(alias, "d")
            tx.send(Message(topic, b"d"))
    assert server.open_transactions() == []
    assert first_column(alias) == ["a", "b", "d"]
    agree(server, alias, topic)


def test_a_savepoint_without_a_block_never_delivers_what_it_rolled_back(
    server: LocalServer, alias: str
) -> None:
    topic = new_topic("plain")
    with contextlib.suppress(SessionEndedInBlock, DatabaseError):
        _roll_back_to_a_plain_savepoint(alias, topic)
    agree(server, alias, topic)


def _roll_back_to_a_plain_savepoint(alias: str, topic: str) -> None:
    with shared.atomic(using=alias) as tx:
        save(alias, "a")
        tx.send(Message(topic, b"a"))
        savepoint = transaction.savepoint(using=alias)
        save(alias, "b")
        tx.send(Message(topic, b"b"))
        transaction.savepoint_rollback(savepoint, using=alias)


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("is_nested", [False, True])
def test_a_statement_that_commits_by_itself_delivers_the_message(
    server: LocalServer, alias: str, fails: bool, is_nested: bool
) -> None:
    """MariaDB commits before it creates a table; the other databases do not."""
    topic = new_topic("implicit")
    with connections[alias].cursor() as cursor:
        cursor.execute("DROP TABLE IF EXISTS extra")
    with contextlib.suppress(ZeroDivisionError, SessionEndedInBlock, DatabaseError):
        _pay_and_create_table(alias, topic, fails=fails, is_nested=is_nested)
    connections[alias].close()
    agree(server, alias, topic)


def _pay_and_create_table(alias: str, topic: str, *, fails: bool, is_nested: bool) -> None:
    outer = transaction.atomic(using=alias) if is_nested else contextlib.nullcontext()
    with outer, shared.atomic(using=alias) as tx:
        save(alias, "a")
        tx.send(Message(topic, b"a"))
        with connections[alias].cursor() as cursor:
            cursor.execute("CREATE TABLE extra (id integer)")
        if fails:
            raise ZeroDivisionError


@pytest.mark.parametrize("sql", ["COMMIT", "ROLLBACK"])
@pytest.mark.parametrize("fails", [False, True])
def test_a_message_is_refused_after_the_transaction_ended_in_the_block(
    server: LocalServer, alias: str, sql: str, fails: bool
) -> None:
    topic = new_topic("ended")
    with pytest.raises(SessionEndedInBlock):
        _end_and_send(alias, topic, sql, fails=fails)
    connections[alias].close()
    agree(server, alias, topic)


def _end_and_send(alias: str, topic: str, sql: str, *, fails: bool) -> None:
    with shared.atomic(using=alias) as tx:
        save(alias, "a")
        tx.send(Message(topic, b"a"))
        with connections[alias].cursor() as cursor:
            cursor.execute(sql)
        if fails:
            tx.send(Message(topic, b"b"))


def test_an_outer_block_that_the_database_gave_up_delivers_nothing(
    server: LocalServer, alias: str
) -> None:
    """PostgreSQL answers the COMMIT of an aborted transaction with a rollback, not an error."""
    topic = new_topic("aborted")
    with transaction.atomic(using=alias):
        pay(alias, topic, "a")
        with contextlib.suppress(DatabaseError), connections[alias].cursor() as cursor:
            cursor.execute("SELECT * FROM there_is_no_such_table")
    agree(server, alias, topic)


# --- join ----------------------------------------------------------------------------------------


def pay_joined(alias: str, topic: str, name: str) -> TransactionMessages:
    """Insert a row and send a message in the atomic block that runs."""
    save(alias, name)
    tx = shared.join(alias)
    tx.send(Message(topic, name.encode()))
    return tx


def test_joined_messages_follow_the_atomic_block_that_runs(server: LocalServer, alias: str) -> None:
    topic = new_topic("join")
    with transaction.atomic(using=alias):
        with contextlib.suppress(ZeroDivisionError), transaction.atomic(using=alias):
            pay_joined(alias, topic, "undone")
            raise ZeroDivisionError
        tx = pay_joined(alias, topic, "a")
        with transaction.atomic(using=alias):
            assert pay_joined(alias, topic, "b") is tx
        with contextlib.suppress(ZeroDivisionError), transaction.atomic(using=alias):
            pay_joined(alias, topic, "c")
            raise ZeroDivisionError
        assert pay_joined(alias, topic, "d") is tx
        assert delivered_bodies(server, topic) == []
    assert tx.outcome is not None
    assert (tx.outcome.verdict, tx.outcome.acknowledged) == (Verdict.COMMIT, True)
    assert first_column(alias) == ["a", "b", "d"]
    assert delivered_bodies(server, topic) == [b"a", b"b", b"d"]
    agree(server, alias, topic)


def test_what_was_joined_in_a_savepoint_that_failed_can_be_used_outside(
    server: LocalServer, alias: str
) -> None:
    topic = new_topic("join-outside")
    with transaction.atomic(using=alias):
        with contextlib.suppress(ZeroDivisionError), transaction.atomic(using=alias):
            tx = shared.join(alias)
            raise ZeroDivisionError
        save(alias, "a")
        tx.send(Message(topic, b"a"))
    assert tx.outcome is not None
    agree(server, alias, topic)


def test_an_atomic_block_that_fails_rolls_joined_messages_back(
    server: LocalServer, alias: str
) -> None:
    topic = new_topic("join-fails")
    with contextlib.suppress(ZeroDivisionError), transaction.atomic(using=alias):
        pay_joined(alias, topic, "a")
        raise ZeroDivisionError
    with transaction.atomic(using=alias):
        pay_joined(alias, topic, "b")
        transaction.set_rollback(True, using=alias)
    with transaction.atomic(using=alias):
        pay_joined(alias, topic, "c")
    assert first_column(alias) == ["c"]
    agree(server, alias, topic)


def test_a_block_of_the_escrow_and_what_joins_it_have_the_same_messages(
    server: LocalServer, alias: str
) -> None:
    topic = new_topic("join-block")
    with transaction.atomic(using=alias):
        outer = pay_joined(alias, topic, "a")
        with shared.atomic(using=alias) as inner:
            assert pay_joined(alias, topic, "b") is inner
        assert pay_joined(alias, topic, "c") is outer
    assert delivered_bodies(server, topic) == [b"a", b"b", b"c"]
    assert open_halves(server) == 0


def test_joining_without_an_atomic_block_is_refused(alias: str) -> None:
    with pytest.raises(transaction.TransactionManagementError, match="atomic"):
        shared.join(alias)


def test_a_message_that_was_not_sent_rolls_the_atomic_block_back(
    server: LocalServer, alias: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    unreachable = {"servers": "127.0.0.1:1", "options": {"retries": 0}}
    monkeypatch.setattr(settings, "ESCROWMQ", {**settings.ESCROWMQ, **unreachable})
    escrow = Escrow()
    with transaction.atomic(using=alias):
        save(alias, "a")
        with pytest.raises(TransportError):
            escrow.join(alias).send(Message("t", b"a"))
    escrow.close()
    assert first_column(alias) == []


def test_a_joined_block_that_the_database_gave_up_delivers_nothing(
    server: LocalServer, alias: str
) -> None:
    """PostgreSQL answers the COMMIT of an aborted transaction with a rollback, not an error."""
    topic = new_topic("join-aborted")
    with transaction.atomic(using=alias):
        pay_joined(alias, topic, "a")
        with contextlib.suppress(DatabaseError), connections[alias].cursor() as cursor:
            cursor.execute("SELECT * FROM there_is_no_such_table")
    agree(server, alias, topic)


# --- the inbox, and the tables -------------------------------------------------------------------


def test_a_redelivered_message_has_no_second_effect(alias: str) -> None:
    inbox = Inbox(group="g", using=alias)

    @inbox.effect
    def credit(message: ReceivedMessage) -> None:
        save(alias, message.body.decode())

    assert credit(received_message("m1", b"a")) is True
    assert credit(received_message("m1", b"a")) is False
    with pytest.raises(DatabaseError):
        credit(received_message("m2", b"a"))  # the effect itself violates a constraint
    assert credit(received_message("m2", b"b")) is True
    with transaction.atomic(using=alias):
        assert credit(received_message("m2", b"b")) is False
        save(alias, "c")  # the outer block can continue
    assert first_column(alias) == ["a", "b", "c"]
    assert inbox.purge(older_than_ms=-1000) == 2


def test_both_bindings_have_the_same_tables(databases: None, tmp_path: Path) -> None:
    of_sqlalchemy = create_engine(f"sqlite:///{tmp_path / 'x.db'}")
    metadata.create_all(of_sqlalchemy)
    of_django = create_engine(f"sqlite:///{settings.DATABASES['default']['NAME']}")
    for table in metadata.tables:
        columns = [
            [
                (column["name"], str(column["type"]), column["nullable"])
                for column in inspect(engine).get_columns(table)
            ]
            for engine in (of_sqlalchemy, of_django)
        ]
        assert columns[0] == columns[1]
        keys = [
            inspect(engine).get_pk_constraint(table)["constrained_columns"]
            for engine in (of_sqlalchemy, of_django)
        ]
        assert keys[0] == keys[1]
    of_sqlalchemy.dispose()
    of_django.dispose()


def test_no_migration_is_missing(databases: None) -> None:
    call_command("makemigrations", "escrowmq", check=True, dry_run=True, stdout=StringIO())


def test_the_django_binding_does_not_import_sqlalchemy(databases: None) -> None:
    script = (
        "import sys; sys.modules['sqlalchemy'] = None\n"
        "import escrowmq.django\n"
        "assert 'escrowmq.sql' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
