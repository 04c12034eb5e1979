"""The messages that `capture.py` has real brokers store, always the same and in the same order."""

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

SCHEDULE_TOPIC = "SCHEDULE_TOPIC_XXXX"
LONG_GROUP = "warehouse-" + "x" * 120  # with %RETRY% in front, more than one length byte can say
BODY_SIZES = (1, 10, 100, 500, 1024, 3000, 5000)
TAGS = ("TagA", "TagB", None, "中文tag", "")

COMMITTED = (
    ("billing", "orders", 0, 3),
    ("billing", "orders", 1, 2),
    ("billing", "payments", 0, 33),
    ("audit", "orders", 3, 1),
)


class Script:
    """The messages, in order. `keep` puts an exchange aside as a wire fixture."""

    def __init__(self, client: Client, keep: Callable[[str], None]) -> None:
        self._client = client
        self._keep = keep
        self._count = 0
        self.unique_keys: list[tuple[str, str]] = []
        self.refusals: dict[str, str] = {}

    def run(self) -> None:
        self._create()
        self._delayed()
        self._orders()
        self._payments()
        self._special_bodies()
        self._retries()
        self._transactions()
        self._committed_offsets()
        self._await("the delayed message", "orders", 2, self._orders_on_queue_2 + 1)

    def _create(self) -> None:
        self._client.create_topic("orders", queues=4)
        self._keep("create_topic")
        self._client.create_topic("payments", queues=2)
        self._client.create_group("billing")
        self._keep("create_group")
        self._client.create_group("audit")

    def _delayed(self) -> None:
        self._send("orders", b"after ten seconds", {"DELAY": "3", "TAGS": "late"}, queue_id=2)
        self._keep("send.delayed")
        self._send("orders", b"after two hours", {"DELAY": "18"}, queue_id=2)

    def _orders(self) -> None:
        for number in range(21):
            properties = {"KEYS": f"order-{number} customer-{number % 3}", "colour": "grün"}
            tag = TAGS[number % len(TAGS)]
            if tag is not None:
                properties["TAGS"] = tag
            size = BODY_SIZES[number % len(BODY_SIZES)]
            body = (f"order {number}; ".encode() * size)[:size]
            self._send("orders", body, properties, queue_id=number % 4)
            if number == 0:
                self._keep("send")
        self._orders_on_queue_2 = self._client.max_offset("orders", 2)

    def _payments(self) -> None:
        for number in range(33):
            properties = {"KEYS": f"payment-{number} common", "TAGS": f"T{number % 2}"}
            self._send("payments", f"payment {number}".encode(), properties)
            if number % 10 == 9:
                time.sleep(0.02)  # so that a search by time has something to tell apart

    def _special_bodies(self) -> None:
        text = "Überweisung nach 東京 "
        properties = {"KEYS": "größe", "emoji": "\U0001f600"}
        self._send("orders", text.encode(), properties, queue_id=3, flag=7)
        squeezed = zlib.compress((text * 300).encode(), 5)
        self._send("orders", squeezed, {"TAGS": "zlib"}, queue_id=3, sys_flag=1)
        self._send("orders", squeezed, {"TAGS": "zlib"}, queue_id=3, sys_flag=0x301)

    def _retries(self) -> None:
        properties = {"RETRY_TOPIC": "orders", "ORIGIN_MESSAGE_ID": "0" * 32}
        self._send("%RETRY%billing", b"again", properties, reconsume_times=1)
        try:
            self._send(f"%RETRY%{LONG_GROUP}", b"long topic", properties, reconsume_times=1)
        except ResponseError as error:
            self.refusals["long retry topic"] = str(error)
            self._keep("send.refused")

    def _transactions(self) -> None:
        halves = [self._send_half(name) for name in ("committed", "rolled back", "open")]
        self._keep("send.half")
        self._end(halves[0], COMMIT, "end_transaction.commit")
        self._end(halves[1], ROLLBACK, "end_transaction.rollback")
        # 5.x gathers ops for seconds, and a stop does not wait for them. 4.x has no settings
        # for the op topic until later, but tells how long its queue is.
        self._await("the ops", OP_TOPIC, 0, 1 if self._ops_are_gathered() else 2)

    def _ops_are_gathered(self) -> bool:
        answer = self._client.pull(OP_TOPIC, 0, 0)
        return answer.code in (SUCCESS, PULL_NOT_FOUND)

    def _send_half(self, name: str) -> SendResult:
        unique = self._next_unique_key()
        properties = {"UNIQ_KEY": unique, "KEYS": f"half-{len(name)}", "TAGS": "tx", "user": "ü"}
        self.unique_keys += [(HALF_TOPIC, unique), ("orders", unique)]
        return self._client.send_half("orders", f"half, {name}".encode(), properties, queue_id=1)

    def _end(self, half: SendResult, verdict: int, name: str) -> None:
        answer = self._client.end_transaction(half, verdict, topic="orders")
        assert answer.code == SUCCESS, answer
        self._keep(name)

    def _committed_offsets(self) -> None:
        for group, topic, queue_id, queue_offset in COMMITTED:
            self._client.commit_offset(group, topic, queue_id, queue_offset)
        self._keep("update_offset")

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
        unique = self._next_unique_key()
        self.unique_keys.append((topic, unique))
        self._client.send(
            topic,
            body,
            {**properties, "UNIQ_KEY": unique, "WAIT": "true"},
            queue_id=queue_id,
            sys_flag=sys_flag,
            flag=flag,
            reconsume_times=reconsume_times,
        )

    def _next_unique_key(self) -> str:
        self._count += 1
        return f"7F000001{self._count:024X}"

    def _await(self, what: str, topic: str, queue_id: int, count: int) -> None:
        deadline = time.monotonic() + 40
        while self._client.max_offset(topic, queue_id) < count:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{what} did not come")
            time.sleep(0.1)
