"""We open what real brokers wrote, and find in it what their clients saw, byte for byte.

No Java: the stores are captured. `fixtures/README.md` says what is in them.
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
    encoded_again,
    file_bytes,
    log_bytes,
    log_records,
    open_store,
    read_all,
    settings_of,
)
from tests.support.stores import assert_clean

CASES = [(version, ending) for version in fixtures.VERSIONS for ending in fixtures.ENDINGS]


@dataclass(frozen=True)
class Captured:
    version: str
    ending: fixtures.Ending
    directory: Path
    seen: dict[str, Any]  # by a client of the broker that wrote it
    settings: StoreConfig

    @property
    def disk(self) -> RealDisk:
        return RealDisk(self.directory)

    def open(self) -> MessageStore:
        return open_store(self.directory, self.settings)

    def config(self, name: str) -> dict[str, Any]:
        """A configuration file, read without our code; empty if the broker left none."""
        path = self.directory / "config" / name
        return loads(path.read_text()) if path.exists() else {}


@pytest.fixture(params=CASES, ids=[f"{version}-{ending}" for version, ending in CASES])
def captured(request: pytest.FixtureRequest, tmp_path: Path) -> Captured:
    version, ending = request.param
    seen = fixtures.expected(version, ending)
    directory = fixtures.unpack_store(version, ending, tmp_path)
    return Captured(version, ending, directory, seen, settings_of(seen["settings"]))


@pytest.fixture
def store(captured: Captured) -> Iterator[MessageStore]:
    store = captured.open()
    yield store
    store.close()
    assert_clean(captured.directory, captured.settings)


# --- what clients saw --------------------------------------------------------------------------


def test_the_settings_are_those_of_the_capture(captured: Captured) -> None:
    ours = captured.settings
    assert (ours.segment_bytes, ours.queue_file_bytes) == (16_384, 600)
    assert (ours.index_slots, ours.index_entries) == (100, 120)


def test_every_queue_holds_what_a_client_pulled(captured: Captured, store: MessageStore) -> None:
    for queue in captured.seen["queues"]:
        topic, queue_id = queue["topic"], queue["queueId"]
        assert store.min_offset(topic, queue_id) == queue["minOffset"]
        assert store.max_offset(topic, queue_id) == queue["maxOffset"]
        read = [message_view(decode_record(data)) for data in read_all(store, topic, queue_id)]
        if "messages" in queue:
            assert read == queue["messages"], f"{topic} {queue_id}"
        else:  # the broker showed them to nobody
            assert len(read) == queue["maxOffset"] - queue["minOffset"]


def test_every_record_is_decoded_as_the_other_decoder_does_it(
    captured: Captured, store: MessageStore
) -> None:
    ours = [as_record(record) for record in store.records()]
    assert ours == log_records(captured.directory / "commitlog")
    shown = {
        message["logOffset"]: message
        for queue in captured.seen["queues"]
        for message in queue.get("messages", [])
    }
    views = {record.log_offset: message_view(record) for record in ours}
    assert shown == {log_offset: views[log_offset] for log_offset in shown}


def test_every_record_encodes_to_the_bytes_it_was_decoded_from(
    captured: Captured, store: MessageStore
) -> None:
    again = {record.log_offset: encoded_again(record) for record in store.records()}
    assert again == log_bytes(captured.directory / "commitlog")


def test_the_second_layout_is_read(captured: Captured, store: MessageStore) -> None:
    long_topic = f"%RETRY%{LONG_GROUP}"
    found = [record.topic for record in store.records() if record.magic == MAGIC_V2]
    assert found == ([long_topic] if captured.version == "5.5.0" else [])
    assert store.max_offset(long_topic, 0) == len(found)


def test_we_deliver_a_delayed_message_with_the_properties_that_the_broker_delivered(
    store: MessageStore,
) -> None:
    [theirs] = [
        record
        for record in store.records()
        if record.topic == "orders" and find_property(record.properties, b"DELAY") == b"3"
    ]
    delayed_messages = DelayedMessages(store, delay_offsets_file(MemoryDisk()), DelayConfig())
    due = delayed_messages.find_due(theirs.stored_ms).records
    [ours] = [record for record in due if record.body == theirs.body]
    assert (ours.topic, ours.queue_id) == (theirs.topic, theirs.queue_id)
    assert decode_properties(ours.properties) == decode_properties(theirs.properties)


def test_keys_lead_to_what_a_client_found(captured: Captured, store: MessageStore) -> None:
    for sought in captured.seen["keys"]:
        found = store.find_by_key(sought["topic"], sought["key"], count_max=32)
        assert {record.log_offset for record in found} == set(sought["logOffsets"]), sought


def test_searches_by_time_end_where_a_client_saw_them_end(
    captured: Captured, store: MessageStore
) -> None:
    """Of 5.5.0 and of us, that is the first message that is not before the time.

    4.9.7 finds the one nearest to it, in a file that it chooses by when the file was changed.
    """
    per_file = captured.settings.queue_file_bytes // 20
    for queue in captured.seen["queues"]:
        stored_ms = [message["storedMs"] for message in queue.get("messages", [])]
        for time_ms, theirs in queue.get("searches", []):
            ours = store.offset_by_time(queue["topic"], queue["queueId"], time_ms)
            assert ours == bisect.bisect_left(stored_ms, time_ms)
            if captured.version == "5.5.0" or not stored_ms:
                assert ours == theirs, f"{queue['topic']} {queue['queueId']} at {time_ms}"
            elif len(stored_ms) <= per_file:
                assert abs(stored_ms[theirs] - time_ms) == min(abs(t - time_ms) for t in stored_ms)


# --- files -------------------------------------------------------------------------------------


def test_the_checker_finds_nothing_wrong_before_and_after_us(captured: Captured) -> None:
    before = assert_clean(captured.directory, captured.settings)
    assert [finding.where for finding in before.findings] == (
        [] if captured.ending == "clean" else ["abort"]
    )
    captured.open().close()
    after = assert_clean(captured.directory, captured.settings)
    assert after.findings == []
    assert (after.records, after.queue_entries, after.keys) == (
        before.records,
        before.queue_entries,
        before.keys,
    )


def test_opening_changes_no_log_and_no_queue(captured: Captured) -> None:
    before = file_bytes(captured.directory)
    captured.open().close()
    after = file_bytes(captured.directory)
    for name in before:
        if name.startswith(("commitlog/", "consumequeue/", "config/")) and any(before[name]):
            assert after[name] == before[name], name


def test_queues_built_again_are_the_brokers_byte_for_byte(captured: Captured) -> None:
    written = file_bytes(captured.directory / "consumequeue")
    assert len(written) > 10
    shutil.rmtree(captured.directory / "consumequeue")
    captured.open().close()
    assert file_bytes(captured.directory / "consumequeue") == written


def test_an_index_built_again_is_the_brokers(captured: Captured) -> None:
    """Byte for byte that of 4.9.7. 5.5.0 has entries for tags between those for keys."""
    written = file_bytes(captured.directory / "index")
    shutil.rmtree(captured.directory / "index")
    store = captured.open()
    records = {record.log_offset: record for record in store.records()}
    store.close()
    built = file_bytes(captured.directory / "index")

    assert len(written) == len(built) == 2
    if captured.version == "4.9.7":
        assert list(built.values()) == list(written.values())  # names are when they were made
    else:
        theirs = index_entries(written, captured.settings)
        by_key = [entry for entry in theirs if not is_of_tag(entry, records)]
        assert index_entries(built, captured.settings) == by_key
        assert len(theirs) > len(by_key)


def index_entries(files: dict[str, bytes], settings: StoreConfig) -> list[tuple[int, int]]:
    """Hash and log offset, in the order of their making."""
    found = []
    for _, data in sorted(files.items()):
        count = HEADER.unpack_from(data)[-1]
        at = HEADER.size + settings.index_slots * 4 + INDEX_ENTRY.size  # entry 0 is never used
        entries = data[at : at + (count - 1) * INDEX_ENTRY.size]
        found += [
            (value, log_offset) for value, log_offset, _, _ in INDEX_ENTRY.iter_unpack(entries)
        ]
    return found


def is_of_tag(entry: tuple[int, int], records: dict[Any, StoredRecord]) -> bool:
    record = records[entry[1]]
    tags = find_property(record.properties, b"TAGS")
    return tags is not None and entry[0] == key_hash(record.topic, b"T#" + tags)


def test_the_checkpoint_is_read_and_written(captured: Captured) -> None:
    theirs = load_rocketmq_checkpoint(captured.disk)
    last = log_records(captured.directory / "commitlog")[-1]
    assert theirs is not None
    # 5.5.0 leaves the time of the queues at 0, and a stop writes none of them once more.
    assert max(theirs.log_ms, theirs.queues_ms, theirs.index_ms) <= last.stored_ms
    if captured.ending == "clean":
        assert theirs.log_ms > last.stored_ms - 60_000

    captured.open().close()
    ours = load_rocketmq_checkpoint(captured.disk)
    assert ours is not None
    assert {ours.log_ms, ours.queues_ms, ours.index_ms} == {last.stored_ms}


# --- configuration -----------------------------------------------------------------------------


def test_topics_are_read_and_written_back(captured: Captured) -> None:
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


def test_groups_are_read_and_written_back(captured: Captured) -> None:
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


def test_consumer_offsets_are_what_a_client_was_told(captured: Captured) -> None:
    file = offsets_file(captured.disk)
    before = captured.config("consumerOffset.json")
    offsets = file.offsets()
    assert numbers(before.get("offsetTable", {})) == offsets
    if captured.ending == "clean":  # one that is killed may not have saved them yet
        for told in captured.seen["committed"]:
            assert offsets[f"{told['topic']}@{told['group']}"][told["queueId"]] == told["offset"]

    file.save(offsetTable=offsets)
    assert offsets_file(captured.disk).offsets() == offsets
    assert_nothing_is_lost(before, captured.config("consumerOffset.json"))


def test_delay_offsets_are_read_and_written_back(captured: Captured) -> None:
    file = delay_offsets_file(captured.disk)
    before = captured.config("delayOffset.json")
    delays = file.int_keys()
    assert delays == {int(level): n for level, n in before.get("offsetTable", {}).items()}
    if captured.ending == "clean":
        assert delays[3] == 1  # level 3 was delivered

    file.save(offsetTable=delays)
    assert delay_offsets_file(captured.disk).int_keys() == delays
    assert_nothing_is_lost(before, captured.config("delayOffset.json"))


def numbers(table: dict[str, dict[str, int]]) -> dict[str, dict[int, int]]:
    return {
        name: {int(queue_id): offset for queue_id, offset in queues.items()}
        for name, queues in table.items()
    }


def assert_nothing_is_lost(before: dict[str, Any], after: dict[str, Any]) -> None:
    """All that the broker wrote is still there, as it was; we may have added defaults."""
    for name, value in before.items():
        if isinstance(value, dict):
            assert_nothing_is_lost(value, after[name])
        else:
            assert after[name] == value, name
