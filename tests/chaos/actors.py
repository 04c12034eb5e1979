"""Who works throughout: plain and transactional senders, consumers; by our client, and by hand.

None of them knows what is done to the broker. Each writes down what it was told.
"""

from __future__ import annotations

import asyncio
import contextlib
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
DECIDED: Final = "chaos-decided"
QUEUES: Final = 4
TX_GROUP: Final = "chaos-tx"
PAUSE_S: Final = 0.01
CALL_S: Final = 3.0
STORE_FULL: Final = 14  # SERVICE_NOT_AVAILABLE: for certain nothing was stored
BUSY: Final = 2
NEVER_STORED: Final = (BUSY, STORE_FULL)


class _Unsaid(Exception):
    """Leave a transaction without a word."""


class Stop:
    """For coroutines and threads alike."""

    def __init__(self) -> None:
        self._event = threading.Event()

    def set(self) -> None:
        self._event.set()

    @property
    def is_set(self) -> bool:
        return self._event.is_set()

    def pause(self, seconds: float) -> None:
        self._event.wait(seconds)


# --- by our client -------------------------------------------------------------------------------


async def send_plainly(servers: str, ledger: Ledger, stop: Stop, number: int) -> None:
    """To one queue, one after the other; the client retries."""
    async with Producer(servers, group=f"chaos-plain-{number}", timeout_s=CALL_S) as producer:
        for count in range(1 << 62):
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


async def decide(
    servers: str, ledger: Ledger, stop: Stop, number: int, choose: random.Random
) -> None:
    """Transactions that commit, roll back, or end without a word; and answers to every question."""
    async with Producer(servers, group=TX_GROUP, timeout_s=CALL_S, heartbeat_s=2) as producer:

        @producer.checker(DECIDED)
        async def was_it(message: ReceivedMessage) -> Verdict:
            return _VERDICTS.get(ledger.fates.get(message.body, Fate.OPEN), Verdict.UNKNOWN)

        count = 0
        while not stop.is_set:
            body = b"tx/client%d/%d" % (number, count)
            await _transact(producer, ledger, body, choose)
            count += 1
            await asyncio.sleep(PAUSE_S)
        await asyncio.Event().wait()  # what is open is asked about: stay until this is cancelled


_VERDICTS: Final = {Fate.COMMITTED: Verdict.COMMIT, Fate.ROLLED_BACK: Verdict.ROLLBACK}


async def _transact(producer: Producer, ledger: Ledger, body: bytes, choose: random.Random) -> None:
    fate = choose.choice((Fate.COMMITTED, Fate.COMMITTED, Fate.ROLLED_BACK))
    is_said = choose.random() < 0.7
    ledger.record(body, Fate.OPEN)
    try:
        async with producer.transaction(Message(DECIDED, body)):
            ledger.record(body, fate)  # the local transaction
            if not is_said:
                raise _Unsaid
            if fate is Fate.ROLLED_BACK:
                raise Rollback
    except _Unsaid:
        pass
    except TransactionConflict as error:
        ledger.violations.append(f"{body!r}: {error}")
    except EscrowError:
        if ledger.fates[body] is Fate.OPEN:  # not parked, or nobody knows: there was no work
            ledger.record(body, Fate.ROLLED_BACK)


async def consume(servers: str, ledger: Ledger, group: str, choose: random.Random) -> None:
    """Now and then it fails, and the message comes again."""
    consumer = Consumer(servers, group=group, concurrency=8)

    async def take(message: ReceivedMessage) -> None:
        if choose.random() < 0.002 and message.reconsume_times < 3:
            raise ValueError("not this time")
        ledger.consume(group, message.body)

    consumer.on(PLAIN)(take)
    consumer.on(DECIDED)(take)
    await _run(consumer)


async def consume_in_order(servers: str, ledger: Ledger, group: str) -> None:
    consumer = Consumer(servers, group=group, orderly=True)

    async def take(message: ReceivedMessage) -> None:
        place = message.topic, message.queue_id
        ledger.consume_in_order(group, place, message.queue_offset, message.body)

    consumer.on(PLAIN)(take)
    consumer.on(DECIDED)(take)
    await _run(consumer)


async def _run(consumer: Consumer) -> None:
    try:
        await consumer.run()
    finally:
        with contextlib.suppress(EscrowError, TimeoutError):
            await consumer.close()


# --- by hand, one attempt each -------------------------------------------------------------------


class Raw:
    """A thread with a line that it opens anew whenever it breaks."""

    def __init__(self, address: str, stop: Stop, step: Callable[[Client], None]) -> None:
        self._address = address
        self._stop = stop
        self._step = step
        self.failed: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def join(self, wait_s: float) -> None:
        self._thread.join(wait_s)
        if self._thread.is_alive():
            raise TimeoutError("a raw client does not end")
        if self.failed is not None:
            raise self.failed

    def _run(self) -> None:
        try:
            while not self._stop.is_set:
                with contextlib.suppress(OSError), Client(self._address, timeout_s=CALL_S) as line:
                    while not self._stop.is_set:
                        self._step(line)
                        self._stop.pause(PAUSE_S)
                self._stop.pause(0.1)
        except BaseException as error:
            self.failed = error


class RawSender:
    def __init__(self, ledger: Ledger, name: str, queue_id: int) -> None:
        self._ledger = ledger
        self._name = name
        self._queue_id = queue_id
        self._count = 0

    def step(self, line: Client) -> None:
        body = f"plain/{self._name}/{self._count}".encode()
        self._count += 1
        self._ledger.record(body, Fate.SENT)
        try:
            line.send(PLAIN, body, {"UNIQ_KEY": body.decode()}, queue_id=self._queue_id)
            self._ledger.record(body, Fate.ACKNOWLEDGED)
        except ResponseError as refused:
            if refused.response.code in NEVER_STORED:
                self._ledger.record(body, Fate.REFUSED)


class RawDecider:
    """Parks, may decide, and hangs up: what it does not say, others of its group are asked."""

    def __init__(self, ledger: Ledger, name: str, seed: int) -> None:
        self._ledger = ledger
        self._name = name
        self._choose = random.Random(seed)
        self._count = 0

    def step(self, line: Client) -> None:
        body = f"tx/{self._name}/{self._count}".encode()
        self._count += 1
        fate = self._choose.choice((Fate.COMMITTED, Fate.ROLLED_BACK))
        is_said = self._choose.random() < 0.7
        self._ledger.record(body, Fate.OPEN)
        try:
            half = line.send_half(DECIDED, body, {"UNIQ_KEY": body.decode()}, group=TX_GROUP)
        except (ResponseError, OSError) as error:
            self._ledger.record(body, Fate.ROLLED_BACK)
            if isinstance(error, OSError):
                raise
            return
        self._ledger.record(body, fate)
        if is_said:
            verdict = COMMIT if fate is Fate.COMMITTED else ROLLBACK
            line.end_transaction(half, verdict, topic=DECIDED, group=TX_GROUP)
        raise ConnectionError("hangs up")


class RawReader:
    """Reads every queue from where its group is, and notes how far it came."""

    def __init__(self, ledger: Ledger, group: str) -> None:
        self._ledger = ledger
        self._group = group

    def step(self, line: Client) -> None:
        for topic in (PLAIN, DECIDED):
            for queue_id in range(QUEUES):
                begin = line.committed_offset(self._group, topic, queue_id) or 0
                answer = line.pull(topic, queue_id, begin, group=self._group)
                if answer.code != SUCCESS:
                    continue
                for record in decode_records(answer.body):
                    place = topic, queue_id
                    self._ledger.consume_in_order(
                        self._group, place, record.queue_offset, record.body
                    )
                begin = int(answer.ext_fields["nextBeginOffset"])
                line.commit_offset(self._group, topic, queue_id, begin)
