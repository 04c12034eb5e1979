"""Clients that work during the whole run: senders, transactional producers, consumers, forgers.

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
from tests.interop.remoting import (
    COMMIT,
    ROLLBACK,
    SUCCESS,
    Client,
    ResponseError,
    SendResult,
)

PLAIN: Final = "chaos-plain"
TRANSACTIONAL: Final = "chaos-transactional"
DELAYED: Final = "chaos-delayed"
FAILING: Final = "chaos-failing"  # every message of it is sent back
CONSUMED: Final = (PLAIN, TRANSACTIONAL, DELAYED)
RETRY_GROUP: Final = "chaos-retry"
QUEUES: Final = 4
TX_GROUP: Final = "chaos-tx"
PAUSE_S: Final = 0.01
REQUEST_TIMEOUT_S: Final = 3.0
SYSTEM_BUSY: Final = 2
SERVICE_NOT_AVAILABLE: Final = 14  # the store is full
MESSAGE_ILLEGAL: Final = 13
NO_PERMISSION: Final = 16
REFUSED: Final = (MESSAGE_ILLEGAL, NO_PERMISSION)
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
    """Run transactions that commit, roll back or have no verdict, and respond to checks.

    They have one message or several, with and without delays.
    """
    async with Producer(
        servers, group=TX_GROUP, timeout_s=REQUEST_TIMEOUT_S, heartbeat_s=2
    ) as producer:

        @producer.checker(TRANSACTIONAL)
        async def check(message: ReceivedMessage) -> Verdict:
            return _VERDICTS.get(ledger.fates.get(message.body, Fate.OPEN), Verdict.UNKNOWN)

        count = 0
        while not stop.is_set:
            message_count = generator.choice((1, 1, 3))
            bodies = [b"tx/client%d/%d.%d" % (number, count, i) for i in range(message_count)]
            await _run_transaction(producer, ledger, bodies, generator)
            count += 1
            await asyncio.sleep(PAUSE_S)
        await asyncio.Event().wait()  # respond to checks of open halves until this is cancelled


_DELAYS: Final = ((0, 0.0), (0, 0.0), (1, 0.0), (0, 0.7))  # level and seconds
_VERDICTS: Final = {Fate.COMMITTED: Verdict.COMMIT, Fate.ROLLED_BACK: Verdict.ROLLBACK}


async def _run_transaction(
    producer: Producer, ledger: Ledger, bodies: list[bytes], generator: random.Random
) -> None:
    def record(fate: Fate) -> None:
        for body in bodies:
            ledger.record(body, fate)

    fate = generator.choice((Fate.COMMITTED, Fate.COMMITTED, Fate.ROLLED_BACK))
    has_verdict = generator.random() < 0.7
    record(Fate.OPEN)
    try:
        async with producer.transaction() as transaction:
            for body in bodies:
                level, delay_s = generator.choice(_DELAYS)
                await transaction.send(
                    Message(TRANSACTIONAL, body, delay_level=level, delay_s=delay_s)
                )
            record(fate)  # the local transaction
            if not has_verdict:
                raise _NoVerdict
            if fate is Fate.ROLLED_BACK:
                raise Rollback
    except _NoVerdict:
        pass
    except TransactionConflict as error:
        ledger.violations.append(f"{bodies[0]!r}: {error}")
    except EscrowError:
        if ledger.fates[bodies[0]] is Fate.OPEN:  # the local transaction has not run
            record(Fate.ROLLED_BACK)


async def consume(servers: str, ledger: Ledger, group: str, generator: random.Random) -> None:
    """Consume all topics. The handler fails now and then, so that messages are retried."""
    consumer = Consumer(servers, group=group, concurrency=8)

    async def handle(message: ReceivedMessage) -> None:
        if generator.random() < 0.01 and message.reconsume_times < 3:
            raise ValueError("planned failure")
        ledger.consume(group, message.body)

    for topic in CONSUMED:
        consumer.on(topic)(handle)
    await _run(consumer)


async def consume_in_order(servers: str, ledger: Ledger, group: str) -> None:
    """Consume all topics in the order of their queues."""
    consumer = Consumer(servers, group=group, orderly=True)

    async def handle(message: ReceivedMessage) -> None:
        queue = message.topic, message.queue_id
        ledger.consume_in_order(group, queue, message.queue_offset, message.body)

    for topic in CONSUMED:
        consumer.on(topic)(handle)
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


_RAW_DELAYS: Final[tuple[dict[str, str], ...]] = (
    {},
    {},
    {"DELAY": "1"},
    {"TIMER_DELAY_MS": "700"},
)


class RawDelays:
    """Sends delayed messages and timers, with one attempt each."""

    def __init__(self, ledger: Ledger, name: str, seed: int) -> None:
        self._ledger = ledger
        self._name = name
        self._generator = random.Random(seed)
        self._count = 0

    def step(self, client: Client) -> None:
        body = f"delayed/{self._name}/{self._count}".encode()
        self._count += 1
        delay = self._generator.choice(
            (
                {"DELAY": str(self._generator.randint(1, 3))},
                {"TIMER_DELAY_MS": str(self._generator.randint(10, 4_000))},
            )
        )
        _send_once(client, self._ledger, DELAYED, body, delay, self._count % QUEUES)


def _send_once(
    client: Client,
    ledger: Ledger,
    topic: str,
    body: bytes,
    properties: dict[str, str],
    queue_id: int = 0,
    *,
    sys_flag: int = 0,
) -> SendResult | None:
    """Send a message with one attempt, and record what the broker responded."""
    ledger.record(body, Fate.SENT)
    try:
        result = client.send(
            topic,
            body,
            {"UNIQ_KEY": body.decode(), **properties},
            queue_id=queue_id,
            sys_flag=sys_flag,
        )
    except ResponseError as refused:
        if refused.response.code in (*NEVER_STORED, *REFUSED):
            ledger.record(body, Fate.REFUSED)
        return None
    ledger.record(body, Fate.ACKNOWLEDGED)
    return result


class RawRetries:
    """Sends a message and, as a consumer that failed, sends it back until there is a response."""

    def __init__(self, ledger: Ledger, name: str) -> None:
        self._ledger = ledger
        self._name = name
        self._count = 0
        self._unanswered: tuple[bytes, int] | None = None  # body and log offset

    def step(self, client: Client) -> None:
        if self._unanswered is None:
            body = f"failing/{self._name}/{self._count}".encode()
            self._count += 1
            result = _send_once(client, self._ledger, FAILING, body, {})
            if result is None:
                return
            self._unanswered = body, result.log_offset
            self._ledger.retries[body] = Fate.SENT
        body, log_offset = self._unanswered
        fields = {"offset": log_offset, "group": RETRY_GROUP, "delayLevel": 1}
        if client.request(36, fields).code == SUCCESS:
            self._ledger.retries[body] = Fate.ACKNOWLEDGED
            self._unanswered = None


CLOSED_TOPICS: Final = (
    "RMQ_SYS_TRANS_HALF_TOPIC",
    "RMQ_SYS_TRANS_OP_HALF_TOPIC",
    "SCHEDULE_TOPIC_XXXX",
    "rmq_sys_wheel_timer",
    "ESCROW_JOURNAL",
    "ESCROW_DECISION",
    "ESCROW_DELIVERY",
)
CURSOR_GROUP: Final = "CID_RMQ_SYS_TRANS"
_FORGED_PROPERTIES: Final[tuple[dict[str, str], ...]] = (
    {"REAL_TOPIC": TRANSACTIONAL, "REAL_QID": "1"},
    {"ESCROW_COPY_OF": "0,1,2", "REAL_TOPIC": PLAIN},
    {"ESCROW_RETRY_OF": "0", "RETRY_TOPIC": FAILING},
    {"ESCROW_BY": "operator", "ENDED": "c", "TAGS": "d"},
    {"TRAN_PREPARED_QUEUE_OFFSET": "0", "TRANSACTION_CHECK_TIMES": "99"},
    {"TIMER_OUT_MS": "1", "REAL_TOPIC": DELAYED, "REAL_QID": "0"},
)


class RawForger:
    """Claims what only the broker may say, in messages and in requests.

    A forged message is one like any other, or is refused. Every other forged request is refused.
    """

    def __init__(self, ledger: Ledger, name: str, seed: int) -> None:
        self._ledger = ledger
        self._name = name
        self._generator = random.Random(seed)
        self._count = 0

    def step(self, client: Client) -> None:
        self._count += 1
        if self._generator.random() < 0.5:
            self._send(client)
        else:
            self._request(client)

    def _send(self, client: Client) -> None:
        """Send a message that looks like the final, or the half, of an open transaction."""
        body = f"forged/{self._name}/{self._count}".encode()
        open_keys = [
            other.decode()
            for other in list(self._ledger.fates)[-200:]
            if other.startswith(b"tx/raw")
        ]
        forged = dict(self._generator.choice(_FORGED_PROPERTIES))
        if open_keys:
            forged |= {"UNIQ_KEY": self._generator.choice(open_keys), "PGROUP": TX_GROUP}
        sys_flag = self._generator.choice((0, 4, 8, 12))
        _send_once(client, self._ledger, TRANSACTIONAL, body, forged, sys_flag=sys_flag)

    def _request(self, client: Client) -> None:
        topic = self._generator.choice(CLOSED_TOPICS)
        offset = {"consumerGroup": CURSOR_GROUP, "topic": topic, "queueId": 0}
        code, fields = self._generator.choice(
            (
                (15, {**offset, "commitOffset": 10**9}),
                (11, {**offset, "sysFlag": 5, "commitOffset": 10**9, **_PULL_FIELDS}),
                (215, {"topic": topic}),
                (207, {"groupName": CURSOR_GROUP, "cleanOffset": True}),
            )
        )
        response = client.request(code, fields)
        if response.code == SUCCESS:
            self._ledger.violations.append(f"forged request {code} {fields} was accepted")
        self._ledger.refused_forgeries += 1


_PULL_FIELDS: Final = {
    "queueOffset": 0,
    "maxMsgNums": 1,
    "suspendTimeoutMillis": 0,
    "subscription": "*",
    "subVersion": 0,
    "expressionType": "TAG",
}


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
            delay = self._generator.choice(_RAW_DELAYS)
            half = client.send_half(
                TRANSACTIONAL, body, {"UNIQ_KEY": body.decode(), **delay}, group=TX_GROUP
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
        for topic in CONSUMED:
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
