"""A worker under measurement: `python -m bench.handler_worker SIDE WORK NAME ADDRESS DATABASE …`.

It handles so many messages, prints how many it did in a second, and ends.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Annotated, Any, Final

import pydantic
import uvloop
from sqlalchemy import BigInteger, Column, Integer, MetaData, Table, insert, update
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine

from escrowmq.app import App
from escrowmq.sql.statements import inbox_table

ESCROWMQ: Final = "escrowmq"
FASTSTREAM: Final = "faststream"
EMPTY: Final = "empty"
MODEL: Final = "model"
INBOX: Final = "inbox"
SUBJECT: Final = "transfers"

tables = MetaData()
accounts = Table(
    "account",
    tables,
    Column("id", Integer, primary_key=True),
    Column("cents", BigInteger, nullable=False),
)


class Transfer(pydantic.BaseModel):
    id: int
    account: int
    cents: Annotated[int, pydantic.Field(gt=0)]


class Meter:
    """Counts handled messages; `done` is set by the last one."""

    def __init__(self, messages: int) -> None:
        self._messages = messages
        self._count = 0
        self._began_s = 0.0
        self.rate = 0.0
        self.done = asyncio.Event()

    def count(self) -> None:
        if self._count == 0:
            self._began_s = time.perf_counter()
        self._count += 1
        if self._count == self._messages:
            self.rate = (self._count - 1) / (time.perf_counter() - self._began_s)
            self.done.set()


async def credit(session: AsyncSession, transfer: Transfer) -> None:
    await session.execute(
        update(accounts)
        .where(accounts.c.id == transfer.account)
        .values(cents=accounts.c.cents + transfer.cents)
    )


async def run_escrowmq(
    work: str, topic: str, servers: str, engine: AsyncEngine, meter: Meter, concurrency: int
) -> None:
    app = App(servers, group=f"g-{topic}", database=engine if work == INBOX else None)
    on_topic = app.on(topic, concurrency=concurrency)
    if work == EMPTY:

        @on_topic
        async def take(body: bytes) -> None:
            meter.count()

    elif work == MODEL:

        @on_topic
        async def decode(transfer: Transfer) -> None:
            meter.count()

    else:

        @on_topic
        async def change(session: AsyncSession, transfer: Transfer) -> None:
            await credit(session, transfer)
            meter.count()

    running = asyncio.create_task(app.run())
    await meter.done.wait()
    app.stop()
    await running


async def run_faststream(
    work: str, name: str, servers: str, engine: AsyncEngine, meter: Meter, concurrency: int
) -> None:
    from faststream.nats import NatsBroker

    broker = NatsBroker(servers, logger=None)
    workers = concurrency if work == INBOX else 1
    subscriber: Callable[[Callable[..., Awaitable[None]]], Any]
    subscriber = broker.subscriber(SUBJECT, max_workers=workers, pending_msgs_limit=1 << 20)
    if work == EMPTY:

        async def take(body: bytes) -> None:
            meter.count()

        subscriber(take)
    elif work == MODEL:

        async def decode(transfer: Transfer) -> None:
            meter.count()

        subscriber(decode)
    else:

        async def change(transfer: Transfer) -> None:
            async with AsyncSession(engine) as session:
                row = {"consumer_group": name, "message_id": str(transfer.id), "at_ms": 0}
                await session.execute(insert(inbox_table), row)
                await credit(session, transfer)
                await session.commit()
            meter.count()

        subscriber(change)
    async with broker:
        await broker.start()
        await broker.publish(b"", f"{SUBJECT}.ready")
        await meter.done.wait()


async def main() -> None:
    side, work, name, address, database, messages, concurrency = sys.argv[1:]
    meter = Meter(int(messages))
    engine = create_async_engine(database, pool_size=int(concurrency) + 2)
    run = run_escrowmq if side == ESCROWMQ else run_faststream
    await run(work, name, address, engine, meter, int(concurrency))
    await engine.dispose()
    print(meter.rate)


if __name__ == "__main__":
    uvloop.run(main())
