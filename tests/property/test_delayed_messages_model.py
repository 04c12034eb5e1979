"""Delayed messages against a model: sends, deliveries, saves, stops and crashes in any order.

Every message that survives in the log comes at least once, and none comes before its time. A
message comes again only after a crash, if its delivery was not covered by a saved position.
"""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from escrowmq.broker.delayed_messages import DelayedMessages, DueMessages
from escrowmq.config import DelayConfig
from escrowmq.message.names import SCHEDULE_TOPIC, TIMER_TOPIC
from escrowmq.store.config_files import delay_offsets_file
from escrowmq.testing.disks import FaultyDisk
from tests.support.stores import NOW_MS, assert_clean, open_store, properties, sample

TOPIC = "T"
LEVELS_MS = (1_000, 50_000)
DELAYS = {  # by the property that asks for it, how long it is
    ("TIMER_DELAY_MS", "1000"): 1_000,
    ("TIMER_DELAY_MS", "40000"): 40_000,
    ("TIMER_DELAY_MS", "6000000"): 6_000_000,
    ("DELAY", "1"): LEVELS_MS[0],
    ("DELAY", "2"): LEVELS_MS[1],
}
LONG_ENOUGH_MS = 10_000_000  # after which every message is due

delays = st.sampled_from(sorted(DELAYS))
steps_ms = st.sampled_from([1_000, 40_000])


class DelaysMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now_ms = NOW_MS
        self.due_ms: dict[bytes, int] = {}  # by body: when it may come
        self.delivered: set[bytes] = set()
        self.unsaved: set[bytes] = set()  # delivered since the position was saved
        self.may_repeat: set[bytes] = set()  # those of `unsaved` at a crash
        self.lost: set[bytes] = set()  # not flushed when the power was cut: they never come
        self.open(FaultyDisk())

    def open(self, disk: FaultyDisk) -> None:
        self.disk = disk
        self.store = open_store(disk)
        self.delays = DelayedMessages(
            self.store, delay_offsets_file(disk), DelayConfig(delay_levels_ms=LEVELS_MS)
        )

    # --- sends and deliveries --------------------------------------------------------------------

    @rule(batch=st.lists(delays, min_size=1, max_size=4), flushes=st.booleans())
    def send(self, batch: list[tuple[str, str]], flushes: bool) -> None:
        for name, value in batch:
            body = b"%d" % len(self.due_ms)
            self.due_ms[body] = self.now_ms + DELAYS[name, value]
            message = sample(
                body=body, topic=TOPIC, queue_id=0, properties=properties(**{name: value})
            )
            record = self.delays.redirect(message, self.now_ms)
            self.store.append([record], now_ms=self.now_ms)
        if flushes:
            self.store.flush()

    @rule(step_ms=steps_ms, then=st.sampled_from(["go on", "save", "flush", "crash"]))
    def deliver(self, step_ms: int, then: str) -> None:
        self.now_ms += step_ms
        due = self.append_due()
        if then == "crash":
            self.kill()  # the messages are in the log, and nothing says so
            return
        self.delays.mark_delivered(due)
        if then == "flush":
            self.store.flush()
        elif then == "save":
            self.save()

    def append_due(self) -> DueMessages:
        due = self.delays.find_due(self.now_ms)
        bodies = [bytes(record.body) for record in due.records]
        assert len(bodies) == len(set(bodies))
        for body in bodies:
            assert self.due_ms[body] <= self.now_ms
            assert body not in self.delivered or body in self.may_repeat
        if due.records:
            self.store.append(due.records, now_ms=self.now_ms)
        self.delivered.update(bodies)
        self.unsaved.update(bodies)
        self.may_repeat.difference_update(bodies)
        return due

    # --- saves and restarts ----------------------------------------------------------------------

    def save(self) -> None:
        self.delays.save()
        if not self.delays.is_dirty:  # else what was delivered is not durable yet
            self.unsaved.clear()

    @rule(how=st.sampled_from(["cut power", "kill", "stop"]), saves=st.booleans())
    def restart(self, how: str, saves: bool) -> None:
        if saves:
            self.save()
        if how == "stop":
            self.stop()
        elif how == "kill":
            self.kill()
        else:
            self.cut_power()

    def stop(self) -> None:
        self.store.flush()
        self.save()
        assert not self.unsaved
        self.store.close()
        assert_clean(self.disk)
        self.open(self.disk)

    def kill(self) -> None:
        """End the process: everything that was written stays."""
        self.store.abandon()
        self.forget_unsaved()
        self.open(self.disk)

    def cut_power(self) -> None:
        """Lose everything that was not flushed: messages and deliveries."""
        disk = self.disk.power_cut(Random(0), "none")
        self.store.abandon()
        self.forget_unsaved()
        self.open(disk)
        self.delivered &= self.bodies_of(TOPIC)
        self.lost |= self.due_ms.keys() - self.delayed_bodies()

    def forget_unsaved(self) -> None:
        self.may_repeat |= self.unsaved
        self.unsaved.clear()

    # --- what holds ------------------------------------------------------------------------------

    def bodies_of(self, topic: str) -> set[bytes]:
        return {bytes(record.body) for record in self.store.records() if record.topic == topic}

    def delayed_bodies(self) -> set[bytes]:
        """Of all messages that were ever delayed, also of those that have come."""
        return self.bodies_of(SCHEDULE_TOPIC) | self.bodies_of(TIMER_TOPIC)

    def teardown(self) -> None:
        self.now_ms += LONG_ENOUGH_MS
        self.delays.mark_delivered(self.append_due())
        assert self.delayed_bodies() == self.due_ms.keys() - self.lost
        assert self.bodies_of(TOPIC) == self.delayed_bodies()
        assert self.append_due().records == []
        self.store.close()
        assert_clean(self.disk)


DelaysMachine.TestCase.settings = settings(stateful_step_count=40)
TestDelays = pytest.mark.slow(DelaysMachine.TestCase)
