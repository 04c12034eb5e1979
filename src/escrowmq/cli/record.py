"""One record of the log, as people and as programs read it."""

from __future__ import annotations

from typing import Any, Final

from escrowmq.clock import file_stamp
from escrowmq.errors import BrokenBody
from escrowmq.message import sysflag
from escrowmq.message.compression import decompress_body
from escrowmq.message.ids import decode_host
from escrowmq.message.names import KEYS, TAGS, UNIQUE_KEY
from escrowmq.message.properties import decode_properties
from escrowmq.message.record import StoredRecord

BODY_WIDTH: Final = 120
_BODY_BYTES_MAX: Final = 64 << 20
_LINE_BREAKS: Final = dict.fromkeys(map(ord, "\t\n\r"), " ")
_TRANSACTION_WORDS: Final = {
    sysflag.TRANSACTION_PREPARED: "prepared",
    sysflag.TRANSACTION_COMMIT: "commit",
    sysflag.TRANSACTION_ROLLBACK: "rollback",
}
_OTHER_WORDS: Final = {
    sysflag.COMPRESSED: "compressed",
    sysflag.MULTI_TAGS: "multi-tags",
    sysflag.INNER_BATCH: "inner-batch",
}


def as_text(record: StoredRecord, *, with_body: bool) -> str:
    """One line, and one more for the body."""
    properties = decode_properties(record.properties)
    words = [
        f"{record.log_offset:>12}",
        utc(record.stored_ms),
        f"{printable(record.topic)}/{record.queue_id} #{record.queue_offset}",
        *(
            f"{label}={printable(properties[name])}"
            for label, name in (("tags", TAGS), ("keys", KEYS), ("unique", UNIQUE_KEY))
            if name in properties
        ),
        *flag_words(record.sys_flag),
        f"{record.size} bytes",
        f"from {host_text(record.born_host)}",
    ]
    line = "  ".join(words)
    if not with_body:
        return line
    return f"{line}\n{'':>14}{_body_line(record)}"


def as_json(record: StoredRecord, *, with_body: bool) -> dict[str, Any]:
    properties = decode_properties(record.properties)
    content: dict[str, Any] = {
        "log_offset": record.log_offset,
        "stored": utc(record.stored_ms),
        "stored_ms": record.stored_ms,
        "born_ms": record.born_ms,
        "topic": record.topic,
        "queue": record.queue_id,
        "queue_offset": record.queue_offset,
        "tags": properties.get(TAGS),
        "keys": properties.get(KEYS),
        "unique_key": properties.get(UNIQUE_KEY),
        "size": record.size,
        "flags": flag_words(record.sys_flag),
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
            content["body_hex"] = bytes(body_of(record)).hex()
    return content


def body_text(record: StoredRecord) -> str | None:
    """The body, decompressed, if it is text; else None."""
    try:
        text = str(body_of(record), "utf-8")
    except UnicodeDecodeError:
        return None
    return text if text.translate(_LINE_BREAKS).isprintable() else None


def _body_line(record: StoredRecord) -> str:
    text = body_text(record)
    if text is None:
        text = "hex " + bytes(body_of(record)[:BODY_WIDTH]).hex()
    shown = printable(text[: BODY_WIDTH + 1])
    return shown if len(shown) <= BODY_WIDTH else shown[:BODY_WIDTH] + "…"


def flag_words(sys_flag: int) -> list[str]:
    words = [word for bit, word in _OTHER_WORDS.items() if sys_flag & bit]
    transaction = _TRANSACTION_WORDS.get(sysflag.transaction_type(sys_flag))
    return [*words, transaction] if transaction else words


def utc(ms: int) -> str:
    try:
        stamp = file_stamp(ms)
    except (ValueError, OverflowError, OSError):  # a damaged record may say anything
        return f"{ms} ms"
    date, time = f"{stamp[:4]}-{stamp[4:6]}-{stamp[6:8]}", f"{stamp[8:10]}:{stamp[10:12]}"
    return f"{date}T{time}:{stamp[12:14]}.{stamp[14:]}Z"


def body_of(record: StoredRecord) -> bytes | memoryview:
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
