"""Topics: names, creation from templates, and their file."""

from __future__ import annotations

import pytest

from escrowmq.broker.metadata import TopicTable, check_topic_name
from escrowmq.config import BrokerConfig
from escrowmq.errors import RequestRefused
from escrowmq.message.names import TEMPLATE_TOPIC
from escrowmq.message.topic_config import TopicConfig
from escrowmq.store.config_files import topics_file
from escrowmq.testing.disks import MemoryDisk
from tests.support.stores import NOW_MS


def topics(disk: MemoryDisk | None = None, *, auto_create: bool = True) -> TopicTable:
    config = BrokerConfig(creates_topics=auto_create)
    return TopicTable(topics_file(disk or MemoryDisk()), config)


def create(table: TopicTable, name: str, *, template: str, queues: int) -> TopicConfig | None:
    return table.get_or_create(name, template=template, queue_count=queues, now_ms=NOW_MS)


@pytest.mark.parametrize(
    ("requested", "queues"), [(4, 4), (8, 8), (100, 8), (1, 1), (0, 0), (-1, 0), (-(2**31), 0)]
)
def test_a_new_topic_has_as_many_queues_as_client_and_template_allow(
    requested: int, queues: int
) -> None:
    topic = create(topics(), "T", template=TEMPLATE_TOPIC, queues=requested)
    assert topic is not None
    assert (topic.read_queue_nums, topic.write_queue_nums, topic.perm) == (queues, queues, 6)


@pytest.mark.parametrize("template", ["", "no-such-topic", "BenchmarkTest", "T"])
def test_no_topic_is_created_from_a_topic_that_is_not_a_template(template: str) -> None:
    table = topics()
    assert create(table, "T", template=template, queues=4) is None
    assert table.find("T") is None


def test_any_topic_with_the_inherit_bit_is_a_template() -> None:
    table = topics()
    pattern = TopicConfig(topic_name="P", read_queue_nums=3, write_queue_nums=2, perm=5)
    table.put(pattern, now_ms=NOW_MS)
    topic = create(table, "T", template="P", queues=9)
    assert topic is not None
    assert (topic.read_queue_nums, topic.write_queue_nums, topic.perm) == (2, 2, 4)


def test_without_auto_creation_there_is_no_template() -> None:
    table = topics(auto_create=False)
    assert table.find(TEMPLATE_TOPIC) is None
    assert create(table, "T", template=TEMPLATE_TOPIC, queues=4) is None


def test_an_old_template_is_not_used_without_auto_creation() -> None:
    disk = MemoryDisk()
    topics(disk).save()
    table = topics(disk, auto_create=False)
    assert table.find(TEMPLATE_TOPIC) is not None
    assert create(table, "T", template=TEMPLATE_TOPIC, queues=4) is None


def test_an_old_template_loses_its_inherit_bit_without_auto_creation() -> None:
    """With the bit, its route would tell producers that they may use it."""
    disk = MemoryDisk()
    topics(disk).save()
    template = topics(disk, auto_create=False).find(TEMPLATE_TOPIC)
    assert template is not None
    assert template.perm == 6


def test_a_retry_topic_is_created_with_one_queue_whatever_the_template() -> None:
    topic = create(topics(auto_create=False), "%RETRY%g", template="", queues=9)
    assert topic is not None
    assert (topic.read_queue_nums, topic.write_queue_nums, topic.perm) == (1, 1, 6)


@pytest.mark.parametrize("name", ["RMQ_SYS_TRACE_TOPIC", "traces"])
def test_the_topic_for_traces_is_created_if_the_settings_say_so(name: str) -> None:
    disk = MemoryDisk()
    disabled = TopicTable(topics_file(disk), BrokerConfig(trace_topic=name))
    assert disabled.find(name) is None
    assert not disabled.is_system(name)
    table = TopicTable(topics_file(disk), BrokerConfig(has_trace_topic=True, trace_topic=name))
    topic = table.find(name)
    assert topic is not None
    assert (topic.read_queue_nums, topic.write_queue_nums, topic.perm) == (1, 1, 6)
    assert table.sendable_queue_counts[name] == 1
    assert table.is_system(name)


def test_an_existing_topic_is_returned_unchanged() -> None:
    table = topics()
    first = create(table, "T", template=TEMPLATE_TOPIC, queues=3)
    version = table.version
    assert create(table, "T", template="", queues=8) is first
    assert table.ensure("T", queue_count=8, now_ms=NOW_MS) is first
    assert table.version == version


def test_every_change_advances_the_version_and_calls_back() -> None:
    calls: list[int] = []
    table = TopicTable(topics_file(MemoryDisk()), BrokerConfig(), lambda: calls.append(1))
    first = table.version.counter
    table.ensure("T", queue_count=1, now_ms=NOW_MS)
    assert table.remove("T", now_ms=NOW_MS + 1)
    assert not table.remove("T", now_ms=NOW_MS + 2)
    assert (table.version.counter, table.version.timestamp) == (first + 2, NOW_MS + 1)
    assert len(calls) == 2


def test_topics_and_their_version_are_loaded_after_a_restart() -> None:
    disk = MemoryDisk()
    table = topics(disk)
    table.ensure("T", queue_count=5, now_ms=NOW_MS)
    assert table.is_dirty
    table.save()
    assert not table.is_dirty
    reloaded = topics(disk)
    assert reloaded.find("T") == table.find("T")
    assert reloaded.version == table.version
    assert not reloaded.is_dirty


def test_a_system_topic_of_the_file_is_not_overwritten() -> None:
    disk = MemoryDisk()
    table = topics(disk)
    name = "RMQ_SYS_TRANS_HALF_TOPIC"
    table.put(TopicConfig(topic_name=name, read_queue_nums=7, write_queue_nums=7), now_ms=NOW_MS)
    table.save()
    topic = topics(disk).find(name)
    assert topic is not None
    assert topic.write_queue_nums == 7


@pytest.mark.parametrize(
    ("name", "queues", "perm"),
    [
        ("TBW102", 8, 7),
        ("SELF_TEST_TOPIC", 1, 6),
        ("BenchmarkTest", 1024, 6),
        ("DefaultCluster", 16, 7),
        ("broker-a", 1, 7),
        ("OFFSET_MOVED_EVENT", 1, 6),
        ("SCHEDULE_TOPIC_XXXX", 18, 6),
        ("DefaultCluster_REPLY_TOPIC", 1, 6),
        ("RMQ_SYS_TRANS_HALF_TOPIC", 1, 6),
        ("RMQ_SYS_TRANS_OP_HALF_TOPIC", 1, 6),
        ("rmq_sys_wheel_timer", 1, 6),
    ],
)
def test_a_new_broker_has_its_system_topics(name: str, queues: int, perm: int) -> None:
    topic = topics().find(name)
    assert topic is not None
    assert (topic.read_queue_nums, topic.write_queue_nums, topic.perm) == (queues, queues, perm)


@pytest.mark.parametrize(
    "name", ["a", "A-Z_0|9%", "x" * 127, "%RETRY%" + "g" * 248, "%DLQ%" + "g" * 250]
)
def test_valid_names_are_accepted(name: str) -> None:
    check_topic_name(name)


@pytest.mark.parametrize(
    "name",
    [
        *("", " ", "a b", "a/b", "..", "a.b", "a\0", "a\n", "\u00e4", "x" * 128, "x" * 100_000),
        *("%RETRY%" + "g" * 249, "%DLQ%" + "g" * 251, "%RETRY%\u00e4", "\u0661"),
    ],
)
def test_invalid_names_are_refused(name: str) -> None:
    with pytest.raises(RequestRefused) as refused:
        check_topic_name(name)
    assert refused.value.code == 29
    assert len(refused.value.remark) < 600
