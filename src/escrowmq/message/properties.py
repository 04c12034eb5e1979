"""The properties string: `name 0x01 value 0x02` repeated.

Writers differ in whether the last 0x02 is there; readers take both. An item that is not a name,
a separator and a non-empty value is skipped, as RocketMQ skips it.

The store and the broker's hot path look for one property in the encoded bytes (`find`) and never
build the mapping; everybody else decodes once.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from escrowmq.errors import LocalProtocolError

_NAME_END = "\x01"
_ITEM_END = "\x02"


def encode_properties(properties: Mapping[str, str]) -> bytes:
    for name, value in properties.items():
        if not name or not value:
            raise LocalProtocolError(f"property {name!r}={value!r}: neither side may be empty")
        if not _SEPARATORS.isdisjoint(name) or not _SEPARATORS.isdisjoint(value):
            raise LocalProtocolError(f"property {name!r} contains a separator (0x01 or 0x02)")
    items = [f"{name}\x01{value}\x02" for name, value in properties.items()]
    try:
        return "".join(items).encode()
    except UnicodeEncodeError as error:
        raise LocalProtocolError(f"properties are not valid text: {error}") from error


def decode_properties(encoded: bytes | memoryview) -> dict[str, str]:
    properties = {}
    for item in str(encoded, "utf-8", "replace").split(_ITEM_END):
        name, separator, value = item.partition(_NAME_END)
        if name and separator and value:
            properties[name] = value
    return properties


def find_property(encoded: bytes, name: bytes) -> bytes | None:
    """One property's value, without decoding the others. Said twice, the last one counts."""
    before = b"\x02" + encoded
    sought = b"\x02" + name + b"\x01"
    while True:
        before, found, rest = before.rpartition(sought)
        if not found:
            return None
        value = rest.partition(b"\x02")[0]
        if value:
            return value  # an empty one is as good as none


def change_properties(
    encoded: bytes, *, remove: Collection[str] = (), update: Mapping[str, str] | None = None
) -> bytes:
    """The same properties but for these; the others stay as they were written, however odd."""
    update = update or {}
    unwanted = {name.encode() for name in (*remove, *update)}
    items = [
        item
        for item in encoded.split(b"\x02")
        if item and item.partition(b"\x01")[0] not in unwanted
    ]
    items += [f"{name}\x01{value}".encode() for name, value in update.items()]
    return b"".join(item + b"\x02" for item in items)


_SEPARATORS = frozenset(_NAME_END + _ITEM_END)
