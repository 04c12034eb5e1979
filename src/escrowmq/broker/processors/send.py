"""Sends: check a message as RocketMQ does, make the record, and wait for the turn to end.

`accept` refuses a send or hands its records to the turn, which appends and answers.

Questions about the properties of a message on its way in, asked of every one.

Of the text as it came, not of its bytes, and one literal at a time: Python finds a literal in text
five times faster than in bytes, and twice as fast as a pattern. What only looks like the name that
is sought is told apart where it matters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Final

import msgspec

from escrowmq.broker.dispatch import Channel, ErrorCodes, Handler, RequestPermissions
from escrowmq.broker.metadata import TopicTable, check_topic_name
from escrowmq.broker.turn import Turn
from escrowmq.config import BrokerConfig
from escrowmq.errors import BrokenBody, RequestRefused
from escrowmq.message.batch import Appendable, BatchItem, decode_batch, decode_bulk_batch
from escrowmq.message.keys import UniqueKeyGenerator
from escrowmq.message.names import BROKER_ONLY_TOPICS, RETRY_PREFIX
from escrowmq.message.properties import change_properties, find_property
from escrowmq.message.record import PROPERTIES_BYTES_MAX, TRANSACTION_MASK, NewRecord
from escrowmq.message.topic_config import PERM_WRITE, TopicConfig
from escrowmq.remoting.codes import RequestCode, ResponseCode
from escrowmq.remoting.headers import SendMessage
from escrowmq.remoting.requests import Body, Request


def is_plain(properties: str) -> bool:
    """Whether nothing in them asks for more than an append: a name or a value that only looks
    as if it did takes the long way, which looks closely."""
    return (
        "TRAN_MSG\x01" not in properties
        and ("\x02UNIQ_KEY\x01" in properties or properties[:9] == "UNIQ_KEY\x01")
        and "\0" not in properties
        and "DELAY\x01" not in properties
        and "TIMER_D" not in properties
        and "WAIT\x01false" not in properties
        and "MSG_REGION\x01" not in properties
        and "POP_CK\x01" not in properties
        and "UNIQ_KEY\x01\x02" not in properties
        and properties[-1] != "\x01"
    )


def is_plain_half(properties: str) -> bool:
    """Whether they make a half of the message and ask for nothing else."""
    return (
        ("\x02TRAN_MSG\x01true\x02" in properties or properties[:14] == "TRAN_MSG\x01true\x02")
        and ("\x02UNIQ_KEY\x01" in properties or properties[:9] == "UNIQ_KEY\x01")
        and properties.count("TRAN_MSG\x01") == 1
        and "\0" not in properties
        and "DELAY\x01" not in properties
        and "TIMER_D" not in properties
        and "WAIT\x01false" not in properties
        and "MSG_REGION\x01" not in properties
        and "POP_CK\x01" not in properties
        and "UNIQ_KEY\x01\x02" not in properties
        and "REAL_" not in properties
        and "ESCROW_" not in properties
        and "CHECK_IMMUNITY" not in properties
        and "__transactionId__" not in properties
        and properties[-1] != "\x01"
    )


def has_unique_key(properties: str) -> bool:
    return find_property(properties.encode(), b"UNIQ_KEY") is not None


def has_wait_false(properties: str) -> bool:
    return find_property(properties.encode(), b"WAIT") == b"false"


def has_special_properties(properties: str) -> bool:
    """Whether a record has to be looked at again before it is appended."""
    return "DELAY\x01" in properties or "TIMER_D" in properties or "TRAN_MSG\x01" in properties


_BROKER_PROPERTIES_BYTES: Final = 512  # for what the broker itself adds
_SHORT_PROPERTIES_LENGTH: Final = (
    4096  # characters that are within every limit, however they are encoded
)

_BROKER_PROPERTIES: Final = ("POP_CK", "MSG_REGION", "TRACE_ON", "CLUSTER")


SEND_ERRORS: Final[ErrorCodes] = {BrokenBody: ResponseCode.MESSAGE_ILLEGAL}

# Looks at a record with special properties: the one to append, or a refusal.
Redirect = Callable[[NewRecord, int], NewRecord]
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
        seed: int = 0,
    ) -> None:
        self._turn = turn
        self._topics = topics
        self._unique_keys = unique_keys
        self._park = park
        self._park_plain = park_plain
        self._redirect = redirect
        self._redirect_retry = redirect_retry
        self._random = Random(seed)
        trace_on = "true" if config.trace_on else "false"
        self._added_properties_text = (
            f"MSG_REGION\x01{config.region_id}\x02TRACE_ON\x01{trace_on}\x02"
            f"CLUSTER\x01{config.cluster_name}\x02"
        )
        self._added_properties = self._added_properties_text.encode()
        self._separated_added_properties = b"\x02" + self._added_properties
        self.change_config(config, message_bytes_max)

    def change_config(self, config: BrokerConfig, message_bytes_max: int) -> None:
        """Apply what can change while the broker runs: its permission and the size limit."""
        self._is_broker_writable = config.is_writable
        self._message_bytes_max = message_bytes_max
        # Queues by topic, if nothing but the place and the message itself can be wrong with a send.
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
            Handler(code, self.send, RequestPermissions.send, SEND_ERRORS, is_flow_controlled=True)
            for code in codes
        ]

    def send(self, channel: Channel, request: Request[SendMessage], now_ms: int) -> None:
        """Put it into this turn's batch, or raise RequestRefused."""
        fields, body = request.head.fields, request.body
        queue_id, text = fields.queue_id, fields.properties
        is_straight = (
            0 <= queue_id < self._fast_path_queue_counts.get(fields.topic, 0)
            and not fields.batch
            and len(body) <= self._message_bytes_max
            and len(text) <= _SHORT_PROPERTIES_LENGTH
        )
        if not is_straight or not is_plain(text):
            if is_straight and is_plain_half(text):
                self._park_plain(channel, request, queue_id, self._added_properties_text, now_ms)
            else:
                self._send_validated(channel, request, now_ms)
            return
        added = self._added_properties if text[-1] == "\x02" else self._separated_added_properties
        record = NewRecord(
            fields.topic,
            queue_id,
            body,  # type: ignore[arg-type]  # a view: it is appended before this turn ends
            text.encode() + added,
            fields.flag,
            fields.sys_flag,
            fields.born_timestamp,
            channel.peer_host,
            fields.reconsume_times,
        )
        self._turn.add_send(channel, request, record, queue_id)

    def _send_validated(self, channel: Channel, request: Request[SendMessage], now_ms: int) -> None:
        """Anything may be wrong with it, or special about it."""
        fields = request.head.fields
        queue_id = self._choose_queue(fields, now_ms)
        waits = "WAIT\x01false" not in fields.properties or not has_wait_false(fields.properties)
        if fields.batch and "ESCROW_WRITER\x01" in fields.properties:
            self._park_packed(channel, request, queue_id, now_ms, waits)
            return
        if fields.batch:
            records = self._make_batch_records(channel, request, queue_id, now_ms)
        else:
            record = self._make_record(channel, request, queue_id, now_ms)
            if has_special_properties(fields.properties):
                if _is_half(record):
                    self._redirect(record, now_ms)  # a delay that is not served is refused now
                    self._park(channel, request, record, now_ms, waits, 0)
                    return
                record = self._redirect(record, now_ms)
            records = [record]
        self._turn.add_send_records(channel, request, records, queue_id, waits_for_flush=waits)

    def _choose_queue(self, fields: SendMessage, now_ms: int) -> int:
        topic = self._topics.find(fields.topic)
        if topic is None or fields.topic in BROKER_ONLY_TOPICS or not topic.perm & PERM_WRITE:
            topic = self._resolve_topic(fields, now_ms)
        if topic.order and not self._is_broker_writable:
            raise RequestRefused(ResponseCode.NO_PERMISSION, "this broker is not writable")
        queues = max(topic.read_queue_nums, topic.write_queue_nums)
        if fields.queue_id < 0 < topic.write_queue_nums:
            return self._random.randrange(topic.write_queue_nums)
        if not 0 <= fields.queue_id < queues:
            raise RequestRefused(
                ResponseCode.INVALID_PARAMETER,
                f"queue {fields.queue_id} of {fields.topic}, which has {queues}",
            )
        return fields.queue_id

    def _resolve_topic(self, fields: SendMessage, now_ms: int) -> TopicConfig:
        """What the straight path does not decide: an unknown topic, or one nobody may send to."""
        check_topic_name(fields.topic)
        if fields.topic in BROKER_ONLY_TOPICS:
            raise RequestRefused(
                ResponseCode.NO_PERMISSION, f"{fields.topic} belongs to the broker"
            )
        topic = self._topics.get_or_create(
            fields.topic,
            template=fields.default_topic,
            queue_count=fields.default_topic_queue_nums,
            now_ms=now_ms,
        )
        if topic is None:
            raise RequestRefused(
                ResponseCode.TOPIC_NOT_EXIST,
                f"topic {fields.topic} does not exist, and may not be made here",
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
            sys_flag=fields.sys_flag,
            born_ms=fields.born_timestamp,
            born_host=channel.peer_host,
            reconsume_times=fields.reconsume_times,
        )
        if fields.topic.startswith(RETRY_PREFIX):
            record = self._redirect_retry(record, fields, request.head.version, now_ms)
        return record

    def _make_properties(self, text: str, now_ms: int) -> bytes:
        """With a unique key, and marked as this broker's."""
        if "\0" in text:
            raise RequestRefused(ResponseCode.MESSAGE_ILLEGAL, "a zero byte in the properties")
        encoded = text.encode()
        if len(encoded) > PROPERTIES_BYTES_MAX - _BROKER_PROPERTIES_BYTES:
            raise RequestRefused(
                ResponseCode.MESSAGE_ILLEGAL, f"properties of {len(encoded)} bytes are too long"
            )
        if "POP_CK\x01" in text or "MSG_REGION\x01" in text:
            # Sent on by a consumer: the marks of where it was consumed do not go along.
            encoded = change_properties(encoded, remove=_BROKER_PROPERTIES)
        if encoded and encoded[-1] != 2:
            encoded += b"\x02"
        if not has_unique_key(text):
            key = self._unique_keys.next(now_ms=now_ms, month_start_ms=0)
            encoded += b"UNIQ_KEY\x01%s\x02" % key.encode()
        return encoded + self._added_properties

    def _make_batch_records(
        self, channel: Channel, request: Request[SendMessage], queue_id: int, now_ms: int
    ) -> Sequence[Appendable]:
        fields = request.head.fields
        if fields.topic.startswith(RETRY_PREFIX) or fields.sys_flag & TRANSACTION_MASK:
            raise RequestRefused(
                ResponseCode.MESSAGE_ILLEGAL, "a batch is neither a retry nor transactional"
            )
        self._check_body_size(len(request.body))
        topic, sys_flag, born_ms = fields.topic, fields.sys_flag, fields.born_timestamp
        born_host, times = channel.peer_host, fields.reconsume_times
        bulk = decode_bulk_batch(request.body)
        if bulk is not None:
            marks = self._added_properties
            return [bulk.to_run(topic, queue_id, marks, sys_flag, born_ms, born_host, times)]
        return [
            NewRecord(
                topic,
                queue_id,
                item.body,  # type: ignore[arg-type]  # a view, as that of a single message
                self._make_batch_properties(item.properties, now_ms),
                item.flag,
                sys_flag,
                born_ms,
                born_host,
                times,
            )
            for item in _decode_items(request.body)
        ]

    def _make_batch_properties(self, encoded_properties: bytes, now_ms: int) -> bytes:
        text = encoded_properties.decode("utf-8", "replace")
        if has_special_properties(text):
            raise RequestRefused(ResponseCode.MESSAGE_ILLEGAL, "no message of a batch is delayed")
        return self._make_properties(text, now_ms)

    def _park_packed(
        self,
        channel: Channel,
        request: Request[SendMessage],
        queue_id: int,
        now_ms: int,
        waits_for_flush: bool,
    ) -> None:
        """Many messages of a writer as one half. What could be wrong with one of them is said now:
        once they are decided it is too late."""
        record = self._make_record(channel, request, queue_id, now_ms)
        if record.topic.startswith(RETRY_PREFIX) or not _is_half(record):
            raise RequestRefused(
                ResponseCode.MESSAGE_ILLEGAL, "a writer's batch is transactional, and no retry"
            )
        bulk = decode_bulk_batch(request.body)
        if bulk is not None:
            keys = bulk.keys
        else:
            items = _decode_items(request.body)
            keys = [self._check_batch_item(item.properties, record, now_ms) for item in items]
        if len(set(keys)) != len(keys):
            raise RequestRefused(
                ResponseCode.MESSAGE_ILLEGAL, "the messages of a writer's batch share a UNIQ_KEY"
            )
        self._park(channel, request, record, now_ms, waits_for_flush, len(keys))

    def _check_batch_item(self, encoded_properties: bytes, record: NewRecord, now_ms: int) -> bytes:
        """Of one of a writer's batch that has other properties too: it may also be delayed."""
        text = encoded_properties.decode("utf-8", "replace")
        key = find_property(encoded_properties, b"UNIQ_KEY")
        if encoded_properties[-1:] != b"\x02" or key is None or "TRAN_MSG\x01" in text:
            raise RequestRefused(
                ResponseCode.MESSAGE_ILLEGAL,
                "each message of a writer's batch has a UNIQ_KEY, no TRAN_MSG, and ends in \\x02",
            )
        properties = self._make_properties(text, now_ms)
        if has_special_properties(text):
            self._redirect(msgspec.structs.replace(record, properties=properties), now_ms)
        return key

    def _check_body_size(self, body_bytes: int) -> None:
        if body_bytes > self._message_bytes_max:
            raise RequestRefused(
                ResponseCode.MESSAGE_ILLEGAL,
                f"a body of {body_bytes} bytes, limit {self._message_bytes_max}",
            )


def _decode_items(body: Body) -> list[BatchItem]:
    items = decode_batch(body)
    if not items:
        raise RequestRefused(ResponseCode.MESSAGE_ILLEGAL, "a batch of no messages")
    return items


def _is_half(record: NewRecord) -> bool:
    """By the property alone, as RocketMQ; a retry that waits for its level is none."""
    if find_property(record.properties, b"TRAN_MSG") != b"true":
        return False
    return not (record.reconsume_times and b"DELAY\x01" in record.properties)
