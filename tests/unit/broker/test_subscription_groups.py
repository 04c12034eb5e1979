"""Subscription groups: creation, names and their file."""

from __future__ import annotations

import pytest

from escrowmq.broker.metadata import SubscriptionGroups, is_valid_group_name
from escrowmq.store.config_files import GroupConfig, groups_file
from escrowmq.testing.disks import MemoryDisk
from tests.support.stores import NOW_MS


def test_the_first_consumer_creates_its_group() -> None:
    groups = SubscriptionGroups(groups_file(MemoryDisk()), auto_create=True)
    created = groups.get_or_create("g", now_ms=NOW_MS)
    assert created == GroupConfig(group_name="g")
    assert groups.find("g") is created
    assert groups.get_or_create("g", now_ms=NOW_MS) is created
    assert groups.version.counter == 1


def test_no_group_is_created_if_automatic_creation_is_disabled() -> None:
    groups = SubscriptionGroups(groups_file(MemoryDisk()), auto_create=False)
    assert groups.get_or_create("g", now_ms=NOW_MS) is None
    assert groups.get_or_create("TOOLS_CONSUMER", now_ms=NOW_MS) is not None


@pytest.mark.parametrize("name", ["", " ", "a/b", "a@b", "a\0", "\u00e4", "x" * 121, "a\n"])
def test_a_group_with_an_invalid_name_is_never_created(name: str) -> None:
    groups = SubscriptionGroups(groups_file(MemoryDisk()), auto_create=True)
    assert not is_valid_group_name(name)
    assert groups.get_or_create(name, now_ms=NOW_MS) is None
    assert not groups.is_dirty


def test_groups_are_loaded_after_a_restart() -> None:
    disk = MemoryDisk()
    groups = SubscriptionGroups(groups_file(disk), auto_create=True)
    groups.put(GroupConfig(group_name="g", retry_max_times=3), now_ms=NOW_MS)
    assert groups.is_dirty
    groups.save()
    assert not groups.is_dirty
    reloaded = SubscriptionGroups(groups_file(disk), auto_create=True)
    assert reloaded.find("g") == GroupConfig(group_name="g", retry_max_times=3)
    assert reloaded.version == groups.version


def test_a_system_group_of_the_file_is_not_overwritten() -> None:
    disk = MemoryDisk()
    groups = SubscriptionGroups(groups_file(disk), auto_create=True)
    groups.put(GroupConfig(group_name="TOOLS_CONSUMER", consume_enable=False), now_ms=NOW_MS)
    groups.save()
    group = SubscriptionGroups(groups_file(disk), auto_create=True).find("TOOLS_CONSUMER")
    assert group is not None
    assert not group.consume_enable
