"""What a live broker serves of a store, as bytes, and what it complained about in its logs."""

from __future__ import annotations

import struct
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.interop.apache import ApacheRocketMQ
from tests.interop.records import decode_record, encode_properties
from tests.interop.remoting import (
    COMMIT,
    HALF_TOPIC,
    OP_TOPIC,
    PULL_NOT_FOUND,
    ROLLBACK,
    SUCCESS,
    Client,
    ResponseError,
)
from tests.interop.samples import Laid, now_ms, unique_key
from tests.interop.script import SCHEDULE_TOPIC
from tests.interop.stores import Queue, cut

AWAIT_S = 30
SYSTEM_TOPICS = (HALF_TOPIC, OP_TOPIC, SCHEDULE_TOPIC)


def pull_bytes(client: Client, topic: str, queue_id: int) -> list[bytes]:
    """Every message of a queue, as it came over the wire."""
    records: list[bytes] = []
    at, end = client.min_offset(topic, queue_id), client.max_offset(topic, queue_id)
    while at < end:
        answer = client.pull(topic, queue_id, at)
        if answer.code != SUCCESS:
            raise ResponseError(11, answer)
        records += cut(answer.body)
        at = int(answer.ext_fields["nextBeginOffset"])
    return records


def assert_serves(client: Client, laid: Laid) -> None:
    """Every message by its queue and by its place, and every key."""
    for (topic, queue_id), messages in laid.queues.items():
        assert client.min_offset(topic, queue_id) == 0
        assert client.max_offset(topic, queue_id) == len(messages), f"{topic} {queue_id}"
        assert pull_bytes(client, topic, queue_id) == messages, f"{topic} {queue_id}"
        for message in messages[:: max(1, len(messages) // 5)]:
            log_offset = decode_record(message).log_offset
            assert client.expect(33, {"offset": log_offset}).body == message
    for (topic, key), log_offsets in laid.keys.items():
        found = client.query_by_key(topic, key)
        assert {record.log_offset for record in found} == log_offsets, f"{topic} {key}"


def assert_finds_by_time(client: Client, laid: Laid, *, queue: Queue, version: str) -> None:
    """A queue of one file: 4.9.7 cannot be relied on with several. See test_fixture_stores.py."""
    times = [decode_record(message).stored_ms for message in laid.queues[queue]]
    for number, stored_ms in enumerate(times):
        found = client.search_offset(*queue, timestamp_ms=stored_ms)
        assert times[found] == stored_ms
        if version != "4.9.7":
            assert found == times.index(stored_ms)
            assert client.search_offset(*queue, timestamp_ms=stored_ms - 1) <= number
    assert client.search_offset(*queue, timestamp_ms=0) == 0


# --- sending -----------------------------------------------------------------------------------


def send_everything(client: Client, count: int, *, delay_levels: Sequence[int]) -> None:
    """Plain messages, batches, three halves (one committed, one rolled back), delays.

    Level 1 is due after a second and waited for.
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
    # 5.x gathers ops for a while. 4.x refuses to show them, but tells how many there are.
    are_gathered = client.pull(OP_TOPIC, 0, 0).code in (SUCCESS, PULL_NOT_FOUND)
    _await(client, (OP_TOPIC, 0), 1 if are_gathered else 2)
    _await(client, ("orders", 2), len(range(2, count, 4)) + (1 in delay_levels))


def send_batch(client: Client, topic: str, numbers: range) -> None:
    body = b""
    for number in numbers:
        text = f"message {number} of a batch".encode()
        keys = {"KEYS": f"k-{number} batch", "UNIQ_KEY": unique_key(number)}
        properties = encode_properties(keys).encode()
        head = struct.pack(">iiiii", 22 + len(text) + len(properties), 0, 0, number, len(text))
        body += head + text + struct.pack(">h", len(properties)) + properties
    named = {"a": "interop-producers", "b": topic, "c": "TBW102", "d": 4, "e": 1, "f": 0}
    rest = {"g": now_ms(), "h": 0, "i": "", "j": 0, "k": False, "m": True}
    client.expect(320, {**named, **rest}, body)


def _await(client: Client, queue: Queue, count: int) -> None:
    deadline = time.monotonic() + AWAIT_S
    while client.max_offset(*queue) < count:
        assert time.monotonic() < deadline, f"{queue} has not {count} messages"
        time.sleep(0.05)


# --- looking -----------------------------------------------------------------------------------

SENT_QUEUES: list[Queue] = [
    *(("orders", queue_id) for queue_id in range(4)),
    ("payments", 1),
    (SCHEDULE_TOPIC, 0),
    (SCHEDULE_TOPIC, 17),
    (HALF_TOPIC, 0),
    (OP_TOPIC, 0),
]


def what_is_served(client: Client, keys: list[tuple[str, str]]) -> Laid:
    """What a client can see of what `send_everything` sent."""
    seen = Laid()
    for queue in SENT_QUEUES:
        try:
            seen.queues[queue] = pull_bytes(client, *queue)
        except ResponseError:  # 4.9.7, of the topics of transactions
            seen.hidden[queue] = client.max_offset(*queue)
    for topic, key in keys:
        found = client.query_by_key(topic, key)
        seen.keys[topic, key] = {record.log_offset for record in found}
    return seen


def complaints(rocketmq: ApacheRocketMQ, *, since: Mapping[Path, int] | None = None) -> list[str]:
    """Errors in the logs of the broker, from where `log_sizes` found them to end once."""
    found = []
    for log in _logs(rocketmq):
        with log.open("rb") as file:
            file.seek((since or {}).get(log, 0))
            lines = file.read().decode(errors="replace").splitlines()
        found += [f"{log.name}: {line}" for line in lines if " ERROR " in line or "[BUG]" in line]
    return found


def log_sizes(rocketmq: ApacheRocketMQ) -> dict[Path, int]:
    return {log: log.stat().st_size for log in _logs(rocketmq)}


def _logs(rocketmq: ApacheRocketMQ) -> list[Path]:
    """4.x speaks to its output, 5.x has files."""
    files = sorted((rocketmq.directory / "logs" / "rocketmqlogs").glob("*.log"))
    return [rocketmq.directory / "broker.out", *files]
