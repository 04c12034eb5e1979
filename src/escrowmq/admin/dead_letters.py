"""Find dead letters, deliver them to their group again, export them, or count them as handled.

A message whose deliveries to a group all failed is stored in the topic `%DLQ%group`, with the cause
of the last failure (`ReceivedMessage.failure`). The log is append-only, so what has become of a
dead letter is recorded beside it, with requests that Apache RocketMQ knows too:

    state     means                                 recorded by
    open      nobody has handled it yet             nothing
    resent    it was delivered to its group again   its copy in %RETRY%group: the property
                                                    DLQ_RESENT_FROM names the dead letter
    purged    somebody gave it up                   the cursor of its queue: the offset of the
                                                    group TOOLS_CONSUMER in %DLQ%group

    criteria = DeadLetterCriteria(groups=["billing"], error_type="BadPayload")
    for result in resend_dead_letters(cluster, find_dead_letters(cluster, criteria), rate=100):
        print(result.letter.message.message_id, result.status, result.detail)

A copy goes to the retry topic, which only its group reads, so other groups of the original topic
get nothing. The copy is its own record: a process that dies between two copies is simply run again.
A copy is found by the unique key of its message, so a broker without a key index
(`messageIndexEnable=false`) would deliver it again.
"""

from __future__ import annotations

import base64
import enum
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from escrowmq.admin.cluster import BrokerAddress, Cluster, error_text
from escrowmq.admin.messages import (
    MessageView,
    decode_messages,
    find_by_id,
    read_queue,
    unique_key_query,
)
from escrowmq.admin.queries import search_offset, topic_configs, topic_offsets
from escrowmq.client.messages import ReceivedMessage, to_received_message
from escrowmq.client.sync_connection import OutgoingRequest, SyncConnection
from escrowmq.clock import Clock, SystemClock
from escrowmq.errors import (
    BrokenBody,
    EscrowError,
    NotSent,
    ProtocolError,
    RemoteProtocolError,
    RequestRefused,
    TransportError,
)
from escrowmq.message import names
from escrowmq.message.delivery_failure import without_failure
from escrowmq.message.keys import decode_offset_id
from escrowmq.message.names import DLQ_PREFIX, TOOLS_CONSUMER_GROUP, dlq_topic, retry_topic
from escrowmq.message.properties import decode_properties, encode_properties, find_property
from escrowmq.remoting.codes import RequestCode, ResponseCode
from escrowmq.remoting.headers import (
    OffsetResponse,
    QueryConsumerOffset,
    SendMessageResponse,
    SendMessageV2,
    UpdateConsumerOffset,
    decode_header,
)

UNKNOWN_CAUSE: Final = "unknown"  # shown for a dead letter whose consumer reported none


class DeadLetterState(enum.Enum):
    """What has become of a dead letter."""

    OPEN = "open"
    RESENT = "resent"
    PURGED = "purged"


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A message that a group could not process, as it is stored in `%DLQ%group`."""

    message: ReceivedMessage
    state: DeadLetterState = DeadLetterState.OPEN

    @property
    def group(self) -> str:
        """The consumer group that could not process the message."""
        return self.message.topic.removeprefix(DLQ_PREFIX)

    @property
    def topic(self) -> str:
        """The topic that the message was sent to; empty if the dead letter does not tell."""
        properties = self.message.properties
        return properties.get(names.RETRY_TOPIC) or properties.get(names.DLQ_ORIGIN_TOPIC, "")

    @property
    def cause(self) -> str:
        """Type and text of the last error in one line; "unknown" if they were not reported."""
        failure = self.message.failure
        return UNKNOWN_CAUSE if failure is None else failure.cause

    @property
    def error_type(self) -> str:
        """The type of the last error, such as `app.BadPayload`; may be empty."""
        failure = self.message.failure
        return UNKNOWN_CAUSE if failure is None else failure.error_type

    @property
    def attempts(self) -> int:
        """How often the message was delivered."""
        failure = self.message.failure
        return (failure.attempts if failure is not None else 0) or self.message.reconsume_times


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetterCriteria:
    """Which dead letters are meant. What is None, 0 or empty excludes none."""

    groups: Collection[str] = ()
    topic: str | None = None  # that the message was sent to
    error_type: str | None = None  # `app.BadPayload`, or the last part of it
    key: str | None = None  # one of the keys, or the unique key
    since_ms: int | None = None  # stored as a dead letter at this time or later
    until_ms: int | None = None  # or at this time or before
    attempts_min: int = 0
    states: Collection[DeadLetterState] = field(default=(DeadLetterState.OPEN,))

    def matches(self, letter: DeadLetter) -> bool:
        """Return whether a dead letter meets all criteria."""
        return letter.state in self.states and self.matches_message(letter)

    def matches_message(self, letter: DeadLetter) -> bool:
        """Return whether a dead letter meets all criteria but that for its state."""
        message = letter.message
        return (
            (not self.groups or letter.group in self.groups)
            and self.topic in (None, letter.topic)
            and (self.error_type is None or _is_type(letter.error_type, self.error_type))
            and (self.key is None or self.key in (message.message_id, *message.keys.split()))
            and (self.since_ms is None or message.stored_ms >= self.since_ms)
            and (self.until_ms is None or message.stored_ms <= self.until_ms)
            and letter.attempts >= self.attempts_min
        )


OPEN_DEAD_LETTERS: Final = DeadLetterCriteria()


def _is_type(error_type: str, name: str) -> bool:
    return error_type == name or error_type.endswith(f".{name}")


# --- find ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DeadLetterQueue:
    """A queue of a dead-letter topic on one broker."""

    group: str
    queue_id: int
    min_offset: int
    cursor: int  # every dead letter before it is handled
    max_offset: int


def dead_letter_queues(
    connection: SyncConnection, groups: Collection[str] = ()
) -> list[DeadLetterQueue]:
    """Return the dead-letter queues of a broker, of these groups or of all."""
    topics = [dlq_topic(group) for group in groups] or [
        name for name in topic_configs(connection) if name.startswith(DLQ_PREFIX)
    ]
    queues = [
        (queue, bounds)
        for offsets in topic_offsets(connection, topics).values()
        for queue, bounds in offsets.items()
    ]
    code = RequestCode.QUERY_CONSUMER_OFFSET
    replies = connection.call_many(
        OutgoingRequest(
            code,
            QueryConsumerOffset(
                consumer_group=TOOLS_CONSUMER_GROUP,
                topic=queue.topic,
                queue_id=queue.queue_id,
                set_zero_if_not_found=False,
            ),
        )
        for queue, _ in queues
    )
    result = []
    for (queue, bounds), reply in zip(queues, replies, strict=True):
        if reply.code not in (ResponseCode.SUCCESS, ResponseCode.QUERY_NOT_FOUND):
            raise connection.refusal(code, reply)
        cursor = 0 if reply.code else decode_header(OffsetResponse, reply.ext_fields).offset
        # A cursor behind the end is that of a topic of this name which was deleted.
        cursor = max(cursor if cursor <= bounds.max_offset else 0, bounds.min_offset)
        group = queue.topic.removeprefix(DLQ_PREFIX)
        result.append(
            DeadLetterQueue(group, queue.queue_id, bounds.min_offset, cursor, bounds.max_offset)
        )
    return sorted(result, key=lambda queue: (queue.group, queue.queue_id))


def find_dead_letters(
    cluster: Cluster, criteria: DeadLetterCriteria = OPEN_DEAD_LETTERS
) -> Iterator[DeadLetter]:
    """Yield the dead letters that meet the criteria: of each queue the oldest first.

    Those that arrive meanwhile are left out. A broker that fails is listed in the failures of the
    cluster, and so is a dead letter whose body cannot be decompressed.
    """
    for broker, queues in cluster.ask_all(
        lambda connection: dead_letter_queues(connection, criteria.groups)
    ):
        for queue in queues:
            try:
                yield from read_dead_letters(cluster, broker, queue, criteria)
            except EscrowError as error:
                cluster.report_failure(broker, error)


def read_dead_letters(
    cluster: Cluster,
    broker: BrokerAddress,
    queue: DeadLetterQueue,
    criteria: DeadLetterCriteria = OPEN_DEAD_LETTERS,
) -> Iterator[DeadLetter]:
    """Yield the dead letters of one queue that meet the criteria. Raises what a broker refuses."""
    connection = cluster.connection(broker.address)
    is_open_only = set(criteria.states) == {DeadLetterState.OPEN}
    begin = queue.cursor if is_open_only else queue.min_offset
    topic = dlq_topic(queue.group)
    if criteria.since_ms is not None and begin < queue.max_offset:
        begin = max(begin, search_offset(connection, topic, queue.queue_id, criteria.since_ms))
    offsets = range(begin, queue.max_offset)
    for views in read_queue(connection, broker.name, topic, queue.queue_id, offsets):
        letters = []
        for view in views:
            try:
                letters.append(DeadLetter(to_received_message(view.record, broker.name)))
            except BrokenBody as error:
                cluster.report_failure(broker, error)
        matching = [letter for letter in letters if criteria.matches_message(letter)]
        for letter in with_states(connection, matching, queue.cursor):
            if letter.state in criteria.states:
                yield letter


def with_states(
    connection: SyncConnection, letters: Sequence[DeadLetter], cursor: int
) -> Iterator[DeadLetter]:
    """Yield dead letters of one queue with what has become of them."""
    for letter, copies in zip(letters, _find_copies(connection, letters), strict=True):
        state = DeadLetterState.OPEN
        if any(_is_copy_of(copy, letter) for copy in copies):
            state = DeadLetterState.RESENT
        elif letter.message.queue_offset < cursor:
            state = DeadLetterState.PURGED
        yield replace(letter, state=state)


def find_dead_letter(
    cluster: Cluster, message_id: str, groups: Collection[str] = ()
) -> list[DeadLetter]:
    """Return the dead letters with this offset id or unique key, in any state.

    A message may be a dead letter of several groups, and of one group several times.
    """
    letters = [
        DeadLetter(to_received_message(view.record, view.broker))
        for view in find_by_id(cluster, message_id, None)
        if view.record.topic.startswith(DLQ_PREFIX)
    ]
    letters = [letter for letter in letters if not groups or letter.group in groups]
    if not letters:
        return []

    def find_states(connection: SyncConnection) -> list[DeadLetter]:
        return [
            letter
            for queue in dead_letter_queues(connection, {letter.group for letter in letters})
            for letter in with_states(
                connection,
                [
                    letter
                    for letter in letters
                    if (letter.group, letter.message.queue_id) == (queue.group, queue.queue_id)
                    and addresses.get(letter.message.broker) == connection.address
                ],
                queue.cursor,
            )
        ]

    addresses = {broker.name: broker.address for broker in cluster.brokers()}
    return [letter for _, letters in cluster.ask_all(find_states) for letter in letters]


def _find_copies(
    connection: SyncConnection, letters: Sequence[DeadLetter]
) -> Iterator[list[MessageView]]:
    """Yield for each dead letter what the retry topic of its group has with its unique key."""
    code = RequestCode.QUERY_MESSAGE
    for reply in connection.call_many(
        OutgoingRequest(code, unique_key_query(retry_topic(letter.group), _copy_key(letter)))
        for letter in letters
    ):
        if reply.code in (ResponseCode.QUERY_NOT_FOUND, ResponseCode.TOPIC_NOT_EXIST):
            yield []
        elif reply.code:
            raise connection.refusal(code, reply)
        else:
            yield list(decode_messages(reply.body, connection.address))


def _is_copy_of(copy: MessageView, letter: DeadLetter) -> bool:
    """Return whether a message of the retry topic is a copy of this dead letter, or a later one.

    A copy that fails too becomes a dead letter again, and may be resent again. A broker returns
    only the newest of many retries, so a copy of a later dead letter of the same message counts.
    """
    resent_from = find_property(copy.record.properties, names.RESENT_FROM.encode())
    if resent_from is None:
        return False
    try:
        _, log_offset = decode_offset_id(resent_from.decode("ascii", "replace"))
    except (RemoteProtocolError, ValueError):
        return False
    return log_offset >= letter.message.log_offset


def _copy_key(letter: DeadLetter) -> str:
    """Return the unique key of a copy: that of the message, so that consumers recognise it."""
    return letter.message.properties.get(names.UNIQUE_KEY) or letter.message.offset_id


# --- resend --------------------------------------------------------------------------------------


class ResendStatus(enum.Enum):
    """The end of an attempt to resend a dead letter."""

    RESENT = "resent"
    RESENT_BEFORE = "resent before"  # by an earlier run: nothing was sent
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class ResendResult:
    """What happened to one dead letter, and why; with RESENT the offset id of its copy."""

    letter: DeadLetter
    status: ResendStatus
    detail: str = ""


# Properties that belong to what happened before, and would have an effect in a copy.
_REMOVED_PROPERTIES: Final = frozenset(
    (
        *names.DELAY_PROPERTIES,
        names.TRANSACTIONAL,
        names.RETRY_OF,
        names.DLQ_ORIGIN_TOPIC,
        names.DLQ_ORIGIN_MESSAGE_ID,
    )
)


def resend_dead_letters(
    cluster: Cluster,
    letters: Iterable[DeadLetter],
    *,
    rate: float | None = None,
    clock: Clock | None = None,
    wait: Callable[[float], object] | None = None,
) -> Iterator[ResendResult]:
    """Store a copy of each dead letter in the retry topic of its group, and yield the result.

    Nothing is sent before the iteration asks for the next result. At most `rate` dead letters per
    second are handled. A copy begins with no failed attempts, and its group gets it at once, from
    the broker that has the dead letter. A dead letter that was resent before is left alone, so this
    can be repeated after any failure. After a broker fails, its other dead letters are not tried.
    """
    addresses = {broker.name: broker.address for broker in cluster.brokers()}
    failures: dict[str, str] = {}
    for letter in _paced(letters, rate, clock or SystemClock(), wait or threading.Event().wait):
        name = letter.message.broker
        try:
            if name in failures:
                raise NotSent(failures[name])
            if name not in addresses:
                raise NotSent(f"there is no broker {name}: `escrowmq broker list` shows them")
            yield _resend(cluster.connection(addresses[name]), letter)
        except RequestRefused as error:
            yield ResendResult(letter, ResendStatus.FAILED, error_text(error))
        except TransportError as error:
            failures[name] = str(error)
            yield ResendResult(letter, ResendStatus.FAILED, str(error))


def _resend(connection: SyncConnection, letter: DeadLetter) -> ResendResult:
    if not letter.topic:
        return ResendResult(
            letter, ResendStatus.FAILED, "it does not say which topic it was sent to"
        )
    [copies] = _find_copies(connection, [letter])
    if any(_is_copy_of(copy, letter) for copy in copies):
        return ResendResult(letter, ResendStatus.RESENT_BEFORE)
    reply = connection.call(RequestCode.SEND_MESSAGE_V2, _copy_header(letter), letter.message.body)
    response = decode_header(SendMessageResponse, reply.ext_fields)
    return ResendResult(letter, ResendStatus.RESENT, response.msg_id)


def _copy_header(letter: DeadLetter) -> SendMessageV2:
    message = letter.message
    properties = {
        name: value
        for name, value in without_failure(message.properties).items()
        if name not in _REMOVED_PROPERTIES
    }
    properties[names.RETRY_TOPIC] = letter.topic
    properties[names.RESENT_FROM] = message.offset_id
    properties[names.UNIQUE_KEY] = _copy_key(letter)
    properties.setdefault(names.ORIGIN_MESSAGE_ID, message.offset_id)
    return SendMessageV2(
        producer_group=names.TOOLS_PRODUCER_GROUP,
        topic=retry_topic(letter.group),
        default_topic=names.TEMPLATE_TOPIC,
        default_topic_queue_nums=1,
        queue_id=0,
        born_timestamp=message.born_ms,
        flag=message.flag,
        properties=encode_properties(properties).decode(),
    )


def _paced(
    letters: Iterable[DeadLetter],
    rate: float | None,
    clock: Clock,
    wait: Callable[[float], object],
) -> Iterator[DeadLetter]:
    """Yield at most `rate` dead letters per second; a pause of the caller is not made up for."""
    next_s = clock.elapsed_s()
    for letter in letters:
        remaining_s = next_s - clock.elapsed_s()
        if rate is not None and remaining_s > 0:
            wait(remaining_s)
        yield letter
        if rate is not None:
            next_s = max(next_s, clock.elapsed_s() - 1) + 1 / rate


# --- purge ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DeadLetterPurge:
    """A change of one cursor, and what it means for the dead letters of the queue."""

    broker: BrokerAddress
    queue: DeadLetterQueue
    new_cursor: int
    purged: int  # open ones that count as handled afterwards
    blocked: int  # open ones that match, but follow one that does not


def plan_purge(cluster: Cluster, criteria: DeadLetterCriteria) -> list[DeadLetterPurge]:
    """Return how the cursors would move, and change nothing.

    A cursor can only say that everything before it is handled. So it moves up to the first dead
    letter that is open and does not match; what matches behind that one stays open.
    `criteria.states` does not matter.
    """
    return _plan(cluster, criteria.groups, criteria.matches_message)


def pass_resent(cluster: Cluster, groups: Collection[str]) -> list[DeadLetterPurge]:
    """Move the cursors of groups up to their first open dead letter, and return what was done.

    What was resent stays resent. But it is not looked at again, and metrics do not count it.
    """
    return apply_purge(cluster, _plan(cluster, groups, None))


def _plan(
    cluster: Cluster, groups: Collection[str], is_matching: Callable[[DeadLetter], bool] | None
) -> list[DeadLetterPurge]:
    plans = []
    for broker, queues in cluster.ask_all(
        lambda connection: dead_letter_queues(connection, groups)
    ):
        for queue in queues:
            try:
                plans.append(_plan_queue(cluster, broker, queue, is_matching))
            except EscrowError as error:
                cluster.report_failure(broker, error)
    return [plan for plan in plans if plan.new_cursor > plan.queue.cursor or plan.blocked]


def _plan_queue(
    cluster: Cluster,
    broker: BrokerAddress,
    queue: DeadLetterQueue,
    is_matching: Callable[[DeadLetter], bool] | None,
) -> DeadLetterPurge:
    new_cursor, purged, blocked = queue.max_offset, 0, 0
    for letter in read_dead_letters(cluster, broker, queue):
        if is_matching is None:  # nothing matches: the first open one is the end
            new_cursor = letter.message.queue_offset
            break
        is_before_cursor = letter.message.queue_offset < new_cursor
        if not is_matching(letter):
            new_cursor = min(new_cursor, letter.message.queue_offset)
        elif is_before_cursor:
            purged += 1
        else:
            blocked += 1
    return DeadLetterPurge(broker, queue, new_cursor, purged, blocked)


def apply_purge(cluster: Cluster, plans: Iterable[DeadLetterPurge]) -> list[DeadLetterPurge]:
    """Move the cursors and return what was done. Brokers that fail are listed in the failures.

    The messages stay in the log until it expires. Brokers store offsets within seconds, so a crash
    may bring dead letters back that were purged a moment before.
    """
    applied = []
    for plan in plans:
        header = UpdateConsumerOffset(
            consumer_group=TOOLS_CONSUMER_GROUP,
            topic=dlq_topic(plan.queue.group),
            queue_id=plan.queue.queue_id,
            commit_offset=plan.new_cursor,
        )

        def commit(connection: SyncConnection, header: UpdateConsumerOffset = header) -> None:
            connection.call(RequestCode.UPDATE_CONSUMER_OFFSET, header)

        if cluster.ask_all(commit, brokers=[plan.broker]):
            applied.append(plan)
    return applied


# --- export --------------------------------------------------------------------------------------


def dead_letter_json(letter: DeadLetter) -> dict[str, Any]:
    """Return a dead letter as one JSON object, from which `parse_dead_letter` makes it again.

    The body is `body` if it is UTF-8 text, else `body_base64`.
    """
    message, failure = letter.message, letter.message.failure
    content: dict[str, Any] = {
        "id": message.offset_id,
        "group": letter.group,
        "topic": letter.topic,
        "state": letter.state.value,
        "broker": message.broker,
        "queue": message.queue_id,
        "queue_offset": message.queue_offset,
        "unique_key": message.properties.get(names.UNIQUE_KEY),
        "keys": message.keys,
        "tags": message.tags,
        "attempts": letter.attempts,
        "error_type": letter.error_type,
        "error_text": "" if failure is None else failure.error_text,
        "host": "" if failure is None else failure.host,
        "address": "" if failure is None else failure.address,
        "failed_ms": 0 if failure is None else failure.failed_ms,
        "stored_ms": message.stored_ms,
        "born_ms": message.born_ms,
        "flag": message.flag,
        "properties": dict(message.properties),
    }
    try:
        content["body"] = message.body.decode()
    except UnicodeDecodeError:
        content["body_base64"] = base64.b64encode(message.body).decode()
    return content


def parse_dead_letter(content: Mapping[str, Any]) -> DeadLetter:
    """Return the dead letter of an exported JSON object, whose body or properties may be edited.

    Raises ValueError if the object is none.
    """
    try:
        body = content.get("body")
        properties = {str(name): str(value) for name, value in content["properties"].items()}
        _, log_offset = decode_offset_id(content["id"])
        # Properties as a broker stores them: a separator within a name or a value is refused.
        properties = decode_properties(encode_properties(properties))
        message = ReceivedMessage(
            topic=dlq_topic(content["group"]),
            body=base64.b64decode(content["body_base64"], validate=True)
            if body is None
            else body.encode(),
            keys=properties.get(names.KEYS, ""),
            tags=properties.get(names.TAGS, ""),
            properties=properties,
            message_id=properties.get(names.UNIQUE_KEY) or content["id"],
            offset_id=content["id"],
            queue_id=int(content["queue"]),
            queue_offset=int(content["queue_offset"]),
            born_ms=int(content["born_ms"]),
            stored_ms=int(content["stored_ms"]),
            reconsume_times=int(content["attempts"]),
            flag=int(content["flag"]),
            log_offset=log_offset,
            broker=content["broker"],
        )
        return DeadLetter(message, DeadLetterState(content["state"]))
    except (KeyError, TypeError, AttributeError, ProtocolError) as error:
        raise ValueError(f"this is no exported dead letter: {error!r}") from error
