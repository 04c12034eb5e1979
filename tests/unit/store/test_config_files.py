"""Files in config/: RocketMQ's format, previous versions and unknown fields."""

from __future__ import annotations

import itertools
import json
from random import Random

import msgspec
import pytest

from escrowmq.errors import StoreDamaged, StoreError
from escrowmq.message.topic_config import DataVersion, TopicConfig
from escrowmq.store.config_files import (
    ConfigFile,
    GroupConfig,
    delay_offsets_file,
    groups_file,
    offsets_file,
    topics_file,
)
from escrowmq.store.disk import Disk, read_file, write_file
from escrowmq.testing import FaultyDisk, MemoryDisk, PowerCut
from escrowmq.testing.disks import Survival

# As a Java broker writes them: pretty-printed with tabs, number keys without quotes.
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


def saved(disk: Disk, name: str) -> object:
    content = read_file(disk, f"config/{name}")
    assert content is not None
    return json.loads(content)


def test_topics_as_rocketmq_writes_them() -> None:
    file = topics_file(disk_with(topics=TOPICS))
    assert file.version() == DataVersion(counter=3, state_version=1, timestamp=1_700_000_000_000)
    (topic,) = file.entries("topicConfigTable", TopicConfig).values()
    assert (topic.topic_name, topic.read_queue_nums, topic.write_queue_nums) == ("TopicTest", 4, 8)
    assert (topic.perm, topic.order, topic.topic_filter_type) == (6, False, "SINGLE_TAG")
    assert topic.attributes == {"+message.type": "TRANSACTION"}
    assert topic.other == {"fieldOfAnotherVersion": [1, 2]}


def test_offsets_as_rocketmq_writes_them() -> None:
    assert offsets_file(disk_with(consumerOffset=OFFSETS)).offsets() == {
        "TopicTest@group": {0: 12, 1: 3},
        "%RETRY%group@group": {0: 0},
        "odd {1:2} name@g": {5: 9223372036854775807},
    }


def test_delays_as_rocketmq_writes_them() -> None:
    assert delay_offsets_file(disk_with(delayOffset=DELAYS)).int_keys() == {1: 100, 2: 5}


def test_groups_as_rocketmq_writes_them() -> None:
    file = groups_file(disk_with(subscriptionGroup=GROUPS))
    (group,) = file.entries("subscriptionGroupTable", GroupConfig).values()
    assert (group.group_name, group.retry_max_times, group.retry_queue_nums) == ("G", 3, 1)
    assert group.group_retry_policy == {"type": "CUSTOMIZED"}


def test_a_missing_file_has_no_content() -> None:
    file = topics_file(MemoryDisk())
    assert file.version() == DataVersion()
    assert file.entries("topicConfigTable", TopicConfig) == {}
    assert offsets_file(MemoryDisk()).offsets() == {}
    assert delay_offsets_file(MemoryDisk()).int_keys() == {}


@pytest.mark.parametrize("broken", ["", "{", '{"a":1', "[]", "null", "7", b"\xff\xfe", b"\0" * 50])
def test_the_backup_is_read_when_the_file_is_invalid(broken: str | bytes) -> None:
    disk = disk_with(delayOffset=broken, delayOffset_bak=DELAYS)
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
    ("text", "use"),
    [
        ('{"offsetTable":7}', "offsets"),
        ('{"offsetTable":{"a@b":{0:"x"}}}', "offsets"),
        ('{"offsetTable":{"a@b":{"x":0}}}', "offsets"),
        ('{"offsetTable":{"a@b":[1]}}', "offsets"),
        ('{"dataVersion":{"counter":"x"}}', "version"),
    ],
)
def test_a_table_of_another_shape_is_damage_and_names_the_file(text: str, use: str) -> None:
    file = offsets_file(disk_with(consumerOffset=text))
    with pytest.raises(StoreDamaged, match=r"config/consumerOffset\.json"):
        getattr(file, use)()


@pytest.mark.parametrize("row", ["7", '"x"', "[]", "{}", '{"topicName":"T","perm":"x"}'])
def test_a_row_of_another_shape_is_damage_and_names_the_file(row: str) -> None:
    file = topics_file(disk_with(topics='{"topicConfigTable":{"T":' + row + "}}"))
    with pytest.raises(StoreDamaged, match=r"config/topics\.json"):
        file.entries("topicConfigTable", TopicConfig)


def test_unknown_fields_are_kept() -> None:
    disk = disk_with(topics=TOPICS)
    file = topics_file(disk)
    topics = file.entries("topicConfigTable", TopicConfig)
    topics["TopicTest"] = msgspec.structs.replace(topics["TopicTest"], perm=4)
    topics["New"] = TopicConfig(topic_name="New")
    file.save(topicConfigTable=topics, dataVersion=file.version().next(5))
    content = saved(disk, "topics.json")
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


def test_a_save_keeps_the_previous_version() -> None:
    disk = MemoryDisk()
    file = delay_offsets_file(disk)
    for number in range(1, 4):
        file.save(offsetTable={1: number})
    assert saved(disk, "delayOffset.json") == {"offsetTable": {"1": 3}}
    assert saved(disk, "delayOffset.json.bak") == {"offsetTable": {"1": 2}}
    assert disk.names("config") == ["delayOffset.json", "delayOffset.json.bak"]


def test_a_save_over_an_invalid_file_keeps_the_valid_backup() -> None:
    disk = disk_with(delayOffset="{broken", delayOffset_bak=DELAYS)
    delay_offsets_file(disk).save(offsetTable={1: 101})
    assert saved(disk, "delayOffset.json") == {"dataVersion": {}, "offsetTable": {"1": 101}}
    assert read_file(disk, "config/delayOffset.json.bak") == DELAYS.encode()


def twice_saved(disk: FaultyDisk) -> ConfigFile:
    file = delay_offsets_file(disk)
    file.save(offsetTable={1: 1})
    file.save(offsetTable={1: 2})
    return file


@pytest.mark.parametrize("survival", ["none", "all", "mixed", "scrambled"])
def test_a_power_cut_at_any_call_of_a_save_leaves_the_old_or_the_new(survival: Survival) -> None:
    for call in itertools.count(1):
        disk = FaultyDisk(seed=call)
        file = twice_saved(disk)
        disk.power_cut_at = disk.calls + call
        done = False
        try:
            file.save(offsetTable={1: 3})
            done = disk.calls < disk.power_cut_at
        except PowerCut:
            pass
        for seed in range(5):
            after = disk.power_cut(Random(seed), survival)
            assert delay_offsets_file(after).int_keys() in ([{1: 3}] if done else [{1: 2}, {1: 3}])
        if done:
            break
    assert call > 8


def test_a_fault_at_any_call_of_a_save_leaves_the_old_or_the_new() -> None:
    for call in itertools.count(1):
        disk = FaultyDisk(seed=call)
        file = twice_saved(disk)
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
