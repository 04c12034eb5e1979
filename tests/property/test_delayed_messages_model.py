"""Delayed messages against a model: sends, deliveries, saves, stops and crashes in any order.

Every message that survives in the log is delivered at least once, and none before it is due. A
message is delivered again only after a crash, if no saved position covered its delivery.
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
DELAYS_MS = {  # by the property that requests the delay
    ("TIMER_DELAY_MS", "1000"): 1_000,
    ("TIMER_DELAY_MS", "40000"): 40_000,
    ("TIMER_DELAY_MS", "6000000"): 6_000_000,
    ("DELAY", "1"): LEVELS_MS[0],
    ("DELAY", "2"): LEVELS_MS[1],
}
ALL_DUE_MS = 10_000_000  # after this time every message is due

delays = st.sampled_from(sorted(DELAYS_MS))
steps_ms = st.sampled_from([1_000, 40_000])


class DelaysMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now_ms = NOW_MS
        self.due_ms: dict[bytes, int] = {}  # by body: the earliest delivery
        self.delivered_bodies: set[bytes] = set()
        self.unsaved_bodies: set[bytes] = set()  # delivered since the last saved position
        self.repeatable_bodies: set[bytes] = set()  # were unsaved at a crash
        self.lost_bodies: set[bytes] = set()  # were not flushed when the power was cut
        self.open(FaultyDisk())

    def open(self, disk: FaultyDisk) -> None:
        self.disk = disk
        self.store = open_store(disk)
        self.delays = DelayedMessages(
            self.store, delay_offsets_file(disk), DelayConfig(delay_levels_ms=LEVELS_MS)
        )

    # --- sends and deliveries --------------------------------------------------------------------

    @rule(batch=st.lists(delays, min_size=1, max_size=4), flush_after=st.booleans())
    def send(self, batch: list[tuple[str, str]], flush_after: bool) -> None:
        for name, value in batch:
            body = b"%d" % len(self.due_ms)
            self.due_ms[body] = self.now_ms + DELAYS_MS[name, value]
            message = sample(
                body=body, topic=TOPIC, queue_id=0, properties=properties(**{name: value})
            )
            record = self.delays.redirect(message, self.now_ms)
            self.store.append([record], now_ms=self.now_ms)
        if flush_after:
            self.store.flush()

    @rule(step_ms=steps_ms, next_action=st.sampled_from(["continue", "save", "flush", "crash"]))
    def deliver(self, step_ms: int, next_action: str) -> None:
        self.now_ms += step_ms
        due = self.append_due()
        if next_action == "crash":
            self.kill()  # the messages are in the log, but are not marked as delivered
            return
        self.delays.mark_delivered(due)
        if next_action == "flush":
            self.store.flush()
        elif next_action == "save":
            self.save()

    def append_due(self) -> DueMessages:
        """Append the messages that are due, and check that each of them may be delivered now."""
        due = self.delays.find_due(self.now_ms)
        bodies = [bytes(record.body) for record in due.records]
        assert len(bodies) == len(set(bodies))
        for body in bodies:
            assert self.due_ms[body] <= self.now_ms
            assert body not in self.delivered_bodies or body in self.repeatable_bodies
        if due.records:
            self.store.append(due.records, now_ms=self.now_ms)
        self.delivered_bodies.update(bodies)
        self.unsaved_bodies.update(bodies)
        self.repeatable_bodies.difference_update(bodies)
        return due

    # --- saves and restarts ----------------------------------------------------------------------

    def save(self) -> None:
        self.delays.save()
        if not self.delays.is_dirty:  # otherwise the deliveries are not durable yet
            self.unsaved_bodies.clear()

    @rule(ending=st.sampled_from(["cut power", "kill", "stop"]), save_first=st.booleans())
    def restart(self, ending: str, save_first: bool) -> None:
        if save_first:
            self.save()
        if ending == "stop":
            self.stop()
        elif ending == "kill":
            self.kill()
        else:
            self.cut_power()

    def stop(self) -> None:
        self.store.flush()
        self.save()
        assert not self.unsaved_bodies
        self.store.close()
        assert_clean(self.disk)
        self.open(self.disk)

    def kill(self) -> None:
        """End the process. Everything that was written stays."""
        self.store.abandon()
        self.allow_unsaved_to_repeat()
        self.open(self.disk)

    def cut_power(self) -> None:
        """Lose everything that was not flushed: messages and deliveries."""
        disk = self.disk.power_cut(Random(0), "none")
        self.store.abandon()
        self.allow_unsaved_to_repeat()
        self.open(disk)
        self.delivered_bodies &= self.bodies_of(TOPIC)
        self.lost_bodies |= self.due_ms.keys() - self.delayed_bodies()

    def allow_unsaved_to_repeat(self) -> None:
        self.repeatable_bodies |= self.unsaved_bodies
        self.unsaved_bodies.clear()

    # --- the end of a run ------------------------------------------------------------------------

    def bodies_of(self, topic: str) -> set[bytes]:
        return {bytes(record.body) for record in self.store.records() if record.topic == topic}

    def delayed_bodies(self) -> set[bytes]:
        """Return the bodies of all messages that were ever delayed, also of the delivered ones."""
        return self.bodies_of(SCHEDULE_TOPIC) | self.bodies_of(TIMER_TOPIC)

    def teardown(self) -> None:
        self.now_ms += ALL_DUE_MS
        self.delays.mark_delivered(self.append_due())
        assert self.delayed_bodies() == self.due_ms.keys() - self.lost_bodies
        assert self.bodies_of(TOPIC) == self.delayed_bodies()
        assert self.append_due().records == []
        self.store.close()
        assert_clean(self.disk)


DelaysMachine.TestCase.settings = settings(stateful_step_count=40)
TestDelays = pytest.mark.slow(DelaysMachine.TestCase)
