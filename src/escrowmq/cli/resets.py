"""Where a group would go by a reset, queue by queue, and to send it there."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from escrowmq.broker.topics import RETRY_PREFIX
from escrowmq.cli.brokers import Brokers
from escrowmq.cli.call import BrokerPlace, Caller
from escrowmq.cli.figures import (
    GONE,
    Progress,
    group_configs,
    progress_of,
    topic_offsets,
)
from escrowmq.cli.groups import no_group
from escrowmq.cli.options import EARLIEST, LATEST
from escrowmq.cli.record import printable
from escrowmq.cli.table import Column, table_lines, width_of
from escrowmq.wire.bodies import QueueName
from escrowmq.wire.bodies_admin import TopicOffset, queue_of, queue_tables
from escrowmq.wire.codes import RequestCode
from escrowmq.wire.headers import decode_header
from escrowmq.wire.headers_admin import ResetOffset
from escrowmq.wire.headers_consume import OffsetAnswer, SearchOffset

_TO_THE_END: Final = -1
_COLUMNS: Final = (
    Column("TOPIC", gives_way=True),
    Column("BROKER", gives_way=True),
    Column("QUEUE", is_number=True),
    Column("FROM", is_number=True),
    Column("TO", is_number=True),
    Column("WHICH IS"),
)


@dataclass(frozen=True, slots=True)
class Move:
    queue: QueueName
    before: int
    after: int

    @property
    def text(self) -> str:
        count = self.after - self.before
        if not count:
            return "no change"
        return f"{-count} read again" if count < 0 else f"{count} skipped"

    def as_json(self) -> dict[str, Any]:
        return {
            "topic": self.queue.topic,
            "broker": self.queue.broker_name,
            "queue": self.queue.queue_id,
            "from": self.before,
            "to": self.after,
        }


def planned_moves(brokers: Brokers, group: str, topic: str | None, target: str | int) -> list[Move]:
    """Nothing is changed. Brokers that do not know the group are left out from here on."""

    def question(caller: Caller) -> list[Move] | None:
        if group not in group_configs(caller):
            return None
        progress = progress_of(caller, group, topic)
        return _moves_of(caller, progress, group, topic, target)

    found = brokers.ask(question, unless=GONE)
    known = [(place, moves) for place, moves in found if moves is not None]
    if not known and not brokers.failed:
        raise no_group(group, brokers)
    brokers.brokers = [place for place, moves in known if moves]
    return [move for _, moves in known for move in moves]


def _moves_of(
    caller: Caller, progress: Progress, group: str, topic: str | None, target: str | int
) -> list[Move]:
    wanted = {queue.topic for queue in progress if topic or not _is_retry(queue.topic, group)}
    moves = []
    for offsets in topic_offsets(caller, sorted(wanted)).values():
        for queue, place in offsets.items():
            if queue in progress:
                after = _target(caller, queue, place, target)
                moves.append(Move(queue, progress[queue].consumer_offset, after))
    return sorted(moves, key=lambda move: (move.queue.topic, move.queue.queue_id))


def _is_retry(topic: str, group: str) -> bool:
    """Its messages have been read once: they are read again by themselves."""
    return topic == f"{RETRY_PREFIX}{group}"


def _target(caller: Caller, queue: QueueName, place: TopicOffset, target: str | int) -> int:
    if target == EARLIEST:
        return place.min_offset
    if target == LATEST:
        return place.max_offset
    asked = SearchOffset(topic=queue.topic, queue_id=queue.queue_id, timestamp=int(target))
    reply = caller.call(RequestCode.SEARCH_OFFSET_BY_TIMESTAMP, asked)
    return decode_header(OffsetAnswer, reply.ext_fields).offset


def move_lines(moves: Sequence[Move]) -> Iterator[str]:
    rows = (
        (
            printable(move.queue.topic),
            printable(move.queue.broker_name),
            str(move.queue.queue_id),
            str(move.before),
            str(move.after),
            move.text,
        )
        for move in moves
    )
    yield from table_lines(_COLUMNS, rows, width_of(sys.stdout))


def reset_offsets(
    brokers: Brokers, group: str, topics: Sequence[str], target: str | int
) -> list[dict[str, Any]]:
    """The places where the group goes on, as its brokers say."""
    timestamp = {EARLIEST: 0, LATEST: _TO_THE_END}.get(str(target))
    time = int(target) if timestamp is None else timestamp
    done: list[dict[str, Any]] = []
    for topic in topics:
        asked = ResetOffset(topic=topic, group=group, timestamp=time, is_force=True)
        for place, table in brokers.ask(partial(_reset, asked=asked)):
            done += _places(place, table)
    return done


def _reset(caller: Caller, asked: ResetOffset) -> dict[str, int]:
    body = caller.call(RequestCode.INVOKE_BROKER_TO_RESET_OFFSET, asked).body
    return dict(queue_tables(body).get("offsetTable", {}))


def _places(place: BrokerPlace, table: dict[str, int]) -> Iterator[dict[str, Any]]:
    for key, offset in table.items():
        queue = queue_of(key)
        yield {
            "topic": queue.topic,
            "broker": place.name,
            "queue": queue.queue_id,
            "offset": offset,
        }
