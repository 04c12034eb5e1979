"""Follow the messages of a topic, over all brokers, without being a consumer.

Queues are pulled by offset, round after round, and nothing is committed: no group moves, nobody
is told, the broker keeps nothing about it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from escrowmq.cli.brokers import Cluster
from escrowmq.cli.call import BrokerAddress, SyncConnection
from escrowmq.cli.figures import NOT_FOUND_CODES, topic_offsets
from escrowmq.cli.lookups import PULL_SUBSCRIPTION_FLAG
from escrowmq.cli.options import EARLIEST, LATEST
from escrowmq.cli.output import pause
from escrowmq.cli.rendering import MessageView, decode_messages
from escrowmq.clock import Clock, SystemClock
from escrowmq.errors import EscrowError, NoRoute, RequestRefused
from escrowmq.message.names import TOOLS_CONSUMER_GROUP
from escrowmq.remoting.codes import RequestCode, ResponseCode
from escrowmq.remoting.command import Command
from escrowmq.remoting.headers import OffsetResponse, PullMessage, SearchOffset, decode_header

_POLL_INTERVAL_S: Final = 0.2
_REFRESH_INTERVAL_S: Final = 5.0  # for queues that are new, and brokers that came back
_PULL_MAX_MESSAGES: Final = 32
_EMPTY_CODES: Final = (ResponseCode.PULL_NOT_FOUND, ResponseCode.PULL_RETRY_IMMEDIATELY)


@dataclass(frozen=True, slots=True)
class TailRequest:
    topic: str
    start: str | int = LATEST  # or earliest, or a time
    expression: str = "*"
    expression_type: str = "TAG"
    follow: bool = True


@dataclass(slots=True)
class _BrokerTail:
    """A connection to one broker, and how far its queues are read."""

    broker: BrokerAddress
    connection: SyncConnection
    offsets: dict[int, int] = field(default_factory=dict)


class MessageTail:
    def __init__(self, cluster: Cluster, request: TailRequest, clock: Clock | None = None) -> None:
        self._cluster = cluster
        self._request = request
        self._clock = clock or SystemClock()
        self._tails: dict[BrokerAddress, _BrokerTail] = {}
        self._saved_offsets: dict[BrokerAddress, dict[int, int]] = {}  # of lines that broke
        self._is_first_refresh = True

    def messages(self) -> Iterator[MessageView]:
        """Without an end, if it follows. In the order of their storing within a round."""
        looked_s = self._clock.elapsed_s()
        self._refresh_queues()
        if not self._tails and not self._cluster.failures:
            asked = ", ".join(place.name for place in self._cluster.brokers)
            raise NoRoute(
                f"no topic {self._request.topic} on {asked}: escrowmq topic list shows them"
            )
        while True:
            found, has_moved = self._pull_all()
            yield from sorted(found, key=lambda one: one.record.stored_ms)
            if has_moved:
                continue
            if not self._request.follow:
                return
            pause(_POLL_INTERVAL_S)
            if self._clock.elapsed_s() - looked_s >= _REFRESH_INTERVAL_S:
                looked_s = self._clock.elapsed_s()
                self._refresh_queues()

    def close(self) -> None:
        for line in self._tails.values():
            line.connection.__exit__(None, None, None)
        self._tails.clear()

    def _refresh_queues(self) -> None:
        """At the queues that there are now. New ones are read from their beginning."""
        for place in self._cluster.brokers:
            try:
                line = self._tails.get(place) or _BrokerTail(place, SyncConnection(place.address))
                self._tails[place] = line
                self._add_queues(line)
            except RequestRefused as error:
                self._disconnect(place)
                if error.code not in NOT_FOUND_CODES:
                    self._cluster.report_failure(place, error)
            except EscrowError as error:
                self._disconnect(place)
                self._cluster.report_failure(place, error)
        self._is_first_refresh = False

    def _add_queues(self, tail: _BrokerTail) -> None:
        topic = self._request.topic
        offsets = topic_offsets(tail.connection, [topic])
        if topic not in offsets:
            self._disconnect(tail.broker)
            return
        tail.offsets = tail.offsets or self._saved_offsets.pop(tail.broker, {})
        for queue, one in offsets[topic].items():
            if queue.queue_id in tail.offsets:
                continue
            if not self._is_first_refresh or self._request.start == EARLIEST:
                at = one.min_offset
            elif self._request.start == LATEST:
                at = one.max_offset
            else:
                at = self._search_offset(tail.connection, queue.queue_id, int(self._request.start))
            tail.offsets[queue.queue_id] = at

    def _search_offset(self, connection: SyncConnection, queue_id: int, time_ms: int) -> int:
        asked = SearchOffset(topic=self._request.topic, queue_id=queue_id, timestamp=time_ms)
        reply = connection.call(RequestCode.SEARCH_OFFSET_BY_TIMESTAMP, asked)
        return decode_header(OffsetResponse, reply.ext_fields).offset

    def _disconnect(self, broker: BrokerAddress) -> None:
        line = self._tails.pop(broker, None)
        if line is not None:
            self._saved_offsets[broker] = line.offsets
            line.connection.__exit__(None, None, None)

    def _pull_all(self) -> tuple[list[MessageView], bool]:
        """What is new, and whether any queue was moved on."""
        found: list[MessageView] = []
        has_moved = False
        for line in list(self._tails.values()):
            queues = sorted(line.offsets)
            try:
                answers = line.connection.call_all_raw(
                    RequestCode.PULL_MESSAGE, [self._pull_header(line, queue) for queue in queues]
                )
                for queue, (command, body) in zip(queues, answers, strict=True):
                    following = _next_offset(line, command)
                    has_moved = has_moved or following > line.offsets[queue]
                    line.offsets[queue] = max(following, line.offsets[queue])
                    found += decode_messages(body, line.broker.name)
            except EscrowError as error:
                self._cluster.report_failure(line.broker, error)
                self._disconnect(line.broker)
        return found, has_moved

    def _pull_header(self, tail: _BrokerTail, queue_id: int) -> PullMessage:
        return PullMessage(
            consumer_group=TOOLS_CONSUMER_GROUP,
            topic=self._request.topic,
            queue_id=queue_id,
            queue_offset=tail.offsets[queue_id],
            max_msg_nums=_PULL_MAX_MESSAGES,
            sys_flag=PULL_SUBSCRIPTION_FLAG,
            subscription=self._request.expression,
            expression_type=self._request.expression_type,
        )


def _next_offset(tail: _BrokerTail, command: Command) -> int:
    codes = (ResponseCode.SUCCESS, *_EMPTY_CODES, ResponseCode.PULL_OFFSET_MOVED)
    if command.code not in codes:
        raise RequestRefused(command.code, command.remark or f"code {command.code}")
    return int(command.ext_fields.get("nextBeginOffset", "0"))
