"""What a client sees of a broker: queues, messages, keys, offsets, and an answer of each kind."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

from tests.interop.records import Record
from tests.interop.remoting import HALF_TOPIC, OLD_VERSION, OP_TOPIC, Client, ResponseError
from tests.interop.script import COMMITTED, LONG_GROUP, SCHEDULE_TOPIC, Script

BODY_HEX_MAX = 64  # a longer body is named by its hash

QUEUES = {
    "orders": range(4),
    "payments": range(2),
    "%RETRY%billing": range(1),
    f"%RETRY%{LONG_GROUP}": range(1),
    SCHEDULE_TOPIC: (2, 17),
    HALF_TOPIC: range(1),
    OP_TOPIC: range(1),
    "OFFSET_MOVED_EVENT": range(1),
}
KEYS = (
    ("orders", "order-3"),
    ("orders", "customer-1"),
    ("orders", "größe"),
    ("payments", "payment-17"),
    ("payments", "common"),
    ("payments", "no-such-key"),
)


def observe(client: Client, script: Script) -> dict[str, Any]:
    return {
        "storeHost": client.address,
        "refusals": script.refusals,
        "queues": [
            queue_view(client, topic, queue_id)
            for topic, queue_ids in QUEUES.items()
            for queue_id in queue_ids
        ],
        "keys": [key_view(client, topic, key, unique=False) for topic, key in KEYS]
        + [key_view(client, topic, key, unique=True) for topic, key in script.unique_keys[::9]]
        + [key_view(client, topic, key, unique=True) for topic, key in script.unique_keys[-6:]],
        "committed": [
            {
                "group": group,
                "topic": topic,
                "queueId": queue_id,
                "offset": client.committed_offset(group, topic, queue_id),
            }
            for group, topic, queue_id, _ in COMMITTED
        ],
    }


def queue_view(client: Client, topic: str, queue_id: int) -> dict[str, Any]:
    minimum, maximum = client.min_offset(topic, queue_id), client.max_offset(topic, queue_id)
    view: dict[str, Any] = {
        "topic": topic,
        "queueId": queue_id,
        "minOffset": minimum,
        "maxOffset": maximum,
    }
    try:
        records = client.pull_all(topic, queue_id)
    except ResponseError as error:
        return {**view, "refused": str(error)}
    for record in records:
        assert (record.topic, record.queue_id) == (topic, queue_id)
        assert record.store_host == client.address
        viewed = client.view_by_id(f"{record.log_offset:032X}")
        assert viewed == record, "pulled and viewed by id, a message must be the same"
    return {
        **view,
        "searches": [
            [timestamp_ms, client.search_offset(topic, queue_id, timestamp_ms=timestamp_ms)]
            for timestamp_ms in search_times(records)
        ],
        "messages": [message_view(record) for record in records],
    }


def search_times(records: list[Record]) -> list[int]:
    if not records:
        return [0]
    stored = [record.stored_ms for record in records]
    middle = stored[len(stored) // 2]
    around = (stored[0] - 1, stored[0], middle, middle + 1, stored[-1], stored[-1] + 1)
    return sorted({0, *around, stored[-1] + 3_600_000})


def message_view(record: Record) -> dict[str, Any]:
    view = record._asdict()
    body = view.pop("body")
    for told_once in ("topic", "queue_id", "store_host", "raw_properties"):
        del view[told_once]
    view["bodyBytes"] = len(body)
    if len(body) <= BODY_HEX_MAX:
        view["bodyHex"] = body.hex()
    else:
        view["bodySha256"] = hashlib.sha256(body).hexdigest()
    view["properties"] = record.properties
    view["tags"] = record.properties.get("TAGS")
    return {_camel(name): value for name, value in view.items()}


def key_view(client: Client, topic: str, key: str, *, unique: bool) -> dict[str, Any]:
    found = client.query_by_key(topic, key, unique=unique)
    offsets = [record.log_offset for record in found]
    return {"topic": topic, "key": key, "unique": unique, "logOffsets": offsets}


def _camel(name: str) -> str:
    first, *rest = name.split("_")
    return first + "".join(part.title() for part in rest)


def ask_around(
    client: Client,
    namesrv: Client,
    keep: Callable[[str], None],
    keep_namesrv: Callable[[str], None],
) -> None:
    """One exchange of each kind.

    They leave nothing behind, but that 4.x records a pull past the end in a topic of its own.
    """
    namesrv.route("orders")
    keep_namesrv("route")
    namesrv.route("no-such-topic")
    keep_namesrv("route.unknown_topic")
    client.heartbeat("127.0.0.1@interop", producer_groups=("interop-producers",))
    keep("heartbeat")
    client.pull("orders", 0, 0, max_messages=1)
    keep("pull.found")
    client.pull("orders", 0, client.max_offset("orders", 0))
    keep("pull.not_found")
    client.pull("orders", 0, 1_000)
    keep("pull.offset_moved")
    client.pull("orders", 0, 0, subscription="no-such-tag")
    keep("pull.no_match")
    client.pull("no-such-topic", 0, 0)
    keep("pull.unknown_topic")
    client.committed_offset("billing", "orders", 0)
    keep("query_offset")
    client.committed_offset("nobody", "payments", 0)
    keep("query_offset.unknown_group")
    client.max_offset("orders", 0)
    keep("max_offset")
    client.min_offset("orders", 0)
    keep("min_offset")
    client.search_offset("orders", 0, timestamp_ms=0)
    keep("search_offset")
    client.query_by_key("orders", "order-0")
    keep("query_message")
    client.query_by_key("orders", "no-such-key")
    keep("query_message.not_found")
    client.request(33, {"offset": 0})
    keep("view_message")
    client.request(33, {"offset": 3})
    keep("view_message.not_found")
    client.request(9_999)
    keep("unsupported")


def ask_as_old_client(namesrv_address: str) -> tuple[bytes, bytes]:
    """The exchange for a route with a client older than 4.9.4: number keys come unquoted."""
    with Client(namesrv_address, version=OLD_VERSION) as old:
        old.route("orders")
        return old.sent_frame, old.received_frame
