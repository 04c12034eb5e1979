"""The ways in which a block may end its database transaction itself, on SQLAlchemy's Session.

An AsyncSession runs them with `run_sync`.
"""

from __future__ import annotations

from collections.abc import Callable

from sqlalchemy import insert, text
from sqlalchemy.orm import Session

from tests.support.sql_bank import transfers


def save(session: Session, name: str) -> None:
    session.execute(insert(transfers).values(id=name, amount=1))


def raw_connection(session: Session) -> object:
    """Return the connection of the database driver, behind everything that SQLAlchemy knows."""
    return session.connection().connection.dbapi_connection


def commit_by_session(session: Session) -> None:
    session.commit()


def commit_by_connection(session: Session) -> None:
    session.connection().commit()


def commit_by_statement(session: Session) -> None:
    session.execute(text("COMMIT"))


def commit_by_driver(session: Session) -> None:
    raw_connection(session).commit()  # type: ignore[attr-defined]


def roll_back_by_session(session: Session) -> None:
    session.rollback()


def roll_back_by_statement(session: Session) -> None:
    session.execute(text("ROLLBACK"))


def roll_back_by_driver(session: Session) -> None:
    raw_connection(session).rollback()  # type: ignore[attr-defined]


def close_session(session: Session) -> None:
    session.close()


def invalidate_session(session: Session) -> None:
    session.invalidate()


def invalidate_connection(session: Session) -> None:
    session.connection().invalidate()


ENDINGS: list[Callable[[Session], None]] = [
    commit_by_session,
    commit_by_connection,
    commit_by_statement,
    commit_by_driver,
    roll_back_by_session,
    roll_back_by_statement,
    roll_back_by_driver,
    close_session,
    invalidate_session,
    invalidate_connection,
]
