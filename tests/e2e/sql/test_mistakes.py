"""Mistakes in the use of the SQLAlchemy binding: each gets a sentence, and none loses a message."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine
from sqlalchemy.pool import NullPool

from escrowmq import Consumer as AsyncConsumer
from escrowmq import Message
from escrowmq.blocking import Consumer
from escrowmq.errors import ClientClosed, LocalProtocolError
from escrowmq.sql import AsyncEscrow, AsyncInbox, Escrow, Inbox
from tests.support.brokers import Server
from tests.support.programs import run_program

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(tmp_path_factory.mktemp("sql-mistakes")) as server:
        yield server


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    engine = create_engine(f"sqlite:///{tmp_path}/bank.db")
    yield engine
    engine.dispose()


@pytest.fixture
def async_engine(tmp_path: Path) -> AsyncEngine:
    # Without a pool, because no event loop is left to close its connections.
    return create_async_engine(f"sqlite+aiosqlite:///{tmp_path}/bank.db", poolclass=NullPool)


def raises(error: type[Exception], text: str) -> Any:
    return pytest.raises(error, match=re.escape(text))


def test_an_engine_of_the_other_kind_names_the_class_that_takes_it(
    server: Server, engine: Any, async_engine: Any
) -> None:
    address = server.namesrv_address
    text = "needs an Engine, which sqlalchemy.create_engine() creates, not AsyncEngine; Async"
    with raises(TypeError, f"Escrow {text}Escrow takes this one"):
        Escrow(async_engine, address, group="g")
    with raises(TypeError, f"Inbox {text}Inbox takes this one"):
        Inbox(async_engine, group="g")
    text = "needs an AsyncEngine, which sqlalchemy.ext.asyncio.create_async_engine() creates, not "
    with raises(TypeError, f"AsyncEscrow {text}Engine; Escrow takes this one"):
        AsyncEscrow(engine, address, group="g")
    with raises(TypeError, f"AsyncInbox {text}Engine; Inbox takes this one"):
        AsyncInbox(engine, group="g")
    url: Any = "sqlite:///bank.db"
    with raises(TypeError, "needs an Engine, which sqlalchemy.create_engine() creates, not str"):
        Escrow(url, address, group="g")


async def test_an_async_escrow_that_is_not_started_says_so(
    server: Server, async_engine: AsyncEngine
) -> None:
    escrow = AsyncEscrow(async_engine, server.namesrv_address, group="g")
    with raises(ClientClosed, "not started: use it in a block, `async with AsyncEscrow(…) as esc"):
        async with escrow.transaction():
            pass


def test_an_escrow_needs_no_block(server: Server, engine: Engine) -> None:
    escrow = Escrow(engine, server.namesrv_address, group="g")
    with escrow.transaction() as (_, tx):
        tx.send(Message("orders", b"x"))
    assert tx.outcome is not None
    assert tx.outcome.acknowledged
    escrow.close()
    with raises(ClientClosed, "this client is closed"), escrow.transaction() as (_, tx):
        tx.send(Message("orders", b"x"))


async def test_an_escrow_on_an_event_loop_warns_and_names_the_asyncio_class(
    server: Server, engine: Engine
) -> None:
    text = "escrowmq.sql.Escrow was called in a running event loop.* use escrowmq.sql.AsyncEscrow"
    with pytest.warns(RuntimeWarning, match=text) as warnings:
        escrow = Escrow(engine, server.namesrv_address, group="g")
    assert [warning.filename for warning in warnings] == [__file__]
    with escrow, escrow.transaction() as (_, tx):  # a second warning would be an error here
        tx.send(Message("orders", b"x"))


def test_the_group_of_an_escrow_may_be_that_of_a_consumer(server: Server, engine: Engine) -> None:
    with Escrow(engine, server.namesrv_address, group="both") as escrow:
        with escrow.transaction() as (_, tx):
            tx.send(Message("both", b"x"))
        with Consumer(server.namesrv_address, group="both", subscribe="both") as consumer:
            assert consumer.receive().body == b"x"


def test_an_async_escrow_in_a_plain_block_names_the_other_class(
    server: Server, async_engine: AsyncEngine
) -> None:
    wrong: Any = AsyncEscrow(async_engine, server.namesrv_address, group="g")
    text = "AsyncEscrow is for asyncio: use `async with`, or escrowmq.sql.Escrow"
    with raises(TypeError, text), wrong:
        pass


async def test_a_send_that_is_not_awaited_rolls_back(
    server: Server, async_engine: AsyncEngine
) -> None:
    async with AsyncEscrow(async_engine, server.namesrv_address, group="unawaited") as escrow:
        text = "tx.send() was called without await (calls: 1), so its message is not sent: write"
        with raises(LocalProtocolError, text):
            async with escrow.transaction() as (_, tx):
                await tx.send(Message("orders", b"awaited"))
                tx.send(Message("orders", b"forgotten"))  # type: ignore[unused-coroutine]
        assert tx.outcome is not None
        assert tx.outcome.state == "rolled_back"


async def test_an_effect_that_an_inbox_cannot_call_is_refused(
    engine: Engine, async_engine: AsyncEngine
) -> None:
    async def coroutine_function(session: Any, message: Any) -> None: ...

    def plain_function(session: Any, message: Any) -> None: ...

    def without_session(message: Any) -> None: ...

    effect: Any = Inbox(engine, group="g").effect
    async_effect: Any = AsyncInbox(async_engine, group="g").effect
    with raises(TypeError, "an effect is a plain function; AsyncInbox takes `async def` functions"):
        effect(coroutine_function)
    with raises(TypeError, "an effect of AsyncInbox is an `async def` function; Inbox takes plain"):
        async_effect(plain_function)
    consumer = AsyncConsumer("127.0.0.1:9876", group="g")
    consumer.on("orders")(effect(plain_function))  # what it returns is a handler
    consumer.on("stock")(async_effect(coroutine_function))
    text = "an effect of an inbox takes session and message, but without_session(message) does not"
    for decorate in (effect, async_effect):
        with raises(TypeError, text):
            decorate(without_session)


def test_an_escrow_of_the_parent_is_refused_in_a_child(server: Server, tmp_path: Path) -> None:
    result = run_program(
        """
        import os, sys, warnings
        from escrowmq import Message
        from escrowmq.sql import Escrow
        from sqlalchemy import create_engine

        warnings.simplefilter("ignore")

        def send(escrow):
            with escrow.transaction() as (session, tx):
                tx.send(Message("forked", b"x"))
            print(tx.outcome.state, flush=True)

        def connect():
            return Escrow(create_engine("sqlite:///" + sys.argv[2]), sys.argv[1], group="g")

        with connect() as escrow:
            send(escrow)
            child = os.fork()
            if not child:
                try:
                    send(escrow)
                except Exception as error:
                    print(f"{type(error).__name__}: {error}", flush=True)
                with connect() as own:
                    send(own)
                os._exit(0)
            assert os.waitpid(child, 0)[1] == 0
            send(escrow)
        """,
        server.namesrv_address,
        str(tmp_path / "bank.db"),
    )
    assert result.out.splitlines() == [
        "committed",
        "WrongProcess: this Escrow was created before a fork; create one in each child, with an "
        "engine of its own",
        "committed",
        "committed",
    ], result.err
