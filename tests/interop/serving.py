"""Check what a running broker serves of a store, send to it, and read the errors in its logs."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.interop.apache import ApacheRocketMQ
from tests.interop.records import decode_record, encode_properties
from tests.interop.remoting import (
    COMMIT,
    HALF_TOPIC,
    OP_TOPIC,
    ROLLBACK,
    SUCCESS,
    Client,
    ResponseError,
)
from tests.interop.samples import StoreContents, now_ms
from tests.interop.script import SCHEDULE_TOPIC, unique_key, wait_for_messages, wait_for_ops
from tests.interop.stores import Queue, split_records

SYSTEM_TOPICS = (HALF_TOPIC, OP_TOPIC, SCHEDULE_TOPIC)


def pull_bytes(client: Client, topic: str, queue_id: int) -> list[bytes]:
    """Return every message of a queue as the bytes that the broker sent."""
    records: list[bytes] = []
    queue_offset, end = client.min_offset(topic, queue_id), client.max_offset(topic, queue_id)
    while queue_offset < end:
        response = client.pull(topic, queue_id, queue_offset)
        if response.code != SUCCESS:
            raise ResponseError(11, response)
        records += split_records(response.body)
        queue_offset = int(response.ext_fields["nextBeginOffset"])
    return records


def assert_serves(client: Client, contents: StoreContents) -> None:
    """Check every queue, a sample of the messages by log offset, and every key."""
    for (topic, queue_id), messages in contents.queues.items():
        assert client.min_offset(topic, queue_id) == 0
        assert client.max_offset(topic, queue_id) == len(messages), f"{topic} {queue_id}"
        assert pull_bytes(client, topic, queue_id) == messages, f"{topic} {queue_id}"
        for message in messages[:: max(1, len(messages) // 5)]:
            log_offset = decode_record(message).log_offset
            assert client.expect(33, {"offset": log_offset}).body == message
    for (topic, key), log_offsets in contents.keys.items():
        records = client.query_by_key(topic, key)
        assert {record.log_offset for record in records} == log_offsets, f"{topic} {key}"


def assert_finds_by_time(
    client: Client, contents: StoreContents, *, queue: Queue, version: str
) -> None:
    """Check searches by time in a queue with one file.

    4.9.7 may search the wrong file if there are several: see test_fixture_stores.py.
    """
    times = [decode_record(message).stored_ms for message in contents.queues[queue]]
    for number, stored_ms in enumerate(times):
        queue_offset = client.search_offset(*queue, timestamp_ms=stored_ms)
        assert times[queue_offset] == stored_ms
        if version != "4.9.7":
            assert queue_offset == times.index(stored_ms)
            assert client.search_offset(*queue, timestamp_ms=stored_ms - 1) <= number
    assert client.search_offset(*queue, timestamp_ms=0) == 0


# --- sending -----------------------------------------------------------------------------------


def send_everything(client: Client, count: int, *, delay_levels: Sequence[int]) -> None:
    """Send `count` plain messages, batches, three halves and a message for each delay level.

    One half is committed, one rolled back. Returns when the message of level 1, which is due after
    a second, is delivered.
    """
    client.create_topic("orders", queues=4)
    client.create_topic("payments", queues=2)
    for level in delay_levels:
        client.send("orders", b"later", {"DELAY": str(level), "TAGS": "late"}, queue_id=2)
    for number in range(count):
        tags = {"TAGS": f"tag-{number % 3}"} if number % 4 else {}
        keys = {"KEYS": f"k-{number} decade-{number // 10}", "UNIQ_KEY": unique_key(number)}
        body = f"message {number}; ".encode() * (number % 37)
        client.send("orders", body or b"-", {**keys, **tags}, queue_id=number % 4, flag=number)
    for number in range(count, count + 20, 5):
        send_batch(client, "payments", range(number, number + 5))
    halves = [
        client.send_half("orders", b"half", {"UNIQ_KEY": unique_key(number)})
        for number in range(10_000, 10_003)
    ]
    assert client.end_transaction(halves[0], COMMIT, topic="orders").code == SUCCESS
    assert client.end_transaction(halves[1], ROLLBACK, topic="orders").code == SUCCESS
    wait_for_ops(client, decided=2)
    wait_for_messages(client, ("orders", 2), len(range(2, count, 4)) + (1 in delay_levels))


def send_batch(client: Client, topic: str, numbers: range) -> None:
    """Send a batch of messages to queue 1."""
    body = b""
    for number in numbers:
        text = f"message {number} of a batch".encode()
        keys = {"KEYS": f"k-{number} batch", "UNIQ_KEY": unique_key(number)}
        properties = encode_properties(keys).encode()
        head = struct.pack(">iiiii", 22 + len(text) + len(properties), 0, 0, number, len(text))
        body += head + text + struct.pack(">h", len(properties)) + properties
    target = {"a": "interop-producers", "b": topic, "c": "TBW102", "d": 4, "e": 1, "f": 0}
    options = {"g": now_ms(), "h": 0, "i": "", "j": 0, "k": False, "m": True}
    client.expect(320, {**target, **options}, body)


# --- reading -----------------------------------------------------------------------------------

SENT_QUEUES: list[Queue] = [
    *(("orders", queue_id) for queue_id in range(4)),
    ("payments", 1),
    (SCHEDULE_TOPIC, 0),
    (SCHEDULE_TOPIC, 17),
    (HALF_TOPIC, 0),
    (OP_TOPIC, 0),
]


def served_contents(client: Client, keys: list[tuple[str, str]]) -> StoreContents:
    """Return what a client can read of the messages from `send_everything`."""
    contents = StoreContents()
    for queue in SENT_QUEUES:
        try:
            contents.queues[queue] = pull_bytes(client, *queue)
        except ResponseError:  # 4.9.7 refuses to serve the half topic and the op topic
            contents.hidden[queue] = client.max_offset(*queue)
    for topic, key in keys:
        records = client.query_by_key(topic, key)
        contents.keys[topic, key] = {record.log_offset for record in records}
    return contents


def logged_errors(
    rocketmq: ApacheRocketMQ, *, since: Mapping[Path, int] | None = None
) -> list[str]:
    """Return the errors in the logs of the broker, after the sizes that `log_sizes` returned."""
    errors = []
    for log in _logs(rocketmq):
        with log.open("rb") as file:
            file.seek((since or {}).get(log, 0))
            lines = file.read().decode(errors="replace").splitlines()
        errors += [f"{log.name}: {line}" for line in lines if " ERROR " in line or "[BUG]" in line]
    return errors


def log_sizes(rocketmq: ApacheRocketMQ) -> dict[Path, int]:
    return {log: log.stat().st_size for log in _logs(rocketmq)}


def _logs(rocketmq: ApacheRocketMQ) -> list[Path]:
    """Return the log files: 4.9.7 logs to its standard output, 5.5.0 to files."""
    files = sorted((rocketmq.directory / "logs" / "rocketmqlogs").glob("*.log"))
    return [rocketmq.directory / "broker.out", *files]
