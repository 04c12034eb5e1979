"""Consumer groups as they are configured; who is connected is in `consume/groups.py`."""

from __future__ import annotations

import re
from typing import Final

from escrowmq.store.configfiles import ConfigFile, DataVersion, GroupConfig

NAME_LENGTH_MAX: Final = 120
# Those that RocketMQ's own tools and brokers use.
_SYSTEM_GROUPS: Final = (
    "TOOLS_CONSUMER",
    "SELF_TEST_C_GROUP",
    "CID_RMQ_SYS_TRANS",
    "CID_ONSAPI_OWNER",
    "CID_ONSAPI_PERMISSION",
    "CID_ONSAPI_PULL",
    "CID_SYS_RMQ_TRANS",
)
_NAME = re.compile(r"[%|a-zA-Z0-9_-]+")


def is_system_group(name: str) -> bool:
    return name in _SYSTEM_GROUPS


def is_group_name(name: str) -> bool:
    return bool(_NAME.fullmatch(name)) and len(name) <= NAME_LENGTH_MAX


class Groups:
    def __init__(self, file: ConfigFile, *, auto_create: bool) -> None:
        self._file = file
        self.auto_create = auto_create
        self._groups = file.entries("subscriptionGroupTable", GroupConfig)
        self.version: DataVersion = file.version()
        self.dirty = False
        for name in _SYSTEM_GROUPS:
            self._groups.setdefault(name, GroupConfig(group_name=name))

    def find(self, name: str) -> GroupConfig | None:
        return self._groups.get(name)

    def find_or_make(self, name: str, *, now_ms: int) -> GroupConfig | None:
        """None if it may not be made: by the settings, or by its name."""
        found = self._groups.get(name)
        if found is None and self.auto_create and is_group_name(name):
            found = GroupConfig(group_name=name)
            self.put(found, now_ms=now_ms)
        return found

    def put(self, config: GroupConfig, *, now_ms: int) -> None:
        self._groups[config.group_name] = config
        self.version = self.version.next(now_ms)
        self.dirty = True

    def remove(self, name: str, *, now_ms: int) -> bool:
        if self._groups.pop(name, None) is None:
            return False
        self.version = self.version.next(now_ms)
        self.dirty = True
        return True

    def all(self) -> dict[str, GroupConfig]:
        return dict(self._groups)

    def save(self) -> None:
        self._file.save(subscriptionGroupTable=self._groups, dataVersion=self.version)
        self.dirty = False
