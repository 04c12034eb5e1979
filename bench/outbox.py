"""Transfers with a message each: through `Escrow`, in a block of its own or in a session that it
joins, and through an outbox table with a poller.

All run in this process, on one PostgreSQL with durable commits and one broker. An outbox is the
usual hand-written solution: the message is a row of the same transaction; a poller runs every
100 ms, sends the rows and deletes them.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from sqlalchemy import (
    BigInteger,
    Column,
    Engine,
    Integer,
    MetaData,
    String,
    Table,
    Update,
    create_engine,
    delete,
    event,
    insert,
    select,
    update,
)
from sqlalchemy.orm import Session

from bench.broker import ResultTable
from bench.figures import latency, ratio
from bench.measure import Plan
from escrowmq import Message
from escrowmq.blocking import Consumer, Producer
from escrowmq.sql import Escrow
from tests.support.brokers import Server
from tests.support.databases import Postgres

THREADS = 8
ACCOUNTS = 1_000
POLL_S = 0.1
POLLED_MAX = 500
PACED_S = 0.04  # between two measured transfers; not a multiple of the poller's interval
IDLE_S = 5.0
DRAIN_S = 60.0
COLUMNS = (
    *("what", "transaction()", "join()", "outbox, 100 ms poller"),
    *("transaction() / outbox", "join() / outbox", "goal"),
)

tables = MetaData()
accounts = Table(
    "account",
    tables,
    Column("id", Integer, primary_key=True),
    Column("balance", BigInteger, nullable=False),
)
outbox = Table(
    "outbox",
    tables,
    Column("id", BigInteger, primary_key=True, autoincrement=True),
    Column("name", String(64), nullable=False),
)


def lack() -> str:
    return Postgres.unavailable_reason()


# --- the variants --------------------------------------------------------------------------------


class Variant(ABC):
    topic: str

    @abstractmethod
    def __init__(self, engine: Engine, namesrv: str) -> None: ...
    @abstractmethod
    def pay(self, account: int, name: str) -> None: ...
    @abstractmethod
    def close(self) -> None: ...


def debit(account: int) -> Update:
    return update(accounts).where(accounts.c.id == account).values(balance=accounts.c.balance - 1)


class ByEscrow(Variant):
    topic = "by-escrow"

    def __init__(self, engine: Engine, namesrv: str) -> None:
        self._escrow = Escrow(engine, namesrv, group="bench-escrow")

    def pay(self, account: int, name: str) -> None:
        with self._escrow.transaction() as (session, tx):
            session.execute(debit(account))
            tx.send(Message(self.topic, name.encode()))

    def close(self) -> None:
        self._escrow.close()


class ByJoin(ByEscrow):
    topic = "by-join"

    def __init__(self, engine: Engine, namesrv: str) -> None:
        super().__init__(engine, namesrv)
        self._engine = engine

    def pay(self, account: int, name: str) -> None:
        with Session(self._engine) as session:
            session.execute(debit(account))
            self._escrow.join(session).send(Message(self.topic, name.encode()))
            session.commit()


class ByOutbox(Variant):
    topic = "by-outbox"

    def __init__(self, engine: Engine, namesrv: str) -> None:
        self._engine = engine
        self._producer = Producer(namesrv, group="bench-outbox").__enter__()
        self._stopped = threading.Event()
        self._poller = threading.Thread(target=self._poll)
        self._poller.start()

    def pay(self, account: int, name: str) -> None:
        with self._engine.begin() as connection:
            connection.execute(debit(account))
            connection.execute(insert(outbox).values(name=name))

    def _poll(self) -> None:
        while not self._stopped.wait(POLL_S):
            while self._send_some() == POLLED_MAX:
                pass

    def _send_some(self) -> int:
        first = select(outbox).order_by(outbox.c.id).limit(POLLED_MAX)
        with self._engine.begin() as connection:
            results = connection.execute(first.with_for_update(skip_locked=True)).all()
            for row in results:
                self._producer.send(Message(self.topic, row.name.encode()))
            if results:
                ids = [row.id for row in results]
                connection.execute(delete(outbox).where(outbox.c.id.in_(ids)))
        return len(results)

    def close(self) -> None:
        self._stopped.set()
        self._poller.join()
        self._producer.close()


VARIANTS: tuple[type[Variant], ...] = (ByEscrow, ByJoin, ByOutbox)

# --- measurements ----------------------------------------------------------------------------


@dataclass
class Arrivals:
    """Record when each message arrived, by its body."""

    at_s: dict[str, float] = field(default_factory=dict)
    changed: threading.Condition = field(default_factory=threading.Condition)

    def take(self, consumer: Consumer, stop: str) -> None:
        for message in consumer:
            name = message.body.decode()
            with self.changed:
                self.at_s[name] = time.monotonic()
                self.changed.notify_all()
            if name == stop:
                return


@dataclass
class Measurement:
    rate: float
    p50_us: float
    p99_us: float
    idle: float  # statements per second


def measure(way: Variant, engine: Engine, namesrv: str, plan: Plan, number: int) -> Measurement:
    arrivals, stop = Arrivals(), f"stop-{number}"
    group = f"{way.topic}-{number}"
    with Consumer(
        namesrv,
        group=group,
        subscribe={way.topic: "*"},
        start="earliest" if number == 0 else "latest",
    ) as consumer:
        taker = threading.Thread(target=arrivals.take, args=(consumer, stop))
        taker.start()
        pace(way, f"warm-{number}", plan.warm_up_s)
        began_s = time.monotonic()
        paid = crowd(way, f"many-{number}", plan.seconds)
        wait_until_there(arrivals, paid)
        rate = len(paid) / (time.monotonic() - began_s)
        committed_s = pace(way, f"one-{number}", plan.seconds)
        wait_until_there(arrivals, list(committed_s))
        took_us = sorted((arrivals.at_s[name] - at) * 1e6 for name, at in committed_s.items())
        idle = idle_rate(engine)
        way.pay(0, stop)
        taker.join(DRAIN_S)
    return Measurement(rate, statistics.median(took_us), took_us[int(len(took_us) * 0.99)], idle)


def wait_until_there(arrivals: Arrivals, names: list[str]) -> None:
    with arrivals.changed:
        if not arrivals.changed.wait_for(lambda: arrivals.at_s.keys() >= set(names), DRAIN_S):
            missing = len(set(names) - arrivals.at_s.keys())
            raise TimeoutError(f"{missing} of {len(names)} messages missing after {DRAIN_S} s")


def crowd(way: Variant, word: str, seconds: float) -> list[str]:
    """Let the given number of threads pay as fast as they can."""
    until_s = time.monotonic() + seconds

    def pay(thread: int) -> list[str]:
        names: list[str] = []
        while time.monotonic() < until_s:
            name = f"{word}-{thread}-{len(names)}"
            way.pay((thread * 101 + len(names)) % ACCOUNTS, name)
            names.append(name)
        return names

    with ThreadPoolExecutor(THREADS) as pool:
        return [name for names in pool.map(pay, range(THREADS)) for name in names]


def pace(way: Variant, word: str, seconds: float) -> dict[str, float]:
    """Pay one after the other with a pause; return when each began to commit."""
    begun_s: dict[str, float] = {}
    until_s = time.monotonic() + seconds
    while time.monotonic() < until_s:
        name = f"{word}-{len(begun_s)}"
        with noting() as commits:
            way.pay(0, name)
        begun_s[name] = commits()
        time.sleep(PACED_S)
    return begun_s


_committing = threading.local()


@contextmanager
def noting() -> Iterator[Callable[[], float]]:
    _committing.at_s = 0.0
    yield lambda: float(_committing.at_s)


def note_commit(_: object) -> None:
    _committing.at_s = time.monotonic()


def idle_rate(engine: Engine) -> float:
    """Return statements per second while no transfer runs."""
    statements: list[object] = []

    def count(*given: object) -> None:
        statements.append(given[2])

    event.listen(engine, "before_cursor_execute", count)
    time.sleep(IDLE_S)
    event.remove(engine, "before_cursor_execute", count)
    return len(statements) / IDLE_S


# --- the table -----------------------------------------------------------------------------------


def rows(plan: Plan) -> ResultTable:
    results: dict[type[Variant], list[Measurement]] = {kind: [] for kind in VARIANTS}
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        served = stack.enter_context(Server(directory))
        server = stack.enter_context(Postgres(durable=True))
        engine = create_engine(server.new_database(), pool_size=2 * THREADS)
        stack.callback(engine.dispose)
        event.listen(engine, "commit", note_commit)
        tables.create_all(engine)
        with engine.begin() as connection:
            connection.execute(
                insert(accounts), [{"id": at, "balance": 0} for at in range(ACCOUNTS)]
            )
        with Producer(served.namesrv_address, group="bench-topics") as producer:
            for kind in results:
                producer.send(Message(kind.topic, b"makes the topic"))
        for number in range(plan.rounds):
            for kind in VARIANTS:
                way = kind(engine, served.namesrv_address)
                try:
                    results[kind].append(measure(way, engine, served.namesrv_address, plan, number))
                finally:
                    way.close()
    return table(*results.values())


def table(*variants: list[Measurement]) -> ResultTable:
    """Return the table for the measurements of VARIANTS."""

    def medians(figure: Callable[[Measurement], float]) -> list[float]:
        return [statistics.median(map(figure, measurements)) for measurements in variants]

    def ratios(values: list[float]) -> list[str]:
        return [ratio(value, values[-1]) for value in values[:-1]]

    rate, p50, p99 = (
        medians(f) for f in (lambda m: m.rate, lambda m: m.p50_us, lambda m: m.p99_us)
    )
    idle = medians(lambda m: m.idle)
    cells = [
        ("transfers, delivered", *(f"{x:,.0f}/s" for x in rate), *ratios(rate), ">= 1"),
        ("commit to delivery, median", *map(latency, p50), *ratios(p50), "<= 0.05"),
        ("commit to delivery, p99", *map(latency, p99), *ratios(p99), ""),
        ("statements while idle", *(f"{x:.1f}/s" for x in idle), "", "", "0"),
    ]
    notes = [
        f"A transfer is one UPDATE and one message. Rate: {THREADS} threads pay as fast as they "
        "can; the clock stops when the last message is delivered.",
        "Latency: one transfer at a time with a pause between them, from the beginning of COMMIT "
        "until a consumer has the message.",
        "Producers, poller and consumer are threads of one Python process; PostgreSQL syncs every "
        "commit, the broker is at its defaults.",
    ]
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    if load > 2 * cores:
        notes.append(
            f"**Others used this machine meanwhile: load {load:.0f} on {cores} cores.** Figures "
            "and ratios change from run to run then; take them again when it is quiet."
        )
    return ResultTable([list(row) for row in cells], notes, COLUMNS)
