"""SEND_MESSAGE and its variants: validate a message, make its record, hand it to the turn.

    send() --> plain message     --> Turn.add_send()             fast path
           --> plain half        --> HalfProcessor.park_plain()  fast path
           --> anything else     --> _send_validated() --> batch, delayed, retry, half, ...

A send is refused here, with RequestRefused, or its records go to the turn, which appends them and
responds. A fast path gives the same record as `_send_validated()` would, with fewer checks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from random import Random
from typing import Final

import msgspec

from escrowmq.broker.dispatch import (
    FRAME_BODY_BYTES_MAX,
    Channel,
    ErrorCodes,
    Handler,
    RequestPermissions,
)
from escrowmq.broker.metadata import TopicTable, check_topic_name
from escrowmq.broker.turn import Turn
from escrowmq.config import BrokerConfig
from escrowmq.errors import BrokenBody, RequestRefused
from escrowmq.message.batch import (
    Appendable,
    BatchItem,
    decode_batch,
    decode_bulk_batch,
    encode_batch,
)
from escrowmq.message.broker_marks import (
    CLIENT_SYS_FLAGS,
    may_have_broker_properties,
    remove_broker_properties,
)
from escrowmq.message.keys import UniqueKeyGenerator, delay_level, tags_and_keys
from escrowmq.message.names import RETRY_PREFIX, is_writable_topic
from escrowmq.message.properties import find_property, parse_boolean
from escrowmq.message.record import (
    PROPERTIES_BYTES_MAX,
    TRANSACTION_MASK,
    TRANSACTION_PREPARED,
    NewRecord,
)
from escrowmq.message.topic_config import PERM_WRITE, TopicConfig
from escrowmq.remoting.codes import RequestCode, ResponseCode
from escrowmq.remoting.headers import SendMessage
from escrowmq.remoting.requests import Body, Request
from escrowmq.sliced_work import SlicedResult, SlicedWork, run_to_end

_BROKER_PROPERTIES_BYTES: Final = 512  # reserved for what the broker adds
# So many characters are within every limit, however they are encoded.
_SHORT_PROPERTIES_LENGTH: Final = 4096

SEND_ERRORS: Final[ErrorCodes] = {BrokenBody: ResponseCode.MESSAGE_ILLEGAL}

# Takes a record with delay properties and the time; returns the record to append instead.
Redirect = Callable[[NewRecord, int], NewRecord]
# HalfProcessor.park and park_plain.
Park = Callable[[Channel, Request[SendMessage], NewRecord, int, bool, int], None]
ParkPlain = Callable[[Channel, Request[SendMessage], int, str, int], None]


class SendProcessor:
    def __init__(
        self,
        turn: Turn,
        topics: TopicTable,
        config: BrokerConfig,
        unique_keys: UniqueKeyGenerator,
        *,
        message_bytes_max: int,
        park: Park,
        park_plain: ParkPlain,
        redirect: Redirect = lambda record, now_ms: record,
        redirect_retry: Callable[
            [NewRecord, SendMessage, int, int], NewRecord
        ] = lambda record, *_: record,
        creations: Callable[[], AbstractContextManager[None]] = nullcontext,
        seed: int = 0,
    ) -> None:
        """`creations`: a block that undoes what a refused send has created."""
        self._turn = turn
        self._topics = topics
        self._unique_keys = unique_keys
        self._park = park
        self._park_plain = park_plain
        self._redirect = redirect
        self._redirect_retry = redirect_retry
        self._creations = creations
        self._random = Random(seed)
        trace_on = "true" if config.trace_on else "false"
        self._added_properties_text = (
            f"MSG_REGION\x01{config.region_id}\x02TRACE_ON\x01{trace_on}\x02"
            f"CLUSTER\x01{config.cluster_name}\x02"
        )
        self.added_properties = self._added_properties_text.encode()
        self._separated_added_properties = b"\x02" + self.added_properties
        self.change_config(config, message_bytes_max)

    def change_config(self, config: BrokerConfig, message_bytes_max: int) -> None:
        """Apply what can change while the broker runs: its permission and the size limit."""
        self._is_broker_writable = config.is_writable
        self._message_bytes_max = message_bytes_max
        # Number of queues of each topic that accepts plain sends. The fast path checks nothing
        # else about the topic.
        self._fast_path_queue_counts: Mapping[str, int] = (
            self._topics.sendable_queue_counts if config.is_writable else {}
        )

    def handlers(self) -> list[Handler]:
        codes = (
            RequestCode.SEND_MESSAGE_V2,
            RequestCode.SEND_MESSAGE,
            RequestCode.SEND_BATCH_MESSAGE,
        )
        return [
            Handler(
                code,
                self.send,
                RequestPermissions.send,
                SEND_ERRORS,
                is_flow_controlled=True,
                body_bytes_max=FRAME_BODY_BYTES_MAX,
            )
            for code in codes
        ]

    def send(
        self, channel: Channel, request: Request[SendMessage], now_ms: int
    ) -> SlicedWork | None:
        """Add a message to this turn, or raise RequestRefused.

        A batch is validated in slices: return the work that does so.
        """
        fields, body = request.head.fields, request.body
        queue_id, text = fields.queue_id, fields.properties
        is_ordinary = (
            0 <= queue_id < self._fast_path_queue_counts.get(fields.topic, 0)
            and not fields.batch
            and len(body) <= self._message_bytes_max
            and len(text) <= _SHORT_PROPERTIES_LENGTH
        )
        if not is_ordinary or not is_plain(text) or fields.sys_flag & ~CLIENT_SYS_FLAGS:
            if is_ordinary and is_plain_half(text):
                self._park_plain(channel, request, queue_id, self._added_properties_text, now_ms)
                return None
            return self._send_validated(channel, request, now_ms)
        added_properties = (
            self.added_properties if text[-1] == "\x02" else self._separated_added_properties
        )
        record = NewRecord(
            fields.topic,
            queue_id,
            body,  # type: ignore[arg-type]  # a view: it is appended before this turn ends
            text.encode() + added_properties,
            fields.flag,
            fields.sys_flag,
            fields.born_timestamp,
            channel.peer_host,
            fields.reconsume_times,
        )
        self._turn.add_send(channel, request, record, queue_id)
        return None

    def _send_validated(
        self, channel: Channel, request: Request[SendMessage], now_ms: int
    ) -> SlicedWork | None:
        """Handle every send that is not plain, or not valid."""
        fields = request.head.fields
        topic = fields.topic
        if self._topics.find(topic) is None or topic.startswith(RETRY_PREFIX):
            if fields.batch and "ESCROW_WRITER\x01" not in fields.properties:
                return self._send_batch_to_new_topic(channel, request, now_ms)
            with self._creations():
                work = self._send_special(channel, request, now_ms)
                if work is not None:
                    run_to_end(work)  # what it creates is kept or forgotten when it is done
                return None
        return self._send_special(channel, request, now_ms)

    def _send_special(
        self, channel: Channel, request: Request[SendMessage], now_ms: int
    ) -> SlicedWork | None:
        fields = request.head.fields
        queue_id = self._choose_queue(fields, now_ms)
        waits_for_flush = _waits_for_flush(fields)
        if fields.batch and "ESCROW_WRITER\x01" in fields.properties:
            return self._park_packed(channel, request, queue_id, now_ms, waits_for_flush)
        if fields.batch:
            return self._send_batch(channel, request, queue_id, now_ms, waits_for_flush)
        record = self._make_record(channel, request, queue_id, now_ms)
        is_special = has_special_properties(fields.properties)
        if is_special and _is_half(record):
            # The delay begins with the commit. Refuse one that is not served now.
            self._redirect(record, now_ms)
            self._park(channel, request, record, now_ms, waits_for_flush, 0)
            return None
        check_is_visible(record, fields.sys_flag)
        if is_special:
            record = self._redirect(record, now_ms)
        self._turn.add_send_records(
            channel, request, [record], queue_id, waits_for_flush=waits_for_flush
        )
        return None

    def _send_batch(
        self,
        channel: Channel,
        request: Request[SendMessage],
        queue_id: int,
        now_ms: int,
        waits_for_flush: bool,
    ) -> SlicedWork:
        records = yield from self._make_batch_records(channel, request, queue_id, now_ms)
        self._turn.add_send_records(
            channel, request, records, queue_id, waits_for_flush=waits_for_flush
        )

    def _send_batch_to_new_topic(
        self, channel: Channel, request: Request[SendMessage], now_ms: int
    ) -> SlicedWork:
        """Create the topic when all messages are valid, because a refused send creates none."""
        fields = request.head.fields
        queue_id = max(0, fields.queue_id)
        records = yield from self._make_batch_records(channel, request, queue_id, now_ms)
        with self._creations():
            self._choose_queue(fields, now_ms)
        self._turn.add_send_records(
            channel, request, records, queue_id, waits_for_flush=_waits_for_flush(fields)
        )

    def make_record(
        self, channel: Channel, request: Request[SendMessage], now_ms: int
    ) -> NewRecord:
        """Return the record of a valid send of one plain message. Raise RequestRefused."""
        fields = request.head.fields
        with self._creations():
            queue_id = self._choose_queue(fields, now_ms)
            record = self._make_record(channel, request, queue_id, now_ms)
            check_is_visible(record, fields.sys_flag)
        return record

    def _choose_queue(self, fields: SendMessage, now_ms: int) -> int:
        topic = self._topics.find(fields.topic)
        if topic is None or not is_writable_topic(fields.topic) or not topic.perm & PERM_WRITE:
            topic = self._resolve_topic(fields, now_ms)
        # As RocketMQ: without write permission, a broker refuses only ordered topics here. Other
        # producers learn from the route that they may not send to it.
        if topic.order and not self._is_broker_writable:
            raise RequestRefused(ResponseCode.NO_PERMISSION, "this broker is not writable")
        queue_count = max(topic.read_queue_nums, topic.write_queue_nums)
        if fields.queue_id < 0 < topic.write_queue_nums:
            return self._random.randrange(topic.write_queue_nums)
        if not 0 <= fields.queue_id < queue_count:
            raise RequestRefused(
                ResponseCode.INVALID_PARAMETER,
                f"topic {fields.topic} has no queue {fields.queue_id}, only {queue_count} queues",
            )
        return fields.queue_id

    def _resolve_topic(self, fields: SendMessage, now_ms: int) -> TopicConfig:
        """Return the topic, created if need be, or raise RequestRefused."""
        check_topic_name(fields.topic)
        if not is_writable_topic(fields.topic):
            raise RequestRefused(ResponseCode.NO_PERMISSION, f"{fields.topic} is a system topic")
        topic = self._topics.get_or_create(
            fields.topic,
            template=fields.default_topic,
            queue_count=fields.default_topic_queue_nums,
            now_ms=now_ms,
        )
        if topic is None:
            raise RequestRefused(
                ResponseCode.TOPIC_NOT_EXIST,
                f"topic {fields.topic} does not exist; create it, or set autoCreateTopicEnable",
            )
        if not topic.perm & PERM_WRITE:
            raise RequestRefused(ResponseCode.NO_PERMISSION, f"{fields.topic} is not writable")
        return topic

    def _make_record(
        self, channel: Channel, request: Request[SendMessage], queue_id: int, now_ms: int
    ) -> NewRecord:
        fields = request.head.fields
        body = request.body
        self._check_body_size(len(body))
        record = NewRecord(
            topic=fields.topic,
            queue_id=queue_id,
            body=body,  # type: ignore[arg-type]  # a view: it is appended before this turn ends
            properties=self._make_properties(fields.properties, now_ms),
            flag=fields.flag,
            sys_flag=fields.sys_flag & CLIENT_SYS_FLAGS,
            born_ms=fields.born_timestamp,
            born_host=channel.peer_host,
            reconsume_times=max(0, fields.reconsume_times),
        )
        if fields.topic.startswith(RETRY_PREFIX):
            record = self._redirect_retry(record, fields, request.head.version, now_ms)
        return record

    def _make_properties(self, text: str, now_ms: int) -> bytes:
        """Encode the properties, with a unique key and the properties that the broker adds."""
        if "\0" in text:
            raise RequestRefused(ResponseCode.MESSAGE_ILLEGAL, "the properties contain a zero byte")
        encoded = text.encode()
        bytes_max = PROPERTIES_BYTES_MAX - _BROKER_PROPERTIES_BYTES
        if len(encoded) > bytes_max:
            raise RequestRefused(
                ResponseCode.MESSAGE_ILLEGAL,
                f"the properties are {len(encoded)} bytes, the limit is {bytes_max}",
            )
        if may_have_broker_properties(text):
            encoded = remove_broker_properties(encoded)
        if encoded and encoded[-1] != 2:
            encoded += b"\x02"
        if not has_unique_key(text):
            key = self._unique_keys.next(now_ms=now_ms, month_start_ms=0)
            encoded += b"UNIQ_KEY\x01%s\x02" % key.encode()
        return encoded + self.added_properties

    def _make_batch_records(
        self, channel: Channel, request: Request[SendMessage], queue_id: int, now_ms: int
    ) -> SlicedResult[Sequence[Appendable]]:
        fields = request.head.fields
        if fields.topic.startswith(RETRY_PREFIX) or fields.sys_flag & TRANSACTION_MASK:
            raise RequestRefused(
                ResponseCode.MESSAGE_ILLEGAL, "a batch cannot be a retry or transactional"
            )
        if delay_level(find_property(fields.properties.encode(), b"DELAY") or b"", 1):
            raise RequestRefused(ResponseCode.MESSAGE_ILLEGAL, "a batch cannot be delayed")
        self._check_body_size(len(request.body))
        topic, born_ms = fields.topic, fields.born_timestamp
        sys_flag = fields.sys_flag & CLIENT_SYS_FLAGS
        born_host, times = channel.peer_host, max(0, fields.reconsume_times)
        bulk = decode_bulk_batch(request.body)
        if bulk is not None:
            added = self.added_properties
            return [bulk.to_run(topic, queue_id, added, sys_flag, born_ms, born_host, times)]
        records = []
        for item in _decode_items(request.body):
            properties = self._make_batch_properties(item.properties, now_ms)
            record = NewRecord(
                topic,
                queue_id,
                item.body,  # type: ignore[arg-type]  # a view, as for a single message
                properties,
                item.flag,
                sys_flag,
                born_ms,
                born_host,
                times,
                # Parsed here, where it may be interrupted, and not by the append of the batch.
                tags_and_keys=tags_and_keys(topic, properties),
            )
            records.append(record)
            yield
        return records

    def _make_batch_properties(self, encoded_properties: bytes, now_ms: int) -> bytes:
        """Encode the properties of one message of a batch.

        As in RocketMQ, a delay among them has no effect: the message is delivered at once. A
        transactional message is refused, because it would be delivered before it is committed.
        """
        text = encoded_properties.decode("utf-8", "replace")
        if "TRAN_MSG\x01" in text:
            raise RequestRefused(
                ResponseCode.MESSAGE_ILLEGAL, "a message of a batch cannot be transactional"
            )
        return self._make_properties(text, now_ms)

    def _park_packed(
        self,
        channel: Channel,
        request: Request[SendMessage],
        queue_id: int,
        now_ms: int,
        waits_for_flush: bool,
    ) -> SlicedWork:
        """Park many messages of a writer as one half.

        Validate each of them now: after the decision it would be too late to refuse one.
        """
        record = self._make_record(channel, request, queue_id, now_ms)
        if record.topic.startswith(RETRY_PREFIX) or not _is_half(record):
            raise RequestRefused(
                ResponseCode.MESSAGE_ILLEGAL,
                "a writer's batch must be transactional and cannot be a retry",
            )
        bulk = decode_bulk_batch(request.body)
        if bulk is not None:
            keys = bulk.keys
        else:
            items, keys = _decode_items(request.body), []
            for item in items:
                keys.append(self._check_batch_item(item.properties, record, now_ms))
                yield
            record = _without_broker_properties(record, items)
        if len(set(keys)) != len(keys):
            raise RequestRefused(
                ResponseCode.MESSAGE_ILLEGAL,
                "two messages of a writer's batch have the same UNIQ_KEY",
            )
        self._park(channel, request, record, now_ms, waits_for_flush, len(keys))

    def _check_batch_item(self, encoded_properties: bytes, record: NewRecord, now_ms: int) -> bytes:
        """Validate one message of a writer's batch, and return its unique key."""
        text = encoded_properties.decode("utf-8", "replace")
        key = find_property(encoded_properties, b"UNIQ_KEY")
        if encoded_properties[-1:] != b"\x02" or key is None or "TRAN_MSG\x01" in text:
            raise RequestRefused(
                ResponseCode.MESSAGE_ILLEGAL,
                "the properties of each message of a writer's batch need a UNIQ_KEY, no TRAN_MSG, "
                "and must end with \\x02",
            )
        properties = self._make_properties(text, now_ms)
        if has_special_properties(text):
            self._redirect(msgspec.structs.replace(record, properties=properties), now_ms)
        return key

    def _check_body_size(self, body_bytes: int) -> None:
        if body_bytes > self._message_bytes_max:
            raise RequestRefused(
                ResponseCode.MESSAGE_ILLEGAL,
                f"message body is {body_bytes} bytes, "
                f"the limit is {self._message_bytes_max} (maxMessageSize)",
            )


def _waits_for_flush(fields: SendMessage) -> bool:
    return "WAIT\x01false" not in fields.properties or not has_wait_false(fields.properties)


def _decode_items(body: Body) -> list[BatchItem]:
    items = decode_batch(body)
    if not items:
        raise RequestRefused(ResponseCode.MESSAGE_ILLEGAL, "the batch contains no message")
    return items


def _is_half(record: NewRecord) -> bool:
    """Return whether a record is a half: by its property alone, as in RocketMQ."""
    return _is_transactional(record) and not _is_delayed_retry(record)


def _is_transactional(record: NewRecord) -> bool:
    return parse_boolean(find_property(record.properties, b"TRAN_MSG"))


def _is_delayed_retry(record: NewRecord) -> bool:
    """Return whether a consumer sent the record back. It keeps the properties of its delivery."""
    return record.reconsume_times > 0 and b"DELAY\x01" in record.properties


def _without_broker_properties(packed: NewRecord, items: Sequence[BatchItem]) -> NewRecord:
    """Return a packed half in which no message has properties that only a broker writes."""
    if not any(
        may_have_broker_properties(item.properties.decode("utf-8", "replace")) for item in items
    ):
        return packed
    cleaned = [
        msgspec.structs.replace(item, properties=remove_broker_properties(item.properties))
        for item in items
    ]
    return msgspec.structs.replace(packed, body=encode_batch(cleaned))


def check_is_visible(record: NewRecord, sys_flag: int) -> None:
    """Raise RequestRefused if a client marked a message so that no consumer would see it.

    The record itself has no transaction type: a client's claim is not stored. A message marked as
    prepared or rolled back is refused, because its sender does not expect it to be delivered.
    Old clients mark the retry of a transactional message in this way; it is delivered.
    """
    # The bit is set in both types. A message marked as committed is delivered like any other.
    if sys_flag & TRANSACTION_PREPARED and not _is_transactional(record):
        raise RequestRefused(
            ResponseCode.MESSAGE_ILLEGAL,
            f"sysFlag {sys_flag} marks the message as prepared or rolled back, but its "
            "property TRAN_MSG is not true; no consumer would ever see it",
        )


# --- properties ----------------------------------------------------------------------------------

# These functions search the text as it was received, not its encoded bytes, and one literal at a
# time: Python finds a literal in a str five times faster than in bytes, and twice as fast as a
# regular expression does.


def is_plain(properties: str) -> bool:
    """Return whether a message can be appended as it is.

    May return False for a plain message: a value that only looks like one of these names takes
    the slow path, which parses the properties.
    """
    return (
        (properties[:9] == "UNIQ_KEY\x01" or "\x02UNIQ_KEY\x01" in properties)
        # Most messages have no underscore but that of UNIQ_KEY, and so none of these names.
        # Counting them makes this a tenth faster for such messages than it was before broker
        # properties had to be found, and half as fast again for others.
        and (
            properties.count("_") == 1
            or (
                "TRAN_" not in properties
                and "TIMER_D" not in properties
                and not may_have_broker_properties(properties)
            )
        )
        and "\0" not in properties
        and "DELAY\x01" not in properties
        and "WAIT\x01false" not in properties
        and "UNIQ_KEY\x01\x02" not in properties
        and properties[-1] != "\x01"
    )


def is_plain_half(properties: str) -> bool:
    """Return whether a message is a half message and nothing else is special about it."""
    return (
        ("\x02TRAN_MSG\x01true\x02" in properties or properties[:14] == "TRAN_MSG\x01true\x02")
        and ("\x02UNIQ_KEY\x01" in properties or properties[:9] == "UNIQ_KEY\x01")
        # As in is_plain(): without other underscores there is none of these names.
        and (
            properties.count("_") == 2
            or (
                properties.count("TRAN_") == 1
                and "TIMER_D" not in properties
                and "CHECK_" not in properties
                and "__" not in properties
                and not may_have_broker_properties(properties)
            )
        )
        and "\0" not in properties
        and "DELAY\x01" not in properties
        and "WAIT\x01false" not in properties
        and "UNIQ_KEY\x01\x02" not in properties
        and properties[-1] != "\x01"
    )


def has_unique_key(properties: str) -> bool:
    return find_property(properties.encode(), b"UNIQ_KEY") is not None


def has_wait_false(properties: str) -> bool:
    return find_property(properties.encode(), b"WAIT") == b"false"


def has_special_properties(properties: str) -> bool:
    """Return whether a record may be delayed or a half, and has to be redirected."""
    return "DELAY\x01" in properties or "TIMER_D" in properties or "TRAN_MSG\x01" in properties
