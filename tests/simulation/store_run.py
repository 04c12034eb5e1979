"""Run a store on a disk that can fail, and check what a crash leaves.

The log is one sequence, so the model is one list of all records that were ever appended:

    expired | durable | acknowledged | in flight

After a crash the store must contain a part of that list without gaps. It begins no later than at
the first record that has not expired, and ends no earlier than at the last durable record. Queues,
offsets and keys must agree with the log.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from random import Random

from escrowmq.config import StoreConfig
from escrowmq.errors import StoreError, StoreFull, StoreUnavailable
from escrowmq.message.keys import encode_host
from escrowmq.message.record import NewRecord
from escrowmq.store.disk import DiskUsage
from escrowmq.store.retention import expire
from escrowmq.store.store import MessageStore
from escrowmq.testing import FaultyDisk
from tests.support.store_appends import bodies
from tests.support.stores import assert_clean

HOST = encode_host("127.0.0.1", 10911)
SETTINGS = StoreConfig(
    segment_bytes=4096, queue_file_bytes=160, index_slots=7, index_entries=25, reserved_hours=1
)
START_MS = 1_700_000_000_000
FULL_DISK = DiskUsage(total_bytes=100, free_bytes=13)  # above force_expire_ratio
ENOUGH_SPACE = DiskUsage(total_bytes=100, free_bytes=50)


@dataclass(frozen=True)
class ModelRecord:
    topic: str
    queue_id: int
    body: bytes


@dataclass
class StoreRun:
    """A store through any number of crashes, and the model of what it must contain."""

    rng: Random
    disk: FaultyDisk
    appended: list[ModelRecord] = field(default_factory=list)
    refused_bodies: set[bytes] = field(default_factory=set)
    # How many of the appended records are at least durable, acknowledged or expired.
    durable_count: int = 0
    acknowledged_count: int = 0
    expired_count: int = 0
    record_count: int = 0
    now_ms: int = START_MS
    store: MessageStore | None = None
    settings: StoreConfig = SETTINGS

    def open(self) -> MessageStore:
        self.store = MessageStore.open(self.disk, self.settings, store_host=HOST)
        return self.store

    def after_crash(self, rng: Random, disk: FaultyDisk) -> StoreRun:
        """Return a copy that continues with the disk of the next process."""
        return replace(
            self,
            rng=rng,
            disk=disk,
            appended=list(self.appended),
            refused_bodies=set(self.refused_bodies),
            store=None,
        )

    # --- operations ------------------------------------------------------------------------------

    def append(self, sizes: list[int]) -> None:
        assert self.store is not None
        records = [self._new_record(size) for size in sizes]
        batch = [ModelRecord(record.topic, record.queue_id, record.body) for record in records]
        # After a failure of the store, the records in flight may still be found.
        if not self.store.has_failed:
            del self.appended[self.acknowledged_count :]
            self.appended += batch
        try:
            self.store.append(records, now_ms=self.now_ms)
        except (StoreFull, StoreUnavailable):
            # Both guarantee that nothing was stored.
            assert not self.store.has_failed
            self.refused_bodies |= {record.body for record in batch}
            del self.appended[self.acknowledged_count :]
            raise
        self.acknowledged_count += len(batch)

    def flush(self) -> None:
        assert self.store is not None
        self.store.flush()
        self.durable_count = self.acknowledged_count

    def checkpoint(self) -> None:
        assert self.store is not None
        self.store.checkpoint()
        self.durable_count = self.acknowledged_count

    def expire(self) -> None:
        assert self.store is not None
        usages = [FULL_DISK, ENOUGH_SPACE]
        segments = self.store.log_files()
        if len(segments) > 1 and segments[1][0] <= self.store.checkpointed_offset:
            # Count the records before they expire: after a crash they may be there or not.
            self.expired_count += sum(1 for _ in self.store.records(0, segments[1][0]))
        expire(self.store, age_of=lambda _: 0, hour=12, read_usage=lambda: usages.pop(0))

    def close(self) -> None:
        assert self.store is not None
        self.store.close()
        self.durable_count = self.acknowledged_count

    def run_scenario(self) -> None:
        """Run a fixed scenario: appends, flushes, checkpoints, expiry and a clean stop."""
        self.open()
        for step in range(36):
            self.append([self.rng.choice((3, 40, 200))] * (1 if step % 3 else 4))
            if step % 5 == 4:
                self.flush()
            if step % 9 == 8:
                self.checkpoint()
            if step == 22:
                self.expire()
        self.append([900, 900, 900, 900, 900])  # one batch across the end of a segment
        self.close()

    def run_random_step(self) -> None:
        weights = {"append": 12, "flush": 3, "checkpoint": 2, "expire": 1, "kill": 1}
        match self.rng.choices(list(weights), list(weights.values()))[0]:
            case "append":
                count = self.rng.choice((1, 1, 1, 2, 5))
                self.append([self.rng.choice((0, 3, 40, 200, 900)) for _ in range(count)])
            case "flush":
                self.flush()
            case "checkpoint":
                self.checkpoint()
            case "expire":
                self.expire()
            case "kill":
                self.kill()

    def kill(self) -> None:
        """Kill the process but not the machine: nothing is lost, and nothing becomes durable."""
        assert self.store is not None
        self.store.abandon()
        self.open()
        self.check()

    def _new_record(self, size: int) -> NewRecord:
        self.record_count += 1
        number = self.record_count
        self.now_ms += self.rng.choice((0, 1, 1500))
        properties = (
            f"UNIQ_KEY\x01U{number}\x02KEYS\x01k{number % 3} all\x02TAGS\x01t{number % 2}\x02"
        )
        return NewRecord(
            topic=self.rng.choice(("orders", "stock")),
            queue_id=self.rng.randrange(2),
            body=b"%d:" % number + b"x" * size,
            properties=properties.encode(),
            born_ms=self.now_ms,
            born_host=HOST,
        )

    # --- checks ----------------------------------------------------------------------------------

    def crash(self, disk: FaultyDisk) -> None:
        """Continue with the disk that the next process finds."""
        self.disk = disk
        self.store = None

    def check(self) -> None:
        """Check a reopened store: it contains what it must contain, and its parts agree.

        Afterwards the model equals the store: what has survived counts as durable.
        """
        store = self.store
        assert store is not None
        assert store.recovery.damage == []
        stored_bodies = [bytes(record.body) for record in store.records()]
        assert not self.refused_bodies & set(stored_bodies)
        appended_bodies = [record.body for record in self.appended]
        begin = appended_bodies.index(stored_bodies[0]) if stored_bodies else self.durable_count
        end = begin + len(stored_bodies)
        assert stored_bodies == appended_bodies[begin:end], "the log has gaps or other records"
        assert begin <= self.expired_count, "a record is lost that has not expired"
        assert end >= self.durable_count, "a durable record is lost"
        del self.appended[end:]
        self.durable_count = self.acknowledged_count = end
        self.expired_count = min(self.expired_count, begin)
        self._check_queues(store, begin)
        self._check_keys(store, begin)
        # Check a copy, because the store itself is locked.
        assert_clean(self.disk.power_cut(Random(0), "all"), self.settings)

    def _check_queues(self, store: MessageStore, begin: int) -> None:
        """Check the queues of the records from number `begin` on."""
        by_queue: dict[tuple[str, int], list[tuple[int, bytes]]] = {}  # record number, body
        for number, record in enumerate(self.appended):
            by_queue.setdefault((record.topic, record.queue_id), []).append((number, record.body))
        unexpired_queues = {queue for queue, records in by_queue.items() if records[-1][0] >= begin}
        assert set(store.queues()) >= unexpired_queues
        for queue in unexpired_queues:
            records = by_queue[queue]
            unexpired_bodies = [body for number, body in records if number >= begin]
            min_offset, max_offset = len(records) - len(unexpired_bodies), len(records)
            assert (store.min_offset(*queue), store.max_offset(*queue)) == (min_offset, max_offset)
            read_bodies: list[bytes] = []
            queue_offset = min_offset
            while queue_offset < max_offset:
                result = store.read(*queue, queue_offset, count_max=3)
                assert result.count, result
                read_bodies += bodies(result)
                queue_offset = result.next_offset
            assert read_bodies == unexpired_bodies

    def _check_keys(self, store: MessageStore, begin: int) -> None:
        for record in self.appended[begin:]:
            key = "U" + record.body.split(b":")[0].decode()
            (stored_record,) = store.find_by_key(record.topic, key)
            assert stored_record.body == record.body


def scenario_error(run: StoreRun) -> Exception | None:
    """Run the fixed scenario and return its first error, or None."""
    try:
        run.run_scenario()
    except (StoreError, MemoryError) as error:
        return error
    return None
