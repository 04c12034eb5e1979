"""Collect what a client sees of a broker: queues, messages, keys, offsets and exchanges."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

from tests.interop.records import Record
from tests.interop.remoting import HALF_TOPIC, OLD_VERSION, OP_TOPIC, Client, ResponseError
from tests.interop.script import COMMITTED, LONG_GROUP, SCHEDULE_TOPIC, Script

BODY_HEX_MAX = 64  # bytes; a longer body is represented by its hash

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
    """Return what a client sees after the script has run, as it is stored in a fixture."""
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
    view: dict[str, Any] = {
        "topic": topic,
        "queueId": queue_id,
        "minOffset": client.min_offset(topic, queue_id),
        "maxOffset": client.max_offset(topic, queue_id),
    }
    try:
        records = client.pull_all(topic, queue_id)
    except ResponseError as error:
        return {**view, "refused": str(error)}
    for record in records:
        assert (record.topic, record.queue_id) == (topic, queue_id)
        assert record.store_host == client.address
        viewed = client.view_by_id(f"{record.log_offset:032X}")
        assert viewed == record, "a message differs from its view by id"
    return {
        **view,
        "searches": [
            [timestamp_ms, client.search_offset(topic, queue_id, timestamp_ms=timestamp_ms)]
            for timestamp_ms in search_times(records)
        ],
        "messages": [message_view(record) for record in records],
    }


def search_times(records: list[Record]) -> list[int]:
    """Return times in ms before, at, between and after the store times of the messages."""
    if not records:
        return [0]
    stored = [record.stored_ms for record in records]
    middle = stored[len(stored) // 2]
    around = (stored[0] - 1, stored[0], middle, middle + 1, stored[-1], stored[-1] + 1)
    return sorted({0, *around, stored[-1] + 3_600_000})


def message_view(record: Record) -> dict[str, Any]:
    """Return a message as it is stored in a fixture."""
    view = record._asdict()
    body = view.pop("body")
    # The view of the queue has the topic and the queue id, the view of the broker the store host.
    for name in ("topic", "queue_id", "store_host", "raw_properties"):
        del view[name]
    view["bodyBytes"] = len(body)
    if len(body) <= BODY_HEX_MAX:
        view["bodyHex"] = body.hex()
    else:
        view["bodySha256"] = hashlib.sha256(body).hexdigest()
    view["properties"] = record.properties
    view["tags"] = record.properties.get("TAGS")
    return {_camel_case(name): value for name, value in view.items()}


def key_view(client: Client, topic: str, key: str, *, unique: bool) -> dict[str, Any]:
    records = client.query_by_key(topic, key, unique=unique)
    log_offsets = [record.log_offset for record in records]
    return {"topic": topic, "key": key, "unique": unique, "logOffsets": log_offsets}


def _camel_case(name: str) -> str:
    first, *rest = name.split("_")
    return first + "".join(part.title() for part in rest)


def run_exchanges(
    client: Client,
    namesrv: Client,
    save_exchange: Callable[[str], None],
    save_namesrv_exchange: Callable[[str], None],
) -> None:
    """Send one request of each kind and save the exchange.

    The requests store nothing, except that 4.9.7 records a pull beyond the end in a system topic.
    """
    namesrv.route("orders")
    save_namesrv_exchange("route")
    namesrv.route("no-such-topic")
    save_namesrv_exchange("route.unknown_topic")
    client.heartbeat("127.0.0.1@interop", producer_groups=("interop-producers",))
    save_exchange("heartbeat")
    client.pull("orders", 0, 0, max_messages=1)
    save_exchange("pull.found")
    client.pull("orders", 0, client.max_offset("orders", 0))
    save_exchange("pull.not_found")
    client.pull("orders", 0, 1_000)
    save_exchange("pull.offset_moved")
    client.pull("orders", 0, 0, subscription="no-such-tag")
    save_exchange("pull.no_match")
    client.pull("no-such-topic", 0, 0)
    save_exchange("pull.unknown_topic")
    client.committed_offset("billing", "orders", 0)
    save_exchange("query_offset")
    client.committed_offset("nobody", "payments", 0)
    save_exchange("query_offset.unknown_group")
    client.max_offset("orders", 0)
    save_exchange("max_offset")
    client.min_offset("orders", 0)
    save_exchange("min_offset")
    client.search_offset("orders", 0, timestamp_ms=0)
    save_exchange("search_offset")
    client.query_by_key("orders", "order-0")
    save_exchange("query_message")
    client.query_by_key("orders", "no-such-key")
    save_exchange("query_message.not_found")
    client.request(33, {"offset": 0})
    save_exchange("view_message")
    client.request(33, {"offset": 3})
    save_exchange("view_message.not_found")
    client.request(9_999)
    save_exchange("unsupported")


def old_client_exchange(namesrv_address: str) -> tuple[bytes, bytes]:
    """Return the exchange of a route request from a client older than 4.9.4.

    Numeric keys of the response have no quotes.
    """
    with Client(namesrv_address, version=OLD_VERSION) as old:
        old.route("orders")
        return old.sent_frame, old.received_frame
