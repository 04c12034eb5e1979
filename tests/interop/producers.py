"""A transactional producer on one connection: parks halves, hears what it is asked, answers.

Bodies are names, so that what is asked about and what is delivered can be compared by them.
"""

from __future__ import annotations

import select
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType

from tests.interop.records import decode_record
from tests.interop.remoting import COMMIT, ROLLBACK, SUCCESS, UNKNOWN, Client, SendResult

TOPIC, QUEUES = "orders", 2
GROUP = "clerks"
STRANDED_TOPIC = "TRANS_CHECK_MAX_TIME_TOPIC"
CHECK = 39
END = 37
PATIENCE_S = 30.0
_POLL_S = 0.1

VERDICTS = {"commit": COMMIT, "rollback": ROLLBACK, "unknown": UNKNOWN}


class Producer:
    """Of one or more groups. What it is asked is in `asked`, once for every time."""

    def __init__(self, address: str, *groups: str) -> None:
        self.client = Client(address, timeout_s=PATIENCE_S)
        self.asked: Counter[str] = Counter()
        self.times: dict[str, str] = {}  # the check's own count, of the last check
        self._answered: set[str] = set()
        try:
            self.client.heartbeat("127.0.0.1@clerk", producer_groups=groups or (GROUP,))
        except BaseException:
            self.client.close()
            raise

    def __enter__(self) -> Producer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.client.close()

    # Sending.

    def park(self, name: str, *, group: str = GROUP, born_ms: int | None = None) -> SendResult:
        number = sum(map(ord, name))
        properties = {"UNIQ_KEY": key_of(name), "TAGS": "tag", "KEYS": f"key-{name}"}
        return self.client.send_half(
            *(TOPIC, name.encode(), properties),
            queue_id=number % QUEUES,
            group=group,
            born_ms=born_ms,
        )

    def end(self, half: SendResult, verdict: int, *, group: str = GROUP) -> None:
        answer = self.client.end_transaction(half, verdict, topic=TOPIC, group=group)
        assert answer.code == SUCCESS, answer

    def settle(self, names: Iterable[str], verdict: int) -> None:
        for name in names:
            self.end(self.park(name), verdict)

    # Being asked.

    def listen(self, plan: Mapping[str, int], *, seconds: float) -> None:
        """Answer what is asked; every half for good only once, whoever asks again."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self._hear(plan, deadline)

    def listen_until(self, done: Callable[[], bool], plan: Mapping[str, int]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not done():
            assert time.monotonic() < deadline, f"asked so far: {dict(self.asked)}"
            self._hear(plan, time.monotonic() + _POLL_S)

    def _hear(self, plan: Mapping[str, int], deadline: float) -> None:
        unasked = self.client.pending_frames
        left = max(0.0, deadline - time.monotonic())
        if not unasked and not select.select([self.client.socket], [], [], left)[0]:
            return
        header, body = unasked.pop(0) if unasked else self.client.receive_frame()
        if header["code"] != CHECK:
            return
        record = decode_record(body)
        name = record.body.decode()
        self.asked[name] += 1
        self.times[name] = record.properties.get("TRANSACTION_CHECK_TIMES", "")
        assert record.topic == TOPIC
        verdict = plan.get(name)
        if verdict is None or name in self._answered:
            return
        if verdict != UNKNOWN:
            self._answered.add(name)
        fields = header["extFields"]
        self.client.send_one_way(
            END,
            {
                "topic": TOPIC,
                "producerGroup": record.properties["PGROUP"],
                "tranStateTableOffset": fields["tranStateTableOffset"],
                "commitLogOffset": fields["commitLogOffset"],
                "commitOrRollback": verdict,
                "fromTransactionCheck": True,
                "msgId": record.properties["UNIQ_KEY"],
                "transactionId": fields.get("transactionId", ""),
            },
        )

    # Looking.

    def delivered(self) -> Counter[str]:
        """Every message of the topic, by name."""
        return Counter(
            record.body.decode()
            for queue_id in range(QUEUES)
            for record in self.client.pull_all(TOPIC, queue_id)
        )


def key_of(name: str) -> str:
    return f"7F000001{name.encode().hex().upper():0>48}"
