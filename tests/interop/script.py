"""The messages that `capture.py` sends to real brokers, in every run in the same order."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable

from tests.interop.remoting import (
    COMMIT,
    HALF_TOPIC,
    OP_TOPIC,
    PULL_NOT_FOUND,
    ROLLBACK,
    SUCCESS,
    Client,
    ResponseError,
    SendResult,
)
from tests.interop.stores import Queue
from tests.support.waiting import wait_until

SCHEDULE_TOPIC = "SCHEDULE_TOPIC_XXXX"
LONG_GROUP = "warehouse-" + "x" * 120  # its retry topic does not fit into one length byte
BODY_SIZES = (1, 10, 100, 500, 1024, 3000, 5000)
TAGS = ("TagA", "TagB", None, "中文tag", "")

MESSAGES_TIMEOUT_S = 40.0  # the delayed message is due after 10 s

COMMITTED = (  # group, topic, queue id, queue offset
    ("billing", "orders", 0, 3),
    ("billing", "orders", 1, 2),
    ("billing", "payments", 0, 33),
    ("audit", "orders", 3, 1),
)


class Script:
    """Send the messages in order. `save_exchange` saves the last exchange as a wire fixture."""

    def __init__(self, client: Client, save_exchange: Callable[[str], None]) -> None:
        self._client = client
        self._save_exchange = save_exchange
        self._count = 0
        self.unique_keys: list[tuple[str, str]] = []
        self.refusals: dict[str, str] = {}

    def run(self) -> None:
        self._create_topics_and_groups()
        self._send_delayed()
        self._send_orders()
        self._send_payments()
        self._send_special_bodies()
        self._send_retries()
        self._run_transactions()
        self._commit_offsets()
        wait_for_messages(
            self._client, ("orders", 2), self._orders_in_queue_2 + 1
        )  # the delayed message

    def _create_topics_and_groups(self) -> None:
        self._client.create_topic("orders", queues=4)
        self._save_exchange("create_topic")
        self._client.create_topic("payments", queues=2)
        self._client.create_group("billing")
        self._save_exchange("create_group")
        self._client.create_group("audit")

    def _send_delayed(self) -> None:
        self._send("orders", b"after ten seconds", {"DELAY": "3", "TAGS": "late"}, queue_id=2)
        self._save_exchange("send.delayed")
        self._send("orders", b"after two hours", {"DELAY": "18"}, queue_id=2)

    def _send_orders(self) -> None:
        for number in range(21):
            properties = {"KEYS": f"order-{number} customer-{number % 3}", "colour": "grün"}
            tag = TAGS[number % len(TAGS)]
            if tag is not None:
                properties["TAGS"] = tag
            size = BODY_SIZES[number % len(BODY_SIZES)]
            body = (f"order {number}; ".encode() * size)[:size]
            self._send("orders", body, properties, queue_id=number % 4)
            if number == 0:
                self._save_exchange("send")
        self._orders_in_queue_2 = self._client.max_offset("orders", 2)

    def _send_payments(self) -> None:
        for number in range(33):
            properties = {"KEYS": f"payment-{number} common", "TAGS": f"T{number % 2}"}
            self._send("payments", f"payment {number}".encode(), properties)
            if number % 10 == 9:
                time.sleep(0.02)  # different store times, which a search by time needs

    def _send_special_bodies(self) -> None:
        text = "Überweisung nach 東京 "
        properties = {"KEYS": "größe", "emoji": "\U0001f600"}
        self._send("orders", text.encode(), properties, queue_id=3, flag=7)
        compressed = zlib.compress((text * 300).encode(), 5)
        self._send("orders", compressed, {"TAGS": "zlib"}, queue_id=3, sys_flag=1)
        self._send("orders", compressed, {"TAGS": "zlib"}, queue_id=3, sys_flag=0x301)

    def _send_retries(self) -> None:
        properties = {"RETRY_TOPIC": "orders", "ORIGIN_MESSAGE_ID": "0" * 32}
        self._send("%RETRY%billing", b"again", properties, reconsume_times=1)
        try:
            self._send(f"%RETRY%{LONG_GROUP}", b"long topic", properties, reconsume_times=1)
        except ResponseError as error:
            self.refusals["long retry topic"] = str(error)
            self._save_exchange("send.refused")

    def _run_transactions(self) -> None:
        halves = [self._send_half(name) for name in ("committed", "rolled back", "open")]
        self._save_exchange("send.half")
        self._end(halves[0], COMMIT, "end_transaction.commit")
        self._end(halves[1], ROLLBACK, "end_transaction.rollback")
        # 5.5.0 writes one op for several halves, seconds later, and loses it at a stop. So wait.
        wait_for_ops(self._client, decided=2)

    def _send_half(self, name: str) -> SendResult:
        key = self._next_unique_key()
        properties = {
            "UNIQ_KEY": key,
            "KEYS": f"half-{len(name)}",
            "TAGS": "tx",
            "user": "ü",
        }
        self.unique_keys += [(HALF_TOPIC, key), ("orders", key)]
        return self._client.send_half("orders", f"half, {name}".encode(), properties, queue_id=1)

    def _end(self, half: SendResult, verdict: int, exchange: str) -> None:
        response = self._client.end_transaction(half, verdict, topic="orders")
        assert response.code == SUCCESS, response
        self._save_exchange(exchange)

    def _commit_offsets(self) -> None:
        for group, topic, queue_id, queue_offset in COMMITTED:
            self._client.commit_offset(group, topic, queue_id, queue_offset)
        self._save_exchange("update_offset")

    def _send(
        self,
        topic: str,
        body: bytes,
        properties: dict[str, str],
        *,
        queue_id: int = 0,
        sys_flag: int = 0,
        flag: int = 0,
        reconsume_times: int = 0,
    ) -> None:
        key = self._next_unique_key()
        self.unique_keys.append((topic, key))
        self._client.send(
            topic,
            body,
            {**properties, "UNIQ_KEY": key, "WAIT": "true"},
            queue_id=queue_id,
            sys_flag=sys_flag,
            flag=flag,
            reconsume_times=reconsume_times,
        )

    def _next_unique_key(self) -> str:
        self._count += 1
        return unique_key(self._count)


def unique_key(number: int) -> str:
    return f"7F000001{number:024X}"


def wait_for_ops(client: Client, *, decided: int) -> None:
    """Wait until the broker has written the ops of this many decided halves.

    5.5.0 writes one op for several halves. 4.9.7 writes one for each; it refuses to serve the op
    topic but responds to requests for its offsets.
    """
    is_5 = client.pull(OP_TOPIC, 0, 0).code in (SUCCESS, PULL_NOT_FOUND)
    wait_for_messages(client, (OP_TOPIC, 0), 1 if is_5 else decided)


def wait_for_messages(client: Client, queue: Queue, count: int) -> None:
    """Wait until a queue has `count` messages."""
    wait_until(
        lambda: client.max_offset(*queue) >= count,
        f"{queue} has {count} messages",
        timeout_s=MESSAGES_TIMEOUT_S,
    )
