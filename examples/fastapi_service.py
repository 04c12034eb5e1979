"""A web service with FastAPI: it saves an order and sends a message, or does neither.

uvicorn examples.fastapi_service:app
curl -X POST "http://127.0.0.1:8000/orders?item=lamp"

Any number of workers may run. Each of them answers the broker's checks from the same database.
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI, HTTPException
from sqlalchemy import Column, Integer, MetaData, String, Table, insert, select
from sqlalchemy.ext.asyncio import create_async_engine

from escrowmq import Message
from escrowmq.errors import EscrowError
from escrowmq.sql import AsyncEscrow

SERVERS = os.environ.get("SERVERS", "127.0.0.1:9876")
DATABASE = os.environ.get("DATABASE", "sqlite+aiosqlite:///fastapi_service.db")

tables = MetaData()
orders = Table(
    "orders",
    tables,
    Column("id", String(36), primary_key=True),
    Column("item", String(100), nullable=False),
    Column("count", Integer, nullable=False),
)
engine = create_async_engine(DATABASE)
# This does not connect yet. `async with` does, in each worker.
escrow = AsyncEscrow(engine, SERVERS, group="web-orders")


@asynccontextmanager
async def lifespan(_: FastAPI) -> AsyncIterator[None]:
    async with engine.begin() as connection:
        await connection.run_sync(tables.create_all)
    async with escrow:
        yield
    await engine.dispose()


app = FastAPI(lifespan=lifespan)


@app.post("/orders", status_code=201)
async def create_order(item: str, count: int = 1) -> dict[str, str]:
    order_id = str(uuid.uuid4())
    try:
        async with escrow.transaction() as (session, tx):
            await session.execute(insert(orders).values(id=order_id, item=item, count=count))
            message = {"id": order_id, "item": item, "count": count}
            await tx.send(Message("web-orders", json.dumps(message).encode(), keys=order_id))
            if count < 1:  # an exception rolls back the row and the message
                raise HTTPException(422, "count must be at least 1")
    except EscrowError as error:
        if error.may_have_happened:  # the caller should look it up before ordering again
            raise HTTPException(500, f"order {order_id} may have been saved") from error
        raise HTTPException(503, "the order was not saved, please try again") from error
    return {"id": order_id}


@app.get("/orders/{order_id}")
async def get_order(order_id: str) -> dict[str, str | int]:
    async with engine.connect() as connection:
        result = await connection.execute(select(orders).where(orders.c.id == order_id))
        row = result.mappings().first()
    if row is None:
        raise HTTPException(404, "no such order")
    return {"id": row["id"], "item": row["item"], "count": row["count"]}
