"""A broker that delays messages in every way, a model of what it promised, and power cuts.

The clients send levels and timers, commit and roll back delayed transactions, alone and in groups,
and send messages back. The model knows which messages must be delivered, which may be, and which
must not. It looks at the real topics after every step: nothing may be there twice.

A message is promised once its response was received and its record is durable: with the response
under SYNC_FLUSH, with the next flush under ASYNC_FLUSH. A client whose request got no response
because of a power cut repeats a send-back, and does not repeat anything else.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from random import Random

from escrowmq.errors import StoreError
from escrowmq.message.names import retry_topic
from escrowmq.remoting.codes import RequestCode
from escrowmq.remoting.headers import ConsumerSendMessageBack
from escrowmq.store.config_files import GroupConfig
from escrowmq.testing.disks import FaultyDisk, PowerCut, Survival
from tests.support.broker_requests import new_request, send_request
from tests.support.escrows import (
    COMMIT,
    ROLLBACK,
    SMALL_SEGMENTS,
    EscrowBench,
    HalfPosition,
    end_many_request,
)
from tests.support.stores import assert_clean

GROUP = "g"
RETRIES = retry_topic(GROUP)
QUEUES = [("T", 0), ("T", 1), (RETRIES, 0)]
DAY_MS = 86_400_000
TURNS_MAX = 60  # in which everything that is due is delivered

Step = Callable[[], None]


class DelayRun:
    def __init__(self, survival: Survival, *, sync: bool, seed: int = 0) -> None:
        self._survival = survival
        self._rng = Random(seed)
        self.bench = EscrowBench(settings=SMALL_SEGMENTS, sync=sync)
        self.promised: set[tuple[str, str]] = set()  # topic and key
        self._unflushed: set[tuple[str, str]] = set()  # acknowledged, and promised with a flush
        self._possible: set[tuple[str, str]] = set()
        self._verdicts: dict[str, int] = {}  # of the clients' database, by the key of a half
        self._halves: dict[str, HalfPosition] = {}
        self._unanswered: list[str] = []  # keys of messages that were sent back
        # By queue and offset: key and log offset of the messages that consumers can read.
        self._visible: dict[tuple[str, int, int], tuple[str, int]] = {}
        self._next_offsets: Counter[tuple[str, int]] = Counter()
        self._durable_end = 0
        self.power_cuts = 0
        self.moved_count = 0
        self.bench.broker.groups.put(GroupConfig(group_name=GROUP), now_ms=self.bench.now_ms)
        self.bench.turn()

    # --- steps -----------------------------------------------------------------------------------

    def attempt(self, step: Step) -> None:
        """Run a step in which the power may fail, and check what is visible afterwards."""
        try:
            step()
        except PowerCut:
            self._cut_power()
        self._check_step()

    def send(self, key: str, delay: str = "") -> None:
        text = f"UNIQ_KEY\x01{key}\x02{delay}"
        self._possible.add(("T", key))
        if self.bench.request(send_request("T", key.encode(), properties=text)).code == 0:
            self._acknowledge("T", key)

    def park(self, key: str, **delay: str) -> None:
        self._verdicts[key] = ROLLBACK  # unless the local transaction commits
        self._halves[key] = self.bench.park(key, **delay)
        self._acknowledge("half", key)

    def end(self, verdict: int, *keys: str) -> None:
        """Decide transactions in the database, and send the verdict."""
        if not all(key in self._halves for key in keys):
            return
        for key in keys:
            self._verdicts[key] = verdict
            if verdict == COMMIT:
                self._possible.add(("T", key))
        if len(keys) == 1:
            self.bench.end(self._halves[keys[0]], verdict)
        else:
            positions = [tuple(self._halves[key]) for key in keys]
            self.bench.request(end_many_request(positions, verdict))  # type: ignore[arg-type]

    def send_back(self, key: str) -> None:
        """Let a consumer fail. It repeats its request if the power fails meanwhile."""
        log_offset = next(
            (
                offset
                for (topic, *_), (k, offset) in self._visible.items()
                if (topic, k) == ("T", key)
            ),
            None,
        )
        if log_offset is None:
            return
        self._unanswered.append(key)
        self._possible.add((RETRIES, key))
        fields = ConsumerSendMessageBack(offset=log_offset, group=GROUP, delay_level=1)
        response = self.bench.request(new_request(RequestCode.CONSUMER_SEND_MSG_BACK, fields))
        self._unanswered.remove(key)
        if response.code == 0:
            self._acknowledge(RETRIES, key)

    def tick(self, after_ms: int) -> None:
        self.bench.tick(after_ms)

    def save(self) -> None:
        self.bench.broker.save()
        self.bench.broker.transactions.save(force=True)

    def expire(self) -> None:
        """Delete the oldest segment if possible, and move what waits in it otherwise."""
        counters = self.bench.broker.delayed_messages.counters
        self.bench.remove_log_file()
        self.moved_count += counters.moved

    def fill(self) -> None:
        for number in range(6):
            key = f"fill-{len(self._possible)}-{number}"
            self._possible.add(("T", key))
            request = send_request(
                "T",
                key.encode(),
                queue_id=1,
                properties=f"UNIQ_KEY\x01{key}\x02a\x01{'x' * 400}\x02",
            )
            self.bench.turn(request)
            self.bench.channel.responses()

    def kill(self) -> None:
        self.bench.store.abandon()
        self.bench = self.bench.reopen(self.bench.disk)
        self._check_visible_again()

    def stop(self) -> None:
        self.bench = self.bench.restarted()
        self._check_visible_again()

    # --- the end ---------------------------------------------------------------------------------

    def finish(self) -> None:
        """Decide what is open, deliver what waits, and check every message."""
        bench = self.bench
        for half in list(bench.coordinator.halves):
            bench.end(
                (half.queue_offset, half.log_offset),
                self._verdicts.get(half.key.decode(), ROLLBACK),
            )
        for _ in range(TURNS_MAX):
            bench.tick(DAY_MS)
            if not bench.broker.delayed_messages.waiting_count:
                break
        self._check_step()
        self._check_counts()
        self.bench = bench = bench.killed()
        self._check_visible_again()
        bench.tick(DAY_MS)
        self._check_step()
        self._check_counts()
        assert bench.broker.delayed_messages.counters.lost == 0
        bench.store.close()
        assert_clean(bench.disk, SMALL_SEGMENTS)

    def _check_counts(self) -> None:
        counts = self._counts()
        for topic, key in self.promised:
            if topic == "half":
                if self._verdicts[key] == COMMIT:
                    assert counts["T", key] == 1, f"{key} was committed and is lost"
            else:
                assert counts[topic, key] == 1, f"{key} is lost in {topic}"

    # --- the model -------------------------------------------------------------------------------

    def _acknowledge(self, topic: str, key: str) -> None:
        (self.promised if self.bench.sync else self._unflushed).add((topic, key))

    def _check_step(self) -> None:
        store = self.bench.store
        if store.flushed_offset == store.end:
            self.promised |= self._unflushed
            self._unflushed.clear()
        self._durable_end = store.flushed_offset
        for topic, queue_id in QUEUES:
            first = max(self._next_offsets[topic, queue_id], store.min_offset(topic, queue_id))
            for queue_offset in range(first, store.max_offset(topic, queue_id)):
                log_offset = store.log_offset_of(topic, queue_id, queue_offset)
                assert log_offset is not None
                key = bytes(store.record_at(log_offset).body).decode()
                self._visible[topic, queue_id, queue_offset] = key, log_offset
                self._next_offsets[topic, queue_id] = queue_offset + 1
        for (topic, key), count in self._counts().items():
            assert count == 1, f"{key} was delivered {count} times to {topic}"
            assert (topic, key) in self._possible, f"{key} was delivered to {topic}"
            assert self._verdicts.get(key, COMMIT) == COMMIT, f"{key} was rolled back"

    def _counts(self) -> Counter[tuple[str, str]]:
        return Counter((topic, key) for (topic, *_), (key, _) in self._visible.items())

    def _cut_power(self) -> None:
        self.power_cuts += 1
        disk = self.bench.disk.power_cut(self._rng, self._survival)
        self.bench.store.abandon()
        self._start(disk)
        self._unflushed.clear()
        self._check_visible_again()
        for key in list(self._unanswered):
            self._unanswered.remove(key)
            self.send_back(key)

    def _start(self, disk: FaultyDisk) -> None:
        """Start the broker. In every second run the power fails once more during the start."""
        if self._rng.random() < 0.5:
            disk.power_cut_at = self._rng.randint(1, 30)
        try:
            self.bench = self.bench.reopen(disk)
        except PowerCut:
            disk = disk.power_cut(self._rng, self._survival)
            self.bench = self.bench.reopen(disk)
        except StoreError as error:
            raise AssertionError(f"the broker does not start: {error}") from error
        disk.power_cut_at = None

    def _check_visible_again(self) -> None:
        """Check after a start that no durable message is missing, and forget those that are."""
        store = self.bench.store
        for (topic, queue_id, queue_offset), (key, log_offset) in list(self._visible.items()):
            if log_offset < store.begin:
                continue
            end = store.max_offset(topic, queue_id)
            position = store.log_offset_of(topic, queue_id, queue_offset)
            if queue_offset < end and position == log_offset:
                record = store.record_at(log_offset)
                if bytes(record.body).decode() == key:
                    continue
            assert log_offset >= self._durable_end, f"{key} was durable and is missing"
            del self._visible[topic, queue_id, queue_offset]
            next_offset = self._next_offsets[topic, queue_id]
            self._next_offsets[topic, queue_id] = min(next_offset, queue_offset)


def scenario(run: DelayRun) -> Iterator[Step]:
    """Yield the steps: every way to delay a message, with maintenance and restarts between them."""
    yield lambda: run.send("level-1", "DELAY\x011\x02")
    yield lambda: run.send("level-2", "DELAY\x012\x02")
    yield lambda: run.send("timer-long", "TIMER_DELAY_SEC\x0190000\x02")
    yield lambda: run.send("timer-short", "TIMER_DELAY_MS\x01500\x02")
    yield lambda: run.park("tx-level", DELAY="1")
    yield lambda: run.park("tx-timer", TIMER_DELAY_MS="700")
    yield lambda: run.park("tx-rolled-back", DELAY="1")
    yield lambda: run.end(COMMIT, "tx-level")
    yield lambda: run.end(ROLLBACK, "tx-rolled-back")
    yield lambda: run.send("fails-1")
    yield lambda: run.send_back("fails-1")
    yield lambda: run.tick(600)
    yield lambda: run.end(COMMIT, "tx-timer")
    yield lambda: run.bench.store.checkpoint()
    yield lambda: run.tick(600)  # level 1, the short timer
    yield lambda: run.save()
    yield lambda: run.park("tx-open", DELAY="2")
    yield lambda: run.tick(600)
    yield lambda: run.kill()
    yield lambda: run.park("group-1", DELAY="1")
    yield lambda: run.park("group-2", TIMER_DELAY_MS="300")
    yield lambda: run.end(COMMIT, "group-1", "group-2")
    yield lambda: run.send("fails-2")
    yield lambda: run.tick(1_000)
    yield lambda: run.send_back("fails-2")
    for number in range(3):
        yield lambda number=number: run.send(f"steady-{number}", "TIMER_DELAY_MS\x0110\x02")  # type: ignore[misc]
        yield lambda: run.tick(100)
        yield lambda: run.save()
    yield lambda: run.fill()
    yield lambda: run.fill()
    for _ in range(3):  # what waits is moved, then the segment is deleted
        yield lambda: run.bench.flush()
        yield lambda: run.expire()
    yield lambda: run.tick(1_000)
    yield lambda: run.stop()
    yield lambda: run.tick(5_000)
    yield lambda: run.end(COMMIT, "tx-open")
    yield lambda: run.tick(5_000)
    yield lambda: run.save()
    yield lambda: run.kill()


def run_scenario(
    survival: Survival, *, sync: bool, power_cut_at: int | None = None
) -> tuple[DelayRun, dict[int, str]]:
    """Run the scenario with a power cut at one disk call.

    Return the run, and the disk calls of the scenario by their numbers.
    """
    run = DelayRun(survival, sync=sync, seed=power_cut_at or 0)
    disk = run.bench.disk
    first_call = disk.calls + 1
    disk.power_cut_at = power_cut_at
    for step in scenario(run):
        run.attempt(step)
    calls = dict(enumerate(disk.trace[first_call - 1 :], first_call))
    run.finish()
    return run, calls
