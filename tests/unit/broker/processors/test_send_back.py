"""Messages sent back: their delay, their retry or dead-letter topic, and their properties."""

from __future__ import annotations

from typing import Any

import pytest

from escrowmq.broker.dispatch import response_code
from escrowmq.broker.metadata import SubscriptionGroups, TopicTable
from escrowmq.broker.processors.send_back import SendBackProcessor
from escrowmq.broker.turn import Turn
from escrowmq.config import BrokerConfig, StoreConfig
from escrowmq.consume.members import QueueLocks
from escrowmq.errors import EscrowError, RequestRefused
from escrowmq.message.batch import iter_records
from escrowmq.message.delivery_failure import (
    ERROR_TEXT_BYTES_MAX,
    DeliveryFailure,
    FailureReport,
    client_properties,
    failure_of,
)
from escrowmq.message.properties import decode_properties
from escrowmq.message.record import PROPERTIES_BYTES_MAX, NewRecord
from escrowmq.remoting.codes import RequestCode
from escrowmq.remoting.headers import ConsumerSendMessageBack, SendMessage
from escrowmq.sliced_work import SliceScheduler
from escrowmq.store.config_files import GroupConfig, groups_file, topics_file
from escrowmq.testing.disks import MemoryDisk
from tests.support.broker_requests import VERSION, FakeChannel, new_request
from tests.support.sliced import finish
from tests.support.stores import HOST, NOW_MS, TINY, open_store, properties, sample

MINUTE_MS = 60_000


class Bench:
    """The processor of messages sent back with its tables and a store."""

    def __init__(self, config: StoreConfig = TINY) -> None:
        disk = MemoryDisk()
        self.store = open_store(disk, config)
        self.topics = TopicTable(topics_file(disk), BrokerConfig())
        self.groups = SubscriptionGroups(groups_file(disk), auto_create=True)
        self.locks = QueueLocks()
        self.appended: list[NewRecord] = []
        self.channel = FakeChannel()
        self.turn = Turn(
            self.store, messages_arrived=lambda runs: self.appended.extend(iter_records(runs))
        )
        self.background_work = SliceScheduler(lambda: 0.0)
        self.retries = SendBackProcessor(
            self.store,
            self.topics,
            self.groups,
            self.locks,
            redirect=lambda record, _: record,  # delays are tested in test_delayed_messages.py
            turn=self.turn,
            background_work=self.background_work,
        )
        self.groups.put(GroupConfig(group_name="g"), now_ms=NOW_MS)

    def failed(self, **changes: Any) -> int:
        """Store a message that a consumer could not process, and return its log offset."""
        fields = {"topic": "T", "properties": properties(TAGS="a", UNIQ_KEY="U")}
        [position] = self.store.append([sample(**{**fields, **changes})], now_ms=NOW_MS)
        return position.log_offset

    def send_back(self, offset: int, *, version: int = VERSION, **changes: Any) -> int:
        """Send a message back and return the response code."""
        fields = {"offset": offset, "group": "g", "delay_level": 0}
        header = ConsumerSendMessageBack(**{**fields, **changes})
        request = new_request(RequestCode.CONSUMER_SEND_MSG_BACK, header, version=version)
        finish(self.retries.send_back(self.channel, request, NOW_MS))
        self.turn.append_all(NOW_MS)
        return self.channel.response().code

    def redirected(self, record: NewRecord, *, version: int = VERSION, **changes: Any) -> NewRecord:
        """Return the record that is stored for a client's send to the retry topic."""
        header = SendMessage(producer_group="p", topic=record.topic, queue_id=0, **changes)
        return self.retries.redirect_retry(record, header, version, NOW_MS)


@pytest.fixture
def bench() -> Bench:
    return Bench()


@pytest.mark.parametrize(
    ("times", "requested_level", "level"),
    [(0, 0, 3), (1, 0, 4), (9, 0, 12), (0, 1, 1), (5, 18, 18)],
)
def test_each_retry_has_a_longer_delay_unless_the_consumer_requests_one(
    bench: Bench, times: int, requested_level: int, level: int
) -> None:
    offset = bench.failed(reconsume_times=times, body=b"failed", flag=7, sys_flag=1)
    assert bench.send_back(offset, delay_level=requested_level) == 0
    [record] = bench.appended
    assert (record.topic, record.queue_id, record.body) == ("%RETRY%g", 0, b"failed")
    assert (record.reconsume_times, record.flag, record.sys_flag) == (times + 1, 7, 1)
    values = decode_properties(record.properties)
    assert (values["DELAY"], values["RETRY_TOPIC"], values["TAGS"]) == (str(level), "T", "a")
    assert values["ORIGIN_MESSAGE_ID"] == f"{HOST.hex().upper()}{offset:016X}"
    assert bench.topics.find("%RETRY%g") is not None


@pytest.mark.parametrize(
    ("times", "changes"),
    [
        (0, {"delay_level": -1}),
        (16, {}),
        (99, {"delay_level": 5}),
        (2, {"max_reconsume_times": 2}),
        (0, {"max_reconsume_times": 0}),
        (16, {"max_reconsume_times": 2, "version": 100}),  # an old client: its limit is ignored
        (16, {"max_reconsume_times": -1}),
    ],
)
def test_beyond_the_maximum_a_message_becomes_a_dead_letter(
    bench: Bench, times: int, changes: dict[str, Any]
) -> None:
    bench.send_back(bench.failed(reconsume_times=times), **changes)
    [record] = bench.appended
    assert (record.topic, record.queue_id) == ("%DLQ%g", 0)
    assert "DELAY" not in decode_properties(record.properties)
    dead = bench.topics.find("%DLQ%g")
    assert dead is not None
    assert (dead.read_queue_nums, dead.write_queue_nums, dead.perm) == (1, 1, 6)


@pytest.mark.parametrize(
    ("times", "changes"),
    [(15, {}), (16, {"max_reconsume_times": 17}), (2, {"max_reconsume_times": 2, "version": 100})],
)
def test_up_to_the_maximum_a_message_is_retried(
    bench: Bench, times: int, changes: dict[str, Any]
) -> None:
    bench.send_back(bench.failed(reconsume_times=times), **changes)
    assert bench.appended[0].topic == "%RETRY%g"


def test_a_second_failure_keeps_the_first_topic_and_id(bench: Bench) -> None:
    first = properties(RETRY_TOPIC="T", ORIGIN_MESSAGE_ID="first", UNIQ_KEY="U")
    bench.send_back(bench.failed(topic="%RETRY%g", properties=first, reconsume_times=1))
    values = decode_properties(bench.appended[0].properties)
    assert (values["RETRY_TOPIC"], values["ORIGIN_MESSAGE_ID"]) == ("T", "first")


def failure(record: NewRecord) -> DeliveryFailure | None:
    return failure_of(decode_properties(record.properties))


def test_a_retry_has_the_cause_and_what_the_broker_knows_of_it(bench: Bench) -> None:
    bench.send_back(bench.failed(), error_type="E", error_text="a\nb", consumer_host="worker-3")
    [record] = bench.appended
    address = bench.channel.address
    assert failure(record) == DeliveryFailure("E", "a b", "worker-3", address, NOW_MS, 1)


def test_a_dead_letter_of_a_client_that_reports_nothing_has_attempts_and_address(
    bench: Bench,
) -> None:
    bench.send_back(bench.failed(reconsume_times=16))
    [record] = bench.appended
    assert failure(record) == DeliveryFailure("unknown", "", "", bench.channel.address, NOW_MS, 17)


def test_a_retry_of_a_client_that_reports_nothing_has_no_new_properties(bench: Bench) -> None:
    bench.send_back(bench.failed())
    assert failure(bench.appended[0]) is None


def test_the_cause_of_a_retry_survives_a_consumer_that_reports_none(bench: Bench) -> None:
    bench.send_back(bench.failed(), error_type="E", error_text="first")
    [retry] = bench.appended
    bench.send_back(
        bench.failed(topic="%RETRY%g", properties=retry.properties, reconsume_times=1),
        delay_level=-1,
    )
    dead = failure(bench.appended[1])
    assert dead is not None
    assert (dead.cause, dead.attempts) == ("E: first", 2)


@pytest.mark.parametrize("topic", ["T", "%RETRY%other"])
@pytest.mark.parametrize("prefix", ["ESCROW_CAUSE_", "DLQ_CAUSE_"])
def test_a_cause_that_a_message_brings_along_is_not_believed(
    bench: Bench, topic: str, prefix: str
) -> None:
    forged = {prefix + name: "1" for name in ("TYPE", "TEXT", "HOST", "ADDRESS", "TIME")}
    offset = bench.failed(topic=topic, properties=properties(UNIQ_KEY="U", **forged))
    bench.send_back(offset, delay_level=-1)
    [record] = bench.appended
    assert failure(record) == DeliveryFailure("unknown", "", "", bench.channel.address, NOW_MS, 1)
    assert not any(name.startswith("DLQ_CAUSE_") for name in decode_properties(record.properties))


def test_a_cause_of_any_length_never_makes_a_message_too_large() -> None:
    """The message fills the room that senders have; the cause gives way."""
    bench = Bench(StoreConfig(segment_bytes=1 << 20))
    text = "x" * (PROPERTIES_BYTES_MAX - 512 - 30)
    filled = properties(UNIQ_KEY="U", mine=text)
    causes: dict[str, Any] = {
        "error_type": "T" * 9_000,
        "error_text": "é" * 9_000,
        "consumer_host": "h" * 9_000,
    }
    assert bench.send_back(bench.failed(properties=filled), **causes) == 0
    assert bench.send_back(bench.failed(), **causes) == 0
    crowded, roomy = map(failure, bench.appended)
    assert crowded is None
    assert roomy is not None
    assert len(roomy.error_text.encode()) <= ERROR_TEXT_BYTES_MAX
    assert len(roomy.error_type) < 9_000


def test_a_copy_that_a_consumer_sends_as_a_dead_letter_has_its_cause(bench: Bench) -> None:
    claimed = client_properties(FailureReport("E", "text", "worker-3", 4), now_ms=5)
    record = sample(topic="%RETRY%g", properties=properties(**claimed), reconsume_times=17)
    dead = bench.redirected(record, max_reconsume_times=16)
    assert dead.topic == "%DLQ%g"
    found = failure(dead)
    assert found is not None
    assert (found.cause, found.attempts, found.is_from_client) == ("E: text", 4, False)
    assert found.failed_ms == NOW_MS


def test_a_group_without_retry_queues_drops_the_message_with_success(bench: Bench) -> None:
    bench.groups.put(GroupConfig(group_name="g", retry_queue_nums=0), now_ms=NOW_MS)
    assert bench.send_back(bench.failed()) == 0
    assert bench.appended == []


def test_retries_are_spread_over_the_groups_retry_queues(bench: Bench) -> None:
    bench.groups.put(GroupConfig(group_name="g", retry_queue_nums=3), now_ms=NOW_MS)
    offset = bench.failed()
    for _ in range(40):
        bench.send_back(offset)
    assert {record.queue_id for record in bench.appended} == {0, 1, 2}


@pytest.mark.parametrize(
    ("changes", "code"), [({"group": "unknown"}, 26), ({"offset": 5}, 1), ({"offset": -1}, 1)]
)
def test_an_invalid_send_back_is_refused(bench: Bench, changes: dict[str, Any], code: int) -> None:
    offset = bench.failed()
    bench.groups.auto_create = False
    with pytest.raises(EscrowError) as refused:
        bench.send_back(**{"offset": offset, **changes})
    assert response_code(refused.value) == code
    assert bench.appended == []


# --- sends to a retry topic ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("times", "changes", "topic"),
    [
        (0, {}, "%RETRY%g"),
        (16, {}, "%RETRY%g"),
        (17, {}, "%DLQ%g"),
        (3, {"max_reconsume_times": 3}, "%RETRY%g"),
        (4, {"max_reconsume_times": 3}, "%DLQ%g"),
        (4, {"max_reconsume_times": 3, "version": 100}, "%RETRY%g"),
    ],
)
def test_a_client_may_send_to_the_retry_topic_up_to_the_maximum(
    bench: Bench, times: int, changes: dict[str, Any], topic: str
) -> None:
    record = sample(topic="%RETRY%g", queue_id=0, reconsume_times=times)
    assert bench.redirected(record, **changes).topic == topic


@pytest.mark.parametrize("ahead_ms", [0, -10 * MINUTE_MS, 10 * MINUTE_MS])
def test_a_dead_letter_of_an_orderly_group_is_not_retried(bench: Bench, ahead_ms: int) -> None:
    """The decision must not depend on the born time, which the consumer's clock sets."""
    bench.locks.lock("g", "c1", [("T", 0)], now_ms=NOW_MS)
    record = sample(topic="%RETRY%g", queue_id=0, born_ms=NOW_MS + ahead_ms)
    assert bench.redirected(record).topic == "%DLQ%g"


def test_a_send_back_creates_the_group_if_groups_are_created_automatically(bench: Bench) -> None:
    bench.send_back(bench.failed(), group="new")
    assert [record.topic for record in bench.appended] == ["%RETRY%new"]
    assert bench.groups.find("new") is not None


def test_a_retry_of_a_group_that_is_not_configured_is_refused(bench: Bench) -> None:
    bench.groups.auto_create = False
    with pytest.raises(RequestRefused) as refused:
        bench.redirected(sample(topic="%RETRY%unknown"))
    assert refused.value.code == 26
