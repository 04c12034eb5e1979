"""Delayed messages of a whole broker: each is delivered once, whatever happens to the process.

Levels, timers, retries and committed delayed transactions take the same way. A crash may come at
any byte of the write that delivers them; one message that cannot be delivered stops no other.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from dataclasses import replace

import pytest

from escrowmq.config import BrokerConfig, Config
from escrowmq.errors import CorruptRecord, StoreFull
from escrowmq.message.names import DELIVERY_TOPIC, SCHEDULE_TOPIC, TIMER_TOPIC
from escrowmq.message.properties import decode_properties
from escrowmq.message.record import CRC_PROPERTY_BYTES_MAX, PROPERTIES_BYTES_MAX
from escrowmq.message.topic_config import TopicConfig
from escrowmq.remoting.codes import RequestCode
from escrowmq.remoting.headers import ConsumerSendMessageBack
from escrowmq.store.config_files import GroupConfig
from tests.support.broker_requests import new_request, send_request
from tests.support.escrows import COMMIT, SETTINGS, SMALL_SEGMENTS, EscrowBench, fill_segments
from tests.support.stores import properties, sample

RETRIES = "%RETRY%g"
STORED_PROPERTIES_BYTES_MAX = PROPERTIES_BYTES_MAX - CRC_PROPERTY_BYTES_MAX
HOUR_MS = 3_600_000


def send_delayed(bench: EscrowBench, key: str, delay: str, *, topic: str = "T") -> None:
    text = f"UNIQ_KEY\x01{key}\x02{delay}\x02"
    assert bench.request(send_request(topic, key.encode(), properties=text)).code == 0


def send_level(bench: EscrowBench) -> None:
    send_delayed(bench, "level", "DELAY\x011")


def send_timer(bench: EscrowBench) -> None:
    send_delayed(bench, "timer", "TIMER_DELAY_MS\x01900")


def commit_delayed(bench: EscrowBench) -> None:
    bench.end(bench.park("transaction", DELAY="1"), COMMIT)


def commit_timer(bench: EscrowBench) -> None:
    bench.end(bench.park("transaction", TIMER_DELAY_MS="900"), COMMIT)


def send_back(bench: EscrowBench, log_offset: int, *, level: int = 1) -> int:
    fields = ConsumerSendMessageBack(offset=log_offset, group="g", delay_level=level)
    return bench.request(new_request(RequestCode.CONSUMER_SEND_MSG_BACK, fields)).code


def fail_message(bench: EscrowBench) -> None:
    """Send a message, and let a consumer send it back."""
    bench.broker.groups.put(GroupConfig(group_name="g"), now_ms=bench.now_ms)
    send_delayed(bench, "retry", "TAGS\x01a")
    [message] = bench.messages()
    assert send_back(bench, message.log_offset) == 0


def delivered(bench: EscrowBench) -> list[bytes]:
    """Return the delivered messages of all topics."""
    return [*bench.bodies(RETRIES), *(body for body in bench.bodies() if body != b"retry")]


WAYS = [
    pytest.param(send_level, b"level", id="level"),
    pytest.param(send_timer, b"timer", id="timer"),
    pytest.param(commit_delayed, b"transaction", id="transaction with a level"),
    pytest.param(commit_timer, b"transaction", id="transaction with a timer"),
    pytest.param(fail_message, b"retry", id="retry"),
]


def deliver_all(bench: EscrowBench) -> None:
    for _ in range(3):
        bench.tick(HOUR_MS)


# --- crashes -------------------------------------------------------------------------------------


@pytest.mark.parametrize("sync", [False, True], ids=["async", "sync"])
@pytest.mark.parametrize(("send", "body"), WAYS)
def test_a_message_is_delivered_once_although_the_broker_was_killed_after_it(
    send: Callable[[EscrowBench], None], body: bytes, sync: bool
) -> None:
    bench = EscrowBench(sync=sync)
    send(bench)
    bench.tick(1_000)
    assert delivered(bench) == [body]
    for _ in range(2):
        bench = bench.killed()
        deliver_all(bench)
        assert delivered(bench) == [body]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("send", "body"), WAYS)
def test_a_message_is_delivered_once_after_a_power_cut_under_steady_traffic(
    send: Callable[[EscrowBench], None], body: bytes, seed: int
) -> None:
    bench = EscrowBench()
    send(bench)
    bench.tick(1_000)
    for number in range(5):  # the log is never flushed to its end when progress is saved
        flush = bench.store.begin_flush()
        send_delayed(bench, f"steady {number}", "TIMER_DELAY_MS\x0110")
        bench.tick(10)
        bench.finish(flush)
        bench.broker.save_delayed_messages()
    assert bench.disk.exists("config/delayOffset.json")
    bench.flush()
    for number in range(5, 8):
        send_delayed(bench, f"steady {number}", "TIMER_DELAY_MS\x0110")
        bench.tick(10)
    bench = bench.power_cut("mixed", seed)
    deliver_all(bench)
    messages = delivered(bench)
    assert len(messages) == len(set(messages))
    assert {body, *(b"steady %d" % number for number in range(5))} <= set(messages)


@pytest.mark.parametrize(("send", "body"), WAYS)
def test_a_crash_in_the_write_that_delivers_repeats_and_loses_nothing(
    send: Callable[[EscrowBench], None], body: bytes
) -> None:
    begin = EscrowBench()
    send(begin)
    before = begin.store.end
    begin.tick(1_000)
    for end in range(before, begin.store.end + 1, 3):
        bench = begin.truncated(end)
        deliver_all(bench)
        assert delivered(bench) == [body], end


def test_a_message_that_a_crash_cut_off_is_delivered_once_after_further_crashes() -> None:
    begin = EscrowBench()
    for number in range(4):
        send_delayed(begin, f"m{number}", "DELAY\x011")
    before = begin.store.end
    begin.tick(1_000)
    third = begin.messages()[2].log_offset
    assert third > before
    bench = begin.truncated(third)
    assert bench.bodies() == [b"m0", b"m1"]
    send_delayed(bench, "other", "TAGS\x01a")  # the cut note is no longer at the end of the log
    bench = bench.killed()
    bench.tick()
    expected = [b"m0", b"m1", b"other", b"m2", b"m3"]
    assert bench.bodies() == expected
    for _ in range(2):
        bench = bench.killed()
        deliver_all(bench)
        assert bench.bodies() == expected


@pytest.mark.parametrize("loses_files", [False, True])
def test_the_next_note_says_which_messages_a_crash_cut_off(
    loses_files: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = EscrowBench()
    for number in range(4):
        send_delayed(begin, f"m{number}", "DELAY\x011")
    begin.tick(1_000)
    bench = begin.truncated(begin.messages()[1].log_offset).restarted().killed()
    monkeypatch.setattr("escrowmq.broker.delayed_messages.BATCH_MESSAGES_MAX", 1)
    bench.tick()  # one more, so that the note that was cut off is no longer the last one
    assert bench.bodies() == [b"m0", b"m1"]
    bench.store.abandon()
    for path in ("config/delayOffset.json", "escrowmq.delays") if loses_files else ():
        bench.disk.remove(path)
    bench = bench.reopen(bench.disk)
    deliver_all(bench)
    assert bench.bodies() == [b"m0", b"m1", b"m2", b"m3"]


@pytest.mark.parametrize(("send", "body"), WAYS)
def test_a_message_stays_due_while_the_disk_is_full(
    send: Callable[[EscrowBench], None], body: bytes
) -> None:
    bench = EscrowBench()
    send(bench)
    bench.disk.error, bench.disk.fail_at = StoreFull, bench.disk.calls + 1
    bench.tick(1_000)
    assert delivered(bench) == []
    bench.tick()
    assert delivered(bench) == [body]


@pytest.mark.parametrize("is_replayed", [False, True], ids=["checkpointed", "replayed"])
@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize("destroyed_bytes", [1, 150], ids=["flipped", "destroyed"])
def test_a_damaged_note_repeats_no_message(
    number: int, is_replayed: bool, destroyed_bytes: int
) -> None:
    bench = EscrowBench(sync=True)
    for batch in range(3):
        for index in range(3):
            delay = "TIMER_DELAY_MS\x01500" if index == 2 else "DELAY\x011"
            send_delayed(bench, f"m{batch}{index}", delay)
        bench.tick(1_000)
        bench.flush()
        bench.store.checkpoint()
        send_delayed(bench, f"between {batch}", "TAGS\x01a")
    expected = sorted(bench.bodies())
    if is_replayed:
        bench.disk.remove("escrowmq.checkpoint")
    damage_record(
        bench, bench.messages(DELIVERY_TOPIC)[number].log_offset, destroyed_bytes=destroyed_bytes
    )
    for _ in range(2):
        bench = bench.killed()
        deliver_all(bench)
        assert sorted(bench.bodies()) == expected


def test_a_damaged_delivery_repeats_only_itself() -> None:
    bench = EscrowBench()
    for number in range(3):
        send_delayed(bench, f"m{number}", "DELAY\x011")
    bench.tick(1_000)
    bench.store.checkpoint()
    damage_record(bench, bench.messages()[1].log_offset)
    bench = bench.killed()
    deliver_all(bench)
    assert readable_bodies(bench) == [b"m0", b"m2", b"m1"]


@pytest.mark.parametrize("delay", ["DELAY\x011", "TIMER_DELAY_MS\x01500"])
def test_a_damaged_delayed_message_is_reported_once(delay: str) -> None:
    bench = EscrowBench()
    for number in range(3):
        send_delayed(bench, f"m{number}", delay)
    bench.store.checkpoint()
    topic = TIMER_TOPIC if "TIMER" in delay else SCHEDULE_TOPIC
    damage_record(bench, bench.messages(topic)[1].log_offset)
    bench = bench.killed()
    deliver_all(bench)
    assert bench.bodies() == [b"m0", b"m2"]
    assert bench.store.damage.total == 1


def readable_bodies(bench: EscrowBench) -> list[bytes]:
    """Return the messages of a queue that are not damaged."""
    bodies = []
    for queue_offset in range(bench.store.max_offset("T", 0)):
        log_offset = bench.store.log_offset_of("T", 0, queue_offset)
        if log_offset is not None:
            with contextlib.suppress(CorruptRecord):
                bodies.append(bytes(bench.store.record_at(log_offset).body))
    return bodies


def damage_record(bench: EscrowBench, log_offset: int, *, destroyed_bytes: int = 1) -> None:
    """Flip a bit in the body of a record, or destroy it from its begin on."""
    file = bench.disk.open(f"commitlog/{0:020d}")
    begin = log_offset + 88 if destroyed_bytes == 1 else log_offset
    data = file.read_at(begin, destroyed_bytes)
    file.write_at(
        begin, bytes(byte ^ 1 for byte in data) if len(data) == 1 else b"\xff" * len(data)
    )
    file.close()
    # Private: what was appended last is in memory, where the damage would not be seen.
    bench.store._log.recent.clear()


# --- a message that is sent back again -----------------------------------------------------------


def failed_message(bench: EscrowBench, key: str = "retry") -> int:
    """Send a message that a consumer will send back, and return its log offset."""
    bench.broker.groups.put(GroupConfig(group_name="g"), now_ms=bench.now_ms)
    send_delayed(bench, key, "TAGS\x01a")
    return bench.messages()[-1].log_offset


def test_a_sender_cannot_choose_the_topic_of_a_retry() -> None:
    bench = EscrowBench()
    bench.broker.groups.put(GroupConfig(group_name="g"), now_ms=bench.now_ms)
    send_delayed(bench, "retry", "RETRY_TOPIC\x01other\x02ORIGIN_MESSAGE_ID\x01other")
    [message] = bench.messages()
    for _ in range(2):
        assert send_back(bench, message.log_offset) == 0
        bench.tick(1_000)
        message = bench.messages(RETRIES)[-1]
        values = decode_properties(message.properties)
        assert values["RETRY_TOPIC"] == "T"
        assert values["ORIGIN_MESSAGE_ID"] != "other"


@pytest.mark.parametrize("sync", [False, True], ids=["async", "sync"])
@pytest.mark.parametrize("is_killed", [False, True])
def test_a_message_that_is_sent_back_again_is_retried_once(is_killed: bool, sync: bool) -> None:
    bench = EscrowBench(sync=sync)
    failed = failed_message(bench)
    assert send_back(bench, failed) == 0
    if is_killed:  # before the client got the response
        bench = bench.killed()
    assert send_back(bench, failed) == 0
    deliver_all(bench)
    assert bench.bodies(RETRIES) == [b"retry"]


def test_a_message_that_is_sent_back_twice_in_a_turn_is_retried_once() -> None:
    bench = EscrowBench(sync=True)
    failed = failed_message(bench)
    fields = ConsumerSendMessageBack(offset=failed, group="g", delay_level=1)
    requests = [new_request(RequestCode.CONSUMER_SEND_MSG_BACK, fields) for _ in range(2)]
    bench.turn(*requests)
    bench.flush()
    bench.tick()  # the second request is handled when the first one is durable
    assert [response.code for response in bench.channel.responses()] == [0, 0]
    deliver_all(bench)
    assert bench.bodies(RETRIES) == [b"retry"]


def test_a_message_that_fails_again_after_its_retry_was_delivered_is_retried_again() -> None:
    """An operator may have reset the offsets of the group."""
    bench = EscrowBench()
    failed = failed_message(bench)
    for count in (1, 2):
        assert send_back(bench, failed) == 0
        bench.tick(1_000)
        assert bench.bodies(RETRIES) == [b"retry"] * count
        bench.tick(120_000)
        send_delayed(bench, f"later {count}", "TAGS\x01a")


def test_a_client_that_repeats_late_does_not_repeat_a_delivered_retry() -> None:
    bench = EscrowBench()
    failed = failed_message(bench)
    assert send_back(bench, failed) == 0
    bench.tick(1_000)
    assert send_back(bench, failed) == 0
    deliver_all(bench)
    assert bench.bodies(RETRIES) == [b"retry"]


def test_a_long_delay_of_a_retry_does_not_make_it_a_second_one() -> None:
    bench = EscrowBench()
    failed = failed_message(bench)
    for number in range(2):
        assert send_back(bench, failed, level=18) == 0
        bench.tick(HOUR_MS)
        send_delayed(bench, f"later {number}", "TAGS\x01a")
    deliver_all(bench)
    assert bench.bodies(RETRIES) == [b"retry"]


def test_a_repeated_dead_letter_is_stored_once_within_two_minutes() -> None:
    bench = EscrowBench()
    failed = failed_message(bench)
    for expected, after_ms in ((1, 0), (1, 0), (2, 120_001)):
        bench.tick(after_ms)
        send_delayed(bench, f"other {after_ms}", "TAGS\x01a")
        assert send_back(bench, failed, level=-1) == 0
        assert bench.bodies("%DLQ%g") == [b"retry"] * expected


def test_the_same_message_fails_in_two_groups_and_with_two_copies() -> None:
    bench = EscrowBench()
    first, second = failed_message(bench), failed_message(bench)  # a producer's repeated send
    bench.broker.groups.put(GroupConfig(group_name="h"), now_ms=bench.now_ms)
    assert send_back(bench, first) == send_back(bench, second) == 0
    fields = ConsumerSendMessageBack(offset=first, group="h", delay_level=1)
    assert bench.request(new_request(RequestCode.CONSUMER_SEND_MSG_BACK, fields)).code == 0
    deliver_all(bench)
    assert bench.bodies(RETRIES) == [b"retry"] * 2
    assert bench.bodies("%RETRY%h") == [b"retry"]


# --- one message that cannot be delivered --------------------------------------------------------


def append_delayed(bench: EscrowBench, body: bytes, **values: str) -> None:
    """Append a delayed message that no client of this broker can have sent."""
    record = sample(
        topic=SCHEDULE_TOPIC, queue_id=0, body=body, properties=properties(DELAY="1", **values)
    )
    bench.store.append([record], now_ms=bench.now_ms)


@pytest.mark.parametrize(
    "values",
    [
        pytest.param({"UNIQ_KEY": "k"}, id="without a topic"),
        pytest.param({"REAL_TOPIC": SCHEDULE_TOPIC, "REAL_QID": "0"}, id="delayed for ever"),
        pytest.param({"REAL_TOPIC": "x" * 300, "REAL_QID": "0"}, id="a topic that is too long"),
        pytest.param({"REAL_TOPIC": "a/b", "REAL_QID": "0"}, id="a topic with an invalid name"),
        pytest.param({"REAL_TOPIC": "gone", "REAL_QID": "9" * 18}, id="a queue out of range"),
    ],
)
def test_a_message_that_cannot_be_delivered_is_set_aside_and_stops_no_other(
    values: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    bench = EscrowBench()
    send_delayed(bench, "first", "DELAY\x011", topic="U")
    append_delayed(bench, b"odd", **values)
    send_delayed(bench, "second", "DELAY\x011", topic="U")
    send_delayed(bench, "timer", "TIMER_DELAY_MS\x01500", topic="U")
    for _ in range(2):
        bench.tick(1_000)
        assert sorted(bench.bodies("U")) == [b"first", b"second", b"timer"]
        assert bench.broker.delayed_messages.set_aside_count == 1
        bench = bench.restarted()
    [line] = [line for line in caplog.messages if "set aside, tried again" in line][:1]
    assert f"topic={SCHEDULE_TOPIC} queue_id=0 queue_offset=1" in line
    assert bench.broker.delayed_messages.counters.lost == 0


def test_a_message_that_was_set_aside_is_delivered_as_soon_as_possible() -> None:
    bench = EscrowBench()
    send_delayed(bench, "first", "DELAY\x011")
    send_delayed(bench, "second", "DELAY\x011")
    first = bench.messages(SCHEDULE_TOPIC)[0]
    bench.store.flush()
    damage_record(bench, first.log_offset)
    bench.tick(1_000)
    assert bench.bodies() == [b"second"]
    damage_record(bench, first.log_offset)  # the same bit again: the record is whole
    bench.tick(1_000)
    assert bench.bodies() == [b"second"]
    bench.tick(60_000)
    assert bench.bodies() == [b"second", b"first"]
    bench = bench.killed()
    deliver_all(bench)
    assert bench.bodies() == [b"second", b"first"]


def test_messages_above_a_lowered_size_limit_are_delivered() -> None:
    bench = EscrowBench()
    text = "UNIQ_KEY\x01long\x02DELAY\x011\x02"
    assert bench.request(send_request("T", b"x" * 9_000, properties=text)).code == 0
    send_delayed(bench, "short", "DELAY\x011")
    lowered = replace(SETTINGS, message_bytes_max=1024)
    bench.broker.change_config(Config(broker=BrokerConfig(cluster_name="C"), store=lowered))
    bench.tick(1_000)
    assert bench.bodies() == [b"x" * 9_000, b"short"]


@pytest.mark.parametrize("is_moved", [False, True])
def test_a_message_whose_properties_leave_no_room_is_delivered(is_moved: bool) -> None:
    bench = EscrowBench(settings=replace(SETTINGS, sealed=True))
    values = {"REAL_TOPIC": "T", "REAL_QID": "0", "MSG_REGION": "DefaultRegion", "a": "x"}
    room = STORED_PROPERTIES_BYTES_MAX - len(properties(DELAY="1", **values))
    append_delayed(bench, b"full", **{**values, "a": "x" * (1 + room)})
    if is_moved:  # which adds its due time
        bench.broker.delayed_messages.move_below(bench.store.end, bench.now_ms)
        assert bench.broker.delayed_messages.counters.moved == 1
    bench.tick(1_000)
    assert bench.bodies() == [b"full"]


def test_a_message_for_a_deleted_topic_is_there_when_the_topic_is_created_again() -> None:
    bench = EscrowBench()
    send_level(bench)
    send_delayed(bench, "other", "DELAY\x011", topic="U")
    bench.broker.topics.remove("T", now_ms=bench.now_ms)
    bench.store.remove_topic("T")
    bench.tick(1_000)
    assert bench.bodies("U") == [b"other"]
    bench = bench.restarted()
    assert bench.bodies("T") == [b"level"]  # the bench has created the topic


def test_a_message_for_a_queue_that_its_topic_no_longer_has_goes_to_another_queue() -> None:
    bench = EscrowBench()
    text = "UNIQ_KEY\x01k\x02DELAY\x011\x02"
    assert bench.request(send_request("T", b"level", queue_id=1, properties=text)).code == 0
    topic = TopicConfig(topic_name="T", read_queue_nums=1, write_queue_nums=1)
    bench.broker.topics.put(topic, now_ms=bench.now_ms)
    bench.tick(1_000)
    assert bench.bodies("T", 0) == [b"level"]


def test_a_message_of_a_level_that_is_no_longer_configured_is_delivered() -> None:
    bench = EscrowBench()
    record = sample(
        topic=SCHEDULE_TOPIC,
        queue_id=29,
        body=b"level 30",
        properties=properties(DELAY="30", REAL_TOPIC="T", REAL_QID="0"),
    )
    bench.store.append([record], now_ms=bench.now_ms)
    bench = bench.restarted()
    bench.tick(2 * HOUR_MS - 1)
    assert bench.bodies() == []
    bench.tick(1)  # the longest delay that is configured
    assert bench.bodies() == [b"level 30"]


def test_an_error_in_one_part_of_the_periodic_work_stops_no_other(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bench = EscrowBench()
    send_level(bench)

    def fail(now_ms: int) -> None:
        raise ZeroDivisionError("planned")

    # Private: no request reaches this failure; it stands for any bug.
    steps = {"planned": fail, **bench.broker._tick_steps}
    monkeypatch.setattr(bench.broker, "_tick_steps", steps)
    bench.tick(1_000)
    assert bench.bodies() == [b"level"]
    assert "periodic work failed: planned" in caplog.messages


# --- segments that expire ------------------------------------------------------------------------


@pytest.mark.parametrize("delay", ["DELAY\x0118", "TIMER_DELAY_SEC\x017200"])
@pytest.mark.parametrize("restart", ["none", "kill", "power cut"])
def test_a_waiting_message_outlives_its_segment(delay: str, restart: str) -> None:
    bench = EscrowBench(settings=SMALL_SEGMENTS)
    due_ms = bench.now_ms + 7_200_000
    send_delayed(bench, "waiting", delay)
    [position] = [*bench.messages(SCHEDULE_TOPIC, 17), *bench.messages(TIMER_TOPIC)]
    for _ in range(2):  # it moves more than once
        end = bench.store.end
        for _ in range(40):
            bench.request(send_request("T", b"x" * 400, queue_id=1))
        while bench.store.begin < end:
            bench.flush()
            assert bench.remove_log_file() or bench.remove_log_file()
        if restart == "kill":
            bench = bench.killed()
        elif restart == "power cut":
            bench = bench.power_cut("none")
    assert bench.store.begin > position.log_offset
    bench.now_ms = due_ms - 1
    bench.tick()
    assert bench.bodies() == []
    bench.tick(1)
    assert bench.bodies() == [b"waiting"]
    deliver_all(bench)
    assert bench.bodies() == [b"waiting"]
    assert bench.broker.delayed_messages.counters.lost == 0


def test_a_segment_is_not_deleted_before_the_copy_of_its_message_is_durable() -> None:
    bench = EscrowBench(settings=SMALL_SEGMENTS)
    send_timer(bench)
    fill_segments(bench)
    bench.flush()
    end = bench.store.begin + SMALL_SEGMENTS.segment_bytes
    assert bench.broker.oldest_needed_offset() == bench.messages(TIMER_TOPIC)[0].log_offset
    bench.broker.delayed_messages.move_below(end, bench.now_ms)
    assert bench.broker.oldest_needed_offset() == bench.store.begin
    bench.flush()
    needed = bench.broker.oldest_needed_offset()
    assert needed is not None
    assert needed > end


# --- what is saved -------------------------------------------------------------------------------


def test_the_file_does_not_grow_with_the_timers_behind_one_that_waits() -> None:
    bench = EscrowBench()
    send_delayed(bench, "long", "TIMER_DELAY_SEC\x01200000")
    sizes = []
    for number in range(300):
        send_delayed(bench, f"short {number}", "TIMER_DELAY_MS\x0110")
        bench.tick(10)
        if number % 100 == 99:
            bench.flush()
            bench.broker.save_delayed_messages()
            file = bench.disk.open("config/delayOffset.json", writable=False)
            content = file.read_at(0, file.size)
            file.close()
            sizes.append(len(content))
    assert max(sizes) < min(sizes) + 20
    table = json.loads(content)["offsetTable"]
    assert all(name.isdecimal() and isinstance(value, int) for name, value in table.items())
    bench = bench.killed()
    deliver_all(bench)
    assert len(bench.bodies()) == 300


def test_rocketmqs_file_is_believed_about_what_rocketmq_delivered() -> None:
    bench = EscrowBench()
    send_level(bench)
    bench.store.close()
    with_table = {"dataVersion": {"counter": 3}, "offsetTable": {"1": 1, "3": 0}}
    file = bench.disk.create("config/delayOffset.json", 0)
    file.resize(len(json.dumps(with_table)))
    file.write_at(0, json.dumps(with_table).encode())
    file.close()
    bench = bench.reopen(bench.disk)
    deliver_all(bench)
    assert bench.bodies() == []


def test_a_delivered_message_has_the_properties_it_was_sent_with() -> None:
    bench = EscrowBench()
    send_level(bench)
    bench.tick(1_000)
    [delivered_message], [source] = bench.messages(), bench.messages(SCHEDULE_TOPIC)
    assert decode_properties(delivered_message.properties) == decode_properties(source.properties)
