"""Messages that brokers have sent, as people and programs read them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from escrowmq.cli.record import as_json, body_of, body_text, flag_words, host_text, printable, utc
from escrowmq.cli.table import field_lines
from escrowmq.errors import CorruptRecord
from escrowmq.message.ids import encode_offset_id
from escrowmq.message.names import KEYS, TAGS, UNIQUE_KEY
from escrowmq.message.offsets import LogOffset
from escrowmq.message.properties import decode_properties
from escrowmq.message.record import StoredRecord, decode_record

_LOG_OFFSET_AT: Final = 28
_HEX_BYTES: Final = 16  # of a line of hex


@dataclass(frozen=True, slots=True)
class Found:
    broker: str
    record: StoredRecord

    @property
    def offset_id(self) -> str:
        return encode_offset_id(self.record.store_host, self.record.log_offset)


def records_in(body: bytes, broker: str) -> Iterator[Found]:
    """Raises CorruptRecord at what cannot be read."""
    at = 0
    while at < len(body):
        size = int.from_bytes(body[at : at + 4], "big", signed=True)
        place = at + _LOG_OFFSET_AT
        log_offset = LogOffset(int.from_bytes(body[place : place + 8], "big"))
        if size <= 0:
            raise CorruptRecord(log_offset, f"{broker} sent a message of {size} bytes")
        yield Found(broker, decode_record(body, at, log_offset))
        at += size


def found_json(found: Found) -> dict[str, Any]:
    return {
        "broker": found.broker,
        "id": found.offset_id,
        **as_json(found.record, with_body=True),
    }


def found_line(found: Found, width: int | None = None) -> str:
    """One line, cut to the terminal if it is shown on one."""
    record = found.record
    properties = decode_properties(record.properties)
    marks = [
        f"{label}={printable(properties[name])}"
        for label, name in (("tags", TAGS), ("keys", KEYS))
        if name in properties
    ]
    text = body_text(record)
    body = f"hex {bytes(body_of(record)).hex()}" if text is None else printable(text)
    words = [
        utc(record.stored_ms),
        f"{printable(found.broker)}/{record.queue_id}#{record.queue_offset}",
        *marks,
        body,
    ]
    line = "  ".join(words)
    return line if width is None or len(line) <= width else line[: width - 1] + "…"


def found_lines(found: Found) -> Iterator[str]:
    """All of one message."""
    record = found.record
    properties = decode_properties(record.properties)
    body = bytes(body_of(record))
    yield from field_lines(
        [
            ("id", found.offset_id),
            ("unique key", printable(properties.get(UNIQUE_KEY, ""))),
            ("topic", printable(record.topic)),
            ("place", f"{printable(found.broker)}, queue {record.queue_id} #{record.queue_offset}"),
            ("log offset", str(record.log_offset)),
            ("stored", utc(record.stored_ms)),
            ("born", f"{utc(record.born_ms)} from {host_text(record.born_host)}"),
            ("tags", printable(properties.get(TAGS, ""))),
            ("keys", printable(properties.get(KEYS, ""))),
            ("deliveries before", str(record.reconsume_times)),
            ("flags", ", ".join(flag_words(record.sys_flag))),
            ("body", f"{len(body)} bytes"),
        ]
    )
    others = {
        name: text for name, text in properties.items() if name not in (UNIQUE_KEY, TAGS, KEYS)
    }
    if others:
        yield ""
        yield "properties"
        yield from (f"  {line}" for line in field_lines(_printable(others)))
    yield ""
    yield from _body_lines(record, body)


def _printable(properties: dict[str, str]) -> Iterator[tuple[str, str]]:
    return ((printable(name), printable(text)) for name, text in sorted(properties.items()))


def _body_lines(record: StoredRecord, body: bytes) -> Iterator[str]:
    text = body_text(record)
    if text is not None:
        yield from map(printable, text.splitlines())
        return
    for at in range(0, len(body), _HEX_BYTES):
        part = body[at : at + _HEX_BYTES]
        seen = "".join(chr(byte) if 32 <= byte < 127 else "." for byte in part)
        yield f"{at:08x}  {part.hex(' '):<{3 * _HEX_BYTES}} {seen}"
