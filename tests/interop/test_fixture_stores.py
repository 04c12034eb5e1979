"""We open stores that real brokers wrote and read what their clients saw, byte for byte.

The stores are captured, so no Java is needed. `fixtures/README.md` describes their contents.
"""

from __future__ import annotations

import bisect
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from escrowmq.broker.delayed_messages import DelayedMessages
from escrowmq.config import DelayConfig, StoreConfig
from escrowmq.message.properties import decode_properties, find_property
from escrowmq.message.record import StoredRecord
from escrowmq.message.topic_config import TopicConfig
from escrowmq.store.checkpoint import load_rocketmq_checkpoint
from escrowmq.store.columns import key_hash
from escrowmq.store.config_files import (
    GroupConfig,
    delay_offsets_file,
    groups_file,
    offsets_file,
    topics_file,
)
from escrowmq.store.disk import RealDisk
from escrowmq.store.key_index import HEADER, INDEX_ENTRY
from escrowmq.store.store import MessageStore
from escrowmq.testing.disks import MemoryDisk
from tests.interop import fixtures
from tests.interop.observe import message_view
from tests.interop.records import MAGIC_V2, decode_record
from tests.interop.remoting import loads
from tests.interop.script import LONG_GROUP
from tests.interop.stores import (
    as_record,
    file_bytes,
    log_bytes,
    log_records,
    open_store,
    read_all,
    reencode,
    settings_of,
)
from tests.support.stores import assert_clean

CASES = [(version, shutdown) for version in fixtures.VERSIONS for shutdown in fixtures.SHUTDOWNS]


@dataclass(frozen=True)
class CapturedStore:
    """A captured store, unpacked, and what a client saw of it."""

    version: str
    shutdown: fixtures.Shutdown
    directory: Path
    view: dict[str, Any]  # what a client of the broker that wrote it saw
    settings: StoreConfig

    @property
    def disk(self) -> RealDisk:
        return RealDisk(self.directory)

    def open(self) -> MessageStore:
        return open_store(self.directory, self.settings)

    def config(self, name: str) -> dict[str, Any]:
        """Return a configuration file, read without our code; {} if the broker wrote none."""
        path = self.directory / "config" / name
        return loads(path.read_text()) if path.exists() else {}


@pytest.fixture(params=CASES, ids=[f"{version}-{shutdown}" for version, shutdown in CASES])
def captured(request: pytest.FixtureRequest, tmp_path: Path) -> CapturedStore:
    version, shutdown = request.param
    view = fixtures.expected(version, shutdown)
    directory = fixtures.unpack_store(version, shutdown, tmp_path)
    return CapturedStore(version, shutdown, directory, view, settings_of(view["settings"]))


@pytest.fixture
def store(captured: CapturedStore) -> Iterator[MessageStore]:
    store = captured.open()
    yield store
    store.close()
    assert_clean(captured.directory, captured.settings)


# --- what clients saw --------------------------------------------------------------------------


def test_broker_settings_are_read_as_ours(captured: CapturedStore) -> None:
    settings = captured.settings
    assert (settings.segment_bytes, settings.queue_file_bytes) == (16_384, 600)
    assert (settings.index_slots, settings.index_entries) == (100, 120)


def test_every_queue_has_the_messages_that_a_client_pulled(
    captured: CapturedStore, store: MessageStore
) -> None:
    for queue in captured.view["queues"]:
        topic, queue_id = queue["topic"], queue["queueId"]
        assert store.min_offset(topic, queue_id) == queue["minOffset"]
        assert store.max_offset(topic, queue_id) == queue["maxOffset"]
        read = [message_view(decode_record(data)) for data in read_all(store, topic, queue_id)]
        if "messages" in queue:
            assert read == queue["messages"], f"{topic} {queue_id}"
        else:  # 4.9.7 does not serve these topics to clients
            assert len(read) == queue["maxOffset"] - queue["minOffset"]


def test_every_record_is_decoded_like_the_independent_decoder_does(
    captured: CapturedStore, store: MessageStore
) -> None:
    ours = [as_record(record) for record in store.records()]
    assert ours == log_records(captured.directory / "commitlog")
    expected = {
        message["logOffset"]: message
        for queue in captured.view["queues"]
        for message in queue.get("messages", [])
    }
    views = {record.log_offset: message_view(record) for record in ours}
    assert {log_offset: views[log_offset] for log_offset in expected} == expected


def test_every_record_encodes_to_the_bytes_it_was_decoded_from(
    captured: CapturedStore, store: MessageStore
) -> None:
    reencoded = {record.log_offset: reencode(record) for record in store.records()}
    assert reencoded == log_bytes(captured.directory / "commitlog")


def test_records_with_the_second_layout_are_read(
    captured: CapturedStore, store: MessageStore
) -> None:
    long_topic = f"%RETRY%{LONG_GROUP}"
    topics = [record.topic for record in store.records() if record.magic == MAGIC_V2]
    assert topics == ([long_topic] if captured.version == "5.5.0" else [])
    assert store.max_offset(long_topic, 0) == len(topics)


def test_we_deliver_a_delayed_message_with_the_properties_that_the_broker_delivered(
    store: MessageStore,
) -> None:
    [theirs] = [
        record
        for record in store.records()
        if record.topic == "orders" and find_property(record.properties, b"DELAY") == b"3"
    ]
    delayed_messages = DelayedMessages(store, MemoryDisk(), DelayConfig())
    due = delayed_messages.find_due(theirs.stored_ms).records
    [ours] = [record for record in due if record.body == theirs.body]
    assert (ours.topic, ours.queue_id) == (theirs.topic, theirs.queue_id)
    assert decode_properties(ours.properties) == decode_properties(theirs.properties)


def test_queries_by_key_return_what_a_client_received(
    captured: CapturedStore, store: MessageStore
) -> None:
    for query in captured.view["keys"]:
        records = store.find_by_key(query["topic"], query["key"], count_max=32)
        assert {record.log_offset for record in records} == set(query["logOffsets"]), query


def test_searches_by_time_return_what_a_client_received(
    captured: CapturedStore, store: MessageStore
) -> None:
    """5.5.0 and we return the first message that is not older than the time.

    4.9.7 returns the message nearest to the time, in a file chosen by its modification time.
    """
    entries_per_file = captured.settings.queue_file_bytes // 20
    for queue in captured.view["queues"]:
        stored_ms = [message["storedMs"] for message in queue.get("messages", [])]
        for time_ms, theirs in queue.get("searches", []):
            ours = store.offset_by_time(queue["topic"], queue["queueId"], time_ms)
            assert ours == bisect.bisect_left(stored_ms, time_ms)
            if captured.version == "5.5.0" or not stored_ms:
                assert ours == theirs, f"{queue['topic']} {queue['queueId']} at {time_ms}"
            elif len(stored_ms) <= entries_per_file:
                assert abs(stored_ms[theirs] - time_ms) == min(abs(t - time_ms) for t in stored_ms)


# --- files -------------------------------------------------------------------------------------


def test_the_checker_finds_no_damage_before_and_after_we_open_the_store(
    captured: CapturedStore,
) -> None:
    before = assert_clean(captured.directory, captured.settings)
    assert [finding.where for finding in before.findings] == (
        [] if captured.shutdown == "clean" else ["abort"]
    )
    captured.open().close()
    after = assert_clean(captured.directory, captured.settings)
    assert after.findings == []
    assert (after.records, after.queue_entries, after.keys) == (
        before.records,
        before.queue_entries,
        before.keys,
    )


def test_opening_a_store_changes_neither_log_nor_queues(captured: CapturedStore) -> None:
    before = file_bytes(captured.directory)
    captured.open().close()
    after = file_bytes(captured.directory)
    for name in before:
        if name.startswith(("commitlog/", "consumequeue/", "config/")) and any(before[name]):
            assert after[name] == before[name], name


def test_rebuilt_queues_equal_those_of_the_broker_byte_for_byte(captured: CapturedStore) -> None:
    original = file_bytes(captured.directory / "consumequeue")
    assert len(original) > 10
    shutil.rmtree(captured.directory / "consumequeue")
    captured.open().close()
    assert file_bytes(captured.directory / "consumequeue") == original


def test_a_rebuilt_key_index_equals_that_of_the_broker(captured: CapturedStore) -> None:
    """Compare the bytes with 4.9.7. 5.5.0 also indexes tags, so compare the entries of keys."""
    original = file_bytes(captured.directory / "index")
    shutil.rmtree(captured.directory / "index")
    store = captured.open()
    records = {record.log_offset: record for record in store.records()}
    store.close()
    rebuilt = file_bytes(captured.directory / "index")

    assert len(original) == len(rebuilt) == 2
    if captured.version == "4.9.7":
        # The names of the files are the times of their creation.
        assert list(rebuilt.values()) == list(original.values())
    else:
        entries = index_entries(original, captured.settings)
        entries_of_keys = [entry for entry in entries if not is_entry_of_tag(entry, records)]
        assert index_entries(rebuilt, captured.settings) == entries_of_keys
        assert len(entries) > len(entries_of_keys)


def index_entries(files: dict[str, bytes], settings: StoreConfig) -> list[tuple[int, int]]:
    """Return hash and log offset of every entry, in the order of the files."""
    pairs = []
    for _, data in sorted(files.items()):
        count = HEADER.unpack_from(data)[-1]
        # Entry 0 is never used.
        start = HEADER.size + settings.index_slots * 4 + INDEX_ENTRY.size
        entries = data[start : start + (count - 1) * INDEX_ENTRY.size]
        pairs += [
            (value, log_offset) for value, log_offset, _, _ in INDEX_ENTRY.iter_unpack(entries)
        ]
    return pairs


def is_entry_of_tag(entry: tuple[int, int], records: dict[Any, StoredRecord]) -> bool:
    record = records[entry[1]]
    tags = find_property(record.properties, b"TAGS")
    return tags is not None and entry[0] == key_hash(record.topic, b"T#" + tags)


def test_the_checkpoint_is_read_and_written(captured: CapturedStore) -> None:
    theirs = load_rocketmq_checkpoint(captured.disk)
    last = log_records(captured.directory / "commitlog")[-1]
    assert theirs is not None
    # 5.5.0 leaves the time of the queues at 0, and a stop does not update the times.
    assert max(theirs.log_ms, theirs.queues_ms, theirs.index_ms) <= last.stored_ms
    if captured.shutdown == "clean":
        assert theirs.log_ms > last.stored_ms - 60_000

    captured.open().close()
    ours = load_rocketmq_checkpoint(captured.disk)
    assert ours is not None
    assert {ours.log_ms, ours.queues_ms, ours.index_ms} == {last.stored_ms}


# --- configuration -----------------------------------------------------------------------------


def test_topics_are_read_and_written_back(captured: CapturedStore) -> None:
    file = topics_file(captured.disk)
    before = captured.config("topics.json")
    topics = file.entries("topicConfigTable", TopicConfig)
    assert (
        {"orders", "payments", "%RETRY%billing"}
        <= topics.keys()
        == (before["topicConfigTable"].keys())
    )
    for name, theirs in before["topicConfigTable"].items():
        ours = topics[name]
        assert (ours.topic_name, ours.perm, ours.order) == (name, theirs["perm"], theirs["order"])
        assert ours.read_queue_nums == theirs["readQueueNums"]
        assert ours.write_queue_nums == theirs["writeQueueNums"]
    assert file.version().counter == before["dataVersion"]["counter"]

    file.save(topicConfigTable=topics, dataVersion=file.version())
    assert topics_file(captured.disk).entries("topicConfigTable", TopicConfig) == topics
    assert_nothing_is_lost(before, captured.config("topics.json"))


def test_groups_are_read_and_written_back(captured: CapturedStore) -> None:
    file = groups_file(captured.disk)
    before = captured.config("subscriptionGroup.json")
    groups = file.entries("subscriptionGroupTable", GroupConfig)
    assert {"billing", "audit"} <= groups.keys() == before["subscriptionGroupTable"].keys()
    assert groups["billing"].retry_max_times == 16
    if captured.version == "5.5.0":
        assert groups[LONG_GROUP].retry_queue_nums == 1
        assert groups["billing"].group_retry_policy == {"type": "CUSTOMIZED"}

    file.save(subscriptionGroupTable=groups, dataVersion=file.version())
    assert groups_file(captured.disk).entries("subscriptionGroupTable", GroupConfig) == groups
    assert_nothing_is_lost(before, captured.config("subscriptionGroup.json"))


def test_consumer_offsets_are_those_that_a_client_queried(captured: CapturedStore) -> None:
    file = offsets_file(captured.disk)
    before = captured.config("consumerOffset.json")
    offsets = file.offsets()
    assert with_integer_keys(before.get("offsetTable", {})) == offsets
    if captured.shutdown == "clean":  # a killed broker may not have saved them
        for queue in captured.view["committed"]:
            saved = offsets[f"{queue['topic']}@{queue['group']}"]
            assert saved[queue["queueId"]] == queue["offset"]

    file.save(offsetTable=offsets)
    assert offsets_file(captured.disk).offsets() == offsets
    assert_nothing_is_lost(before, captured.config("consumerOffset.json"))


def test_delay_offsets_are_read_and_written_back(captured: CapturedStore) -> None:
    file = delay_offsets_file(captured.disk)
    before = captured.config("delayOffset.json")
    delays = file.int_keys()
    assert delays == {int(level): offset for level, offset in before.get("offsetTable", {}).items()}
    if captured.shutdown == "clean":
        assert delays[3] == 1  # level 3 was delivered

    file.save(offsetTable=delays)
    assert delay_offsets_file(captured.disk).int_keys() == delays
    assert_nothing_is_lost(before, captured.config("delayOffset.json"))


def with_integer_keys(table: dict[str, dict[str, int]]) -> dict[str, dict[int, int]]:
    return {
        name: {int(queue_id): offset for queue_id, offset in queues.items()}
        for name, queues in table.items()
    }


def assert_nothing_is_lost(before: dict[str, Any], after: dict[str, Any]) -> None:
    """Check that every value of the broker is unchanged. Our code may add defaults."""
    for name, value in before.items():
        if isinstance(value, dict):
            assert_nothing_is_lost(value, after[name])
        else:
            assert after[name] == value, name
