"""One record of the log, as people and as programs read it.

Messages that brokers have sent, as people and programs read them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from escrowmq.cli.output import field_lines
from escrowmq.errors import BrokenBody, CorruptRecord
from escrowmq.message import record as sysflag
from escrowmq.message.compression import decompress_body
from escrowmq.message.keys import decode_host, encode_offset_id
from escrowmq.message.names import KEYS, TAGS, UNIQUE_KEY
from escrowmq.message.properties import decode_properties
from escrowmq.message.record import LogOffset, StoredRecord, decode_record
from escrowmq.parsing import format_timestamp

BODY_WIDTH: Final = 120
_BODY_BYTES_MAX: Final = 64 << 20
_LINE_BREAKS: Final = dict.fromkeys(map(ord, "\t\n\r"), " ")
_TRANSACTION_FLAGS: Final = {
    sysflag.TRANSACTION_PREPARED: "prepared",
    sysflag.TRANSACTION_COMMIT: "commit",
    sysflag.TRANSACTION_ROLLBACK: "rollback",
}
_OTHER_FLAGS: Final = {
    sysflag.COMPRESSED: "compressed",
    sysflag.MULTI_TAGS: "multi-tags",
    sysflag.INNER_BATCH: "inner-batch",
}


def record_text(record: StoredRecord, *, with_body: bool) -> str:
    """One line, and one more for the body."""
    properties = decode_properties(record.properties)
    words = [
        f"{record.log_offset:>12}",
        format_timestamp(record.stored_ms),
        f"{printable(record.topic)}/{record.queue_id} #{record.queue_offset}",
        *(
            f"{label}={printable(properties[name])}"
            for label, name in (("tags", TAGS), ("keys", KEYS), ("unique", UNIQUE_KEY))
            if name in properties
        ),
        *flag_names(record.sys_flag),
        f"{record.size} bytes",
        f"from {host_text(record.born_host)}",
    ]
    line = "  ".join(words)
    if not with_body:
        return line
    return f"{line}\n{'':>14}{_body_line(record)}"


def record_json(record: StoredRecord, *, with_body: bool) -> dict[str, Any]:
    properties = decode_properties(record.properties)
    content: dict[str, Any] = {
        "log_offset": record.log_offset,
        "stored": format_timestamp(record.stored_ms),
        "stored_ms": record.stored_ms,
        "born_ms": record.born_ms,
        "topic": record.topic,
        "queue": record.queue_id,
        "queue_offset": record.queue_offset,
        "tags": properties.get(TAGS),
        "keys": properties.get(KEYS),
        "unique_key": properties.get(UNIQUE_KEY),
        "size": record.size,
        "flags": flag_names(record.sys_flag),
        "born_host": host_text(record.born_host),
        "store_host": host_text(record.store_host),
        "reconsume_times": record.reconsume_times,
        "prepared_offset": record.prepared_offset,
        "properties": properties,
    }
    if with_body:
        text = body_text(record)
        content["body"] = text
        if text is None:
            content["body_hex"] = bytes(decompressed_body(record)).hex()
    return content


def body_text(record: StoredRecord) -> str | None:
    """The body, decompressed, if it is text; else None."""
    try:
        text = str(decompressed_body(record), "utf-8")
    except UnicodeDecodeError:
        return None
    return text if text.translate(_LINE_BREAKS).isprintable() else None


def _body_line(record: StoredRecord) -> str:
    text = body_text(record)
    if text is None:
        text = "hex " + bytes(decompressed_body(record)[:BODY_WIDTH]).hex()
    shown = printable(text[: BODY_WIDTH + 1])
    return shown if len(shown) <= BODY_WIDTH else shown[:BODY_WIDTH] + "…"


def flag_names(sys_flag: int) -> list[str]:
    words = [word for bit, word in _OTHER_FLAGS.items() if sys_flag & bit]
    transaction = _TRANSACTION_FLAGS.get(sysflag.transaction_type(sys_flag))
    return [*words, transaction] if transaction else words


def decompressed_body(record: StoredRecord) -> bytes | memoryview:
    try:
        return decompress_body(record.body, record.sys_flag, body_bytes_max=_BODY_BYTES_MAX)
    except BrokenBody:
        return record.body


def host_text(host: bytes) -> str:
    address, port = decode_host(host)
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def printable(text: str) -> str:
    """On one line: no message may move an operator's cursor."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


_LOG_OFFSET_POSITION: Final = 28
_HEX_BYTES_PER_LINE: Final = 16  # of a line of hex


@dataclass(frozen=True, slots=True)
class MessageView:
    broker: str
    record: StoredRecord

    @property
    def offset_id(self) -> str:
        return encode_offset_id(self.record.store_host, self.record.log_offset)


def decode_messages(body: bytes, broker: str) -> Iterator[MessageView]:
    """Raises CorruptRecord at what cannot be read."""
    at = 0
    while at < len(body):
        size = int.from_bytes(body[at : at + 4], "big", signed=True)
        place = at + _LOG_OFFSET_POSITION
        log_offset = LogOffset(int.from_bytes(body[place : place + 8], "big"))
        if size <= 0:
            raise CorruptRecord(log_offset, f"{broker} sent a message of {size} bytes")
        yield MessageView(broker, decode_record(body, at, log_offset))
        at += size


def message_json(message: MessageView) -> dict[str, Any]:
    return {
        "broker": message.broker,
        "id": message.offset_id,
        **record_json(message.record, with_body=True),
    }


def message_line(message: MessageView, width: int | None = None) -> str:
    """One line, cut to the terminal if it is shown on one."""
    record = message.record
    properties = decode_properties(record.properties)
    marks = [
        f"{label}={printable(properties[name])}"
        for label, name in (("tags", TAGS), ("keys", KEYS))
        if name in properties
    ]
    text = body_text(record)
    body = f"hex {bytes(decompressed_body(record)).hex()}" if text is None else printable(text)
    words = [
        format_timestamp(record.stored_ms),
        f"{printable(message.broker)}/{record.queue_id}#{record.queue_offset}",
        *marks,
        body,
    ]
    line = "  ".join(words)
    return line if width is None or len(line) <= width else line[: width - 1] + "…"


def message_lines(message: MessageView) -> Iterator[str]:
    """All of one message."""
    record = message.record
    properties = decode_properties(record.properties)
    body = bytes(decompressed_body(record))
    yield from field_lines(
        [
            ("id", message.offset_id),
            ("unique key", printable(properties.get(UNIQUE_KEY, ""))),
            ("topic", printable(record.topic)),
            (
                "place",
                f"{printable(message.broker)}, queue {record.queue_id} #{record.queue_offset}",
            ),
            ("log offset", str(record.log_offset)),
            ("stored", format_timestamp(record.stored_ms)),
            ("born", f"{format_timestamp(record.born_ms)} from {host_text(record.born_host)}"),
            ("tags", printable(properties.get(TAGS, ""))),
            ("keys", printable(properties.get(KEYS, ""))),
            ("deliveries before", str(record.reconsume_times)),
            ("flags", ", ".join(flag_names(record.sys_flag))),
            ("body", f"{len(body)} bytes"),
        ]
    )
    others = {
        name: text for name, text in properties.items() if name not in (UNIQUE_KEY, TAGS, KEYS)
    }
    if others:
        yield ""
        yield "properties"
        yield from (f"  {line}" for line in field_lines(_printable_items(others)))
    yield ""
    yield from _body_lines(record, body)


def _printable_items(properties: dict[str, str]) -> Iterator[tuple[str, str]]:
    return ((printable(name), printable(text)) for name, text in sorted(properties.items()))


def _body_lines(record: StoredRecord, body: bytes) -> Iterator[str]:
    text = body_text(record)
    if text is not None:
        yield from map(printable, text.splitlines())
        return
    for at in range(0, len(body), _HEX_BYTES_PER_LINE):
        part = body[at : at + _HEX_BYTES_PER_LINE]
        seen = "".join(chr(byte) if 32 <= byte < 127 else "." for byte in part)
        yield f"{at:08x}  {part.hex(' '):<{3 * _HEX_BYTES_PER_LINE}} {seen}"
