"""The properties string of a message: `name 0x01 value 0x02`, repeated.

Writers differ in whether the last 0x02 is there; both forms are read. An item that is not a name, a
separator and a non-empty value is skipped, as RocketMQ skips it.

The store and the hot path of the broker look for single properties in the encoded bytes
(`find_property`) and never build a mapping; all other code decodes once.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from escrowmq.errors import LocalProtocolError

_NAME_END = "\x01"
_ITEM_END = "\x02"
_SEPARATORS = frozenset(_NAME_END + _ITEM_END)


def encode_properties(properties: Mapping[str, str]) -> bytes:
    """Return the encoded properties. Raises LocalProtocolError if they cannot be encoded."""
    for name, value in properties.items():
        if not name or not value:
            raise LocalProtocolError(
                f"property {name!r}={value!r}: name and value must not be empty"
            )
        if not _SEPARATORS.isdisjoint(name) or not _SEPARATORS.isdisjoint(value):
            raise LocalProtocolError(f"property {name!r} contains a separator (0x01 or 0x02)")
    items = [f"{name}\x01{value}\x02" for name, value in properties.items()]
    try:
        return "".join(items).encode()
    except UnicodeEncodeError as error:
        raise LocalProtocolError(f"properties are not valid text: {error}") from error


def decode_properties(encoded: bytes | memoryview) -> dict[str, str]:
    """Return the properties by name. Of a name that occurs twice, the last value counts."""
    properties = {}
    for item in str(encoded, "utf-8", "replace").split(_ITEM_END):
        name, separator, value = item.partition(_NAME_END)
        if name and separator and value:
            properties[name] = value
    return properties


def find_property(encoded: bytes, name: bytes) -> bytes | None:
    """Return the value of one property, or None, without decoding the others.

    Of a name that occurs twice, the last value counts; empty values are ignored.
    """
    before = b"\x02" + encoded
    marker = b"\x02" + name + b"\x01"
    while True:
        before, separator, after = before.rpartition(marker)
        if not separator:
            return None
        value = after.partition(b"\x02")[0]
        if value:
            return value


def parse_boolean(value: bytes | None) -> bool:
    """Read a property as Java's `Boolean.parseBoolean` does: "true" in any case, nothing else."""
    return value is not None and value.lower() == b"true"


def change_properties(
    encoded: bytes, *, remove: Collection[str] = (), update: Mapping[str, str] | None = None
) -> bytes:
    """Return the properties without those of `remove` and with those of `update`.

    All others stay byte by byte as they were written, even if they are malformed.
    """
    update = update or {}
    dropped = {name.encode() for name in (*remove, *update)}
    items = [
        item
        for item in encoded.split(b"\x02")
        if item and item.partition(b"\x01")[0] not in dropped
    ]
    items += [f"{name}\x01{value}".encode() for name, value in update.items()]
    return b"".join(item + b"\x02" for item in items)
