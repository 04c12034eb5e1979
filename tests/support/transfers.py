"""A service that stores a row and sends a message in one transaction, with each of the bindings.

The functions run in processes of their own too, so they are in a module.
"""

from __future__ import annotations

import sqlite3
from typing import Any

import psycopg
import pymysql
from sqlalchemy import URL, create_engine, insert, make_url
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from escrowmq import Message, blocking, dbapi
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


# --- transactions of the service that are joined -------------------------------------------------


def transfer_in_session(url: str, servers: str, name: str) -> None:
    engine = create_engine(url)
    with Escrow(engine, servers, group=name) as escrow, Session(engine) as session:
        session.execute(insert(transfers).values(id=name, amount=1))
        escrow.join(session).send(Message(name, b"paid"))
        session.commit()


async def transfer_in_async_session(url: str, servers: str, name: str) -> None:
    engine = create_async_engine(async_driver(url))
    async with (
        AsyncEscrow(engine, servers, group=name) as escrow,
        AsyncSession(engine) as session,
    ):
        await session.execute(insert(transfers).values(id=name, amount=1))
        await escrow.join(session).send(Message(name, b"paid"))
        await session.commit()
    await engine.dispose()


def transfer_on_connection(url: str, servers: str, name: str) -> None:
    engine = create_engine(url)
    with Escrow(engine, servers, group=name) as escrow, engine.begin() as connection:
        connection.execute(insert(transfers).values(id=name, amount=1))
        escrow.join(connection).send(Message(name, b"paid"))


def transfer_on_driver_connection(url: str, servers: str, name: str) -> None:
    def connect() -> Any:
        return open_driver_connection(make_url(url))

    with dbapi.Escrow(connect, servers, group=name) as escrow:
        connection = connect()
        with escrow.join(connection) as tx:
            connection.cursor().execute(f"INSERT INTO transfer (id, amount) VALUES ('{name}', 1)")
            tx.send(Message(name, b"paid"))


def transfer_in_atomic_block(url: str, servers: str, name: str) -> None:
    configure_django(make_url(url), servers, name)
    from django.db import connection, transaction  # configured now

    from escrowmq.django import escrow

    escrow.start()
    with transaction.atomic():
        with connection.cursor() as cursor:
            cursor.execute("INSERT INTO transfer (id, amount) VALUES (%s, 1)", [name])
        escrow.join().send(Message(name, b"paid"))
    escrow.close()


DJANGO_BACKENDS = {"sqlite": "sqlite3", "postgresql": "postgresql", "mysql": "mysql"}


def async_driver(url: str) -> str:
    """Return the URL of a database with its driver for asyncio; psycopg is one already."""
    return url.replace("sqlite:", "sqlite+aiosqlite:").replace("mysql+pymysql:", "mysql+aiomysql:")


def open_driver_connection(url: URL) -> Any:
    """Connect to a database without SQLAlchemy."""
    match url.get_backend_name():
        case "sqlite":
            return sqlite3.connect(str(url.database))
        case "postgresql":
            options = str(url.query.get("options", ""))
            return psycopg.connect(
                host=url.host,
                port=url.port,
                user=url.username,
                dbname=url.database,
                options=options,
            )
        case _:
            return pymysql.connect(
                host=url.host, port=url.port or 0, user=url.username, database=url.database
            )


def configure_django(url: URL, servers: str, group: str) -> None:
    import django  # only this binding needs it
    from django.conf import settings

    pymysql.install_as_MySQLdb()  # Django's backend for MariaDB has no driver of its own
    settings.configure(
        INSTALLED_APPS=["escrowmq.django"],
        DATABASES={
            "default": {
                "ENGINE": f"django.db.backends.{DJANGO_BACKENDS[url.get_backend_name()]}",
                "NAME": url.database,
                "HOST": url.host,
                "PORT": url.port,
                "USER": url.username,
            }
        },
        USE_TZ=True,
        ESCROWMQ={"servers": servers, "group": group},
    )
    django.setup()


# --- functions for the tests of crash points ------------------------------------------------------


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
