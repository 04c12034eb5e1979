"""A web service with FastAPI that gets its session from `Depends`, and joins its transaction.

uvicorn examples.fastapi_depends:app
curl -X POST "http://127.0.0.1:8000/orders?item=lamp"

`fastapi_service.py` does the same with a block. Here the handler has a session already, and its own
commit decides the row and the message.
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated

from fastapi import Depends, FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse
from sqlalchemy import String
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from escrowmq import Message
from escrowmq.errors import EscrowError
from escrowmq.sql import AsyncEscrow

SERVERS = os.environ.get("SERVERS", "127.0.0.1:9876")
DATABASE = os.environ.get("DATABASE", "sqlite+aiosqlite:///fastapi_depends.db")


class Base(DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "orders"
    id: Mapped[str] = mapped_column(String(36), primary_key=True)
    item: Mapped[str] = mapped_column(String(100))
    count: Mapped[int]


engine = create_async_engine(DATABASE)
new_session = async_sessionmaker(engine, expire_on_commit=False)
# This does not connect yet. `async with` does, in each worker.
escrow = AsyncEscrow(engine, SERVERS, group="depends-orders")


@asynccontextmanager
async def lifespan(_: FastAPI) -> AsyncIterator[None]:
    async with engine.begin() as connection:
        await connection.run_sync(Base.metadata.create_all)
    async with escrow:
        yield
    await engine.dispose()


async def get_session() -> AsyncIterator[AsyncSession]:
    async with new_session() as session:  # rolls back what the handler has not committed
        yield session


CurrentSession = Annotated[AsyncSession, Depends(get_session)]
app = FastAPI(lifespan=lifespan)


@app.exception_handler(EscrowError)
async def not_saved(_: Request, error: Exception) -> JSONResponse:
    """Answer a request whose message could not be sent, so that its session was not committed."""
    return JSONResponse({"detail": f"the order was not saved, try again: {error}"}, 503)


@app.post("/orders", status_code=201)
async def create_order(item: str, session: CurrentSession, count: int = 1) -> dict[str, str]:
    order = Order(id=str(uuid.uuid4()), item=item, count=count)
    session.add(order)
    await announce(order, session)
    if count < 1:  # without a commit, neither the row nor the message remains
        raise HTTPException(422, "count must be at least 1")
    await session.commit()
    return {"id": order.id}


async def announce(order: Order, session: AsyncSession) -> None:
    """Send a message with the transaction of a session, wherever it was begun."""
    body = json.dumps({"id": order.id, "item": order.item, "count": order.count}).encode()
    await escrow.join(session).send(Message("depends-orders", body, keys=order.id))


@app.get("/orders/{order_id}")
async def get_order(order_id: str, session: CurrentSession) -> dict[str, str | int]:
    order = await session.get(Order, order_id)
    if order is None:
        raise HTTPException(404, "no such order")
    return {"id": order.id, "item": order.item, "count": order.count}
