"""Follow the messages of a topic, over all brokers, without being a consumer.

Queues are pulled by offset, round after round, and nothing is committed: no group moves, nobody
is told, the broker keeps nothing about it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from escrowmq.cli.brokers import Brokers
from escrowmq.cli.call import BrokerPlace, Caller
from escrowmq.cli.figures import GONE, topic_offsets
from escrowmq.cli.lookups import HAS_SUBSCRIPTION, TOOLS_GROUP
from escrowmq.cli.options import EARLIEST, LATEST
from escrowmq.cli.output import pause
from escrowmq.cli.rendering import Found, records_in
from escrowmq.clock import Clock, SystemClock
from escrowmq.errors import EscrowError, NoRoute, RequestRefused
from escrowmq.remoting.codes import RequestCode, ResponseCode
from escrowmq.remoting.command import Command
from escrowmq.remoting.headers import OffsetAnswer, PullMessage, SearchOffset, decode_header

_ROUND_S: Final = 0.2
_LOOK_AGAIN_S: Final = 5.0  # for queues that are new, and brokers that came back
_COUNT: Final = 32
_NOTHING: Final = (ResponseCode.PULL_NOT_FOUND, ResponseCode.PULL_RETRY_IMMEDIATELY)


@dataclass(frozen=True, slots=True)
class Wish:
    topic: str
    start: str | int = LATEST  # or earliest, or a time
    expression: str = "*"
    kind: str = "TAG"
    follow: bool = True


@dataclass(slots=True)
class _Line:
    """A connection to one broker, and how far its queues are read."""

    place: BrokerPlace
    caller: Caller
    offsets: dict[int, int] = field(default_factory=dict)


class Tail:
    def __init__(self, brokers: Brokers, wish: Wish, clock: Clock | None = None) -> None:
        self._brokers = brokers
        self._wish = wish
        self._clock = clock or SystemClock()
        self._lines: dict[BrokerPlace, _Line] = {}
        self._left: dict[BrokerPlace, dict[int, int]] = {}  # of lines that broke
        self._is_first = True

    def messages(self) -> Iterator[Found]:
        """Without an end, if it follows. In the order of their storing within a round."""
        looked_s = self._clock.elapsed_s()
        self._look()
        if not self._lines and not self._brokers.failed:
            asked = ", ".join(place.name for place in self._brokers.brokers)
            raise NoRoute(f"no topic {self._wish.topic} on {asked}: escrowmq topic list shows them")
        while True:
            found, has_moved = self._round()
            yield from sorted(found, key=lambda one: one.record.stored_ms)
            if has_moved:
                continue
            if not self._wish.follow:
                return
            pause(_ROUND_S)
            if self._clock.elapsed_s() - looked_s >= _LOOK_AGAIN_S:
                looked_s = self._clock.elapsed_s()
                self._look()

    def close(self) -> None:
        for line in self._lines.values():
            line.caller.__exit__(None, None, None)
        self._lines.clear()

    def _look(self) -> None:
        """At the queues that there are now. New ones are read from their beginning."""
        for place in self._brokers.brokers:
            try:
                line = self._lines.get(place) or _Line(place, Caller(place.address))
                self._lines[place] = line
                self._add_queues(line)
            except RequestRefused as error:
                self._drop(place)
                if error.code not in GONE:
                    self._brokers.note(place, error)
            except EscrowError as error:
                self._drop(place)
                self._brokers.note(place, error)
        self._is_first = False

    def _add_queues(self, line: _Line) -> None:
        topic = self._wish.topic
        offsets = topic_offsets(line.caller, [topic])
        if topic not in offsets:
            self._drop(line.place)
            return
        line.offsets = line.offsets or self._left.pop(line.place, {})
        for queue, one in offsets[topic].items():
            if queue.queue_id in line.offsets:
                continue
            if not self._is_first or self._wish.start == EARLIEST:
                at = one.min_offset
            elif self._wish.start == LATEST:
                at = one.max_offset
            else:
                at = self._offset_at(line.caller, queue.queue_id, int(self._wish.start))
            line.offsets[queue.queue_id] = at

    def _offset_at(self, caller: Caller, queue_id: int, time_ms: int) -> int:
        asked = SearchOffset(topic=self._wish.topic, queue_id=queue_id, timestamp=time_ms)
        reply = caller.call(RequestCode.SEARCH_OFFSET_BY_TIMESTAMP, asked)
        return decode_header(OffsetAnswer, reply.ext_fields).offset

    def _drop(self, place: BrokerPlace) -> None:
        line = self._lines.pop(place, None)
        if line is not None:
            self._left[place] = line.offsets
            line.caller.__exit__(None, None, None)

    def _round(self) -> tuple[list[Found], bool]:
        """What is new, and whether any queue was moved on."""
        found: list[Found] = []
        has_moved = False
        for line in list(self._lines.values()):
            queues = sorted(line.offsets)
            try:
                answers = line.caller.answers(
                    RequestCode.PULL_MESSAGE, [self._pull(line, queue) for queue in queues]
                )
                for queue, (command, body) in zip(queues, answers, strict=True):
                    following = _next(line, command)
                    has_moved = has_moved or following > line.offsets[queue]
                    line.offsets[queue] = max(following, line.offsets[queue])
                    found += records_in(body, line.place.name)
            except EscrowError as error:
                self._brokers.note(line.place, error)
                self._drop(line.place)
        return found, has_moved

    def _pull(self, line: _Line, queue_id: int) -> PullMessage:
        return PullMessage(
            consumer_group=TOOLS_GROUP,
            topic=self._wish.topic,
            queue_id=queue_id,
            queue_offset=line.offsets[queue_id],
            max_msg_nums=_COUNT,
            sys_flag=HAS_SUBSCRIPTION,
            subscription=self._wish.expression,
            expression_type=self._wish.kind,
        )


def _next(line: _Line, command: Command) -> int:
    codes = (ResponseCode.SUCCESS, *_NOTHING, ResponseCode.PULL_OFFSET_MOVED)
    if command.code not in codes:
        raise RequestRefused(command.code, command.remark or f"code {command.code}")
    return int(command.ext_fields.get("nextBeginOffset", "0"))
