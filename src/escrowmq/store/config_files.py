"""Files in config/*.json: topics, consumer groups and offsets, in RocketMQ's format.

Each file has its previous version beside it (`.bak`). It is read if the file itself is missing,
empty or invalid. Fields of a file that EscrowMQ does not use are kept and written back unchanged.
"""

from __future__ import annotations

from typing import Any, Final, TypeVar

import msgspec

from escrowmq.errors import ProtocolError, StoreDamaged
from escrowmq.message.topic_config import ConfigEntry, DataVersion
from escrowmq.parsing import parse_lenient_json
from escrowmq.store.disk import Disk, read_file, replace_file

CONFIG_DIRECTORY: Final = "config"

OffsetTable = dict[str, dict[int, int]]  # "topic@group" -> queue id -> offset


class GroupConfig(ConfigEntry, frozen=True, kw_only=True, rename="camel"):
    """A consumer group, with RocketMQ's field names."""

    group_name: str
    consume_enable: bool = True
    consume_from_min_enable: bool = True
    consume_broadcast_enable: bool = True
    consume_message_orderly: bool = False
    retry_queue_nums: int = 1
    retry_max_times: int = 16
    broker_id: int = 0
    which_broker_when_consume_slowly: int = 1
    notify_consumer_ids_changed_enable: bool = True
    group_sys_flag: int = 0
    consume_timeout_minute: int = 15
    # RocketMQ 5 writes it. It is kept and shown, but delays of retries always follow the levels.
    group_retry_policy: dict[str, Any] = msgspec.field(
        default_factory=lambda: {"type": "CUSTOMIZED"}
    )
    attributes: dict[str, str] = msgspec.field(default_factory=dict)


E = TypeVar("E", bound=ConfigEntry)


class ConfigFile:
    """One file and its content as plain values. `save` keeps the previous version as .bak."""

    def __init__(self, disk: Disk, name: str) -> None:
        self._disk = disk
        self._path = f"{CONFIG_DIRECTORY}/{name}"
        self._is_main_file_valid = False  # the file itself, not its .bak
        self.content = self._load()

    def version(self) -> DataVersion:
        return _convert(self.content.get("dataVersion") or {}, DataVersion, self._path)

    def table(self, key: str) -> dict[str, Any]:
        """Return a table of the file; empty if there is none. Raises StoreDamaged."""
        table = self.content.get(key) or {}
        if not isinstance(table, dict):
            raise StoreDamaged(f"{self._path}: {key} is not a table")
        return table

    def entries(self, key: str, entry_type: type[E]) -> dict[str, E]:
        return {
            name: _convert_entry(row, entry_type, self._path)
            for name, row in self.table(key).items()
        }

    def offsets(self, key: str = "offsetTable") -> OffsetTable:
        return _convert(self.table(key), OffsetTable, self._path)

    def int_keys(self, key: str = "offsetTable") -> dict[int, int]:
        return _convert(self.table(key), dict[int, int], self._path)

    def str_keys(self, key: str) -> dict[str, int]:
        return _convert(self.table(key), dict[str, int], self._path)

    def save(self, **tables: Any) -> None:
        """Replace tables of the file, durably. Entries and versions are written like RocketMQ's.

        A client that creates a topic waits for this, and the file may hold ten thousand topics. So
        the file is not parsed again, and msgspec encodes it instead of the json module.
        """
        # An invalid file must not overwrite its .bak, which may be the only valid version.
        previous = read_file(self._disk, self._path) if self._is_main_file_valid else None
        if previous is not None:
            replace_file(self._disk, self._path + ".bak", previous)
        for name, table in tables.items():
            self.content[name] = to_plain(table)
        text = msgspec.json.format(msgspec.json.encode(self.content))
        replace_file(self._disk, self._path, text)
        self._is_main_file_valid = True

    def _load(self) -> dict[str, Any]:
        has_data = False
        for path in (self._path, self._path + ".bak"):
            data = read_file(self._disk, path)
            has_data = has_data or bool(data)
            content = _parse(data) if data else None
            if content is not None:
                self._is_main_file_valid = path == self._path
                return content
        if has_data:
            raise StoreDamaged(f"{self._path} is invalid, and so is its .bak")
        return {}


def topics_file(disk: Disk) -> ConfigFile:
    """Open the file with `topicConfigTable`: TopicConfig by name."""
    return ConfigFile(disk, "topics.json")


def groups_file(disk: Disk) -> ConfigFile:
    """Open the file with `subscriptionGroupTable`: GroupConfig by name."""
    return ConfigFile(disk, "subscriptionGroup.json")


def offsets_file(disk: Disk) -> ConfigFile:
    """Open the file with `offsetTable`: how far each group has read each queue."""
    return ConfigFile(disk, "consumerOffset.json")


def delay_offsets_file(disk: Disk) -> ConfigFile:
    """Open the file with `offsetTable`: how far each delay level has been delivered."""
    return ConfigFile(disk, "delayOffset.json")


def _parse(data: bytes) -> dict[str, Any] | None:
    try:
        content = parse_lenient_json(data)
    except ProtocolError:
        return None
    return content if isinstance(content, dict) else None


T = TypeVar("T")


def _convert(value: Any, target_type: type[T], path: str) -> T:
    try:
        return msgspec.convert(value, target_type, strict=False)
    except msgspec.ValidationError as error:
        raise StoreDamaged(f"{path}: {error}") from error


def _convert_entry(row: Any, entry_type: type[E], path: str) -> E:
    entry = _convert(row, entry_type, path)
    other = {name: value for name, value in row.items() if name not in _known_fields(entry_type)}
    return msgspec.structs.replace(entry, other=other) if other else entry


def _known_fields(entry_type: type[ConfigEntry]) -> frozenset[str]:
    return frozenset(entry_type.__struct_encode_fields__)


def to_plain(value: Any) -> Any:
    """Return a value that JSON can encode. Fields in `other` become fields of their entry."""
    if isinstance(value, ConfigEntry):
        if value.other is msgspec.UNSET:
            return value  # msgspec encodes it directly, which is faster
        row: dict[str, Any] = msgspec.to_builtins(value)
        return row | row.pop("(other)")
    if isinstance(value, dict):
        return {str(key): to_plain(item) for key, item in value.items()}
    return msgspec.to_builtins(value)
