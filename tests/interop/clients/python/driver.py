"""Run a scenario with a Python client from PyPI.

    python driver.py CLIENT NAMESRV TOPIC GROUP SCENARIO

It runs in the environment of the client, where our code is not installed. Both clients are thin
wrappers of C++ libraries and share most of their API; `Wrapper` and its subclasses contain the
differences. The driver prints an event as a line of JSON for each message that it sends or
receives. The test that started it checks these events.
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

TIMEOUT_S = 30
# Only time can show that nothing more arrives: a message, or a check of a half.
NO_MORE_MESSAGES_S = 0.7
NO_MORE_CHECKS_S = 4  # longer than the immunity of any half
# A broadcast consumer starts at the end of the queues, and the client does not report when.
BROADCAST_START_S = 3
MESSAGES = 8

Handler = Callable[[Any], bool]  # returns whether the message was consumed
# Returns the verdict for a body. The number of the check is 0 for the local transaction.
Plan = Callable[[str, int], str]
_output_lock = threading.Lock()  # messages arrive on threads of the library


def report(event: str, **fields: object) -> None:
    line = json.dumps({"event": event, **fields}) + "\n"
    with _output_lock:
        sys.stdout.write(line)
        sys.stdout.flush()


def text(value: bytes | str | None) -> str:
    return value.decode() if isinstance(value, bytes) else value or ""


class Wrapper:
    """A common interface of both clients."""

    namesrv_setter = "set_namesrv_addr"

    def __init__(self, namesrv: str, topic: str, group: str) -> None:
        self.namesrv, self.topic, self.group = namesrv, topic, group
        self.received_count = 0
        self._started: list[Any] = []

    def producer(self) -> Any:
        return self.started(client.Producer(f"{self.group}-producers"))

    def started(self, member: Any) -> Any:
        """Start a producer or a consumer and return it."""
        getattr(member, self.namesrv_setter)(self.namesrv)
        member.start()
        self._started.append(member)
        return member

    def consume(
        self, handler: Handler, *, tags: str = "*", orderly: bool = False, broadcast: bool = False
    ) -> None:
        model = ffi.MessageModel.BROADCASTING if broadcast else ffi.MessageModel.CLUSTERING
        consumer = client.PushConsumer(self.group, orderly=orderly, message_model=model)
        consumer.set_thread_count(4)
        self.prepare(consumer)
        consumer.subscribe(self.topic, lambda message: self.handle(message, handler), tags)
        self.started(consumer)

    def prepare(self, consumer: Any) -> None:
        """Change the settings of a consumer before it subscribes."""

    def handle(self, message: Any, handler: Handler) -> object:
        self.report_received(message)
        if not handler(message):
            raise RuntimeError("consume it later")
        return None

    def report_received(self, message: Any) -> None:
        report(
            "received",
            client="1",
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
        self.received_count += 1

    def message(self, body: str, *, tag: str = "tag") -> Any:
        message = client.Message(self.topic)
        message.set_tags(tag)
        message.set_keys(f"key-{len(body)}")
        message.set_body(body)
        message.set_property("colour", "größer")
        return message

    def report_sent(self, body: str, result: Any) -> None:
        status = "ok" if int(result.status) == 0 else str(result.status)
        report("sent", body=body, status=status, id=result.msg_id, offset=result.offset)

    def send_in_order(self, producer: Any, body: str, order: int) -> Any:
        raise NotImplementedError

    def wait_for(self, count: int) -> None:
        """Wait for `count` messages, and a moment longer for any that must not arrive."""
        deadline_s = time.monotonic() + TIMEOUT_S
        while self.received_count < count and time.monotonic() < deadline_s:
            time.sleep(0.05)
        time.sleep(NO_MORE_MESSAGES_S)

    def close(self) -> None:
        for member in self._started:
            member.shutdown()


class ClientPython(Wrapper):
    """rocketmq-client-python 2.0.0, with the shared library of another package.

    The library logs to /logs if it has permission, whatever HOME is.
    """

    namesrv_setter = "set_name_server_address"

    def producer(self) -> Any:
        return self.started(client.Producer(f"{self.group}-producers", True))

    def prepare(self, consumer: Any) -> None:
        # Without tracing, the shutdown of the library dereferences a null pointer. 0 enables it.
        ffi.dll.SetPushConsumerMessageTrace.argtypes = [ctypes.c_void_p, ctypes.c_int]
        # The library has no public name for its native handle.
        ffi.dll.SetPushConsumerMessageTrace(consumer._handle, 0)

    def handle(self, message: Any, handler: Handler) -> object:
        self.report_received(message)
        status = client.ConsumeStatus
        return status.CONSUME_SUCCESS if handler(message) else status.RECONSUME_LATER

    def send_in_order(self, producer: Any, body: str, order: int) -> Any:
        return producer.send_orderly_with_sharding_key(self.message(body), f"order {order}")

    def transaction_sender(self, plan: Plan) -> Callable[[str], None]:
        """Return a function that parks a body; `plan` returns the verdicts for it."""
        checks: dict[str, int] = {}

        def check(message: Any) -> Any:
            body = text(message.body)
            checks[body] = checks.get(body, 0) + 1
            report(
                "checked",
                client="1",
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
                report("local", client="1", body=body)
                return verdict(plan(body, 0))

            result = producer.send_message_in_transaction(self.message(body), execute)
            self.report_sent(body, result)

        return park


class Rocketmq(Wrapper):
    """rocketmq 0.4.4."""

    def send_in_order(self, producer: Any, body: str, order: int) -> Any:
        return producer.send_orderly(self.message(body), order)


def sync(wrapper: Wrapper) -> None:
    wrapper.consume(lambda message: True)
    producer = wrapper.producer()
    for body in bodies("sync"):
        wrapper.report_sent(body, producer.send_sync(wrapper.message(body)))
    wrapper.wait_for(MESSAGES)


def asynchronous(wrapper: Wrapper) -> None:
    wrapper.consume(lambda message: True)
    producer = wrapper.producer()
    for body in bodies("async"):

        def succeeded(result: Any, body: str = body) -> None:
            wrapper.report_sent(body, result)

        def failed(error: Exception, body: str = body) -> None:
            report("sent", body=body, status=str(error))

        producer.send_async(wrapper.message(body), succeeded, failed)
    wrapper.wait_for(MESSAGES)


def oneway(wrapper: Wrapper) -> None:
    wrapper.consume(lambda message: True)
    producer = wrapper.producer()
    for body in bodies("oneway"):
        producer.send_oneway(wrapper.message(body))
    wrapper.wait_for(MESSAGES)


def batch(wrapper: Wrapper) -> None:
    wrapper.consume(lambda message: True)
    result = wrapper.producer().send_batch([wrapper.message(body) for body in bodies("batch")])
    wrapper.report_sent("", result)
    wrapper.wait_for(MESSAGES)


def big(wrapper: Wrapper) -> None:
    wrapper.consume(lambda message: True)
    producer = wrapper.producer()
    for size in (4_095, 4_097, 100_000):
        body = "".join(f"{number} " for number in range(size))[:size]
        wrapper.report_sent(body, producer.send_sync(wrapper.message(body)))
    wrapper.wait_for(3)


def delay(wrapper: Wrapper) -> None:
    wrapper.consume(lambda message: True)
    producer = wrapper.producer()
    for body in bodies("delay")[:3]:
        message = wrapper.message(body)
        message.set_delay_time_level(1)
        wrapper.report_sent(body, producer.send_sync(message))
    wrapper.wait_for(3)


def tags(wrapper: Wrapper) -> None:
    wrapper.consume(lambda message: True, tags="red || green")
    producer = wrapper.producer()
    for tag in ("blue", "red", "", "green", "redder"):
        body = f"tagged-{tag}"
        wrapper.report_sent(body, producer.send_sync(wrapper.message(body, tag=tag)))
    wrapper.wait_for(2)


def orderly(wrapper: Wrapper) -> None:
    wrapper.consume(lambda message: True, orderly=True)
    producer = wrapper.producer()
    for step in range(6):
        for order in range(3):
            body = f"{order}/{step}"
            wrapper.report_sent(body, wrapper.send_in_order(producer, body, order))
    wrapper.wait_for(18)


def broadcast(wrapper: Wrapper) -> None:
    wrapper.consume(lambda message: True, broadcast=True)
    time.sleep(BROADCAST_START_S)
    producer = wrapper.producer()
    for body in bodies("broadcast"):
        wrapper.report_sent(body, producer.send_sync(wrapper.message(body)))
    wrapper.wait_for(MESSAGES)


def retry(wrapper: Wrapper) -> None:
    wrapper.consume(lambda message: text(message.body) == "fine" or message.reconsume_times == 2)
    producer = wrapper.producer()
    for body in ("fine", "again"):
        wrapper.report_sent(body, producer.send_sync(wrapper.message(body)))
    wrapper.wait_for(4)


def pull(wrapper: Wrapper) -> None:
    producer = wrapper.producer()
    for body in bodies("pulled"):
        wrapper.report_sent(body, producer.send_sync(wrapper.message(body)))
    consumer = wrapper.started(client.PullConsumer(f"{wrapper.group}-pullers"))
    for message in consumer.pull(wrapper.topic):
        wrapper.report_received(message)


# A body starts with a plan: the verdict of the local transaction, then those of the checks.


def transaction(wrapper: ClientPython) -> None:
    wrapper.consume(lambda message: True)
    park = wrapper.transaction_sender(planned_verdict)
    for number in range(MESSAGES):
        for plan in ("commit", "rollback"):
            park(f"{plan}/{number}")
    park("commit/" + "".join(f"{number} " for number in range(20_000))[:20_000])
    wrapper.wait_for(MESSAGES + 1)
    time.sleep(NO_MORE_CHECKS_S)


def transaction_check(wrapper: ClientPython) -> None:
    wrapper.consume(lambda message: True)
    park = wrapper.transaction_sender(planned_verdict)
    for number in range(3):
        for plan in (
            *("unknown,commit", "unknown,rollback", "throw,commit", "throw,rollback"),
            *("unknown,unknown,commit", "unknown,throw,rollback", "commit", "rollback"),
        ):
            park(f"{plan}/{number}")
    wrapper.wait_for(3 * 4)
    time.sleep(NO_MORE_CHECKS_S)


def transaction_slow(wrapper: ClientPython) -> None:
    """Each local transaction runs until its half was checked, and then commits."""
    wrapper.consume(lambda message: True)
    checked = {f"{plan}/slow": threading.Event() for plan in ("unknown", "commit", "rollback")}

    def plan(body: str, check: int) -> str:
        if check:
            checked[body].set()
            return body.partition("/")[0]
        if not checked[body].wait(TIMEOUT_S):
            report("failed", reason=f"{body} was not checked")
        time.sleep(0.3)  # the client does not report when it has sent the verdict of the check
        return "commit"

    park = wrapper.transaction_sender(plan)
    for body in checked:
        park(body)
    wrapper.wait_for(2)
    time.sleep(NO_MORE_CHECKS_S)


def planned_verdict(body: str, check: int) -> str:
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
    "autocreate": sync,  # the topic does not exist before the first message
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
    client_name, namesrv, topic, group, scenario = sys.argv[1:]
    wrappers: dict[str, type[Wrapper]] = {
        "rocketmq-client-python": ClientPython,
        "rocketmq": Rocketmq,
    }
    try:
        wrapper = wrappers[client_name](namesrv, topic, group)
        SCENARIOS[scenario](wrapper)
        wrapper.close()
    except Exception as error:
        report("failed", reason=f"{type(error).__name__}: {error}")
        traceback.print_exc()
        return 1
    report("done")
    return 0


if __name__ == "__main__":
    os._exit(main())  # native threads would keep the process alive
