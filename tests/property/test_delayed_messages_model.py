"""Delayed messages against a model: sends, deliveries, saves, moves and crashes in any order.

Every message that survives in the log is delivered exactly once, and none before it is due. A power
cut may come at any write or flush, and leaves any part of what was not flushed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from random import Random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from escrowmq.broker.delayed_messages import DelayedMessages
from escrowmq.config import DelayConfig
from escrowmq.message.names import DELIVERY_TOPIC, SCHEDULE_TOPIC, TIMER_TOPIC
from escrowmq.testing.disks import FaultyDisk, PowerCut, Survival
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
TURNS_MAX = 20  # in which everything that is due is delivered

delays = st.sampled_from(sorted(DELAYS_MS))
steps_ms = st.sampled_from([1_000, 40_000])
survivals = st.sampled_from(["none", "all", "mixed"])


class DelaysMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now_ms = NOW_MS
        self.due_ms: dict[bytes, int] = {}  # by body: the earliest delivery
        self.known_bodies: set[bytes] = set()  # that are in the log
        self.open(FaultyDisk())

    def open(self, disk: FaultyDisk) -> None:
        self.disk = disk
        self.store = open_store(disk)
        self.delays = DelayedMessages(self.store, disk, DelayConfig(delay_levels_ms=LEVELS_MS))
        self.delays.progress.snapshot_interval_bytes = 1_000

    # --- what happens ----------------------------------------------------------------------------

    @rule(batch=st.lists(delays, min_size=1, max_size=4))
    def send(self, batch: list[tuple[str, str]]) -> None:
        for name, value in batch:
            body = b"%d" % len(self.due_ms)
            self.due_ms[body] = self.now_ms + DELAYS_MS[name, value]
            message = sample(
                body=body, topic=TOPIC, queue_id=0, properties=properties(**{name: value})
            )
            record = self.delays.redirect(message, self.now_ms)
            self.store.append([record], now_ms=self.now_ms)
            self.known_bodies.add(body)

    @rule()
    def send_another_message(self) -> None:
        """Append what is no delivery: the log never ends with a note and its messages."""
        self.store.append([sample(7)], now_ms=self.now_ms)

    @rule(step_ms=steps_ms)
    def deliver(self, step_ms: int) -> None:
        self.now_ms += step_ms
        self.delays.deliver(self.now_ms)
        self.check_deliveries()

    @rule()
    def flush(self) -> None:
        self.store.flush()

    @rule()
    def save(self) -> None:
        self.delays.save()

    @rule()
    def move(self) -> None:
        """Move every waiting message, as if all segments expired."""
        self.delays.move_below(self.store.end, self.now_ms)

    # --- restarts --------------------------------------------------------------------------------

    @rule()
    def stop(self) -> None:
        self.store.flush()
        self.delays.save()
        self.store.close()
        assert_clean(self.disk)
        self.open(self.disk)

    @rule()
    def kill(self) -> None:
        """End the process. Everything that was written stays."""
        self.store.abandon()
        self.open(self.disk)
        self.check_deliveries()

    @rule(survival=survivals, seed=st.integers(0, 1000))
    def cut_power(self, survival: Survival, seed: int) -> None:
        disk = self.disk.power_cut(Random(seed), survival)
        self.store.abandon()
        self.open(disk)
        self.forget_lost_messages()

    @rule(
        action=st.sampled_from(["deliver", "move", "save"]),
        call=st.integers(1, 6),
        survival=survivals,
        seed=st.integers(0, 1000),
    )
    def cut_power_during(self, action: str, call: int, survival: Survival, seed: int) -> None:
        """Cut the power at a disk call of an action, and perhaps again during the start."""
        self.now_ms += 1_000
        actions: dict[str, Callable[[], None]] = {
            "deliver": lambda: self.delays.deliver(self.now_ms),
            "move": self.move,
            "save": self.delays.save,
        }
        self.disk.power_cut_at = self.disk.calls + call
        try:
            actions[action]()
        except PowerCut:
            self.cut_power(survival, seed)
        else:
            self.disk.power_cut_at = None
            self.check_deliveries()

    def forget_lost_messages(self) -> None:
        bodies = self.delivered_counts() | self.delayed_counts()
        self.known_bodies &= bodies.keys()
        self.check_deliveries()

    # --- what holds ------------------------------------------------------------------------------

    def counts(self, *topics: str) -> Counter[bytes]:
        return Counter(
            bytes(record.body) for record in self.store.records() if record.topic in topics
        )

    def delivered_counts(self) -> Counter[bytes]:
        return self.counts(TOPIC)

    def delayed_counts(self) -> Counter[bytes]:
        return self.counts(SCHEDULE_TOPIC, TIMER_TOPIC)

    def check_deliveries(self) -> None:
        for body, count in self.delivered_counts().items():
            assert count == 1, f"{body!r} was delivered {count} times"
            assert self.due_ms[body] <= self.now_ms, f"{body!r} was delivered too early"

    def teardown(self) -> None:
        self.now_ms += ALL_DUE_MS
        for _ in range(TURNS_MAX):
            self.delays.deliver(self.now_ms)
        self.check_deliveries()
        assert self.delivered_counts().keys() == self.known_bodies
        assert self.delays.waiting_count == 0
        assert self.delays.counters.lost == 0
        end = self.store.max_offset(DELIVERY_TOPIC, 0)
        self.delays.deliver(self.now_ms)
        assert self.store.max_offset(DELIVERY_TOPIC, 0) == end
        self.store.close()
        assert_clean(self.disk)


DelaysMachine.TestCase.settings = settings(stateful_step_count=40)
TestDelays = pytest.mark.slow(DelaysMachine.TestCase)
