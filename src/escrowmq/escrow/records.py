"""The records of a transaction, in RocketMQ's layout with a few properties of our own.

    half      half topic, queue 0    the message; REAL_TOPIC and REAL_QID name its own queue
    final     its own topic, queue   the message again, marked committed; names its half
    op        op topic, queue 0      body: the half's queue offset; ours also say how it ended
    stranded  stranded topic         the message again, for operators
    journal   a topic of our own     one step of a check: sent, answered with UNKNOWN, resumed

The properties that only a half has are at the end of its properties, so that in most cases the
properties of the final are a prefix of those of the half.

A packed half holds many messages for one queue. Its body is that of a batch (`message/batch.py`):
a writer that sends millions of messages needs one half for some hundreds of them. Each message has
a unique key of its own. After a crash the keys tell how many finals of the half were stored.
"""

from __future__ import annotations

import enum
import logging
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, NamedTuple, Protocol

import msgspec

from escrowmq.client_memory import name_error
from escrowmq.errors import CorruptRecord, RecordRefused, RequestRefused
from escrowmq.escrow.half_table import Attempt
from escrowmq.message import names
from escrowmq.message.batch import Appendable, RecordRun, decode_batch, decode_bulk_batch
from escrowmq.message.keys import decode_host, tag_code
from escrowmq.message.names import (
    ATTEMPT,
    BATCH,
    CHECK_IMMUNITY_TIME,
    CHECK_TIMES,
    COPY_CHECK_STATE,
    COPY_OF,
    DECIDED_BY,
    FENCE,
    OUTCOME,
    PACKED,
    PREPARED_QUEUE_OFFSET,
    PREVIOUS_OFFSETS,
    REASON,
    TRANSACTION_ID,
    WRITER,
)
from escrowmq.message.properties import change_properties, decode_properties, find_property
from escrowmq.message.record import (
    CRC_PROPERTY_BYTES_MAX,
    PROPERTIES_BYTES_MAX,
    TRANSACTION_COMMIT,
    TRANSACTION_NONE,
    NewRecord,
    StoredRecord,
    copy_record,
    encode_record,
    transaction_type,
    with_transaction_type,
)
from escrowmq.message.transaction import COMMITTED, TransactionState

log = logging.getLogger(__name__)

# Turns a record with delay properties into the record to store first. Raises RequestRefused.
Redirect = Callable[[NewRecord, int], NewRecord]


class DecidedBy(enum.StrEnum):
    """What caused a decision. The op stores it, followed by a name if there is one."""

    PRODUCER = "producer"  # not stored: almost every op has it
    CHECK = "check"  # a producer that answered a check
    GROUP = "group"  # END_TRANSACTIONS; the name is the address of the client
    WRITER = "writer"
    OPERATOR = "operator"
    BROKER = "broker"


# Module names are looked up faster than members of an enum, and every END needs this one.
BY_PRODUCER: Final = DecidedBy.PRODUCER

# A final does not have these. It keeps delay properties: a delay counts from the commit.
_HALF_ONLY_PROPERTIES: Final = (
    names.TRANSACTIONAL,
    names.REAL_TOPIC,
    names.REAL_QUEUE_ID,
    CHECK_TIMES,
    PREPARED_QUEUE_OFFSET,
    COPY_OF,
    COPY_CHECK_STATE,
    PACKED,
    TRANSACTION_ID,
    WRITER,
    BATCH,
    ATTEMPT,
    FENCE,
)
_TAIL: Final = b"TRAN_MSG\x01true\x02REAL_TOPIC\x01"
_LETTER_BY_STATE: Final = {
    TransactionState.COMMITTED: "c",
    TransactionState.ROLLED_BACK: "r",
    TransactionState.STRANDED: "s",
    TransactionState.OPEN: "m",  # moved: a copy has replaced the half
}
_STATE_BY_LETTER: Final = {letter: state for state, letter in _LETTER_BY_STATE.items()}
NO_HOST: Final = b"\0" * 8
OFFSET_DIGITS_MAX: Final = 19  # of fewer digits, no number is too large
_PLAIN_COMMIT_PROPERTIES: Final = f"TAGS\x01d\x02{OUTCOME}\x01c\x02".encode()


# --- limits --------------------------------------------------------------------------------------

# What the broker may have to add to a half later: the number of a check; the reason on a stranded
# copy; previous offsets and check state on a moved copy; the due time of a delayed final. A half
# that leaves no room for it is refused when it is sent, because later nothing can be refused.
HALF_RESERVED_BYTES: Final = 1_024
UNIQUE_KEY_BYTES_MAX: Final = 255  # a half repeats its key as the transaction id
_STORED_PROPERTIES_BYTES_MAX: Final = PROPERTIES_BYTES_MAX - CRC_PROPERTY_BYTES_MAX
HALF_PROPERTIES_BYTES_MAX: Final = _STORED_PROPERTIES_BYTES_MAX - HALF_RESERVED_BYTES
# A half that stays open for months moves every few days. Its producer knows the first position,
# or one that a check named lately.
_PREVIOUS_OFFSETS_MAX: Final = 16
REASON_LENGTH_MAX: Final = 500  # of an op
REMARK_LENGTH_MAX: Final = 200  # of a producer, in the journal and in memory


def check_half_names(group: str, key: bytes) -> None:
    """Raise RecordRefused if group or key could break a line of a log or of a list."""
    for name, value in (("PGROUP", group), ("UNIQ_KEY", key.decode("utf-8", "replace"))):
        if names.has_control_characters(value):
            raise RecordRefused(
                f"the {name} of a transactional message contains control characters: "
                f"{value[:100]!r}"
            )


def check_half_limits(key: bytes, group: str, properties_bytes: int) -> None:
    """Raise RecordRefused if a half leaves no room for what the broker may have to add.

    Also if its names are too long: they are kept in memory as long as it is open.
    """
    if error := name_error("the producer group of a transactional message", group):
        raise RecordRefused(error)
    if len(key) > UNIQUE_KEY_BYTES_MAX:
        raise RecordRefused(
            f"the UNIQ_KEY of a transactional message is {len(key)} bytes, "
            f"the limit is {UNIQUE_KEY_BYTES_MAX}"
        )
    if properties_bytes > HALF_PROPERTIES_BYTES_MAX:
        raise RecordRefused(
            f"the properties of a transactional message are {properties_bytes} bytes with those "
            f"that the broker adds, the limit is {HALF_PROPERTIES_BYTES_MAX}"
        )


def _with_properties(
    half: StoredRecord, update: Mapping[str, str], remove: Sequence[str] = ()
) -> bytes:
    """Return the changed properties of a half.

    RocketMQ reserves no room in the halves that it stores. If one is too full, it loses what its
    broker added for information.
    """
    properties = change_properties(half.properties, remove=remove, update=update)
    if len(properties) > _STORED_PROPERTIES_BYTES_MAX:
        informational = [name.decode() for name in _BROKER_PROPERTIES]
        properties = change_properties(properties, remove=informational)
    return properties


def _encode_offsets(offsets: Sequence[int]) -> str:
    """Return offsets as text: all, or the first one and the newest."""
    if len(offsets) > _PREVIOUS_OFFSETS_MAX:
        offsets = [offsets[0], *offsets[1 - _PREVIOUS_OFFSETS_MAX :]]
    return ",".join(map(str, offsets))


def _truncate(text: str, bytes_max: int) -> str:
    """Return as many characters as fit into `bytes_max` bytes."""
    return text.encode()[: max(0, bytes_max)].decode("utf-8", "ignore")


# --- halves --------------------------------------------------------------------------------------


class CheckState(NamedTuple):
    """The checks of a moved half so far. Its new position changes none of them."""

    parked_ms: int
    due_ms: int
    checks: int
    is_stranded: bool
    unknown_answers: int = 0


class HalfProperties(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What the properties of a half say about it."""

    topic: str
    queue_id: int
    group: str
    key: bytes
    immunity_ms: int | None = None
    attempt: Attempt | None = None
    check_state: CheckState | None = None
    # Queue offsets it had before it was moved, also those that the log has lost.
    previous_offsets: tuple[int, ...] = ()


def make_half(record: NewRecord, *, packed_count: int = 0) -> NewRecord:
    """Return the record that parks a message, from which broker properties were removed before.

    `packed_count`: the number of messages in its body, if it is packed.
    """
    before, _, after = (b"\x02" + record.properties).partition(b"\x02TRAN_MSG\x01true\x02")
    properties = before[1:] + b"\x02" + after if before else after
    if b"TRAN_MSG\x01" in properties or b"__transactionId__" in properties:
        properties = change_properties(
            record.properties, remove=(names.TRANSACTIONAL, TRANSACTION_ID)
        )
    key = find_property(properties, b"UNIQ_KEY") or b""
    if packed_count:
        properties += b"%b\x01%d\x02" % (PACKED.encode(), packed_count)
    properties += b"__transactionId__\x01%b\x02" % key
    tail = _make_tail(record.topic, record.queue_id)
    return NewRecord(
        names.HALF_TOPIC,
        0,
        record.body,
        properties + tail,
        record.flag,
        with_transaction_type(record.sys_flag, TRANSACTION_NONE),
        record.born_ms,
        record.born_host,
        record.reconsume_times,
    )


TagsAndKeys = tuple[int, list[bytes]]


def make_plain_half(
    properties: str, added_properties: str, topic: str, queue_id: int
) -> tuple[bytes, bytes, str, bytes, TagsAndKeys | None]:
    """Return what a half with ordinary properties only needs, without parsing them all.

    Returns the properties of the half, those of its final, group, unique key, and tags code and
    keys, which half and final share. Every transactional send comes through here. The properties
    are cut as text, because Python searches text much faster than bytes.
    """
    before, _, after = properties.partition("TRAN_MSG\x01true\x02")
    kept = before + after
    if kept[-1] != "\x02":
        kept += "\x02"
    items = "\x02" + kept
    _, has_group, after = items.rpartition("\x02PGROUP\x01")
    group = after.partition("\x02")[0] if has_group else ""
    key = items.rpartition("\x02UNIQ_KEY\x01")[2].partition("\x02")[0].encode()
    final_properties = (kept + added_properties).encode()
    tail = b"__transactionId__\x01%b\x02%b" % (key, _make_tail(topic, queue_id))
    half_properties = final_properties + tail
    return half_properties, final_properties, group, key, _plain_tags_and_keys(items, key)


@lru_cache(maxsize=4096)
def _make_tail(topic: str, queue_id: int) -> bytes:
    return b"%b%b\x02REAL_QID\x01%d\x02" % (_TAIL, topic.encode(), queue_id)


def _plain_tags_and_keys(items: str, key: bytes) -> TagsAndKeys | None:
    """Return the same as `message/keys.py`; None if the properties are too unusual for this."""
    code, keys = 0, [key]
    _, has_tags, after = items.rpartition("\x02TAGS\x01")
    if has_tags:
        tag = after.partition("\x02")[0]
        if not tag:
            return None
        code = tag_code(tag)
    _, has_keys, after = items.rpartition("\x02KEYS\x01")
    if has_keys:
        text = after.partition("\x02")[0]
        if not text:
            return None
        keys += filter(None, text.encode().split(b" "))
    return code, keys


def is_escrowmq_half(properties: bytes) -> bool:
    """Whether we wrote this half. RocketMQ writes the same properties in another order."""
    return _TAIL in properties or f"{COPY_OF}\x01".encode() in properties


def make_copy(
    half: StoredRecord, *previous_offsets: int, check_state: CheckState | None = None
) -> NewRecord:
    """Return the record that appends a half again, because it moves."""
    added = {COPY_OF: _encode_offsets(previous_offsets)}
    removed = (CHECK_TIMES, PREPARED_QUEUE_OFFSET, COPY_CHECK_STATE)
    properties = _with_properties(half, added, removed)
    if check_state is not None:
        state = ",".join(str(int(part)) for part in check_state)
        with_state = _with_properties(half, {**added, COPY_CHECK_STATE: state}, removed)
        # A full half of RocketMQ's has no room for it. Then its checks start again, which is
        # better than a half that cannot be moved.
        if len(with_state) <= _STORED_PROPERTIES_BYTES_MAX:
            properties = with_state
    return copy_record(half, topic=names.HALF_TOPIC, queue_id=0, properties=properties)


def make_stranded(half: StoredRecord, reason: str) -> NewRecord:
    """Return the record that shows a stranded message to operators.

    The op has the whole reason; here it is cut to the room that is left.
    """
    bytes_max = _STORED_PROPERTIES_BYTES_MAX - len(half.properties) - len(REASON) - 2
    reason = _truncate(_printable(reason), bytes_max)
    added = {REASON: reason} if reason else {}
    properties = _with_properties(half, added)
    return copy_record(half, topic=names.STRANDED_TOPIC, queue_id=0, properties=properties)


class HasProperties(Protocol):
    @property
    def properties(self) -> bytes: ...


def parse_half(half: HasProperties) -> HalfProperties | None:
    """Return what the properties say; None if they do not name a topic and queue to deliver to."""
    properties = half.properties
    return _parse_plain_half(properties) or _parse_any_half(properties)


def _parse_plain_half(properties: bytes) -> HalfProperties | None:
    """Parse a half that we wrote with ordinary properties; None if it is not such a half.

    A start reads every open half, so this avoids parsing all properties of each.
    """
    kept, has_tail, tail = properties.rpartition(_TAIL)
    topic, _, after_topic = tail.partition(b"\x02")
    queue_id = after_topic[9:-1]
    is_plain = (
        has_tail
        and topic
        and queue_id.isdigit()
        and after_topic == b"REAL_QID\x01%b\x02" % queue_id
    )
    if not is_plain or kept.find(b"ESCROW_") >= 0 or kept.find(b"CHECK_IMMUNITY") >= 0:
        return None
    items = b"\x02" + kept
    _, has_group, after = items.rpartition(b"\x02PGROUP\x01")
    group = after.partition(b"\x02")[0]
    _, has_key, after = items.rpartition(b"\x02UNIQ_KEY\x01")
    key = after.partition(b"\x02")[0]
    if not (has_group and group and has_key and key):
        return None
    return HalfProperties(
        topic=topic.decode("utf-8", "replace"),
        queue_id=int(queue_id),
        group=group.decode("utf-8", "replace"),
        key=key,
    )


def _parse_any_half(properties: bytes) -> HalfProperties | None:
    topic = find_property(properties, b"REAL_TOPIC")
    queue_id = find_property(properties, b"REAL_QID") or b"0"
    if not topic or not queue_id.isdigit():
        return None
    immunity: bytes | None = None
    if b"CHECK_IMMUNITY" in properties:
        immunity = find_property(properties, CHECK_IMMUNITY_TIME.encode())
    attempt = None
    if b"ESCROW_WRITER" in properties:
        attempt = parse_attempt(decode_properties(properties))
    check_state, previous_offsets = None, b""
    if b"ESCROW_COPY" in properties:
        check_state = _parse_check_state(properties)
        previous_offsets = find_property(properties, COPY_OF.encode()) or b""
    return HalfProperties(
        topic=topic.decode("utf-8", "replace"),
        queue_id=int(queue_id),
        group=(find_property(properties, b"PGROUP") or b"").decode("utf-8", "replace"),
        key=find_property(properties, b"UNIQ_KEY") or b"",
        immunity_ms=None
        if immunity is None
        else parse_immunity_ms(immunity.decode("utf-8", "replace")),
        attempt=attempt,
        check_state=check_state,
        previous_offsets=tuple(
            int(offset) for offset in previous_offsets.split(b",") if offset.isdigit()
        ),
    )


def _parse_check_state(properties: bytes) -> CheckState | None:
    parts = (find_property(properties, COPY_CHECK_STATE.encode()) or b"").split(b",")
    if len(parts) not in (4, 5) or not all(part.isdigit() for part in parts):
        return None
    parked_ms, due_ms, checks, is_stranded, *unknown_answers = map(int, parts)
    return CheckState(parked_ms, due_ms, checks, bool(is_stranded), *unknown_answers)


def parse_attempt(properties: Mapping[str, str]) -> Attempt | None:
    writer, batch = properties.get(WRITER), properties.get(BATCH, "")
    if not writer or not batch.isdecimal():
        return None
    fence = properties.get(FENCE, "")
    number = int(fence) if fence.isdecimal() else 0
    return Attempt(writer, int(batch), properties.get(ATTEMPT, ""), number)


def parse_immunity_ms(text: str | None) -> int | None:
    """Parse seconds. None, which means the broker's own setting, if the text is no valid time.

    As in RocketMQ, 0 and less mean that the first check is due at once, and -1 means None.
    """
    if text is None:
        return None
    try:
        seconds = float(text)
    except ValueError:
        return None
    if not -(10**9) < seconds < 10**9 or seconds == -1:
        return None
    return max(0, int(seconds * 1000))


# --- finals --------------------------------------------------------------------------------------

_PACKED_KEY: Final = f"{PACKED}\x01".encode()
_BROKER_PROPERTIES: Final = (b"MSG_REGION", b"TRACE_ON", b"CLUSTER")


def make_finals(
    half: StoredRecord,
    topic: str,
    queue_id: int,
    redirect: Redirect | None = None,
    now_ms: int = 0,
) -> list[Appendable]:
    """Return the messages as consumers will see them; each names the half it came from.

    A delay counts from the commit, so `redirect` sends delayed finals to where delayed messages
    wait. The bodies are views of the log: append the records before the turn ends.
    """
    finals: list[Appendable] = (
        _unpack_finals(half, topic, queue_id)
        if is_packed(half.properties)
        else [make_final(half, topic, queue_id)]
    )
    return finals if redirect is None else [_redirected(f, redirect, now_ms) for f in finals]


def make_final(half: StoredRecord, topic: str, queue_id: int) -> NewRecord:
    """Return the final of a half that is not packed."""
    kept, has_tail, tail = half.properties.rpartition(_TAIL)
    kept, has_id, after_id = kept.rpartition(b"__transactionId__\x01")
    if (
        not (has_tail and has_id)
        or tail.count(b"\x02") + after_id.count(b"\x02") != 3
        or kept.find(b"ESCROW_") >= 0
    ):
        # Written by RocketMQ, moved, or part of a batch: the tail is not all there is to remove.
        kept = change_properties(half.properties, remove=_HALF_ONLY_PROPERTIES)
    return NewRecord(
        topic,
        queue_id,
        half.body,  # type: ignore[arg-type]  # a view: it is appended in this turn
        kept,
        half.flag,
        with_transaction_type(half.sys_flag, TRANSACTION_COMMIT),
        half.born_ms,
        half.born_host,
        half.reconsume_times,
        half.log_offset,
    )


def make_plain_final(
    half: NewRecord, final_properties: bytes, topic: str, queue_id: int, log_offset: int
) -> NewRecord:
    """Return the final of a half that `make_plain_half` made and that is now at `log_offset`."""
    return NewRecord(
        topic,
        queue_id,
        half.body,
        final_properties,
        half.flag,
        half.sys_flag | TRANSACTION_COMMIT,
        half.born_ms,
        half.born_host,
        half.reconsume_times,
        log_offset,
        half.tags_and_keys,
    )


def is_packed(properties: bytes) -> bool:
    return properties.find(_PACKED_KEY) >= 0


def _unpack_finals(half: StoredRecord, topic: str, queue_id: int) -> list[Appendable]:
    broker_properties = b"".join(
        b"%b\x01%b\x02" % (name, find_property(half.properties, name) or b"")
        for name in _BROKER_PROPERTIES
    )
    sys_flag = with_transaction_type(half.sys_flag, TRANSACTION_COMMIT)
    origin = half.born_ms, half.born_host, half.reconsume_times, half.log_offset
    bulk = decode_bulk_batch(half.body)
    if bulk is not None:
        return [bulk.to_run(topic, queue_id, broker_properties, sys_flag, *origin)]
    return [
        NewRecord(
            topic,
            queue_id,
            item.body,  # type: ignore[arg-type]  # a view: it is appended in this turn
            item.properties + broker_properties,
            item.flag,
            sys_flag,
            *origin,
        )
        for item in decode_batch(half.body)
    ]


def _redirected(final: Appendable, redirect: Redirect, now_ms: int) -> Appendable:
    if type(final) is RecordRun:  # its messages have no properties beyond a unique key
        return final
    if not is_delayed(final.properties):
        return final
    try:
        return redirect(final, now_ms)
    except RequestRefused as error:
        # It was parked under other settings, or by RocketMQ. Early is better than never.
        log.warning("message delivered without its delay topic=%s: %s", final.topic, error)
        return final


# --- origins -------------------------------------------------------------------------------------


class MessageOrigin(NamedTuple):
    """Where a message came from and what it says. Copies keep all of it, RocketMQ's as well.

    The born host is the address of the connection that the message was sent by. The broker sets
    it, so another client cannot send a message with the same origin.
    """

    born_host: bytes
    born_ms: int
    body_crc: int
    body_bytes: int


def origin_of(record: StoredRecord) -> MessageOrigin:
    return MessageOrigin(record.born_host, record.born_ms, record.body_crc, len(record.body))


def is_final_of(final: StoredRecord, half: StoredRecord, properties: HalfProperties) -> bool:
    """Return whether a record is the final of a half, or one of the finals of a packed half.

    A client can send a message with the key, the group and the body of a half, and in an old log
    also with the transaction type of a final. It can set neither the prepared offset nor the
    born host. A message without a half has the prepared offset 0, where a half may be as well, so
    both have to match.
    """
    if (
        transaction_type(final.sys_flag) != TRANSACTION_COMMIT
        or final.prepared_offset != half.log_offset
        or (final.born_host, final.born_ms) != (half.born_host, half.born_ms)
    ):
        return False
    topic, queue_id = final.topic, final.queue_id
    if topic in (names.SCHEDULE_TOPIC, names.TIMER_TOPIC):
        values = decode_properties(final.properties)
        topic, queue = values.get(names.REAL_TOPIC, ""), values.get(names.REAL_QUEUE_ID, "")
        queue_id = int(queue) if queue.isdecimal() else -1
    if (topic, queue_id) != (properties.topic, properties.queue_id):
        return False
    if is_packed(half.properties):
        return True  # its finals have bodies and keys of their own
    key = find_property(final.properties, b"UNIQ_KEY") or b""
    return key == properties.key and origin_of(final) == origin_of(half)


def is_delayed(properties: bytes) -> bool:
    """Return whether a message may have a delay; True for some that have none."""
    # `find` and not `in`: for bytes it is twice as fast.
    return properties.find(b"DELAY\x01") >= 0 or properties.find(b"TIMER_D") >= 0


# --- ops -----------------------------------------------------------------------------------------


def make_op(
    queue_offset: int,
    state: TransactionState,
    by: str,
    reason: str = "",
    *,
    previous_offsets: Sequence[int] = (),
    born_host: bytes = NO_HOST,
    now_ms: int,
) -> NewRecord:
    """Return the record which says that a half, and all copies it was moved from, is done.

    RocketMQ reads only tag and body. The other properties are ours: the outcome, what decided it
    (a `DecidedBy`, perhaps with a name), and the reason. The record's born host is the address
    of the client that decided.
    """
    body = b"%d" % queue_offset
    if state is COMMITTED and by == BY_PRODUCER and not previous_offsets and not reason:
        return NewRecord(
            names.OP_TOPIC, 0, body, _PLAIN_COMMIT_PROPERTIES, born_ms=now_ms, born_host=born_host
        )
    text = f"TAGS\x01d\x02{OUTCOME}\x01{_LETTER_BY_STATE[state]}\x02"
    if by != BY_PRODUCER:
        text += f"{DECIDED_BY}\x01{by}\x02"
    if state is not COMMITTED:
        # With a key, the op is found when the history of the transaction is read. A commit does
        # without: its final is found by the message's own key, and the op is right behind it.
        text += f"KEYS\x01{queue_offset}\x02"
    if previous_offsets:
        text += f"{PREVIOUS_OFFSETS}\x01{_encode_offsets(previous_offsets)}\x02"
    if reason:
        text += f"{REASON}\x01{_printable(reason)}\x02"
    return NewRecord(names.OP_TOPIC, 0, body, text.encode(), born_ms=now_ms, born_host=born_host)


@dataclass(frozen=True, slots=True)
class Op:
    half_offsets: list[int]
    previous_offsets: list[int]  # of the same half, before it was moved
    state: TransactionState | None  # OPEN: moved; None: written by RocketMQ, which does not say
    by: str
    reason: str


def plain_commit_offset(record: StoredRecord) -> int | None:
    """Return the half that an op commits, if it is one as producers cause them; else None.

    Most ops are. `decode_op` returns the same for it, and takes several times as long.
    """
    if record.properties != _PLAIN_COMMIT_PROPERTIES:
        return None
    body = bytes(record.body)
    return int(body) if body.isdigit() and len(body) < OFFSET_DIGITS_MAX else None


def decode_op(record: StoredRecord) -> Op | None:
    """Parse an op; None if it is none. RocketMQ 5 writes several halves, with commas."""
    properties = decode_properties(record.properties)
    parts = bytes(record.body).split(b",")
    if properties.get(names.TAGS) != "d" or not any(parts):
        return None
    if not all(part.isdigit() and len(part) < OFFSET_DIGITS_MAX for part in parts if part):
        return None
    return Op(
        [int(part) for part in parts if part],
        [int(part) for part in properties.get(PREVIOUS_OFFSETS, "").split(",") if part.isdecimal()],
        _STATE_BY_LETTER.get(properties.get(OUTCOME, "")),
        _decided_by(properties, record),
        properties.get(REASON, ""),
    )


def _decided_by(properties: Mapping[str, str], record: StoredRecord) -> str:
    by = properties.get(DECIDED_BY, BY_PRODUCER if OUTCOME in properties else "")
    if record.born_host == NO_HOST or OUTCOME not in properties:
        return by
    address, port = decode_host(record.born_host)
    return f"{by} [{address}]:{port}" if ":" in address else f"{by} {address}:{port}"


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else " " for c in text[:REASON_LENGTH_MAX])


def short_remark(text: str) -> str:
    """Return the part of a producer's remark that is kept: one line, not too long."""
    return _printable(text[:REMARK_LENGTH_MAX]).strip()


# --- checks --------------------------------------------------------------------------------------


def make_check_body(half: StoredRecord, topic: str, queue_id: int, checks: int) -> bytes:
    """Return the message as a check shows it to its producer: with its own topic and queue."""
    properties = half.properties + f"{CHECK_TIMES}\x01{checks}\x02".encode()
    if len(properties) > PROPERTIES_BYTES_MAX:
        properties = half.properties  # a full half of RocketMQ's: the number is only informational
    record = copy_record(half, topic=topic, queue_id=queue_id, properties=properties)
    return encode_record(
        record, half.queue_offset, half.log_offset, half.stored_ms, half.store_host
    )


class JournalEntry(msgspec.Struct, frozen=True):
    """One step in the checks of a half, as the journal topic stores it."""

    half_offset: int
    event: str  # one of JOURNAL_EVENTS
    check_number: int
    peer: str  # for "resumed": the operator
    reason: str = ""  # the producer's remark, or the operator's reason
    stored_ms: int = 0


_JOURNAL_FORMAT = struct.Struct(">qBH")
_CHECK_NUMBER_MAX: Final = 0xFFFF
# Stored as an index. "unknown" answers a check; "unknown_at_send" is the end of a send.
JOURNAL_EVENTS: Final = ("asked", "unknown", "resumed", "unknown_at_send")


def make_journal_record(entry: JournalEntry, *, now_ms: int) -> NewRecord:
    event = JOURNAL_EVENTS.index(entry.event)
    check_number = min(entry.check_number, _CHECK_NUMBER_MAX)
    text = f"{entry.peer}\n{entry.reason}" if entry.reason else entry.peer
    body = _JOURNAL_FORMAT.pack(entry.half_offset, event, check_number) + text.encode()
    return NewRecord(
        names.JOURNAL_TOPIC, 0, body, f"KEYS\x01{entry.half_offset}\x02".encode(), born_ms=now_ms
    )


def decode_journal_entry(record: StoredRecord) -> JournalEntry:
    """Raises CorruptRecord."""
    try:
        half_offset, event, check_number = _JOURNAL_FORMAT.unpack_from(record.body)
        text = bytes(record.body[_JOURNAL_FORMAT.size :]).decode()
        peer, _, reason = text.partition("\n")
        return JournalEntry(
            half_offset, JOURNAL_EVENTS[event], check_number, peer, reason, record.stored_ms
        )
    except (struct.error, IndexError, UnicodeDecodeError) as error:
        raise CorruptRecord(record.log_offset, f"not a journal entry: {error}") from error
