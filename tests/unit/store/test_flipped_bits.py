"""One flipped bit in a log costs at most its own message, wherever it is and however it is found.

The log has records below the checkpoint, records that are only flushed and records that are not
even that, in several segments. Each test flips one bit of each byte of the log in turn, opens the
store and reads all queues. The nightly run flips every bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise, product
from typing import Final

import pytest

from escrowmq.config import StoreConfig
from escrowmq.errors import CorruptRecord
from escrowmq.message.record import StoredRecord
from escrowmq.store.check import Severity
from escrowmq.store.checkpoint import CHECKPOINT_PATH
from escrowmq.store.flush_marks import MARKS_PATH
from escrowmq.testing import FaultyDisk
from tests.support.disk_damage import delete_files, flip_bit_at, flip_bit_in_file
from tests.support.store_recovery import detached_copy
from tests.support.stores import NOW_MS, examine, open_store, sample

SEALED: Final = StoreConfig(
    segment_bytes=4096, queue_file_bytes=200, index_slots=7, index_entries=100
)
PLAIN: Final = replace(SEALED, sealed=False)
CHECKPOINTED, FLUSHED, WRITTEN = 6, 12, 16  # numbers of records

pytestmark = pytest.mark.slow  # hundreds of recoveries each

Damage = Callable[[FaultyDisk], None]


@dataclass(frozen=True)
class SampleLog:
    disk: FaultyDisk
    records: list[StoredRecord]
    end: int

    def record_at(self, log_offset: int) -> StoredRecord | None:
        """Return the record that this byte belongs to; None for the end of a segment."""
        for record in self.records:
            if record.log_offset <= log_offset < record.log_offset + record.size:
                return record
        return None


def write_log(settings: StoreConfig) -> SampleLog:
    """Write a log and stop like a killed process."""
    disk = FaultyDisk()
    store = open_store(disk, settings)
    for number in range(WRITTEN):
        if number == CHECKPOINTED:
            store.checkpoint()
        # Long bodies fill the segments, short ones are where bits are flipped.
        body = b"body %d " % number * (100 if number % 4 == 0 else 1)
        record = sample(number, body=body)
        store.append([record], now_ms=NOW_MS + number)
        if number < FLUSHED:
            store.flush()
    records = [detached_copy(record) for record in store.records()]
    end = store.end
    store.abandon()
    return SampleLog(disk, records, end)


@pytest.fixture(scope="module", params=[SEALED, PLAIN], ids=["sealed", "without record CRC"])
def log_and_settings(request: pytest.FixtureRequest) -> tuple[SampleLog, StoreConfig]:
    return write_log(request.param), request.param


def messages(disk: FaultyDisk, settings: StoreConfig) -> dict[tuple[str, int, int], bytes]:
    """Open a store and return all messages by topic, queue id and queue offset."""
    store = open_store(disk, settings)
    found = {}
    for topic, queue_id in store.queues():
        for offset in range(store.min_offset(topic, queue_id), store.max_offset(topic, queue_id)):
            try:
                read = store.read(topic, queue_id, offset, count_max=1)
            except CorruptRecord:
                continue
            for data in read.slices:
                found[topic, queue_id, offset] = bytes(data)
    store.close()
    return found


def flip_each(
    log: SampleLog, settings: StoreConfig, prepare: Damage, positions: list[int], bits: list[int]
) -> None:
    """Flip bits of each of these bytes of the log, and check what is left of the messages."""
    expected = messages(log.disk.after_kill(), settings)
    for position in positions:
        for bit in bits or [position % 8]:
            disk = log.disk.after_kill()
            flip_bit_at(disk, settings.segment_bytes, position, bit)
            prepare(disk)
            found = messages(disk, settings)
            hit = log.record_at(position)
            where = f"byte {position}, bit {bit}, record {hit and hit.log_offset}"
            lost = expected.keys() - found.keys()
            own = set() if hit is None else {(hit.topic, hit.queue_id, hit.queue_offset)}
            assert lost <= own, f"{where}: {lost - own} are lost too"
            others = {key: data for key, data in found.items() if key not in own}
            assert others == {key: expected[key] for key in expected if key not in own}, where


def leave_as_it_is(disk: FaultyDisk) -> None:
    pass


def lose_queues(disk: FaultyDisk) -> None:
    delete_files(disk, "consumequeue/")


def lose_checkpoint(disk: FaultyDisk) -> None:
    delete_files(disk, CHECKPOINT_PATH)


PREPARATIONS: Final = {
    "from the checkpoint": leave_as_it_is,
    "from the start, without queues": lose_queues,
    "from the start, with queues": lose_checkpoint,
}
CASES = pytest.mark.parametrize("prepare", PREPARATIONS.values(), ids=PREPARATIONS.keys())


def positions_of(log: SampleLog, numbers: list[int]) -> list[int]:
    """Return the log offsets of all bytes of some records."""
    records = [log.records[number] for number in numbers]
    return [
        position
        for record in records
        for position in range(record.log_offset, record.log_offset + record.size)
    ]


def blank_records(log: SampleLog) -> list[int]:
    """Return the log offsets of all bytes that belong to no message, but to the log."""
    ends = [
        record.log_offset + record.size
        for record, following in pairwise(log.records)
        if record.log_offset + record.size != following.log_offset
    ]
    assert ends, "the log has one segment only"
    return [end + position for end in ends for position in range(8)]


@CASES
def test_a_flipped_bit_costs_at_most_its_own_message(
    log_and_settings: tuple[SampleLog, StoreConfig], prepare: Damage
) -> None:
    log, settings = log_and_settings
    positions = positions_of(log, [2, CHECKPOINTED - 1, CHECKPOINTED + 1, FLUSHED + 1])
    flip_each(log, settings, prepare, positions + blank_records(log), [])


@pytest.mark.nightly
@CASES
def test_any_flipped_bit_costs_at_most_its_own_message(
    log_and_settings: tuple[SampleLog, StoreConfig], prepare: Damage
) -> None:
    log, settings = log_and_settings
    flip_each(log, settings, prepare, list(range(log.end)), list(range(8)))


@pytest.mark.parametrize("prepare", [leave_as_it_is, lose_queues], ids=["queues", "no queues"])
def test_the_offset_of_a_lost_message_is_not_given_to_another(
    log_and_settings: tuple[SampleLog, StoreConfig], prepare: Damage
) -> None:
    # A consumer that has received the lost message would not look at this offset again.
    log, settings = log_and_settings
    last_of_queues = {(record.topic, record.queue_id): record for record in log.records[:FLUSHED]}
    for record in last_of_queues.values():
        for position in range(record.log_offset + 8, record.log_offset + 36):
            disk = log.disk.after_kill()
            delete_unflushed(disk, log, settings)
            flip_bit_at(disk, settings.segment_bytes, position, position % 8)
            prepare(disk)
            store = open_store(disk, settings)
            assert store.max_offset(record.topic, record.queue_id) == record.queue_offset + 1
            store.close()


SIZE, BODY_LENGTH = 3, 87  # the low bytes of the two fields that say where a record ends


@pytest.mark.parametrize("settings", [SEALED, PLAIN], ids=["sealed", "without record CRC"])
@pytest.mark.parametrize("fields", list(product((SIZE, BODY_LENGTH), repeat=3)))
def test_wrong_lengths_of_several_records_cost_only_these(
    settings: StoreConfig, fields: tuple[int, ...]
) -> None:
    """There is no known boundary between them: all were flushed at once, behind the checkpoint."""
    disk = FaultyDisk()
    store = open_store(disk, settings)
    store.append([sample(number, body=b"%d" % number) for number in range(12)], now_ms=NOW_MS)
    store.flush()
    records = [detached_copy(record) for record in store.records()]
    store.abandon()
    expected = messages(disk.after_kill(), settings)
    hit = [records[number] for number in (2, 3, 7)]
    for bit in range(8):
        damaged = disk.after_kill()
        for record, field in zip(hit, fields, strict=True):
            flip_bit_at(damaged, settings.segment_bytes, record.log_offset + field, bit)
        found = messages(damaged, settings)
        lost = {(record.topic, record.queue_id, record.queue_offset) for record in hit}
        assert found == {key: data for key, data in expected.items() if key not in lost}, bit


def delete_unflushed(disk: FaultyDisk, log: SampleLog, settings: StoreConfig) -> None:
    """Let the log end with its last flushed record."""
    begin = log.records[FLUSHED].log_offset
    for position in range(begin, log.end):
        base = position - position % settings.segment_bytes
        file = disk.open(f"commitlog/{base:020d}")
        file.write_at(position - base, b"\0")
        file.sync()


def test_a_flipped_bit_in_the_flush_marks_is_found_and_costs_nothing() -> None:
    log = write_log(SEALED)
    expected = messages(log.disk.after_kill(), SEALED)
    used_slots = WRITTEN + 2
    for position in [*range(80), *range(512, 512 + 16 * used_slots), 511]:
        disk = log.disk.after_kill()
        flip_bit_in_file(disk, MARKS_PATH, position, position % 8)
        findings = [finding.where for finding in examine(disk, SEALED).findings]
        assert MARKS_PATH in findings, position
        assert messages(disk, SEALED) == expected, position


def test_damage_is_logged_and_reported(caplog: pytest.LogCaptureFixture) -> None:
    log = write_log(SEALED)
    hit = log.records[CHECKPOINTED + 1]
    flip_bit_at(log.disk, SEALED.segment_bytes, hit.log_offset + 25, 0)
    [finding] = [f for f in examine(log.disk, SEALED).findings if f.severity is Severity.DAMAGE]
    assert f"log offset {hit.log_offset}" in finding.what
    store = open_store(log.disk, SEALED)
    [damage] = store.recovery.damage
    assert (damage.begin, damage.size) == (hit.log_offset, hit.size)
    [line] = [record for record in caplog.records if record.levelname == "ERROR"]
    assert f"log_offset={hit.log_offset} bytes={hit.size}" in line.getMessage()
    store.close()
