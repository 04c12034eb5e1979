"""What is sent, what is received, and how a send ended.

Namespaces: several tenants with the same names on one broker, told apart by a prefix.

    orders            ns%orders
    %RETRY%billing    %RETRY%ns%billing
    TBW102            TBW102               the broker's own names are everybody's

The form is RocketMQ's, so its clients with the same namespace meet ours.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Final, NamedTuple

from escrowmq.clock import Timestamp
from escrowmq.errors import LocalProtocolError
from escrowmq.message import names
from escrowmq.message.compression import decompress_body
from escrowmq.message.keys import encode_offset_id
from escrowmq.message.names import GROUP_TOPIC_PREFIXES, TX_ID, TX_NAME, is_shared_name
from escrowmq.message.properties import decode_properties
from escrowmq.message.record import StoredRecord

DELAY_MAX_S = 100 * 365 * 86_400
BODY_BYTES_MAX = 64 << 20  # of a compressed body, once it is not


@dataclass(frozen=True, slots=True)
class Message:
    """One to be sent. `keys` is text with blanks between several, or the keys themselves."""

    topic: str
    body: bytes
    _: KW_ONLY
    keys: str | Iterable[str] = ""
    tags: str = ""
    properties: Mapping[str, str] = field(default_factory=dict)
    sharding_key: str = ""  # messages with the same one go to the same queue, in order
    delay_level: int = 0  # RocketMQ's: 1 is a second, 18 two hours
    delay_s: float = 0  # from when the broker has it; in a transaction, from the commit
    deliver_at: Timestamp | None = None  # with a time zone
    flag: int = 0

    def __post_init__(self) -> None:
        if not self.topic:
            raise LocalProtocolError("a message has a topic")
        if not isinstance(self.body, bytes):
            raise TypeError(f"a message's body is bytes, not {type(self.body).__name__}")
        if self.delay_level or self.delay_s or self.deliver_at is not None:
            self._check_delay()

    def _check_delay(self) -> None:
        if sum((bool(self.delay_level), bool(self.delay_s), self.deliver_at is not None)) > 1:
            raise LocalProtocolError("a message has one delay: a level, a span or a time")
        if not isinstance(self.delay_level, int) or self.delay_level < 0:
            raise LocalProtocolError(f"a delay level is 1 or more, not {self.delay_level!r}")
        if not 0 <= self.delay_s < DELAY_MAX_S:
            raise LocalProtocolError(f"delay_s is a span from now on, not {self.delay_s!r}")
        if self.deliver_at is not None and self.deliver_at.tzinfo is None:
            raise LocalProtocolError("deliver_at needs a time zone, like datetime.now(UTC) has one")

    @property
    def is_delayed(self) -> bool:
        return bool(self.delay_level or self.delay_s or self.deliver_at is not None)

    @property
    def transaction_id(self) -> str:
        """Known to the local transaction of a listener; empty before the message is parked."""
        return self.properties.get(TX_ID) or self.properties.get(names.UNIQUE_KEY, "")


class MessageQueue(NamedTuple):
    """One queue of a topic, and where its broker is."""

    topic: str
    broker: str
    queue_id: int
    address: str = ""


@dataclass(frozen=True, slots=True)
class ReceivedMessage:
    topic: str
    body: bytes
    keys: str
    tags: str
    properties: Mapping[str, str]
    message_id: str  # what its sender calls it
    offset_id: str  # where it lies
    queue_id: int
    queue_offset: int
    born_ms: int
    stored_ms: int
    reconsume_times: int
    flag: int
    log_offset: int
    prepared_offset: int = 0
    broker: str = ""

    @property
    def transaction_id(self) -> str:
        """Of the transaction that it was sent in; that of its first message, if there are more."""
        return self.properties.get(TX_ID) or self.message_id

    @property
    def transaction_name(self) -> str:
        """What `producer.transaction(…, name=…)` called it."""
        return self.properties.get(TX_NAME, "")


def to_received_message(record: StoredRecord, broker: str = "") -> ReceivedMessage:
    """Raises BrokenBody if its body cannot be decompressed."""
    properties = decode_properties(record.properties)
    offset_id = encode_offset_id(record.store_host, record.log_offset)
    return ReceivedMessage(
        topic=record.topic,
        body=decompress_body(record.body, record.sys_flag, body_bytes_max=BODY_BYTES_MAX),
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
    """Stored in all four; in the last three not as safely as the broker is set up to."""

    SEND_OK = 0
    FLUSH_DISK_TIMEOUT = 10
    SLAVE_NOT_AVAILABLE = 11
    FLUSH_SLAVE_TIMEOUT = 12


@dataclass(frozen=True, slots=True)
class SendResult:
    status: SendStatus
    message_id: str
    offset_id: str
    queue: MessageQueue
    queue_offset: int
    transaction_id: str = ""


NAMESPACE_SEPARATOR: Final = "%"


@dataclass(frozen=True, slots=True)
class Namespace:
    """Of one client. Without a name it changes nothing."""

    name: str = ""

    def __post_init__(self) -> None:
        if NAMESPACE_SEPARATOR in self.name:
            raise ValueError(f"a namespace has no {NAMESPACE_SEPARATOR} in it: {self.name!r}")

    def wrap(self, plain: str) -> str:
        """A topic or a group as the broker knows it. Wrapping twice is wrapping once."""
        if not self.name or not plain or is_shared_name(plain):
            return plain
        prefix, rest = _split_prefix(plain)
        if rest.startswith(self.name + NAMESPACE_SEPARATOR):
            return plain
        return f"{prefix}{self.name}{NAMESPACE_SEPARATOR}{rest}"

    def unwrap(self, wrapped: str) -> str:
        """As its users know it; a name of another namespace stays as it is."""
        if not self.name:
            return wrapped
        prefix, rest = _split_prefix(wrapped)
        return prefix + rest.removeprefix(self.name + NAMESPACE_SEPARATOR)


def wrap(namespace: str, plain: str) -> str:
    return Namespace(namespace).wrap(plain)


def unwrap(namespace: str, wrapped: str) -> str:
    return Namespace(namespace).unwrap(wrapped)


def _split_prefix(name: str) -> tuple[str, str]:
    for prefix in GROUP_TOPIC_PREFIXES:
        if name.startswith(prefix):
            return prefix, name[len(prefix) :]
    return "", name
