"""A message that could not be processed: when it comes again, and when it is given up.

    sent back (request 36)              stored under        delay level    reconsume times
    group keeps no retry queues         nowhere: dropped
    asked for the dead letters (< 0)    %DLQ%group          none           + 1
    times so far >= maximum             %DLQ%group          none           + 1
    a level asked for (> 0)             %RETRY%group        that one       + 1
    otherwise (0)                       %RETRY%group        3 + times      + 1

A client that fails to send a message back sends it to the retry topic itself (`divert`); so do
orderly consumers that have tried often enough. Such a group holds locks on its queues, and a
retry would break the order: straight to the dead letters.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from escrowmq.message.names import (
    DELAY_LEVEL,
    DLQ_ORIGIN_MESSAGE_ID,
    DLQ_ORIGIN_TOPIC,
    DLQ_PREFIX,
    ORIGIN_MESSAGE_ID,
    RETRY_TOPIC,
    TIMER_DELAY_MS,
    TIMER_DELAY_SEC,
    TIMER_DELIVER_MS,
    UNIQUE_KEY,
    dlq_topic,
    retry_topic,
)

DLQ_QUEUE_COUNT: Final = 1

# Properties.
_DELAY_PROPERTIES: Final = (DELAY_LEVEL, TIMER_DELAY_SEC, TIMER_DELAY_MS, TIMER_DELIVER_MS)

_FIRST_DELAY_LEVEL: Final = 3
_RECONSUME_TIMES_MAX: Final = (1 << 31) - 1  # what a record can hold
_VERSION_WITH_MAX_TIMES: Final = 121  # 3.4.9; older clients send a maximum that means nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """What a group's settings say, and what its client asks for."""

    retry_queue_count: int = 1  # retryQueueNums
    max_reconsume_times: int = 16  # retryMaxTimes
    requested_max_times: int | None = None  # maxReconsumeTimes of the request
    client_version: int = _VERSION_WITH_MAX_TIMES

    @property
    def effective_max_times(self) -> int:
        asked = self.requested_max_times
        if asked is None or asked < 0 or self.client_version < _VERSION_WITH_MAX_TIMES:
            return self.max_reconsume_times
        return asked


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedMessage:
    """The record that was sent back."""

    topic: str
    reconsume_times: int
    properties: Mapping[str, str]
    offset_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Redelivery:
    """What to store, beside what stays as it was: body, flags, born time and host."""

    topic: str
    queue_count: int  # any one of them; the topic is made with as many
    reconsume_times: int
    delay_level: int  # 0: no delay; otherwise it is in the properties too
    properties: dict[str, str]

    @property
    def is_dead_letter(self) -> bool:
        return self.topic.startswith(DLQ_PREFIX)


def send_back(
    failed: FailedMessage, group: str, policy: RetryPolicy, *, delay_level: int
) -> Redelivery | None:
    """None: the group keeps no retries; say that it went well and store nothing."""
    if policy.retry_queue_count <= 0:
        return None
    times = max(0, failed.reconsume_times)
    properties = _without_delays(failed.properties)
    properties.setdefault(RETRY_TOPIC, failed.topic)
    properties.setdefault(ORIGIN_MESSAGE_ID, failed.offset_id)
    if delay_level < 0 or times >= policy.effective_max_times:
        return _dead_letter(group, min(times + 1, _RECONSUME_TIMES_MAX), properties)
    level = delay_level or _FIRST_DELAY_LEVEL + times
    properties[DELAY_LEVEL] = str(level)
    return Redelivery(
        topic=retry_topic(group),
        queue_count=policy.retry_queue_count,
        reconsume_times=times + 1,
        delay_level=level,
        properties=properties,
    )


def redirect(
    properties: Mapping[str, str],
    group: str,
    policy: RetryPolicy,
    *,
    reconsume_times: int,
    group_has_locks: bool,
) -> Redelivery | None:
    """For a send to a retry topic: where it goes instead. None: store it as it was sent."""
    if reconsume_times <= policy.effective_max_times and not group_has_locks:
        return None
    return _dead_letter(group, reconsume_times, _without_delays(properties))


def _dead_letter(group: str, reconsume_times: int, properties: dict[str, str]) -> Redelivery:
    topic = properties.get(RETRY_TOPIC)
    first_id = properties.get(UNIQUE_KEY) or properties.get(ORIGIN_MESSAGE_ID)
    if topic is not None:
        properties.setdefault(DLQ_ORIGIN_TOPIC, topic)
    if first_id is not None:
        properties.setdefault(DLQ_ORIGIN_MESSAGE_ID, first_id)
    return Redelivery(
        topic=dlq_topic(group),
        queue_count=DLQ_QUEUE_COUNT,
        reconsume_times=reconsume_times,
        delay_level=0,
        properties=properties,
    )


def _without_delays(properties: Mapping[str, str]) -> dict[str, str]:
    """The delay that a message was sent with is over; it must not be waited for again."""
    return {name: value for name, value in properties.items() if name not in _DELAY_PROPERTIES}
