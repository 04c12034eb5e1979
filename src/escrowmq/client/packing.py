"""One message as it goes out: its properties as text, its body compressed if that helps.

Made once per message and used for every attempt, so that all of them carry the same unique key: a
broker of ours that has it already says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

from escrowmq.client.messages import Message
from escrowmq.clock import since_1970_ms
from escrowmq.errors import LocalProtocolError
from escrowmq.message import names, sysflag
from escrowmq.message.compression import compress_body
from escrowmq.wire.fastpath import Body

SHARDING_KEY: Final = "__SHARDINGKEY"
DELAY_MS: Final = "TIMER_DELAY_MS"
DELIVER_MS: Final = "TIMER_DELIVER_MS"
COMPRESS_OVER: Final = 4096
KINDS: Final = {
    "zlib": sysflag.COMPRESSION_ZLIB,
    "lz4": sysflag.COMPRESSION_LZ4,
    "zstd": sysflag.COMPRESSION_ZSTD,
}


class Packed(NamedTuple):
    topic: str  # as the broker knows it
    body: Body
    properties: str
    sys_flag: int
    flag: int
    message_id: str
    sharding_key: str = ""
    batch: bool = False


class Packer:
    """`over`: bodies longer than so many bytes are compressed; None for never."""

    def __init__(self, *, over: int | None = COMPRESS_OVER, kind: str = "zlib") -> None:
        if kind not in KINDS:
            raise ValueError(f"compression is one of {', '.join(KINDS)}, not {kind!r}")
        if over is not None and over < 0:
            raise ValueError(f"compress_over is a number of bytes, or None; not {over}")
        self._over = over
        self._kind = KINDS[kind]

    def pack(
        self,
        message: Message,
        topic: str,
        unique_key: str,
        *,
        more: Mapping[str, str] | None = None,
        sys_flag: int = 0,
        delays: bool = True,
    ) -> Packed:
        """`more` properties win over its own. `delays=False` leaves its delay out."""
        body = message.body
        if self._over is not None and len(body) > self._over:
            smaller = compress_body(body, self._kind)
            if len(smaller) < len(body):
                body = smaller
                sys_flag = sysflag.with_compression(sys_flag, self._kind)
        message_id = message.properties.get(names.UNIQUE_KEY) or unique_key
        text = properties_text(message, message_id, more, delays=delays)
        return Packed(topic, body, text, sys_flag, message.flag, message_id, message.sharding_key)


def properties_text(
    message: Message,
    message_id: str,
    more: Mapping[str, str] | None = None,
    *,
    delays: bool = True,
) -> str:
    """Its own, and those that say what the others of its fields say, in RocketMQ's form."""
    found = {names.UNIQUE_KEY: message_id, names.WAIT_STORED: "true"}
    if message.properties:
        found |= message.properties
    keys = message.keys if isinstance(message.keys, str) else " ".join(message.keys)
    if keys:
        found[names.KEYS] = keys
    if message.tags:
        found[names.TAGS] = message.tags
    if message.sharding_key:
        found[SHARDING_KEY] = message.sharding_key
    if delays and message.is_delayed:
        found |= _delay_of(message)
    if more:
        found |= more
    text = "".join([f"{name}\x01{value}\x02" for name, value in found.items()])
    # Every name and every value is followed by its own separator, and no other is in the text.
    if text.count("\x01") != len(found) or text.count("\x02") != len(found):
        raise LocalProtocolError("a property contains a separator (0x01 or 0x02)")
    if text[0] == "\x01" or "\x01\x02" in text or "\x02\x01" in text:
        raise LocalProtocolError(f"a property without name or value: {message.properties}")
    return text


def _delay_of(message: Message) -> dict[str, str]:
    if message.delay_level:
        return {names.DELAY_LEVEL: str(message.delay_level)}
    if message.deliver_at is not None:
        return {DELIVER_MS: str(since_1970_ms(message.deliver_at))}
    return {DELAY_MS: str(max(1, round(message.delay_s * 1000)))}
