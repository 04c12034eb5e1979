"""Drive a store on a disk that can fail, and check what a crash leaves.

The log is one sequence, so the model is one list. Of everything ever appended, in order:

    expired | durable | acknowledged | in flight

After a crash the store must hold one run of that list, which begins no later than at the first
record that was not expired and ends no earlier than at the last durable one. Queues, offsets and
keys must agree with the log.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

from escrowmq.config import StoreConfig
from escrowmq.errors import StoreError, StoreFull
from escrowmq.message.keys import encode_host
from escrowmq.message.record import NewRecord
from escrowmq.store.disk import DiskUsage
from escrowmq.store.retention import expire
from escrowmq.store.store import MessageStore
from escrowmq.testing import FaultyDisk
from tests.support.stores import assert_clean

HOST = encode_host("127.0.0.1", 10911)
SETTINGS = StoreConfig(
    segment_bytes=4096, queue_file_bytes=160, index_slots=7, index_entries=25, reserved_hours=1
)
START_MS = 1_700_000_000_000
FULL = DiskUsage(total_bytes=100, free_bytes=13)  # past force_expire_ratio: the oldest must go


@dataclass(frozen=True)
class Sent:
    topic: str
    queue_id: int
    body: bytes


@dataclass
class StoreRun:
    """One store through any number of crashes, and the model of what it must contain."""

    rng: Random
    disk: FaultyDisk
    everything: list[Sent] = field(default_factory=list)
    refused: set[bytes] = field(default_factory=set)
    durable: int = 0  # so many of everything
    acknowledged: int = 0
    expired: int = 0
    count: int = 0
    now_ms: int = START_MS
    store: MessageStore | None = None
    settings: StoreConfig = SETTINGS

    def open(self) -> MessageStore:
        self.store = MessageStore.open(self.disk, self.settings, store_host=HOST)
        return self.store

    # --- what a broker does ----------------------------------------------------------------------

    def append(self, sizes: list[int]) -> None:
        assert self.store is not None
        records = [self._record(size) for size in sizes]
        batch = [Sent(record.topic, record.queue_id, record.body) for record in records]
        if not self.store.has_failed:  # else what is in flight may still be found
            del self.everything[self.acknowledged :]
            self.everything += batch
        try:
            self.store.append(records, now_ms=self.now_ms)
        except StoreFull:
            # "Nothing was stored" is a promise.
            assert not self.store.has_failed
            self.refused |= {sent.body for sent in batch}
            del self.everything[self.acknowledged :]
            raise
        self.acknowledged += len(batch)

    def flush(self) -> None:
        assert self.store is not None
        self.store.flush()
        self.durable = self.acknowledged

    def checkpoint(self) -> None:
        assert self.store is not None
        self.store.checkpoint()
        self.durable = self.acknowledged

    def expire(self) -> None:
        assert self.store is not None
        usage = [FULL, DiskUsage(total_bytes=100, free_bytes=50)]
        files = self.store.log_files()
        if len(files) > 1 and files[1][0] <= self.store.checkpointed_offset:
            # Counted before it happens: a crash in the middle may leave either.
            gone = sum(1 for _ in self.store.records(0, files[1][0]))
            self.expired += gone
        expire(self.store, now_ms=self.now_ms, hour=12, read_usage=lambda: usage.pop(0))

    def close(self) -> None:
        assert self.store is not None
        self.store.close()
        self.durable = self.acknowledged

    def scenario(self) -> None:
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
        self.append([900, 900, 900, 900, 900])  # across a file's end, in one batch
        self.close()

    def random_step(self) -> None:
        steps = {"append": 12, "flush": 3, "checkpoint": 2, "expire": 1, "kill": 1}
        match self.rng.choices(list(steps), list(steps.values()))[0]:
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
        self.judge()

    def _record(self, size: int) -> NewRecord:
        self.count += 1
        number = self.count
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

    # --- what must hold --------------------------------------------------------------------------

    def crash(self, disk: FaultyDisk) -> None:
        """Continue with the disk that the next process finds."""
        self.disk = disk
        self.store = None

    def judge(self) -> None:
        """Check a reopened store: it contains what it must, and its parts agree."""
        store = self.store
        assert store is not None
        assert store.recovery.damage == []
        found = [bytes(record.body) for record in store.records()]
        assert not self.refused & set(found)
        bodies = [sent.body for sent in self.everything]
        begin = bodies.index(found[0]) if found else len(bodies[: self.durable])
        end = begin + len(found)
        assert found == bodies[begin:end], "not one run of what was appended"
        assert begin <= self.expired, "something is gone that did not expire"
        assert end >= self.durable, "something durable is gone"
        del self.everything[end:]
        self.durable = self.acknowledged = end
        self.expired = min(self.expired, begin)
        self._judge_queues(store, begin)
        self._judge_keys(store, begin)
        # A copy: the checker will not look at a directory that somebody owns.
        assert_clean(self.disk.power_cut(Random(0), "all"), self.settings)

    def _judge_queues(self, store: MessageStore, begin: int) -> None:
        by_queue: dict[tuple[str, int], list[tuple[int, bytes]]] = {}
        for number, sent in enumerate(self.everything):
            places = by_queue.setdefault((sent.topic, sent.queue_id), [])
            places.append((number, sent.body))
        assert set(store.queues()) >= {q for q, sent in by_queue.items() if sent[-1][0] >= begin}
        for (topic, queue_id), places in by_queue.items():
            alive = [offset for offset, (number, _) in enumerate(places) if number >= begin]
            if not alive:
                continue
            assert store.min_offset(topic, queue_id) == alive[0]
            assert store.max_offset(topic, queue_id) == len(places)
            read: list[bytes] = []
            at = alive[0]
            while at < len(places):
                answer = store.read(topic, queue_id, at, count_max=3)
                assert answer.count, answer
                read += bodies_in(answer.slices)
                at = answer.next_offset
            assert read == [body for number, body in places if number >= begin]

    def _judge_keys(self, store: MessageStore, begin: int) -> None:
        for sent in self.everything[begin:]:
            key = "U" + sent.body.split(b":")[0].decode()
            (record,) = store.find_by_key(sent.topic, key)
            assert record.body == sent.body


def bodies_in(slices: list[memoryview]) -> list[bytes]:
    """Return the bodies of adjacent records."""
    bodies = []
    for data in slices:
        at = 0
        while at < len(data):
            size = int.from_bytes(data[at : at + 4], "big")
            length = int.from_bytes(data[at + 84 : at + 88], "big")
            bodies.append(bytes(data[at + 88 : at + 88 + length]))
            at += size
    return bodies


def outcome(run: StoreRun) -> StoreError | None:
    """Run the fixed scenario and return its first failure, or None."""
    try:
        run.scenario()
    except StoreError as error:
        return error
    return None
