"""A Python client from PyPI, put through one scenario.

    python driver.py CLIENT NAMESRV TOPIC GROUP SCENARIO

Runs in the client's own environment, where nothing of ours is installed. Both clients are thin
wrappers around C++ libraries of different age and share most of their vocabulary; what differs is
in `Wrapper` and its two kinds. Tells in JSON lines what was sent and what arrived, judges nothing.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

from rocketmq import client, ffi  # type: ignore[import-not-found]

PATIENCE_S = 30
LINGER_S = 0.7
SETTLE_S = 3  # a broadcast consumer begins at the end: it must be there first
NOT_ASKED_S = 4  # longer than any half is left alone
MESSAGES = 8

Fine = Callable[[Any], bool]
Plan = Callable[[str, int], str]  # of a body, and which check it is: what to say
_telling = threading.Lock()  # messages arrive on threads of the library


def say(event: str, **more: object) -> None:
    line = json.dumps({"event": event, **more}) + "\n"
    with _telling:
        sys.stdout.write(line)
        sys.stdout.flush()


def text(value: bytes | str | None) -> str:
    return value.decode() if isinstance(value, bytes) else value or ""


class Wrapper:
    """What both wrappers can do, under one set of names."""

    name_server = "set_namesrv_addr"

    def __init__(self, namesrv: str, topic: str, group: str) -> None:
        self.namesrv, self.topic, self.group = namesrv, topic, group
        self.arrived = 0
        self._open: list[Any] = []

    def producer(self) -> Any:
        return self.started(client.Producer(f"{self.group}-producers"))

    def started(self, which: Any) -> Any:
        getattr(which, self.name_server)(self.namesrv)
        which.start()
        self._open.append(which)
        return which

    def consume(
        self, fine: Fine, *, tags: str = "*", orderly: bool = False, broadcast: bool = False
    ) -> None:
        model = ffi.MessageModel.BROADCASTING if broadcast else ffi.MessageModel.CLUSTERING
        consumer = client.PushConsumer(self.group, orderly=orderly, message_model=model)
        consumer.set_thread_count(4)
        self.prepare(consumer)
        consumer.subscribe(self.topic, lambda message: self.take(message, fine), tags)
        self.started(consumer)

    def prepare(self, consumer: Any) -> None:
        pass

    def take(self, message: Any, fine: Fine) -> object:
        self.got(message)
        if not fine(message):
            raise RuntimeError("consume it later")
        return None

    def got(self, message: Any) -> None:
        say(
            "got",
            by="1",
            body=text(message.body),
            topic=message.topic,
            times=message.reconsume_times,
            queue=message.queue_id,
            offset=message.queue_offset,
            tag=text(message.tags),
            key=text(message.keys),
            colour=text(message.get_property("colour")),
            waited_ms=time.time_ns() // 1_000_000 - message.born_timestamp,
        )
        self.arrived += 1

    def message(self, body: str, *, tag: str = "tag") -> Any:
        message = client.Message(self.topic)
        message.set_tags(tag)
        message.set_keys(f"key-{len(body)}")
        message.set_body(body)
        message.set_property("colour", "größer")
        return message

    def sent(self, body: str, result: Any) -> None:
        status = "ok" if int(result.status) == 0 else str(result.status)
        say("sent", body=body, status=status, id=result.msg_id, offset=result.offset)

    def send_in_order(self, producer: Any, body: str, order: int) -> Any:
        raise NotImplementedError

    def wait(self, count: int) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while self.arrived < count and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(LINGER_S)

    def close(self) -> None:
        for which in self._open:
            which.shutdown()


class A(Wrapper):
    """rocketmq-client-python 2.0.0, with the library of another package.

    That library logs to /logs, if it may, whatever HOME says.
    """

    name_server = "set_name_server_address"

    def producer(self) -> Any:
        return self.started(client.Producer(f"{self.group}-producers", True))

    def prepare(self, consumer: Any) -> None:
        # Without tracing its shutdown reads through a null pointer. 0 switches it on.
        ffi.dll.SetPushConsumerMessageTrace.argtypes = [ctypes.c_void_p, ctypes.c_int]
        # The library has no public name for its native handle.
        ffi.dll.SetPushConsumerMessageTrace(consumer._handle, 0)

    def take(self, message: Any, fine: Fine) -> object:
        self.got(message)
        status = client.ConsumeStatus
        return status.CONSUME_SUCCESS if fine(message) else status.RECONSUME_LATER

    def send_in_order(self, producer: Any, body: str, order: int) -> Any:
        return producer.send_orderly_with_sharding_key(self.message(body), f"order {order}")

    def transactor(self, plan: Plan) -> Callable[[str], None]:
        """What parks a body, and lets `plan` decide: in its local transaction and when asked."""
        checks: dict[str, int] = {}

        def check(message: Any) -> Any:
            body = text(message.body)
            checks[body] = checks.get(body, 0) + 1
            say(
                "asked",
                by="1",
                body=body,
                topic=message.topic,
                check=checks[body],
                times=text(message.get_property("TRANSACTION_CHECK_TIMES")),
                tag=text(message.tags),
                key=text(message.keys),
                colour=text(message.get_property("colour")),
                waited_ms=time.time_ns() // 1_000_000 - message.born_timestamp,
            )
            return verdict(plan(body, checks[body]))

        producer = self.started(
            client.TransactionMQProducer(f"{self.group}-transactors", check, timeout=5_000)
        )

        def park(body: str) -> None:
            def execute(message: Any, _: Any) -> Any:
                say("local", by="1", body=body)
                return verdict(plan(body, 0))

            self.sent(body, producer.send_message_in_transaction(self.message(body), execute))

        return park


class B(Wrapper):
    """rocketmq 0.4.4."""

    def send_in_order(self, producer: Any, body: str, order: int) -> Any:
        return producer.send_orderly(self.message(body), order)


def sync(my: Wrapper) -> None:
    my.consume(lambda message: True)
    producer = my.producer()
    for body in bodies("sync"):
        my.sent(body, producer.send_sync(my.message(body)))
    my.wait(MESSAGES)


def asynchronous(my: Wrapper) -> None:
    my.consume(lambda message: True)
    producer = my.producer()
    for body in bodies("async"):

        def succeeded(result: Any, body: str = body) -> None:
            my.sent(body, result)

        def failed(error: Exception, body: str = body) -> None:
            say("sent", body=body, status=str(error))

        producer.send_async(my.message(body), succeeded, failed)
    my.wait(MESSAGES)


def oneway(my: Wrapper) -> None:
    my.consume(lambda message: True)
    producer = my.producer()
    for body in bodies("oneway"):
        producer.send_oneway(my.message(body))
    my.wait(MESSAGES)


def batch(my: Wrapper) -> None:
    my.consume(lambda message: True)
    result = my.producer().send_batch([my.message(body) for body in bodies("batch")])
    my.sent("", result)
    my.wait(MESSAGES)


def big(my: Wrapper) -> None:
    my.consume(lambda message: True)
    producer = my.producer()
    for size in (4_095, 4_097, 100_000):
        body = "".join(f"{number} " for number in range(size))[:size]
        my.sent(body, producer.send_sync(my.message(body)))
    my.wait(3)


def delay(my: Wrapper) -> None:
    my.consume(lambda message: True)
    producer = my.producer()
    for body in bodies("delay")[:3]:
        late = my.message(body)
        late.set_delay_time_level(1)
        my.sent(body, producer.send_sync(late))
    my.wait(3)


def tags(my: Wrapper) -> None:
    my.consume(lambda message: True, tags="red || green")
    producer = my.producer()
    for tag in ("blue", "red", "", "green", "redder"):
        body = f"tagged-{tag}"
        my.sent(body, producer.send_sync(my.message(body, tag=tag)))
    my.wait(2)


def orderly(my: Wrapper) -> None:
    my.consume(lambda message: True, orderly=True)
    producer = my.producer()
    for step in range(6):
        for order in range(3):
            body = f"{order}/{step}"
            my.sent(body, my.send_in_order(producer, body, order))
    my.wait(18)


def broadcast(my: Wrapper) -> None:
    my.consume(lambda message: True, broadcast=True)
    time.sleep(SETTLE_S)
    producer = my.producer()
    for body in bodies("broadcast"):
        my.sent(body, producer.send_sync(my.message(body)))
    my.wait(MESSAGES)


def retry(my: Wrapper) -> None:
    my.consume(lambda message: text(message.body) == "fine" or message.reconsume_times == 2)
    producer = my.producer()
    for body in ("fine", "again"):
        my.sent(body, producer.send_sync(my.message(body)))
    my.wait(4)


def pull(my: Wrapper) -> None:
    producer = my.producer()
    for body in bodies("pulled"):
        my.sent(body, producer.send_sync(my.message(body)))
    consumer = my.started(client.PullConsumer(f"{my.group}-pullers"))
    for message in consumer.pull(my.topic):
        my.got(message)


# What a body says first its local transaction says; then come the answers to the checks.


def transaction(my: A) -> None:
    my.consume(lambda message: True)
    park = my.transactor(planned)
    for number in range(MESSAGES):
        for plan in ("commit", "rollback"):
            park(f"{plan}/{number}")
    park("commit/" + "".join(f"{number} " for number in range(20_000))[:20_000])
    my.wait(MESSAGES + 1)
    time.sleep(NOT_ASKED_S)


def transaction_check(my: A) -> None:
    my.consume(lambda message: True)
    park = my.transactor(planned)
    for number in range(3):
        for plan in (
            *("unknown,commit", "unknown,rollback", "throw,commit", "throw,rollback"),
            *("unknown,unknown,commit", "unknown,throw,rollback", "commit", "rollback"),
        ):
            park(f"{plan}/{number}")
    my.wait(3 * 4)
    time.sleep(NOT_ASKED_S)


def transaction_slow(my: A) -> None:
    """The local transaction outlasts the first check, whatever that is told."""
    my.consume(lambda message: True)
    asked = {f"{plan}/slow": threading.Event() for plan in ("unknown", "commit", "rollback")}

    def plan(body: str, check: int) -> str:
        if check:
            asked[body].set()
            return body.partition("/")[0]
        if not asked[body].wait(PATIENCE_S):
            say("failed", why=f"nobody asked about {body}")
        time.sleep(0.3)  # by then the check has its answer
        return "commit"

    park = my.transactor(plan)
    for body in asked:
        park(body)
    my.wait(2)
    time.sleep(NOT_ASKED_S)


def planned(body: str, check: int) -> str:
    plan = body.partition("/")[0].split(",")
    return plan[min(check, len(plan) - 1)]


def verdict(name: str) -> Any:
    if name == "throw":
        raise RuntimeError("as planned")
    return getattr(client.TransactionStatus, name.upper())


def bodies(kind: str) -> list[str]:
    return [f"{kind}-{number}" for number in range(MESSAGES)]


SCENARIOS: dict[str, Callable[[Any], None]] = {
    "sync": sync,
    "autocreate": sync,  # its topic is one that nobody created
    "async": asynchronous,
    "oneway": oneway,
    "batch": batch,
    "big": big,
    "delay": delay,
    "tags": tags,
    "orderly": orderly,
    "broadcast": broadcast,
    "retry": retry,
    "pull": pull,
    "transaction": transaction,
    "transaction-check": transaction_check,
    "transaction-slow": transaction_slow,
}


def main() -> int:
    which, namesrv, topic, group, scenario = sys.argv[1:]
    kinds: dict[str, type[Wrapper]] = {"A": A, "B": B}
    try:
        my = kinds[which](namesrv, topic, group)
        SCENARIOS[scenario](my)
        my.close()
    except Exception as error:
        say("failed", why=f"{type(error).__name__}: {error}")
        traceback.print_exc()
        return 1
    say("done")
    return 0


if __name__ == "__main__":
    os._exit(main())  # native threads outlive an ordinary exit
