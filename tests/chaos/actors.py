"""Clients that work during the whole run: senders, transactional producers and consumers.

Some use our client, others the independent client of `tests/interop`. They do not know about the
faults; they record in the ledger what the broker responds.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import threading
from collections.abc import Callable
from typing import Final

from escrowmq import Consumer, Message, Producer, ReceivedMessage, Rollback, Verdict
from escrowmq.errors import EscrowError, TransactionConflict
from tests.chaos.ledger import Fate, Ledger
from tests.interop.records import decode_records
from tests.interop.remoting import COMMIT, ROLLBACK, SUCCESS, Client, ResponseError

PLAIN: Final = "chaos-plain"
TRANSACTIONAL: Final = "chaos-transactional"
QUEUES: Final = 4
TX_GROUP: Final = "chaos-tx"
PAUSE_S: Final = 0.01
REQUEST_TIMEOUT_S: Final = 3.0
SYSTEM_BUSY: Final = 2
SERVICE_NOT_AVAILABLE: Final = 14  # the store is full
NEVER_STORED: Final = (SYSTEM_BUSY, SERVICE_NOT_AVAILABLE)  # the broker has stored nothing


class _NoVerdict(Exception):
    """Leaves a transaction without a verdict, so that the broker has to check it."""


class Stop:
    """A stop signal for coroutines and threads."""

    def __init__(self) -> None:
        self._event = threading.Event()

    def set(self) -> None:
        self._event.set()

    @property
    def is_set(self) -> bool:
        return self._event.is_set()

    def pause(self, seconds: float) -> None:
        self._event.wait(seconds)


# --- with our client -----------------------------------------------------------------------------


async def send_plain(servers: str, ledger: Ledger, stop: Stop, number: int) -> None:
    """Send messages to one queue, one after the other. The client retries."""
    async with Producer(
        servers, group=f"chaos-plain-{number}", timeout_s=REQUEST_TIMEOUT_S
    ) as producer:
        for count in itertools.count():
            if stop.is_set:
                return
            body = b"plain/client%d/%d" % (number, count)
            ledger.record(body, Fate.SENT)
            with contextlib.suppress(EscrowError):
                await producer.send(
                    Message(PLAIN, body), queue=lambda queues, _: queues[number % len(queues)]
                )
                ledger.record(body, Fate.ACKNOWLEDGED)
            await asyncio.sleep(PAUSE_S)


async def run_transactions(
    servers: str, ledger: Ledger, stop: Stop, number: int, generator: random.Random
) -> None:
    """Run transactions that commit, roll back or have no verdict, and respond to checks."""
    async with Producer(
        servers, group=TX_GROUP, timeout_s=REQUEST_TIMEOUT_S, heartbeat_s=2
    ) as producer:

        @producer.checker(TRANSACTIONAL)
        async def check(message: ReceivedMessage) -> Verdict:
            return _VERDICTS.get(ledger.fates.get(message.body, Fate.OPEN), Verdict.UNKNOWN)

        count = 0
        while not stop.is_set:
            body = b"tx/client%d/%d" % (number, count)
            await _run_transaction(producer, ledger, body, generator)
            count += 1
            await asyncio.sleep(PAUSE_S)
        await asyncio.Event().wait()  # respond to checks of open halves until this is cancelled


_VERDICTS: Final = {Fate.COMMITTED: Verdict.COMMIT, Fate.ROLLED_BACK: Verdict.ROLLBACK}


async def _run_transaction(
    producer: Producer, ledger: Ledger, body: bytes, generator: random.Random
) -> None:
    fate = generator.choice((Fate.COMMITTED, Fate.COMMITTED, Fate.ROLLED_BACK))
    has_verdict = generator.random() < 0.7
    ledger.record(body, Fate.OPEN)
    try:
        async with producer.transaction(Message(TRANSACTIONAL, body)):
            ledger.record(body, fate)  # the local transaction
            if not has_verdict:
                raise _NoVerdict
            if fate is Fate.ROLLED_BACK:
                raise Rollback
    except _NoVerdict:
        pass
    except TransactionConflict as error:
        ledger.violations.append(f"{body!r}: {error}")
    except EscrowError:
        if ledger.fates[body] is Fate.OPEN:  # the local transaction has not run
            ledger.record(body, Fate.ROLLED_BACK)


async def consume(servers: str, ledger: Ledger, group: str, generator: random.Random) -> None:
    """Consume both topics. The handler fails now and then, so that messages are retried."""
    consumer = Consumer(servers, group=group, concurrency=8)

    async def handle(message: ReceivedMessage) -> None:
        if generator.random() < 0.002 and message.reconsume_times < 3:
            raise ValueError("planned failure")
        ledger.consume(group, message.body)

    consumer.on(PLAIN)(handle)
    consumer.on(TRANSACTIONAL)(handle)
    await _run(consumer)


async def consume_in_order(servers: str, ledger: Ledger, group: str) -> None:
    """Consume both topics in the order of their queues."""
    consumer = Consumer(servers, group=group, orderly=True)

    async def handle(message: ReceivedMessage) -> None:
        queue = message.topic, message.queue_id
        ledger.consume_in_order(group, queue, message.queue_offset, message.body)

    consumer.on(PLAIN)(handle)
    consumer.on(TRANSACTIONAL)(handle)
    await _run(consumer)


async def _run(consumer: Consumer) -> None:
    try:
        await consumer.run()
    finally:
        with contextlib.suppress(EscrowError, TimeoutError):
            await consumer.close()


# --- with the independent client, which does not retry -------------------------------------------


class RawWorker:
    """A thread that repeats a step, with a new connection whenever the last one broke."""

    def __init__(self, address: str, stop: Stop, step: Callable[[Client], None]) -> None:
        self._address = address
        self._stop = stop
        self._step = step
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def join(self, timeout_s: float) -> None:
        """Wait for the end of the thread. Raises its failure."""
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise TimeoutError("a raw worker does not stop")
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        try:
            while not self._stop.is_set:
                with (
                    contextlib.suppress(OSError),
                    Client(self._address, timeout_s=REQUEST_TIMEOUT_S) as client,
                ):
                    while not self._stop.is_set:
                        self._step(client)
                        self._stop.pause(PAUSE_S)
                self._stop.pause(0.1)
        except BaseException as error:
            self._failure = error


class RawSender:
    """Sends plain messages to one queue, with one attempt each."""

    def __init__(self, ledger: Ledger, name: str, queue_id: int) -> None:
        self._ledger = ledger
        self._name = name
        self._queue_id = queue_id
        self._count = 0

    def step(self, client: Client) -> None:
        body = f"plain/{self._name}/{self._count}".encode()
        self._count += 1
        self._ledger.record(body, Fate.SENT)
        try:
            client.send(PLAIN, body, {"UNIQ_KEY": body.decode()}, queue_id=self._queue_id)
            self._ledger.record(body, Fate.ACKNOWLEDGED)
        except ResponseError as refused:
            if refused.response.code in NEVER_STORED:
                self._ledger.record(body, Fate.REFUSED)


class RawTransactions:
    """Parks a half, ends it or not, and disconnects: the broker checks at others of the group."""

    def __init__(self, ledger: Ledger, name: str, seed: int) -> None:
        self._ledger = ledger
        self._name = name
        self._generator = random.Random(seed)
        self._count = 0

    def step(self, client: Client) -> None:
        body = f"tx/{self._name}/{self._count}".encode()
        self._count += 1
        fate = self._generator.choice((Fate.COMMITTED, Fate.ROLLED_BACK))
        has_verdict = self._generator.random() < 0.7
        self._ledger.record(body, Fate.OPEN)
        try:
            half = client.send_half(
                TRANSACTIONAL, body, {"UNIQ_KEY": body.decode()}, group=TX_GROUP
            )
        except (ResponseError, OSError) as error:
            self._ledger.record(body, Fate.ROLLED_BACK)
            if isinstance(error, OSError):
                raise
            return
        self._ledger.record(body, fate)
        if has_verdict:
            verdict = COMMIT if fate is Fate.COMMITTED else ROLLBACK
            client.end_transaction(half, verdict, topic=TRANSACTIONAL, group=TX_GROUP)
        raise ConnectionError("planned disconnect")


class RawReader:
    """Reads every queue from the committed offset of its group, and commits how far it read."""

    def __init__(self, ledger: Ledger, group: str) -> None:
        self._ledger = ledger
        self._group = group

    def step(self, client: Client) -> None:
        for topic in (PLAIN, TRANSACTIONAL):
            for queue_id in range(QUEUES):
                start = client.committed_offset(self._group, topic, queue_id) or 0
                response = client.pull(topic, queue_id, start, group=self._group)
                if response.code != SUCCESS:
                    continue
                for record in decode_records(response.body):
                    self._ledger.consume_in_order(
                        self._group, (topic, queue_id), record.queue_offset, record.body
                    )
                next_offset = int(response.ext_fields["nextBeginOffset"])
                client.commit_offset(self._group, topic, queue_id, next_offset)
