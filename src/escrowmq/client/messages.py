"""Values of the client's public interface: messages, queues, results of a send; and namespaces."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Final, NamedTuple

from escrowmq.clock import Timestamp
from escrowmq.errors import LocalProtocolError
from escrowmq.message import names
from escrowmq.message.compression import decompress_body
from escrowmq.message.delivery_failure import DeliveryFailure, failure_of
from escrowmq.message.keys import encode_offset_id
from escrowmq.message.names import GROUP_TOPIC_PREFIXES, TX_ID, TX_NAME, is_shared_name
from escrowmq.message.properties import decode_properties
from escrowmq.message.record import StoredRecord
from escrowmq.parsing import suggest_arguments

DELAY_MAX_S: Final = 100 * 365 * 86_400
BODY_BYTES_MAX: Final = 64 << 20  # limit of a body after decompression


@suggest_arguments
@dataclass(frozen=True, slots=True)
class Message:
    """A message to send.

        Message("orders", b"o-17", keys="o-17", tags="created")

    `keys` are searchable (`escrowmq message find`): several in one text separated by spaces, or
    as an iterable. `tags` is the tag that consumers filter by. `properties` are the application's
    own; SQL92 filters see them.

    Messages with the same `sharding_key` go to the same queue and keep their order.

    A message has at most one delay. `delay_level` is RocketMQ's (1 is 1 s, 18 is 2 h by default),
    `delay_s` counts from the time when the broker stores the message, or from the commit in a
    transaction, and `deliver_at` is a datetime with a time zone.

    Raises LocalProtocolError for an empty topic or an invalid delay, and TypeError if the body is
    not bytes, or the topic or tag no text.
    """

    topic: str
    body: bytes
    _: KW_ONLY
    keys: str | Iterable[str] = ""
    tags: str = ""
    properties: Mapping[str, str] = field(default_factory=dict)
    sharding_key: str = ""
    delay_level: int = 0
    delay_s: float = 0
    deliver_at: Timestamp | None = None
    flag: int = 0

    def __post_init__(self) -> None:
        if not self.topic:
            raise LocalProtocolError("a message needs a topic")
        if not isinstance(self.body, bytes):
            raise TypeError(_body_type_error(self.body))
        if not isinstance(self.topic, str) or not isinstance(self.tags, str):
            raise TypeError(
                "the topic and the tag of a message are texts, not "
                f"topic={self.topic!r} and tags={self.tags!r}"
            )
        if self.delay_level or self.delay_s or self.deliver_at is not None:
            self._check_delay()

    def _check_delay(self) -> None:
        if sum((bool(self.delay_level), bool(self.delay_s), self.deliver_at is not None)) > 1:
            raise LocalProtocolError(
                "a message can have one delay: delay_level, delay_s or deliver_at"
            )
        if not isinstance(self.delay_level, int) or self.delay_level < 0:
            raise LocalProtocolError(f"delay_level must be 1 or more, not {self.delay_level!r}")
        if not isinstance(self.delay_s, (int, float)) or not 0 <= self.delay_s < DELAY_MAX_S:
            raise LocalProtocolError(
                f"delay_s must be a number of seconds from 0 to {DELAY_MAX_S}, not {self.delay_s!r}"
            )
        if self.deliver_at is not None and not isinstance(self.deliver_at, Timestamp):
            raise LocalProtocolError(
                f"deliver_at is a datetime with a time zone, not {self.deliver_at!r}; "
                "delay_s= counts seconds from now"
            )
        if self.deliver_at is not None and self.deliver_at.tzinfo is None:
            raise LocalProtocolError(
                "deliver_at needs a time zone: use datetime.now(UTC) + timedelta(...)"
            )

    @property
    def is_delayed(self) -> bool:
        """Whether the message has a delay, of any kind."""
        return bool(self.delay_level or self.delay_s or self.deliver_at is not None)

    @property
    def transaction_id(self) -> str:
        """The transaction's id in `TransactionListener.execute_local_transaction`; else empty."""
        return self.properties.get(TX_ID) or self.properties.get(names.UNIQUE_KEY, "")


def check_is_message(message: object) -> None:
    """Raise TypeError for anything else than a Message, which a producer sends."""
    if isinstance(message, Message):
        return
    what = f"Message('orders', b'…'), not {message!r}"
    if isinstance(message, ReceivedMessage):
        what = "a new Message(topic, received.body), not a received one"
    raise TypeError(f"a producer sends {what}")


def _body_type_error(body: object) -> str:
    how = "encode it first"
    if isinstance(body, str):
        how = "use text.encode()"
    elif isinstance(body, (bytearray, memoryview)):
        how = "use bytes(body)"
    elif isinstance(body, (dict, list, tuple, int, float)):
        how = "use json.dumps(value).encode()"
    return f"the body of a message must be bytes, not {type(body).__name__}: {how}"


class MessageQueue(NamedTuple):
    """One queue of a topic: `MessageQueue("orders", "broker-a", 0)`."""

    topic: str
    broker: str
    queue_id: int

    def __str__(self) -> str:
        return f"{self.topic} {self.broker}:{self.queue_id}"


@dataclass(frozen=True, slots=True)
class ReceivedMessage:
    """A message as a consumer or a checker receives it. Times are milliseconds since 1970."""

    topic: str
    body: bytes
    keys: str
    tags: str
    properties: Mapping[str, str]
    message_id: str  # given by the sender; the same in every delivery
    offset_id: str  # the broker's address and the log offset, as RocketMQ writes them
    queue_id: int
    queue_offset: int
    born_ms: int
    stored_ms: int
    reconsume_times: int  # number of earlier deliveries that failed
    flag: int
    log_offset: int
    prepared_offset: int = 0
    broker: str = ""

    @property
    def transaction_id(self) -> str:
        """The id of the transaction that sent this message, or the message's own id."""
        return self.properties.get(TX_ID) or self.message_id

    @property
    def failure(self) -> DeliveryFailure | None:
        """Why the delivery before this one failed: of a retry or a dead letter; else None."""
        return failure_of(self.properties)

    @property
    def transaction_name(self) -> str:
        """The `name` given to `producer.transaction(name=...)`; empty if there was none."""
        return self.properties.get(TX_NAME, "")


_PROPERTY_BYTES: Final = 130  # measured: what a property takes in memory beside its text


def retained_bytes(message: ReceivedMessage) -> int:
    """Return about how much memory a message takes.

    Most of it is the body. But 32 KiB of short properties become half a megabyte of objects.
    """
    properties = message.properties
    texts = sum(map(len, properties)) + sum(map(len, properties.values()))
    return len(message.body) + texts + _PROPERTY_BYTES * len(properties)


def to_received_message(
    record: StoredRecord, broker: str = "", *, body_bytes_max: int = BODY_BYTES_MAX
) -> ReceivedMessage:
    """Convert a stored record.

    Raises BrokenBody if its body cannot be decompressed, or would have more than `body_bytes_max`
    bytes.
    """
    properties = decode_properties(record.properties)
    offset_id = encode_offset_id(record.store_host, record.log_offset)
    return ReceivedMessage(
        topic=record.topic,
        body=decompress_body(record.body, record.sys_flag, body_bytes_max=body_bytes_max),
        keys=properties.get(names.KEYS, ""),
        tags=properties.get(names.TAGS, ""),
        properties=properties,
        message_id=properties.get(names.UNIQUE_KEY) or offset_id,
        offset_id=offset_id,
        queue_id=record.queue_id,
        queue_offset=record.queue_offset,
        born_ms=record.born_ms,
        stored_ms=record.stored_ms,
        reconsume_times=record.reconsume_times,
        flag=record.flag,
        log_offset=record.log_offset,
        prepared_offset=record.prepared_offset,
        broker=broker,
    )


class SendStatus(enum.Enum):
    """How safely a message is stored. Any other response of the broker raises RequestRefused.

    Only SEND_OK means that the message is as durable as the broker is configured to make it.
    With the other three it is stored, but not flushed or not replicated in time.
    """

    SEND_OK = 0
    FLUSH_DISK_TIMEOUT = 10
    SLAVE_NOT_AVAILABLE = 11
    FLUSH_SLAVE_TIMEOUT = 12


@dataclass(frozen=True, slots=True)
class SendResult:
    """Where a message was stored, and how safely (`status`)."""

    status: SendStatus
    message_id: str  # unique key; the same in every attempt and delivery
    offset_id: str  # broker's address and log offset, as RocketMQ writes them
    queue: MessageQueue
    queue_offset: int
    transaction_id: str = ""


# --- namespaces ----------------------------------------------------------------------------------

NAMESPACE_SEPARATOR: Final = "%"


@dataclass(frozen=True, slots=True)
class Namespace:
    """Prefix of topics and groups that lets several tenants use the same names on one broker.

        orders            ns%orders
        %RETRY%billing    %RETRY%ns%billing
        TBW102            TBW102               (system names are shared)

    This is RocketMQ's format, so RocketMQ clients with the same namespace see the same topics.
    An empty namespace changes nothing. Raises ValueError if the name contains a percent sign.
    """

    name: str = ""

    def __post_init__(self) -> None:
        if NAMESPACE_SEPARATOR in self.name:
            raise ValueError(
                f"a namespace must not contain {NAMESPACE_SEPARATOR!r}, got {self.name!r}"
            )

    def wrap(self, name: str) -> str:
        """Return a topic or group as the broker knows it. Wrapping twice equals wrapping once."""
        if not self.name or not name or is_shared_name(name):
            return name
        prefix, plain = _split_prefix(name)
        if plain.startswith(self.name + NAMESPACE_SEPARATOR):
            return name
        return f"{prefix}{self.name}{NAMESPACE_SEPARATOR}{plain}"

    def unwrap(self, wrapped: str) -> str:
        """Return a topic or group as users know it. Names of other namespaces do not change."""
        if not self.name:
            return wrapped
        prefix, plain = _split_prefix(wrapped)
        return prefix + plain.removeprefix(self.name + NAMESPACE_SEPARATOR)


def _split_prefix(name: str) -> tuple[str, str]:
    for prefix in GROUP_TOPIC_PREFIXES:
        if name.startswith(prefix):
            return prefix, name[len(prefix) :]
    return "", name
