"""The JSON files in config/: RocketMQ's format, backup files (.bak) and unknown fields."""

from __future__ import annotations

import itertools
import json
from random import Random

import msgspec
import pytest

from escrowmq.errors import StoreDamaged, StoreError
from escrowmq.message.topic_config import DataVersion, TopicConfig
from escrowmq.store.config_files import (
    FORMATTED_BYTES_MAX,
    ConfigFile,
    GroupConfig,
    delay_offsets_file,
    groups_file,
    offsets_file,
    topics_file,
)
from escrowmq.store.damage import DamageKind, DamageReports
from escrowmq.store.disk import Disk, read_file, write_file
from escrowmq.testing import FaultyDisk, MemoryDisk, PowerCut
from escrowmq.testing.disks import Survival

# In the format of a Java broker: indented with tabs, numeric keys without quotes.
TOPICS = """{
\t"dataVersion":{
\t\t"counter":3,
\t\t"stateVersion":1,
\t\t"timestamp":1700000000000
\t},
\t"topicConfigTable":{
\t\t"TopicTest":{
\t\t\t"attributes":{"+message.type":"TRANSACTION"},
\t\t\t"order":false,
\t\t\t"perm":6,
\t\t\t"readQueueNums":4,
\t\t\t"topicFilterType":"SINGLE_TAG",
\t\t\t"topicName":"TopicTest",
\t\t\t"topicSysFlag":0,
\t\t\t"writeQueueNums":8,
\t\t\t"fieldOfAnotherVersion":[1,2]
\t\t}
\t},
\t"tableOfAnotherVersion":{"x":{7:"y"}}
}"""
OFFSETS = """{
\t"dataVersion":{"counter":1,"stateVersion":0,"timestamp":1},
\t"offsetTable":{
\t\t"TopicTest@group":{0:12,1:3
\t\t},
\t\t"%RETRY%group@group":{0:0},
\t\t"odd {1:2} name@g":{5:9223372036854775807}
\t}
}"""
DELAYS = '{"dataVersion":{},"offsetTable":{1:100,2:5}}'
GROUPS = """{"dataVersion":{"counter":1,"stateVersion":0,"timestamp":1},"forbiddenTable":{},
"subscriptionGroupTable":{"G":{"groupName":"G","consumeEnable":true,"retryMaxTimes":3,
"groupRetryPolicy":{"type":"CUSTOMIZED"},"attributes":{}}}}"""


def disk_with(**files: str | bytes) -> MemoryDisk:
    """Return a disk with files; `topics` and `topics_bak` become topics.json and its .bak."""
    disk = MemoryDisk()
    for name, text in files.items():
        path = "config/" + name.removesuffix("_bak") + ".json" + ".bak" * name.endswith("_bak")
        write_file(disk, path, text.encode() if isinstance(text, str) else text)
    return disk


def load_json(disk: Disk, name: str) -> object:
    content = read_file(disk, f"config/{name}")
    assert content is not None
    return json.loads(content)


def test_topics_are_read_in_rocketmqs_format() -> None:
    file = topics_file(disk_with(topics=TOPICS))
    assert file.version() == DataVersion(counter=3, state_version=1, timestamp=1_700_000_000_000)
    (topic,) = file.entries("topicConfigTable", TopicConfig).values()
    assert (topic.topic_name, topic.read_queue_nums, topic.write_queue_nums) == ("TopicTest", 4, 8)
    assert (topic.perm, topic.order, topic.topic_filter_type) == (6, False, "SINGLE_TAG")
    assert topic.attributes == {"+message.type": "TRANSACTION"}
    assert topic.other == {"fieldOfAnotherVersion": [1, 2]}


def test_offsets_are_read_in_rocketmqs_format() -> None:
    assert offsets_file(disk_with(consumerOffset=OFFSETS)).offsets() == {
        "TopicTest@group": {0: 12, 1: 3},
        "%RETRY%group@group": {0: 0},
        "odd {1:2} name@g": {5: 9223372036854775807},
    }


def test_delay_offsets_are_read_in_rocketmqs_format() -> None:
    assert delay_offsets_file(disk_with(delayOffset=DELAYS)).int_keys() == {1: 100, 2: 5}


def test_groups_are_read_in_rocketmqs_format() -> None:
    file = groups_file(disk_with(subscriptionGroup=GROUPS))
    (group,) = file.entries("subscriptionGroupTable", GroupConfig).values()
    assert (group.group_name, group.retry_max_times, group.retry_queue_nums) == ("G", 3, 1)
    assert group.group_retry_policy == {"type": "CUSTOMIZED"}


def test_a_missing_file_counts_as_empty() -> None:
    file = topics_file(MemoryDisk())
    assert file.version() == DataVersion()
    assert file.entries("topicConfigTable", TopicConfig) == {}
    assert offsets_file(MemoryDisk()).offsets() == {}
    assert delay_offsets_file(MemoryDisk()).int_keys() == {}


@pytest.mark.parametrize("content", ["", "{", '{"a":1', "[]", "null", "7", b"\xff\xfe", b"\0" * 50])
def test_the_backup_is_read_when_the_file_is_invalid(content: str | bytes) -> None:
    disk = disk_with(delayOffset=content, delayOffset_bak=DELAYS)
    assert delay_offsets_file(disk).int_keys() == {1: 100, 2: 5}


def test_the_backup_is_read_when_the_file_is_missing() -> None:
    assert delay_offsets_file(disk_with(delayOffset_bak=DELAYS)).int_keys() == {1: 100, 2: 5}


def test_a_valid_file_is_read_whatever_its_backup_is() -> None:
    disk = disk_with(delayOffset=DELAYS, delayOffset_bak="{broken")
    assert delay_offsets_file(disk).int_keys() == {1: 100, 2: 5}


@pytest.mark.parametrize(
    "files",
    [
        {"delayOffset": "{", "delayOffset_bak": "{"},
        {"delayOffset": "{", "delayOffset_bak": ""},
        {"delayOffset": "", "delayOffset_bak": "{"},
        {"delayOffset": "{"},
        {"delayOffset_bak": "{"},
    ],
)
def test_an_invalid_file_with_an_invalid_backup_is_damage(files: dict[str, str]) -> None:
    with pytest.raises(StoreDamaged, match=r"config/delayOffset\.json"):
        delay_offsets_file(disk_with(**files))


@pytest.mark.parametrize(
    ("text", "method"),
    [
        ('{"offsetTable":7}', "offsets"),
        ('{"offsetTable":{"a@b":{0:"x"}}}', "offsets"),
        ('{"offsetTable":{"a@b":{"x":0}}}', "offsets"),
        ('{"offsetTable":{"a@b":[1]}}', "offsets"),
        ('{"dataVersion":{"counter":"x"}}', "version"),
    ],
)
def test_a_table_of_a_wrong_type_is_damage_and_the_error_names_the_file(
    text: str, method: str
) -> None:
    file = offsets_file(disk_with(consumerOffset=text))
    with pytest.raises(StoreDamaged, match=r"config/consumerOffset\.json"):
        getattr(file, method)()


@pytest.mark.parametrize("row", ["7", '"x"', "[]", "{}", '{"topicName":"T","perm":"x"}'])
def test_a_row_of_a_wrong_type_is_damage_and_the_error_names_the_file(row: str) -> None:
    file = topics_file(disk_with(topics='{"topicConfigTable":{"T":' + row + "}}"))
    with pytest.raises(StoreDamaged, match=r"config/topics\.json"):
        file.entries("topicConfigTable", TopicConfig)


def test_unknown_fields_are_preserved_by_a_save() -> None:
    disk = disk_with(topics=TOPICS)
    file = topics_file(disk)
    topics = file.entries("topicConfigTable", TopicConfig)
    topics["TopicTest"] = msgspec.structs.replace(topics["TopicTest"], perm=4)
    topics["New"] = TopicConfig(topic_name="New")
    file.save(topicConfigTable=topics, dataVersion=file.version().next(5))
    content = load_json(disk, "topics.json")
    assert isinstance(content, dict)
    assert content["tableOfAnotherVersion"] == {"x": {"7": "y"}}
    assert content["dataVersion"] == {"counter": 4, "stateVersion": 1, "timestamp": 5}
    row = content["topicConfigTable"]["TopicTest"]
    assert row["fieldOfAnotherVersion"] == [1, 2]
    assert (row["perm"], row["writeQueueNums"]) == (4, 8)
    assert "(other)" not in row
    assert content["topicConfigTable"]["New"] == {
        "topicName": "New",
        "readQueueNums": 16,
        "writeQueueNums": 16,
        "perm": 6,
        "topicFilterType": "SINGLE_TAG",
        "topicSysFlag": 0,
        "order": False,
        "attributes": {},
    }


def test_saved_tables_are_loaded_again() -> None:
    disk = MemoryDisk()
    offsets = {"T@g": {0: 1, 3: 1 << 62}, "ünï@g": {0: 0}}
    offsets_file(disk).save(offsetTable=offsets)
    assert offsets_file(disk).offsets() == offsets
    delay_offsets_file(disk).save(offsetTable={1: 5, 18: 0})
    assert delay_offsets_file(disk).int_keys() == {1: 5, 18: 0}
    groups = {"G": GroupConfig(group_name="G", retry_max_times=2)}
    groups_file(disk).save(subscriptionGroupTable=groups)
    assert groups_file(disk).entries("subscriptionGroupTable", GroupConfig) == groups


def test_a_save_writes_the_same_content_to_the_file_and_its_copy() -> None:
    disk = MemoryDisk()
    file = delay_offsets_file(disk)
    for number in range(1, 4):
        file.save(offsetTable={1: number})
    content = read_file(disk, "config/delayOffset.json")
    assert content == read_file(disk, "config/delayOffset.json.bak")
    assert b'"1": 3' in (content or b"")
    assert disk.names("config") == ["delayOffset.json", "delayOffset.json.bak"]


def test_a_long_file_has_few_line_breaks_and_its_checksum_is_verified() -> None:
    disk = MemoryDisk()
    offsets = {f"topic-{number}@g": {0: number} for number in range(FORMATTED_BYTES_MAX // 16)}
    offsets_file(disk).save(offsetTable=offsets)
    content = read_file(disk, "config/consumerOffset.json") or b""
    assert content.count(b"\n") < 10
    assert offsets_file(disk).offsets() == offsets
    write_file(disk, "config/consumerOffset.json", content.replace(b'"0":7}', b'"0":8}'))
    damage = DamageReports()
    assert offsets_file(disk, damage).offsets() == offsets
    assert damage.counts == {(DamageKind.CONFIG, True): 1}


@pytest.mark.parametrize("path", ["config/delayOffset.json", "config/delayOffset.json.bak"])
def test_a_flipped_bit_anywhere_in_one_file_costs_nothing_and_is_reported(path: str) -> None:
    disk = MemoryDisk()
    file = delay_offsets_file(disk)
    file.save(offsetTable={1: 1}, other={"a": "b"})
    file.save(offsetTable={1: 22})
    content = read_file(disk, path)
    assert content is not None
    for position in range(len(content)):
        for bit in range(8):
            flipped = bytearray(content)
            flipped[position] ^= 1 << bit
            write_file(disk, path, bytes(flipped))
            damage = DamageReports()
            assert delay_offsets_file(disk, damage).int_keys() == {1: 22}, (position, bit)
            if not path.endswith(".bak"):
                assert damage.counts == {(DamageKind.CONFIG, True): 1}, (position, bit)
                assert read_file(disk, path) == content  # written again from the copy
    write_file(disk, path, content)
    damage = DamageReports()
    assert delay_offsets_file(disk, damage).int_keys() == {1: 22}
    assert damage.total == 0


def test_a_file_of_rocketmq_has_no_checksum_and_is_read_as_it_is() -> None:
    disk = MemoryDisk()
    delay_offsets_file(disk).save(offsetTable={1: 1})
    write_file(disk, "config/delayOffset.json", DELAYS.encode())
    damage = DamageReports()
    assert delay_offsets_file(disk, damage).int_keys() == {1: 100, 2: 5}
    assert damage.total == 0


def test_an_edited_file_is_used_only_without_its_checksum() -> None:
    disk = MemoryDisk()
    delay_offsets_file(disk).save(offsetTable={1: 1})
    text = read_file(disk, "config/delayOffset.json") or b""
    edited = text.replace(b'"1": 1', b'"1": 7')
    write_file(disk, "config/delayOffset.json", edited)
    assert delay_offsets_file(disk).int_keys() == {1: 1}
    lines = [line for line in edited.split(b"\n") if b"escrowChecksum" not in line]
    write_file(disk, "config/delayOffset.json", b"\n".join(lines))
    assert delay_offsets_file(disk).int_keys() == {1: 7}


def save_twice(disk: FaultyDisk) -> ConfigFile:
    file = delay_offsets_file(disk)
    file.save(offsetTable={1: 1})
    file.save(offsetTable={1: 2})
    return file


@pytest.mark.parametrize("survival", ["none", "all", "mixed", "scrambled"])
def test_a_power_cut_at_any_call_of_a_save_leaves_the_old_or_the_new_content(
    survival: Survival,
) -> None:
    for call in itertools.count(1):
        disk = FaultyDisk(seed=call)
        file = save_twice(disk)
        disk.power_cut_at = disk.calls + call
        is_complete = False
        try:
            file.save(offsetTable={1: 3})
            is_complete = disk.calls < disk.power_cut_at
        except PowerCut:
            pass
        for seed in range(5):
            disk_after = disk.power_cut(Random(seed), survival)
            assert delay_offsets_file(disk_after).int_keys() in (
                [{1: 3}] if is_complete else [{1: 2}, {1: 3}]
            )
        if is_complete:
            break
    assert call > 8


def test_a_fault_at_any_call_of_a_save_leaves_the_old_or_the_new_content() -> None:
    for call in itertools.count(1):
        disk = FaultyDisk(seed=call)
        file = save_twice(disk)
        disk.fail_at = disk.calls + call
        try:
            file.save(offsetTable={1: 3})
        except StoreError:
            assert delay_offsets_file(disk).int_keys() in [{1: 2}, {1: 3}]
        else:
            break
        file.save(offsetTable={1: 4})
        assert delay_offsets_file(disk).int_keys() == {1: 4}
    assert call > 8
