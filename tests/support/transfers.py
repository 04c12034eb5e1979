"""A service for the tests of `escrowmq.testing`: a row and a message in one transaction.

The functions run in processes of their own too, so they are in a module.
"""

from __future__ import annotations

from sqlalchemy import create_engine, insert
from sqlalchemy.ext.asyncio import create_async_engine

from escrowmq import Message, blocking
from escrowmq.sql import AsyncEscrow, Escrow
from tests.support.sql_bank import tables, transfers


def transfer(url: str, servers: str, name: str) -> None:
    """Save a row and send a message. `name` is the group, the topic and the id of the row."""
    engine = create_engine(url)
    tables.create_all(engine)
    with (
        Escrow(engine, servers, group=name) as escrow,
        escrow.transaction() as (session, tx),
    ):
        session.execute(insert(transfers).values(id=name, amount=1))
        tx.send(Message(name, b"paid"))


async def transfer_async(url: str, servers: str, name: str) -> None:
    engine = create_async_engine(url.replace("sqlite:", "sqlite+aiosqlite:"))
    async with engine.begin() as connection:
        await connection.run_sync(tables.create_all)
    async with (
        AsyncEscrow(engine, servers, group=name) as escrow,
        escrow.transaction() as (session, tx),
    ):
        await session.execute(insert(transfers).values(id=name, amount=1))
        await tx.send(Message(name, b"paid"))
    await engine.dispose()


def transfer_in_django(database: str, servers: str, name: str) -> None:
    from django.conf import settings

    settings.configure(
        INSTALLED_APPS=["escrowmq.django"],
        DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": database}},
        USE_TZ=True,
        ESCROWMQ={"servers": servers, "group": name},
    )
    import django
    from django.core.management import call_command
    from django.db import connection

    django.setup()
    call_command("migrate", verbosity=0)
    from escrowmq.django import escrow

    with connection.cursor() as cursor:
        cursor.execute("CREATE TABLE IF NOT EXISTS transfer (id varchar(64) PRIMARY KEY)")
    with escrow.atomic() as tx:
        with connection.cursor() as cursor:
            cursor.execute("INSERT INTO transfer (id) VALUES (%s)", [name])
        tx.send(Message(name, b"paid"))
    escrow.close()


def send_in_transaction(servers: str, name: str) -> None:
    """Send a message in a transaction without a database."""
    with (
        blocking.Producer(servers, group=name) as producer,
        producer.transaction(Message(name, b"paid")),
    ):
        pass


def fail() -> None:
    raise ValueError("this function fails")


def do_nothing() -> None:
    pass
