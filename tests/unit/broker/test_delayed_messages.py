"""Delayed messages: where they wait, when they are delivered, and what a restart does to them."""

from __future__ import annotations

from typing import Any

import pytest

from escrowmq.broker.delayed_messages import DelayedMessages
from escrowmq.config import DelayConfig
from escrowmq.errors import RequestRefused
from escrowmq.message.properties import decode_properties
from escrowmq.message.record import NewRecord
from escrowmq.store.config_files import delay_offsets_file
from escrowmq.testing.disks import MemoryDisk
from tests.support.stores import NOW_MS, assert_clean, open_store, properties, sample

LEVELS = "SCHEDULE_TOPIC_XXXX"
TIMERS = "rmq_sys_wheel_timer"
NOTES = "ESCROW_DELIVERY"
HOUR_MS = 3_600_000


class Bench:
    """Delayed messages with their store."""

    def __init__(self, config: DelayConfig | None = None) -> None:
        self.disk = MemoryDisk()
        self.config = config or DelayConfig()
        self.open()

    def open(self) -> None:
        self.store = open_store(self.disk)
        self.delays = DelayedMessages(self.store, self.disk, self.config)

    def restart(self, *, saved: bool = True) -> None:
        if saved:
            self.delays.save()
        self.store.close()
        self.open()

    def send(self, body: bytes, *, at_ms: int = NOW_MS, **values: str) -> None:
        record = self.delays.redirect(self.record(body, **values), at_ms)
        self.store.append([record], now_ms=at_ms)

    def record(self, body: bytes, **values: str) -> NewRecord:
        """Return a record with these properties."""
        return sample(body=body, topic="T", queue_id=1, properties=properties(**values))

    def deliver(self, at_ms: int) -> list[bytes]:
        """Deliver the messages that are due, and return their bodies."""
        begin = self.store.end
        self.delays.deliver(at_ms)
        self.store.flush()
        topics = LEVELS, TIMERS, NOTES
        records = self.store.records(begin)
        return [bytes(record.body) for record in records if record.topic not in topics]


@pytest.fixture
def bench() -> Bench:
    return Bench()


# --- where they wait -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("level", "queue_id"), [("1", 0), ("2", 1), ("18", 17), ("19", 17), ("9" * 40, 17), ("007", 6)]
)
def test_each_level_has_its_own_queue(bench: Bench, level: str, queue_id: int) -> None:
    record = bench.delays.redirect(bench.record(b"x", DELAY=level, TAGS="a"), NOW_MS)
    assert (record.topic, record.queue_id) == (LEVELS, queue_id)
    values = decode_properties(record.properties)
    assert (values["REAL_TOPIC"], values["REAL_QID"], values["TAGS"]) == ("T", "1", "a")


@pytest.mark.parametrize("level", ["0", "-1", "one", "1.5", "\u0661"])
def test_an_invalid_level_does_not_delay(bench: Bench, level: str) -> None:
    record = bench.record(b"x", DELAY=level)
    assert bench.delays.redirect(record, NOW_MS) == record


def test_a_level_above_the_highest_counts_as_the_highest() -> None:
    bench = Bench(DelayConfig(delay_levels_ms=(1000, 2000)))
    record = bench.delays.redirect(bench.record(b"x", DELAY="5"), NOW_MS)
    assert record.queue_id == 1


def test_a_level_beyond_rocketmqs_eighteen_can_be_configured() -> None:
    bench = Bench(DelayConfig(delay_levels_ms=tuple(range(1000, 21_000, 1000))))
    record = bench.delays.redirect(bench.record(b"x", DELAY="20"), NOW_MS)
    assert record.queue_id == 19


@pytest.mark.parametrize(
    ("delay", "due_ms"),
    [
        ({"TIMER_DELIVER_MS": str(NOW_MS + 1)}, NOW_MS + 1),
        ({"TIMER_DELAY_SEC": "2"}, NOW_MS + 2000),
        ({"TIMER_DELAY_MS": "30"}, NOW_MS + 30),
        ({"TIMER_DELAY_SEC": str(3 * 24 * 3600)}, NOW_MS + 3 * 24 * HOUR_MS),
    ],
)
def test_a_timer_is_stored_with_its_time(bench: Bench, delay: dict[str, str], due_ms: int) -> None:
    record = bench.delays.redirect(bench.record(b"x", **delay), NOW_MS)
    assert (record.topic, record.queue_id) == (TIMERS, 0)
    assert decode_properties(record.properties)["TIMER_OUT_MS"] == str(due_ms)


@pytest.mark.parametrize(
    "delay",
    [{"TIMER_DELIVER_MS": str(NOW_MS)}, {"TIMER_DELIVER_MS": "1"}, {"TIMER_DELAY_MS": "0"}],
)
def test_a_time_in_the_past_does_not_delay(bench: Bench, delay: dict[str, str]) -> None:
    record = bench.record(b"x", **delay)
    assert bench.delays.redirect(record, NOW_MS) == record


@pytest.mark.parametrize("name", ["TIMER_DELIVER_MS", "TIMER_DELAY_SEC", "TIMER_DELAY_MS"])
@pytest.mark.parametrize("value", ["soon", "-1", "1.5", "9" * 18, "9" * 100])
def test_an_invalid_time_is_refused(bench: Bench, name: str, value: str) -> None:
    with pytest.raises(RequestRefused) as refused:
        bench.delays.redirect(bench.record(b"x", **{name: value}), NOW_MS)
    assert refused.value.code == 13


def test_a_time_beyond_the_limit_is_refused(bench: Bench) -> None:
    far = str(NOW_MS + 3 * 24 * HOUR_MS + 1)
    with pytest.raises(RequestRefused):
        bench.delays.redirect(bench.record(b"x", TIMER_DELIVER_MS=far), NOW_MS)


def test_malformed_properties_beside_the_delay_are_kept(bench: Bench) -> None:
    """RocketMQ takes the text up to the first separator as the name, and the remainder as value."""
    malformed = b"odd\x01a\x01b\x02"
    record = sample(topic="T", properties=malformed + b"DELAY\x011\x02\x02nothing\x02")
    redirected = bench.delays.redirect(record, NOW_MS)
    assert redirected.topic == LEVELS
    assert malformed in redirected.properties


# --- when they are delivered ---------------------------------------------------------------------


def test_a_level_is_delivered_exactly_when_it_is_due(bench: Bench) -> None:
    bench.send(b"1", DELAY="1", TAGS="a", UNIQ_KEY="U")
    assert bench.deliver(NOW_MS + 999) == []
    [record] = bench.delays.find_due(NOW_MS + 1000).records
    assert (record.topic, record.queue_id, record.body) == ("T", 1, b"1")
    assert decode_properties(record.properties) == {
        "TAGS": "a",
        "UNIQ_KEY": "U",
        "DELAY": "1",
        "REAL_TOPIC": "T",
        "REAL_QID": "1",
    }


def test_a_timer_is_delivered_exactly_when_it_is_due(bench: Bench) -> None:
    bench.send(b"1", TIMER_DELAY_MS="70", TAGS="a", UNIQ_KEY="U")
    assert bench.deliver(NOW_MS + 69) == []
    [record] = bench.delays.find_due(NOW_MS + 70).records
    assert (record.topic, record.queue_id, record.body) == ("T", 1, b"1")
    assert decode_properties(record.properties) == {
        "TAGS": "a",
        "UNIQ_KEY": "U",
        "TIMER_DELAY_MS": "70",
        "TIMER_OUT_MS": str(NOW_MS + 70),
        "REAL_TOPIC": "T",
        "REAL_QID": "1",
    }


def test_a_level_counts_and_a_timer_beside_it_is_dropped(bench: Bench) -> None:
    bench.send(b"1", DELAY="1", TIMER_DELAY_MS="70")
    [record] = bench.delays.find_due(NOW_MS + 1000).records
    assert decode_properties(record.properties).keys() == {"DELAY", "REAL_TOPIC", "REAL_QID"}


def test_a_message_with_the_properties_of_a_delivered_timer_is_not_delayed(bench: Bench) -> None:
    bench.send(b"1", TIMER_DELAY_MS="70")
    [delivered] = bench.delays.find_due(NOW_MS + 70).records
    assert bench.delays.redirect(delivered, NOW_MS + 70) == delivered


@pytest.mark.parametrize("delay", [{"DELAY": "1"}, {"TIMER_DELAY_MS": "70"}])
def test_a_delivered_message_that_keeps_its_delay_is_delivered_once(
    bench: Bench, delay: dict[str, Any]
) -> None:
    bench.send(b"1", **delay)
    assert bench.deliver(NOW_MS + 1000) == [b"1"]
    for at_ms in (NOW_MS + 1000, NOW_MS + HOUR_MS):
        bench.restart()
        assert bench.deliver(at_ms) == []
    assert bench.store.max_offset("T", 1) == 1


def test_a_level_keeps_the_order_of_its_queue(bench: Bench) -> None:
    for number in range(5):
        bench.send(b"%d" % number, at_ms=NOW_MS + number, DELAY="1")
    assert bench.deliver(NOW_MS + 1002) == [b"0", b"1", b"2"]
    assert bench.deliver(NOW_MS + 1002) == []
    assert bench.deliver(NOW_MS + 9000) == [b"3", b"4"]


def test_timers_are_delivered_in_the_order_of_their_times(bench: Bench) -> None:
    for delay in (300, 100, 200, 100):
        bench.send(b"%d" % delay, TIMER_DELAY_MS=str(delay))
    assert bench.deliver(NOW_MS + 200) == [b"100", b"100", b"200"]
    assert bench.deliver(NOW_MS + 1000) == [b"300"]
    assert bench.deliver(NOW_MS + HOUR_MS) == []


def test_a_long_level_does_not_delay_a_short_one(bench: Bench) -> None:
    bench.send(b"long", DELAY="18")
    bench.send(b"short", DELAY="1")
    assert bench.deliver(NOW_MS + 1000) == [b"short"]
    assert bench.deliver(NOW_MS + 2 * HOUR_MS) == [b"long"]


def test_a_turn_delivers_a_limited_number_and_the_next_turn_the_remaining(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("escrowmq.broker.delayed_messages.BATCH_MESSAGES_MAX", 3)
    bench = Bench()
    for number in range(4):
        bench.send(b"l%d" % number, DELAY="1")
        bench.send(b"t%d" % number, TIMER_DELAY_MS="10")
    turns = [bench.deliver(NOW_MS + 5000) for _ in range(4)]
    assert [len(turn) for turn in turns] == [3, 3, 2, 0]
    # A queue that fills a batch is the last one in the next batch.
    assert turns == [[b"l0", b"l1", b"l2"], [b"t0", b"t1", b"t2"], [b"l3", b"t3"], []]


# --- restarts ------------------------------------------------------------------------------------


def test_delivered_messages_are_not_delivered_again_after_a_restart(bench: Bench) -> None:
    bench.send(b"level", DELAY="1")
    bench.send(b"timer", TIMER_DELAY_MS="10")
    assert bench.deliver(NOW_MS + 1000) == [b"level", b"timer"]
    bench.restart()
    assert bench.deliver(NOW_MS + HOUR_MS) == []


def test_messages_that_were_not_due_are_delivered_after_a_restart(bench: Bench) -> None:
    bench.send(b"level", DELAY="2")
    bench.send(b"timer", TIMER_DELAY_MS="7000")
    assert bench.deliver(NOW_MS + 1000) == []
    bench.restart()
    assert bench.deliver(NOW_MS + 4999) == []
    assert bench.deliver(NOW_MS + 5000) == [b"level"]
    assert bench.deliver(NOW_MS + 7000) == [b"timer"]


def test_a_timer_that_overtook_another_is_not_delivered_again_after_a_restart(
    bench: Bench,
) -> None:
    bench.send(b"slow", TIMER_DELAY_MS="9000")
    bench.send(b"fast", TIMER_DELAY_MS="10")
    assert bench.deliver(NOW_MS + 10) == [b"fast"]
    bench.restart()
    assert bench.deliver(NOW_MS + 8999) == []
    assert bench.deliver(NOW_MS + 9000) == [b"slow"]


@pytest.mark.parametrize("delays_ms", [(2000, 9000), (9000, 2000)], ids=["in order", "overtaken"])
def test_all_pending_timers_are_delivered_after_a_restart(
    bench: Bench, delays_ms: tuple[int, int]
) -> None:
    for delay_ms in delays_ms:
        bench.send(b"%d" % delay_ms, TIMER_DELAY_MS=str(delay_ms))
    assert bench.deliver(NOW_MS + 1000) == []
    bench.restart()
    assert bench.deliver(NOW_MS + 2000) == [b"2000"]
    bench.restart()
    assert bench.deliver(NOW_MS + 9000) == [b"9000"]
    bench.restart()
    assert bench.deliver(NOW_MS + HOUR_MS) == []


def test_without_a_save_a_message_is_still_delivered_once(bench: Bench) -> None:
    bench.send(b"level", DELAY="1")
    bench.deliver(NOW_MS + 1000)
    bench.restart(saved=False)
    assert bench.deliver(NOW_MS + 1000) == []


def test_offsets_are_saved_only_when_the_deliveries_are_durable(bench: Bench) -> None:
    bench.send(b"level", DELAY="1")
    bench.delays.deliver(NOW_MS + 1000)
    bench.delays.save()
    assert delay_offsets_file(bench.disk).int_keys() == {}
    bench.store.flush()
    bench.delays.save()
    assert delay_offsets_file(bench.disk).int_keys()[1] == 1


@pytest.mark.parametrize("table", [{"1": 99, "0": 99}, {"1": -5, "0": -5}, {"77": 3}])
def test_a_malformed_file_is_tolerated(bench: Bench, table: dict[str, Any]) -> None:
    delay_offsets_file(bench.disk).save(offsetTable=table)
    bench.store.close()
    bench.open()
    bench.send(b"level", DELAY="2")
    assert bench.deliver(NOW_MS + 5000) == [b"level"]
    bench.store.close()
    assert_clean(bench.disk)
