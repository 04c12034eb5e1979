"""The records of a transaction, as RocketMQ lays them out, and what we add to them.

    half      half topic, queue 0    the message; REAL_TOPIC and REAL_QID say where it wants to go
    final     its own topic, queue   the message again, marked committed; names its half
    op        op topic, queue 0      body: the half's queue offset; ours also says how it ended
    stranded  stranded topic         the message again, for whoever looks there
    journal   a topic of ours        one step of a check: to whom, which one it was

A half's properties end with those that its final does not have, so that most of the time the final
is the half with its tail cut off.

Questions and the journal of them: what a producer is asked, and one line for each step.

A half that holds many messages: parked in one piece, delivered one by one.

Its body is that of a batch (`message/batch.py`), all for one queue. A writer who sends millions
pays for a place in the escrow once for some hundred of them. Each message has a unique key of
its own, unlike those beside it: after a crash it says how many of them had been delivered.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, NamedTuple, Protocol

import msgspec

from escrowmq.errors import CorruptRecord
from escrowmq.escrow.half_table import Attempt
from escrowmq.message import names
from escrowmq.message.batch import Appendable, decode_batch, decode_bulk_batch
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
    TRANSACTION_COMMIT,
    TRANSACTION_NONE,
    NewRecord,
    StoredRecord,
    encode_record,
    with_transaction_type,
)
from escrowmq.message.transaction import COMMITTED, TransactionState

# Of a half, not of its final. Delays stay: they count from the commit.
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
_RESERVED_PROPERTIES: Final = _HALF_ONLY_PROPERTIES[:-5]
_TAIL: Final = b"TRAN_MSG\x01true\x02REAL_TOPIC\x01"
_LETTER_BY_STATE: Final = {
    TransactionState.COMMITTED: "c",
    TransactionState.ROLLED_BACK: "r",
    TransactionState.STRANDED: "s",
    TransactionState.OPEN: "m",  # moved: a copy of it has taken its place
}
BY_PRODUCER: Final = "producer"  # decides most of them, and is not named
NO_HOST: Final = b"\0" * 8
_PLAIN_COMMIT_PROPERTIES: Final = f"TAGS\x01d\x02{OUTCOME}\x01c\x02".encode()  # what most ops say
_STATE_BY_LETTER: Final = {letter: state for state, letter in _LETTER_BY_STATE.items()}


class CheckState(NamedTuple):
    """What a half that was appended again had behind it: its new place changes none of it."""

    parked_ms: int
    due_ms: int
    checks: int
    is_stranded: bool


class HalfProperties(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What a parked half says of itself."""

    topic: str
    queue_id: int
    group: str
    key: bytes
    immunity_ms: int | None = None
    attempt: Attempt | None = None
    check_state: CheckState | None = None
    previous_offsets: tuple[int, ...] = ()  # places it had before, also those that the log has lost


def make_half(record: NewRecord, *, packed_count: int = 0) -> NewRecord:
    """The message as it is parked. What it said of other places than its own is forgotten.

    `packed`: its body holds so many of them.
    """
    before, _, after = (b"\x02" + record.properties).partition(b"\x02TRAN_MSG\x01true\x02")
    kept = before[1:] + b"\x02" + after if before else after
    if b"TRAN_MSG\x01" in kept or b"REAL_" in kept or b"ESCROW_" in kept:
        kept = change_properties(record.properties, remove=_RESERVED_PROPERTIES)
    key = find_property(kept, b"UNIQ_KEY") or b""
    if packed_count:
        kept += b"%b\x01%d\x02" % (PACKED.encode(), packed_count)
    if b"__transactionId__\x01" not in kept:
        kept += b"__transactionId__\x01%b\x02" % key
    tail = _make_tail(record.topic, record.queue_id)
    return NewRecord(
        names.HALF_TOPIC,
        0,
        record.body,
        kept + tail,
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
    """A half with nothing out of the ordinary in its properties: those of the half, those that its
    final will have, group, unique key; and tags code and keys, which both have. Every
    transactional send comes by here, so it is cut into pieces once, as text."""
    before, _, after = properties.partition("TRAN_MSG\x01true\x02")
    kept = before + after
    if kept[-1] != "\x02":
        kept += "\x02"
    items = "\x02" + kept
    _, found, after = items.rpartition("\x02PGROUP\x01")
    group = after.partition("\x02")[0] if found else ""
    key = items.rpartition("\x02UNIQ_KEY\x01")[2].partition("\x02")[0].encode()
    of_final = (kept + added_properties).encode()
    tail = b"__transactionId__\x01%b\x02%b" % (key, _make_tail(topic, queue_id))
    return of_final + tail, of_final, group, key, _plain_tags_and_keys(items, key)


@lru_cache(maxsize=4096)
def _make_tail(topic: str, queue_id: int) -> bytes:
    return b"%b%b\x02REAL_QID\x01%d\x02" % (_TAIL, topic.encode(), queue_id)


def _plain_tags_and_keys(items: str, key: bytes) -> TagsAndKeys | None:
    """What `message/keys.py` finds in properties with this unique key; None if that takes it."""
    code, keys = 0, [key]
    _, found, after = items.rpartition("\x02TAGS\x01")
    if found:
        tag = after.partition("\x02")[0]
        if not tag:
            return None
        code = tag_code(tag)
    _, found, after = items.rpartition("\x02KEYS\x01")
    if found:
        given = after.partition("\x02")[0]
        if not given:
            return None
        keys += filter(None, given.encode().split(b" "))
    return code, keys


def is_escrowmq_half(properties: bytes) -> bool:
    """Of a half: RocketMQ writes the same properties in another order."""
    return _TAIL in properties or f"{COPY_OF}\x01".encode() in properties


def make_final(half: StoredRecord, topic: str, queue_id: int) -> NewRecord:
    """The message as its consumers will see it; it names the half that it came from."""
    kept, found, tail = half.properties.rpartition(_TAIL)
    kept, id_found, last = kept.rpartition(b"__transactionId__\x01")
    if (
        not (found and id_found)
        or tail.count(b"\x02") + last.count(b"\x02") != 3
        or kept.find(b"ESCROW_") >= 0
    ):
        # Written by somebody else, appended again, or part of a batch.
        kept = change_properties(half.properties, remove=_HALF_ONLY_PROPERTIES)
    return NewRecord(
        topic,
        queue_id,
        half.body,  # type: ignore[arg-type]  # a view: it is appended before this turn ends
        kept,
        half.flag,
        with_transaction_type(half.sys_flag, TRANSACTION_COMMIT),
        half.born_ms,
        half.born_host,
        half.reconsume_times,
        half.log_offset,
    )


def make_copy(
    half: StoredRecord, *previous_offsets: int, check_state: CheckState | None = None
) -> NewRecord:
    """The half once more, for another place in the log than those it had."""
    put = {COPY_OF: ",".join(map(str, previous_offsets))}
    if check_state is not None:
        put[COPY_CHECK_STATE] = ",".join(str(int(part)) for part in check_state)
    properties = change_properties(
        half.properties, remove=(CHECK_TIMES, PREPARED_QUEUE_OFFSET, COPY_CHECK_STATE), update=put
    )
    return _copy_to_topic(half, names.HALF_TOPIC, properties)


def make_stranded(half: StoredRecord, reason: str) -> NewRecord:
    return _copy_to_topic(
        half, names.STRANDED_TOPIC, change_properties(half.properties, update={REASON: reason})
    )


def _copy_to_topic(half: StoredRecord, topic: str, properties: bytes) -> NewRecord:
    return NewRecord(
        topic,
        0,
        half.body,  # type: ignore[arg-type]  # a view: it is appended before this turn ends
        properties,
        half.flag,
        half.sys_flag,
        half.born_ms,
        half.born_host,
        half.reconsume_times,
    )


class HasProperties(Protocol):
    @property
    def properties(self) -> bytes: ...


def parse_half(half: HasProperties) -> HalfProperties | None:
    """None: it is no half that could be delivered."""
    properties = half.properties
    return _parse_plain_half(properties) or _parse_any_half(properties)


def _parse_plain_half(properties: bytes) -> HalfProperties | None:
    """Of a half as we lay it, with nothing special: a start reads every open one."""
    kept, found, tail = properties.rpartition(_TAIL)
    topic, _, rest = tail.partition(b"\x02")
    queue_id = rest[9:-1]
    is_ours = found and topic and queue_id.isdigit() and rest == b"REAL_QID\x01%b\x02" % queue_id
    if not is_ours or kept.find(b"ESCROW_") >= 0 or kept.find(b"CHECK_IMMUNITY") >= 0:
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
    past, older = None, b""
    if b"ESCROW_COPY" in properties:
        past, older = (
            _parse_check_state(properties),
            find_property(properties, COPY_OF.encode()) or b"",
        )
    return HalfProperties(
        topic=topic.decode("utf-8", "replace"),
        queue_id=int(queue_id),
        group=(find_property(properties, b"PGROUP") or b"").decode("utf-8", "replace"),
        key=find_property(properties, b"UNIQ_KEY") or b"",
        immunity_ms=None
        if immunity is None
        else parse_immunity_ms(immunity.decode("utf-8", "replace")),
        attempt=attempt,
        check_state=past,
        previous_offsets=tuple(int(place) for place in older.split(b",") if place.isdigit()),
    )


def _parse_check_state(properties: bytes) -> CheckState | None:
    parts = (find_property(properties, COPY_CHECK_STATE.encode()) or b"").split(b",")
    if len(parts) != 4 or not all(part.isdigit() for part in parts):
        return None
    parked_ms, due_ms, checks, is_stranded = map(int, parts)
    return CheckState(parked_ms, due_ms, checks, bool(is_stranded))


def parse_attempt(properties: Mapping[str, str]) -> Attempt | None:
    writer, batch = properties.get(WRITER), properties.get(BATCH, "")
    if not writer or not batch.isdecimal():
        return None
    fence = properties.get(FENCE, "")
    number = int(fence) if fence.isdecimal() else 0
    return Attempt(writer, int(batch), properties.get(ATTEMPT, ""), number)


def parse_immunity_ms(text: str | None) -> int | None:
    """As text, and as odd as it may come; None leaves it to the broker's own time."""
    if text is None:
        return None
    try:
        seconds = float(text)
    except ValueError:
        return None
    return int(seconds * 1000) if 0 < seconds < 10**9 else None


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
    """That a half is settled, and older copies of it. RocketMQ reads tag and body; the rest is our
    memory of it: how it ended, by whose word, and where he was (the record's born host)."""
    body = b"%d" % queue_offset
    if state is COMMITTED and by == BY_PRODUCER and not previous_offsets and not reason:
        return NewRecord(
            names.OP_TOPIC, 0, body, _PLAIN_COMMIT_PROPERTIES, born_ms=now_ms, born_host=born_host
        )
    text = f"TAGS\x01d\x02{OUTCOME}\x01{_LETTER_BY_STATE[state]}\x02"
    if by != BY_PRODUCER:
        text += f"{DECIDED_BY}\x01{by}\x02"
    if (
        state is not TransactionState.COMMITTED
    ):  # a final is found by its own key, and its op lies behind it
        text += f"KEYS\x01{queue_offset}\x02"
    if previous_offsets:
        text += f"{PREVIOUS_OFFSETS}\x01{','.join(map(str, previous_offsets))}\x02"
    if reason:
        text += f"{REASON}\x01{_printable(reason)}\x02"
    return NewRecord(names.OP_TOPIC, 0, body, text.encode(), born_ms=now_ms, born_host=born_host)


@dataclass(frozen=True, slots=True)
class Op:
    half_offsets: list[int]
    previous_offsets: list[int]  # older copies of the same half
    state: TransactionState | None  # None: RocketMQ's, which does not say
    by: str
    reason: str


def decode_op(record: StoredRecord) -> Op | None:
    """One number, or several with commas as RocketMQ 5 writes them; None if it is neither."""
    properties = decode_properties(record.properties)
    parts = bytes(record.body).split(b",")
    if properties.get(names.TAGS) != "d" or not any(parts):
        return None
    if not all(part.isdigit() and len(part) < 19 for part in parts if part):
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
    return "".join(c if c.isprintable() else " " for c in text)[:500]


def make_check_body(half: StoredRecord, topic: str, queue_id: int, checks: int) -> bytes:
    """The message as its producer is asked about it: where it wants to go, and not where it is."""
    properties = half.properties + f"{CHECK_TIMES}\x01{checks}\x02".encode()
    record = NewRecord(
        topic,
        queue_id,
        half.body,  # type: ignore[arg-type]
        properties,
        half.flag,
        half.sys_flag,
        half.born_ms,
        half.born_host,
        half.reconsume_times,
    )
    return encode_record(
        record, half.queue_offset, half.log_offset, half.stored_ms, half.store_host
    )


class JournalEntry(msgspec.Struct, frozen=True):
    """One line of the journal."""

    half_offset: int
    event: str  # asked, unknown, resumed
    check_number: int  # of the check
    peer: str
    stored_ms: int = 0


_JOURNAL_FORMAT = struct.Struct(">qBH")
JOURNAL_EVENTS: Final = ("asked", "unknown", "resumed")


def make_journal_record(entry: JournalEntry, *, now_ms: int) -> NewRecord:
    body = (
        _JOURNAL_FORMAT.pack(
            entry.half_offset, JOURNAL_EVENTS.index(entry.event), entry.check_number
        )
        + entry.peer.encode()
    )
    return NewRecord(
        names.JOURNAL_TOPIC, 0, body, f"KEYS\x01{entry.half_offset}\x02".encode(), born_ms=now_ms
    )


def decode_journal_entry(record: StoredRecord) -> JournalEntry:
    try:
        half, what, number = _JOURNAL_FORMAT.unpack_from(record.body)
        peer = bytes(record.body[_JOURNAL_FORMAT.size :]).decode()
        return JournalEntry(half, JOURNAL_EVENTS[what], number, peer, record.stored_ms)
    except (struct.error, IndexError, UnicodeDecodeError) as error:
        raise CorruptRecord(record.log_offset, f"no line of a journal: {error}") from error


_PACKED_KEY: Final = f"{PACKED}\x01".encode()
_BROKER_PROPERTIES: Final = (b"MSG_REGION", b"TRACE_ON", b"CLUSTER")


def is_packed(properties: bytes) -> bool:
    return properties.find(_PACKED_KEY) >= 0


def make_finals(half: StoredRecord, topic: str, queue_id: int) -> list[Appendable]:
    """The messages as their consumers will see them; each names the half that it came from."""
    if not is_packed(half.properties):
        return [make_final(half, topic, queue_id)]
    marks = b"".join(
        b"%b\x01%b\x02" % (name, find_property(half.properties, name) or b"")
        for name in _BROKER_PROPERTIES
    )
    sys_flag = with_transaction_type(half.sys_flag, TRANSACTION_COMMIT)
    born = half.born_ms, half.born_host, half.reconsume_times, half.log_offset
    bulk = decode_bulk_batch(half.body)
    if bulk is not None:
        return [bulk.to_run(topic, queue_id, marks, sys_flag, *born)]
    return [
        NewRecord(
            topic,
            queue_id,
            item.body,  # type: ignore[arg-type]  # a view: it is appended before this turn ends
            item.properties + marks,
            item.flag,
            sys_flag,
            *born,
        )
        for item in decode_batch(half.body)
    ]
