"""Show records and messages: one line, all of it, or JSON.

Bodies are shown as text if they are text, else in hexadecimal. Control characters are escaped, so
that no message can move the cursor of the terminal.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from escrowmq.admin.messages import MessageView
from escrowmq.cli.output import field_lines, printable, truncate
from escrowmq.errors import BrokenBody
from escrowmq.message import record as sysflag
from escrowmq.message.compression import decompress_body
from escrowmq.message.keys import decode_host
from escrowmq.message.names import KEYS, TAGS, UNIQUE_KEY
from escrowmq.message.properties import decode_properties
from escrowmq.message.record import StoredRecord
from escrowmq.parsing import format_timestamp

BODY_WIDTH: Final = 120  # of a body in `store dump`
_BODY_BYTES_MAX: Final = 64 << 20
_HEX_BYTES_PER_LINE: Final = 16
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

# --- messages of brokers -------------------------------------------------------------------------


def message_json(message: MessageView) -> dict[str, Any]:
    return {
        "broker": message.broker,
        "id": message.offset_id,
        **record_json(message.record, with_body=True),
    }


def message_line(message: MessageView, width: int | None = None) -> str:
    """Return one line, cut to `width` terminal cells if it is given."""
    record = message.record
    properties = decode_properties(record.properties)
    text = body_text(record)
    body = f"hex {bytes(decompressed_body(record)).hex()}" if text is None else printable(text)
    words = [
        format_timestamp(record.stored_ms),
        f"{printable(message.broker)}/{record.queue_id}#{record.queue_offset}",
        *_labels(properties, tags=TAGS, keys=KEYS),
        body,
    ]
    line = "  ".join(words)
    return line if width is None else truncate(line, width)


def message_lines(message: MessageView) -> Iterator[str]:
    """Yield everything about one message: its fields, its properties, its body."""
    record = message.record
    properties = decode_properties(record.properties)
    body = bytes(decompressed_body(record))
    broker = printable(message.broker)
    yield from field_lines(
        [
            ("id", message.offset_id),
            ("unique key", printable(properties.get(UNIQUE_KEY, ""))),
            ("topic", printable(record.topic)),
            ("position", f"{broker}, queue {record.queue_id} #{record.queue_offset}"),
            ("log offset", str(record.log_offset)),
            ("stored", format_timestamp(record.stored_ms)),
            ("born", f"{format_timestamp(record.born_ms)} from {host_text(record.born_host)}"),
            ("tags", printable(properties.get(TAGS, ""))),
            ("keys", printable(properties.get(KEYS, ""))),
            ("redeliveries", str(record.reconsume_times)),
            ("flags", ", ".join(flag_names(record.sys_flag))),
            ("body", f"{len(body)} bytes"),
        ]
    )
    others = sorted(
        (printable(name), printable(value))
        for name, value in properties.items()
        if name not in (UNIQUE_KEY, TAGS, KEYS)
    )
    if others:
        yield ""
        yield "properties"
        yield from (f"  {line}" for line in field_lines(others))
    yield ""
    yield from body_lines(body)


def body_lines(body: bytes) -> Iterator[str]:
    """Yield the lines of a decompressed body, or a hexadecimal dump if it is not text."""
    text = _printable_text(body)
    if text is not None:
        yield from map(printable, text.splitlines())
        return
    for begin in range(0, len(body), _HEX_BYTES_PER_LINE):
        part = body[begin : begin + _HEX_BYTES_PER_LINE]
        ascii_text = "".join(chr(byte) if 32 <= byte < 127 else "." for byte in part)
        yield f"{begin:08x}  {part.hex(' '):<{3 * _HEX_BYTES_PER_LINE}} {ascii_text}"


# --- records of a log ----------------------------------------------------------------------------


def record_text(record: StoredRecord, *, with_body: bool) -> str:
    """Return one line, and a second one for the body."""
    properties = decode_properties(record.properties)
    words = [
        f"{record.log_offset:>12}",
        format_timestamp(record.stored_ms),
        f"{printable(record.topic)}/{record.queue_id} #{record.queue_offset}",
        *_labels(properties, tags=TAGS, keys=KEYS, unique=UNIQUE_KEY),
        *flag_names(record.sys_flag),
        f"{record.size} bytes",
        f"from {host_text(record.born_host)}",
    ]
    line = "  ".join(words)
    if not with_body:
        return line
    return f"{line}\n{'':>14}{_short_body(record)}"


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


def _short_body(record: StoredRecord) -> str:
    text = body_text(record)
    if text is None:
        text = "hex " + bytes(decompressed_body(record)[:BODY_WIDTH]).hex()
    # A body may be megabytes: cut it first, and keep a character more than fits for the ellipsis.
    return truncate(printable(text[: BODY_WIDTH + 2]), BODY_WIDTH + 1)


# --- parts of a record ---------------------------------------------------------------------------


def body_text(record: StoredRecord) -> str | None:
    """Return the decompressed body if it is printable text, else None."""
    return _printable_text(decompressed_body(record))


def _printable_text(body: bytes | memoryview) -> str | None:
    try:
        text = str(body, "utf-8")
    except UnicodeDecodeError:
        return None
    return text if text.translate(_LINE_BREAKS).isprintable() else None


def decompressed_body(record: StoredRecord) -> bytes | memoryview:
    """Return the body, as it is stored if it cannot be decompressed."""
    try:
        return decompress_body(record.body, record.sys_flag, body_bytes_max=_BODY_BYTES_MAX)
    except BrokenBody:
        return record.body


def flag_names(sys_flag: int) -> list[str]:
    words = [word for bit, word in _OTHER_FLAGS.items() if sys_flag & bit]
    transaction = _TRANSACTION_FLAGS.get(sysflag.transaction_type(sys_flag))
    return [*words, transaction] if transaction else words


def host_text(host: bytes) -> str:
    address, port = decode_host(host)
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def _labels(properties: Mapping[str, str], **names: str) -> list[str]:
    """Return `label=value` for each property that the message has."""
    return [
        f"{label}={printable(properties[name])}"
        for label, name in names.items()
        if name in properties
    ]
