"""Flow control: refuse sends with SYSTEM_BUSY before memory or disk is at risk.

Replies and messages that consumers send back are stored like sends, so they are limited too. There
are three limits: on what one connection sends, on what is sent to one topic, and on how much
of the log the disk has not written yet. As long as none is set or reached, `is_limiting` is False
and the broker does not call flow control at all.

A rate is a token bucket that holds the tokens of one second. A send passes if the bucket is not
empty, even if it costs more than is left; the bucket is then below zero and fills up from there. So
a message longer than the rate gets through, and the rate holds on average.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable
from typing import Any, Final

from escrowmq.broker.dispatch import Channel, HandlerFunction
from escrowmq.config import OverloadConfig
from escrowmq.errors import BrokenBody, CorruptRecord, RecordNotFound, RequestRefused
from escrowmq.message.batch import decode_batch
from escrowmq.message.names import retry_topic
from escrowmq.message.record import LogOffset
from escrowmq.remoting.codes import ResponseCode
from escrowmq.remoting.headers import ConsumerSendMessageBack
from escrowmq.remoting.requests import Request
from escrowmq.store.store import MessageStore

CONNECTION: Final = "connection"
TOPIC: Final = "topic"
UNFLUSHED: Final = "unflushed"
IDLE_MS: Final = 10_000
_REJECT_MARK: Final = "[REJECTREQUEST]"  # RocketMQ's users search their logs for it


class FlowControl:
    def __init__(self, store: MessageStore, config: OverloadConfig) -> None:
        self._store = store
        self._config = config
        # By what is limited (a channel or a topic name), and whether bytes are counted.
        self._buckets: dict[tuple[Hashable, bool], _Bucket] = {}
        self.refused_by_limit: defaultdict[str, int] = defaultdict(int)
        self.is_limiting = False
        self.update()

    def change_config(self, config: OverloadConfig) -> None:
        self._config = config
        self._buckets.clear()
        self.update()

    def update(self) -> None:
        """Find out whether sends have to be checked. Called at the end of each turn."""
        self.is_limiting = self._config.has_rates or self.is_disk_behind

    @property
    def is_disk_behind(self) -> bool:
        return self._store.end - self._store.flushed_offset > self._config.unflushed_bytes_max

    def handle(
        self, function: HandlerFunction, channel: Channel, request: Request[Any], now_ms: int
    ) -> None:
        """Call the handler function of a send, or raise RequestRefused with SYSTEM_BUSY."""
        config, fields = self._config, request.head.fields
        is_send_back = type(fields) is ConsumerSendMessageBack
        topic = retry_topic(fields.group) if is_send_back else fields.topic
        if self.is_disk_behind:
            self._refuse(
                UNFLUSHED,
                f"more than escrowUnflushedBytesMax={config.unflushed_bytes_max} bytes "
                "wait for the disk",
            )
        sends_max, bytes_max = config.connection_sends_max, config.connection_send_bytes_max
        limits = (
            (CONNECTION, channel, False, sends_max, "escrowConnectionSendsMax"),
            (CONNECTION, channel, True, bytes_max, "escrowConnectionSendBytesMax"),
            (TOPIC, topic, False, config.topic_sends_max, "escrowTopicSendsMax"),
            (TOPIC, topic, True, config.topic_send_bytes_max, "escrowTopicSendBytesMax"),
        )
        charged: list[tuple[tuple[Hashable, bool], _Bucket]] = []
        for limit, owner, counts_bytes, rate_per_s, setting in limits:
            if rate_per_s:
                key = owner, counts_bytes
                bucket = self._buckets.get(key) or _Bucket(rate_per_s, now_ms)
                if not bucket.has_tokens(rate_per_s, now_ms):
                    self._refuse(limit, f"{setting}={rate_per_s} per second; send less, or later")
                charged.append((key, bucket))
        function(channel, request, now_ms)
        # A send that the handler refused raised above. It costs nothing and leaves nothing: the
        # name of its topic may be any text.
        for key, bucket in charged:
            self._buckets[key] = bucket
            counts_bytes = key[1]
            if is_send_back:
                bucket.tokens -= self._record_bytes(fields.offset) if counts_bytes else 1
            else:
                bucket.tokens -= len(request.body) if counts_bytes else _message_count(request)

    def _record_bytes(self, log_offset: int) -> int:
        """Return the size of the body that a send-back stores again."""
        try:
            return len(self._store.record_at(LogOffset(log_offset)).body)
        except (RecordNotFound, CorruptRecord):
            return 0

    def purge_idle(self, now_ms: int) -> None:
        """Drop the buckets that are full again; a new one would be the same."""
        self._buckets = {
            key: bucket
            for key, bucket in self._buckets.items()
            if now_ms - bucket.updated_ms < IDLE_MS or bucket.tokens < 0
        }

    def channel_closed(self, channel: Channel) -> None:
        self._buckets.pop((channel, False), None)
        self._buckets.pop((channel, True), None)

    def _refuse(self, limit: str, reason: str) -> None:
        self.refused_by_limit[limit] += 1
        raise RequestRefused(ResponseCode.SYSTEM_BUSY, f"{_REJECT_MARK} system busy: {reason}")


class _Bucket:
    __slots__ = ("tokens", "updated_ms")

    def __init__(self, rate_per_s: int, now_ms: int) -> None:
        self.tokens = float(rate_per_s)
        self.updated_ms = now_ms

    def has_tokens(self, rate_per_s: int, now_ms: int) -> bool:
        new_tokens = rate_per_s * (now_ms - self.updated_ms) / 1000
        self.tokens = min(float(rate_per_s), self.tokens + new_tokens)
        self.updated_ms = now_ms
        return self.tokens > 0


def _message_count(request: Request[Any]) -> int:
    if not request.head.fields.batch:
        return 1
    try:
        return len(decode_batch(request.body))
    except BrokenBody:
        return 1
