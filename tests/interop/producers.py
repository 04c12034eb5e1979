"""A transactional producer on one connection, which parks halves and responds to checks.

A body is the name of its message, so that checks and delivered messages can be compared by it.
"""

from __future__ import annotations

import select
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType

from tests.interop.records import decode_record
from tests.interop.remoting import SUCCESS, UNKNOWN, Client, SendResult

TOPIC, QUEUES = "orders", 2
GROUP = "producers"
STRANDED_TOPIC = "TRANS_CHECK_MAX_TIME_TOPIC"
CHECK_TRANSACTION_STATE = 39
END_TRANSACTION = 37
TIMEOUT_S = 30.0
_POLL_S = 0.1


class Producer:
    """A member of one or more groups. `checks` counts the checks of each message."""

    def __init__(self, address: str, *groups: str) -> None:
        self.client = Client(address, timeout_s=TIMEOUT_S)
        self.checks: Counter[str] = Counter()
        self._decided: set[str] = set()
        try:
            self.client.heartbeat("127.0.0.1@producer", producer_groups=groups or (GROUP,))
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
        """Send a half message with this name."""
        number = sum(map(ord, name))
        properties = {"UNIQ_KEY": unique_key(name), "TAGS": "tag", "KEYS": f"key-{name}"}
        return self.client.send_half(
            *(TOPIC, name.encode(), properties),
            queue_id=number % QUEUES,
            group=group,
            born_ms=born_ms,
        )

    def end(self, half: SendResult, verdict: int, *, group: str = GROUP) -> None:
        response = self.client.end_transaction(half, verdict, topic=TOPIC, group=group)
        assert response.code == SUCCESS, response

    def park_and_end(self, names: Iterable[str], verdict: int) -> None:
        for name in names:
            self.end(self.park(name), verdict)

    # Checks.

    def respond_to_checks(self, verdicts: Mapping[str, int], *, seconds: float) -> None:
        """Respond to checks for `seconds`, with the verdict for each name.

        A name without a verdict gets no response. COMMIT and ROLLBACK are sent once, even if the
        broker checks again.
        """
        deadline_s = time.monotonic() + seconds
        while time.monotonic() < deadline_s:
            self._respond_to_next_check(verdicts, deadline_s)

    def respond_until(self, condition: Callable[[], bool], verdicts: Mapping[str, int]) -> None:
        """Respond to checks until the condition is true."""
        deadline_s = time.monotonic() + TIMEOUT_S
        while not condition():
            assert time.monotonic() < deadline_s, f"checks so far: {dict(self.checks)}"
            self._respond_to_next_check(verdicts, time.monotonic() + _POLL_S)

    def _respond_to_next_check(self, verdicts: Mapping[str, int], deadline_s: float) -> None:
        remaining_s = max(0.0, deadline_s - time.monotonic())
        is_pending = bool(self.client.pending_frames)
        if not is_pending and not select.select([self.client.socket], [], [], remaining_s)[0]:
            return
        header, body = self.client.next_frame()
        if header["code"] != CHECK_TRANSACTION_STATE:
            return
        record = decode_record(body)
        name = record.body.decode()
        self.checks[name] += 1
        assert record.topic == TOPIC
        verdict = verdicts.get(name)
        if verdict is None or name in self._decided:
            return
        if verdict != UNKNOWN:
            self._decided.add(name)
        fields = header["extFields"]
        self.client.send_one_way(
            END_TRANSACTION,
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

    # Reading.

    def delivered(self) -> Counter[str]:
        """Return how often each message is in the queues of the topic."""
        return Counter(
            record.body.decode()
            for queue_id in range(QUEUES)
            for record in self.client.pull_all(TOPIC, queue_id)
        )


def unique_key(name: str) -> str:
    return f"7F000001{name.encode().hex().upper():0>48}"
