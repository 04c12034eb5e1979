"""A flipped bit, a cut or a missing file beside the log costs nothing, and every one is reported.

The files are those that a broker with messages, tags, keys, offsets and transactions leaves. They
are taken from the directory as it is, so a new kind of file is covered as soon as it exists. Damage
of the log itself is covered by the tests of recovery: it can cost the message that it hits.

ESCROWMQ_SEEDS flips a bit of every byte; without it, a sample of the bytes of each file.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import cache
from random import Random
from typing import Any

import pytest

from escrowmq.consume.subscription import compile_subscription, parse_subscription
from escrowmq.message.record import decode_record
from escrowmq.remoting.codes import RequestCode
from escrowmq.remoting.headers import NoFields, UpdateConsumerOffset
from escrowmq.store.check import check_store
from escrowmq.store.disk import Disk
from escrowmq.testing.disks import FaultyDisk
from tests.support.broker_requests import new_request, send_request
from tests.support.escrows import COMMIT, ROLLBACK, SMALL_SEGMENTS, EscrowBench

IS_LONG_RUN = "ESCROWMQ_SEEDS" in os.environ
FLIPS_PER_FILE = 100_000 if IS_LONG_RUN else 12
READS_MAX = 100_000 if IS_LONG_RUN else 40
QUEUES = 2
TAGS = ("red", "blue")
# Nothing reads these: RocketMQ does, or their existence is all that matters.
UNREAD_PATHS = ("checkpoint", "lock", "abort")


def start(disk: FaultyDisk) -> EscrowBench:
    return EscrowBench(disk, settings=SMALL_SEGMENTS)


@cache
def filled_disk(*, is_killed: bool) -> FaultyDisk:
    """Return the disk of a broker that was stopped, or killed after its last checkpoint."""
    bench = start(FaultyDisk())
    group = b'{"groupName":"g"}'
    bench.turn(new_request(RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, NoFields(), group))
    halves = []
    for number in range(24):
        properties = f"TAGS\x01{TAGS[number % 2]}\x02KEYS\x01k{number}\x02UNIQ_KEY\x01U{number}\x02"
        bench.turn(
            send_request(
                body=b"message %d" % number, queue_id=number // 2 % QUEUES, properties=properties
            )
        )
        bench.channel.responses()
        if number % 4 == 0:
            halves.append(bench.park(f"half {number}"))
        if number % 10 == 0:
            bench.store.checkpoint()
    bench.end(halves[0], COMMIT)
    bench.end(halves[1], ROLLBACK)
    commit = UpdateConsumerOffset(consumer_group="g", topic="T", queue_id=1, commit_offset=3)
    bench.turn(new_request(RequestCode.UPDATE_CONSUMER_OFFSET, commit))
    for key, delay in (("level", "DELAY\x011"), ("timer", "TIMER_DELAY_MS\x01900")):
        text = f"UNIQ_KEY\x01{key}\x02{delay}\x02"
        bench.turn(send_request(body=key.encode(), properties=text))
    bench.tick(1_000)
    bench.channel.responses()
    if is_killed:
        bench.store.checkpoint()
        bench.broker.save()
        bench.store.abandon()
    else:
        bench.flush()
        bench.broker.save()
        bench.broker.transactions.save(force=True)
        bench.store.close()
    return bench.disk


def copy_of(disk: FaultyDisk) -> FaultyDisk:
    return disk.power_cut(Random(0), "all")


def observed(bench: EscrowBench) -> dict[str, Any]:
    """Return everything that clients and operators can see of a broker's files."""
    store, broker = bench.store, bench.broker
    bench.tick(10_000)  # nothing is delivered a second time
    return {
        "messages": [bench.bodies("T", queue_id) for queue_id in range(QUEUES)],
        "tagged": [list(tagged(bench, tag, queue)) for tag in TAGS for queue in range(QUEUES)],
        "offsets": [
            (store.min_offset(topic, queue_id), store.max_offset(topic, queue_id))
            for topic, queue_id in sorted(store.queues())
        ],
        "times": [store.offset_by_time("T", 0, bench.now_ms + ms) for ms in (-1, 0, 1)],
        "keys": [
            [bytes(record.body) for record in store.find_by_key("T", f"k{number}")]
            for number in range(24)
        ],
        "open halves": sorted(half.key for half in bench.coordinator.halves),
        "committed": broker.offsets.dump(),
        "topics": sorted(broker.topics.configs().items()),
        "groups": sorted(broker.groups.configs().items()),
    }


def tagged(bench: EscrowBench, tag: str, queue_id: int) -> Iterator[bytes]:
    """Yield the bodies that a consumer of one tag gets."""
    message_filter = compile_subscription(parse_subscription("T", tag))
    offset = 0
    while offset < bench.store.max_offset("T", queue_id):
        read = bench.store.read("T", queue_id, offset, message_filter=message_filter)
        for data in read.slices:
            position = 0
            while position < len(data):
                log_offset = int.from_bytes(data[position + 28 : position + 36], "big")
                record = decode_record(data, position, log_offset)  # type: ignore[arg-type]  # int
                yield bytes(record.body)
                position += record.size
        offset = read.next_offset


def derived_paths(disk: Disk, directory: str = "") -> list[str]:
    """Return the paths of all files but the log."""
    paths: list[str] = []
    files = disk.sizes(directory)
    for name in disk.names(directory):
        path = f"{directory}/{name}" if directory else name
        if name in files:
            paths.append(path)
        elif path != "commitlog":
            paths += derived_paths(disk, path)
    return paths


def flip(disk: FaultyDisk, path: str, position: int, bit: int) -> None:
    file = disk.open(path)
    file.write_at(position, bytes([file.read_at(position, 1)[0] ^ 1 << bit]))
    file.close()


PATHS = derived_paths(filled_disk(is_killed=False))
KILLED_PATHS = derived_paths(filled_disk(is_killed=True))


@pytest.mark.parametrize(
    ("path", "is_killed"),
    [*((path, False) for path in PATHS), *((path, True) for path in KILLED_PATHS)],
)
def test_a_flipped_bit_costs_nothing(path: str, is_killed: bool) -> None:
    disk = filled_disk(is_killed=is_killed)
    expected = observed(start(copy_of(disk)))
    rng = Random(path)
    positions = range(disk.sizes(path.rpartition("/")[0])[path.rpartition("/")[2]])
    for position in sorted(rng.sample(positions, min(FLIPS_PER_FILE, len(positions)))):
        damaged = copy_of(disk)
        flip(damaged, path, position, rng.randrange(8))
        bench = start(damaged)
        assert observed(bench) == expected, (path, position)
        bench.store.close()
        # What was repaired stays repaired.
        again = start(damaged)
        assert observed(again) == expected, (path, position)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kept_ratio", [None, 0, 0.5], ids=["missing", "empty", "half"])
def test_a_missing_or_short_file_costs_nothing(path: str, kept_ratio: float | None) -> None:
    disk = filled_disk(is_killed=False)
    expected = observed(start(copy_of(disk)))
    damaged = copy_of(disk)
    if kept_ratio is None:
        damaged.remove(path)
    else:
        file = damaged.open(path)
        file.resize(int(file.size * kept_ratio))
        file.close()
    assert observed(start(damaged)) == expected


def test_a_read_that_fails_once_costs_at_most_the_messages_it_reads() -> None:
    disk = filled_disk(is_killed=False)
    counting = copy_of(disk)
    expected = observed(start(counting))
    step = max(1, counting.reads // READS_MAX)
    for read in range(1, counting.reads + 1, step):
        failing = copy_of(disk)
        failing.fail_read_at = read
        bench = start(failing)
        found = observed(bench)
        for bodies, expected_bodies in zip(found["messages"], expected["messages"], strict=True):
            assert set(bodies) <= set(expected_bodies), read
            assert bodies == [body for body in expected_bodies if body in bodies], read
        assert found["open halves"] == expected["open halves"], read
        bench.store.close()
        assert observed(start(failing)) == expected, read


def test_damage_of_every_kind_of_file_is_reported() -> None:
    disk = filled_disk(is_killed=False)
    silent = []
    for path in PATHS:
        if path in UNREAD_PATHS:
            continue
        damaged = copy_of(disk)
        flip(damaged, path, 9, 0)
        bench = start(damaged)
        observed(bench)
        if not bench.store.damage.total:
            silent.append(path)
    assert silent == []


@pytest.mark.parametrize("is_killed", [False, True])
def test_the_check_of_a_directory_finds_what_a_start_finds(is_killed: bool) -> None:
    disk = filled_disk(is_killed=is_killed)
    silent = []
    for path in derived_paths(disk):
        if path in UNREAD_PATHS or "index/" in path or path == "escrowmq.redo":
            continue  # of the index, the check compares the entries with the log and nothing else
        damaged = copy_of(disk)
        flip(damaged, path, 9, 0)
        findings = check_store(damaged, SMALL_SEGMENTS).findings
        if not any(finding.where == path for finding in findings):
            silent.append(path)
    assert silent == []


@pytest.mark.parametrize("path", [path for path in KILLED_PATHS if path not in UNREAD_PATHS])
@pytest.mark.parametrize("is_killed", [False, True])
def test_bytes_that_were_added_to_a_file_cost_nothing(path: str, is_killed: bool) -> None:
    disk = filled_disk(is_killed=is_killed)
    if not disk.exists(path):
        return
    expected = observed(start(copy_of(disk)))
    damaged = copy_of(disk)
    add_bytes(damaged, path)
    assert observed(start(damaged)) == expected


def test_bytes_that_were_added_to_a_segment_cost_nothing_and_are_reported() -> None:
    disk = filled_disk(is_killed=True)
    expected = observed(start(copy_of(disk)))
    for name in disk.names("commitlog"):
        damaged = copy_of(disk)
        add_bytes(damaged, f"commitlog/{name}")
        bench = start(damaged)
        assert observed(bench) == expected
        assert bench.store.damage.total == 1


def add_bytes(disk: FaultyDisk, path: str) -> None:
    file = disk.open(path)
    size = file.size
    file.resize(size + 777)
    file.write_at(size, b"\xa5" * 777)
    file.close()
