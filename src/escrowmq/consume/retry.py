"""Messages that could not be processed: when they are redelivered, and when they are dead letters.

A consumer sends such a message back (request 36). `send_back` decides what happens to it:

    condition                           stored in the topic   delay level    reconsume times
    the group has no retry queues       none: it is dropped
    requested delay level < 0           %DLQ%group            none           + 1
    reconsume times >= maximum          %DLQ%group            none           + 1
    requested delay in milliseconds     %RETRY%group          none: a timer  + 1
    requested delay level > 0           %RETRY%group          as requested   + 1
    requested delay level 0             %RETRY%group          3 + times      + 1

A client that fails to send a message back sends it to the retry topic itself, and so do orderly
consumers that have tried it too often. `redirect` decides about such a send. A group that consumes
in order holds locks on its queues, and a retry would break the order, so its messages go straight
to the dead letter topic. A dead letter that an operator resends is an exception: its place in the
order is lost already.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from escrowmq.message.names import (
    DELAY_LEVEL,
    DELAY_PROPERTIES,
    DLQ_ORIGIN_MESSAGE_ID,
    DLQ_ORIGIN_TOPIC,
    DLQ_PREFIX,
    ORIGIN_MESSAGE_ID,
    RESENT_FROM,
    RETRY_TOPIC,
    TIMER_DELAY_MS,
    TIMER_OUT_MS,
    UNIQUE_KEY,
    dlq_topic,
    is_group_topic,
    retry_topic,
)

DLQ_QUEUE_COUNT: Final = 1

_FIRST_DELAY_LEVEL: Final = 3
_RECONSUME_TIMES_MAX: Final = (1 << 31) - 1  # the largest value of the field in a record
_VERSION_WITH_MAX_TIMES: Final = 121  # 3.4.9; older clients send a meaningless value


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """How often a group retries: its settings and what the request of its client says."""

    retry_queue_count: int = 1  # retryQueueNums
    max_reconsume_times: int = 16  # retryMaxTimes
    requested_max_times: int | None = None  # maxReconsumeTimes of the request
    client_version: int = _VERSION_WITH_MAX_TIMES

    @property
    def effective_max_times(self) -> int:
        requested = self.requested_max_times
        if requested is None or requested < 0 or self.client_version < _VERSION_WITH_MAX_TIMES:
            return self.max_reconsume_times
        return requested


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedMessage:
    """The stored message that was sent back."""

    topic: str
    reconsume_times: int
    properties: Mapping[str, str]
    offset_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Redelivery:
    """What to store. Body, flags, born time and born host stay those of the failed message."""

    topic: str
    queue_count: int  # the topic is created with so many queues; any of them will do
    reconsume_times: int
    delay_level: int  # 0: no delay, or a timer; otherwise the properties contain it too
    properties: dict[str, str]

    @property
    def is_dead_letter(self) -> bool:
        return self.topic.startswith(DLQ_PREFIX)


def send_back(
    failed: FailedMessage,
    group: str,
    policy: RetryPolicy,
    *,
    delay_level: int,
    delay_ms: int | None = None,
) -> Redelivery | None:
    """Return what to store; None if the group has no retry queues.

    With None, store nothing and respond that the message was taken. `delay_ms`, if it is above 0,
    takes precedence over a delay level of 0 or more.
    """
    if policy.retry_queue_count <= 0:
        return None
    times = max(0, failed.reconsume_times)
    properties = _without_delays(failed.properties)
    origin = {RETRY_TOPIC: failed.topic, ORIGIN_MESSAGE_ID: failed.offset_id}
    # A message that was sent back before says where it came from. In any other message these
    # properties are a claim of its sender, and the retry would reach consumers as that topic's.
    was_sent_back = is_group_topic(failed.topic)
    properties = {**origin, **properties} if was_sent_back else {**properties, **origin}
    if delay_level < 0 or times >= policy.effective_max_times:
        return _dead_letter(group, min(times + 1, _RECONSUME_TIMES_MAX), properties)
    level = delay_level or _FIRST_DELAY_LEVEL + times
    if delay_ms is not None and delay_ms > 0:
        level = 0
        properties[TIMER_DELAY_MS] = str(delay_ms)
    else:
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
    """Return where a message goes that was sent to a retry topic; None to store it as it is."""
    max_times = policy.effective_max_times
    # An orderly consumer that gives up on a resent message sends it with all attempts used.
    is_resent = RESENT_FROM in properties and reconsume_times < max_times
    if reconsume_times <= max_times and (is_resent or not group_has_locks):
        return None
    return _dead_letter(group, reconsume_times, _without_delays(properties))


def _dead_letter(group: str, reconsume_times: int, properties: dict[str, str]) -> Redelivery:
    topic = properties.get(RETRY_TOPIC)
    origin_id = properties.get(UNIQUE_KEY) or properties.get(ORIGIN_MESSAGE_ID)
    if topic is not None:
        properties.setdefault(DLQ_ORIGIN_TOPIC, topic)
    if origin_id is not None:
        properties.setdefault(DLQ_ORIGIN_MESSAGE_ID, origin_id)
    return Redelivery(
        topic=dlq_topic(group),
        queue_count=DLQ_QUEUE_COUNT,
        reconsume_times=reconsume_times,
        delay_level=0,
        properties=properties,
    )


def _without_delays(properties: Mapping[str, str]) -> dict[str, str]:
    """Remove the delay that the message was sent with: it is over and must not apply again.

    With TIMER_OUT_MS, which a timer leaves behind, a new timer would count as over too.
    """
    past = (*DELAY_PROPERTIES, TIMER_OUT_MS)
    return {name: value for name, value in properties.items() if name not in past}
