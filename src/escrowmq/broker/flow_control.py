"""Sends that are too many: refused with SYSTEM_BUSY, before memory or disk is at risk.

Three limits: what one connection sends, what is sent to one topic, and how much of the log the disk
has not taken yet. As long as none is set or reached, sends do not come by here at all: `handler`
says who takes them, and is asked again when a turn ends.

A rate is a bucket that holds one second of it. Whoever finds something in it may send, also more
than is left: it fills up again from below zero, so a message longer than the rate gets through, and
the rate is kept on the whole.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, fields
from typing import Any, Final

from escrowmq.broker.dispatch import Channel
from escrowmq.errors import BrokenBody, RequestRefused
from escrowmq.message.batch import decode_batch
from escrowmq.remoting.codes import RequestCode, ResponseCode
from escrowmq.remoting.requests import Request
from escrowmq.store.store import MessageStore

CONNECTION: Final = "connection"
TOPIC: Final = "topic"
UNFLUSHED: Final = "unflushed"
_REJECT_MARK: Final = "[REJECTREQUEST]"  # by which RocketMQ's users find such answers in their logs

SEND_CODES: Final = (
    RequestCode.SEND_MESSAGE_V2,
    RequestCode.SEND_MESSAGE,
    RequestCode.SEND_BATCH_MESSAGE,
)
SendHandler = Callable[[Channel, Request[Any], int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowControlRules:
    """Rates are a second's; 0: no limit."""

    unflushed_bytes_max: int = 1 << 30
    connection_sends_max: int = 0
    connection_send_bytes_max: int = 0
    topic_sends_max: int = 0
    topic_send_bytes_max: int = 0

    @property
    def has_rates(self) -> bool:
        return any(getattr(self, item.name) for item in fields(self)[1:])


class _Bucket:
    __slots__ = ("tokens", "updated_ms")

    def __init__(self, rate_per_s: int, now_ms: int) -> None:
        self.tokens = float(rate_per_s)
        self.updated_ms = now_ms

    def has_tokens(self, rate_per_s: int, now_ms: int) -> bool:
        more = rate_per_s * (now_ms - self.updated_ms) / 1000
        self.tokens = min(float(rate_per_s), self.tokens + more)
        self.updated_ms = now_ms
        return self.tokens > 0


class FlowControl:
    def __init__(self, store: MessageStore, send: SendHandler, rules: FlowControlRules) -> None:
        self._store = store
        self._send = send
        self.rules = rules
        self._buckets: dict[tuple[Hashable, bool], _Bucket] = {}  # of whom; whether of bytes
        self.refused_by_limit: defaultdict[str, int] = defaultdict(int)  # by limit

    def change_rules(self, rules: FlowControlRules) -> None:
        self.rules = rules
        self._buckets.clear()

    @property
    def is_disk_behind(self) -> bool:
        """The disk does not keep up."""
        return self._store.end - self._store.flushed_offset > self.rules.unflushed_bytes_max

    def send_handler(self) -> SendHandler:
        """Who takes sends as things are."""
        return self._send_limited if self.rules.has_rates or self.is_disk_behind else self._send

    def purge_idle(self, now_ms: int) -> None:
        """Those of whom nothing came for a while: a new bucket says the same."""
        self._buckets = {
            whose: bucket
            for whose, bucket in self._buckets.items()
            if now_ms - bucket.updated_ms < 10_000 or bucket.tokens < 0
        }

    def channel_closed(self, channel: Channel) -> None:
        self._buckets.pop((channel, False), None)
        self._buckets.pop((channel, True), None)

    def _send_limited(self, channel: Channel, request: Request[Any], now_ms: int) -> None:
        rules, topic = self.rules, request.head.fields.topic
        if self.is_disk_behind:
            self._refuse(
                UNFLUSHED,
                f"more than escrowUnflushedBytesMax={rules.unflushed_bytes_max} bytes "
                "wait for the disk",
            )
        limits = [
            (CONNECTION, channel, False, rules.connection_sends_max, "escrowConnectionSendsMax"),
            (
                CONNECTION,
                channel,
                True,
                rules.connection_send_bytes_max,
                "escrowConnectionSendBytesMax",
            ),
            (TOPIC, topic, False, rules.topic_sends_max, "escrowTopicSendsMax"),
            (TOPIC, topic, True, rules.topic_send_bytes_max, "escrowTopicSendBytesMax"),
        ]
        buckets: list[tuple[_Bucket, bool]] = []
        for what, whose, is_bytes, a_second, key in limits:
            if a_second:
                bucket = self._get_bucket((whose, is_bytes), a_second, now_ms)
                if not bucket.has_tokens(a_second, now_ms):
                    self._refuse(what, f"{key}={a_second} a second; send less, or later")
                buckets.append((bucket, is_bytes))
        self._send(channel, request, now_ms)  # what it refuses does not count
        for bucket, is_bytes in buckets:
            bucket.tokens -= len(request.body) if is_bytes else _message_count(request)

    def _get_bucket(self, key: tuple[Hashable, bool], rate_per_s: int, now_ms: int) -> _Bucket:
        found = self._buckets.get(key)
        if found is None:
            found = self._buckets[key] = _Bucket(rate_per_s, now_ms)
        return found

    def _refuse(self, limit: str, reason: str) -> None:
        self.refused_by_limit[limit] += 1
        raise RequestRefused(ResponseCode.SYSTEM_BUSY, f"{_REJECT_MARK} system busy: {reason}")


def _message_count(request: Request[Any]) -> int:
    if not request.head.fields.batch:
        return 1
    try:
        return len(decode_batch(request.body))
    except BrokenBody:
        return 1
