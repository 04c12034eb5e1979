"""Files in config/*.json: topics, consumer groups and offsets, in RocketMQ's format.

Each file has a copy beside it (`.bak`), which is written before the file itself. It is read, and
this is reported, if the file is missing, empty or damaged; so nothing that was saved is lost with
one file. The first field of a file, `escrowChecksum`, covers the bytes behind it. RocketMQ ignores
this field and writes files without it, which are read as they are.

Fields of a file that EscrowMQ does not use are kept and written back unchanged.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable
from typing import Any, Final, NamedTuple, TypeVar

import msgspec

from escrowmq.errors import ProtocolError, StoreDamaged, StoreError
from escrowmq.message.names import LIGHT_QUEUE_PREFIX
from escrowmq.message.record import crc32
from escrowmq.message.topic_config import ConfigEntry, DataVersion
from escrowmq.parsing import parse_lenient_json
from escrowmq.store.damage import DamageKind, DamageReports
from escrowmq.store.disk import Disk, read_file, replace_file

CONFIG_DIRECTORY: Final = "config"
CHECKSUM_FIELD: Final = "escrowChecksum"
# Longer files are written without line breaks: to format offsets of ten thousand topics takes as
# long as to encode them, on the event loop.
FORMATTED_BYTES_MAX: Final = 1 << 20
_MISSING: Final = "is missing"
_CHECKSUM_DAMAGED: Final = "its checksum is damaged, but not its content"
_CHECKSUM_LINE: Final = re.compile(rb'\{\n  "escrowChecksum": "([0-9a-f]{8})",\n')

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
    """One file and its content as plain values. `save` writes it and its copy, .bak."""

    def __init__(self, disk: Disk, name: str, damage: DamageReports | None = None) -> None:
        """Read the file or its copy.

        With `damage`, a damaged file is reported there and replaced by its copy. Raises
        StoreDamaged if both are damaged.
        """
        self._disk = disk
        self._path = f"{CONFIG_DIRECTORY}/{name}"
        self._damage = damage
        # False if the file itself was missing or damaged: what is in its copy may be older.
        self.was_intact = True
        self.has_checksum = False  # this broker has written the file, and nobody has edited it
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

    def names(self, key: str) -> list[str]:
        return _convert(self.content.get(key) or [], list[str], self._path)

    def int_keys(self, key: str = "offsetTable") -> dict[int, int]:
        return _convert(self.table(key), dict[int, int], self._path)

    def str_keys(self, key: str) -> dict[str, int]:
        return _convert(self.table(key), dict[str, int], self._path)

    def save(self, **tables: Any) -> None:
        """Replace tables of the file, durably. Entries and versions are written like RocketMQ's.

        A client that creates a topic waits for this, and the file may hold ten thousand topics. So
        msgspec encodes it instead of the json module. Raises StoreError; the file may be the old
        one or the new one then, and `content` is unchanged.
        """
        content = {**self.content, **{name: to_plain(table) for name, table in tables.items()}}
        text = _encode(content)
        # The copy comes first: if the file itself cannot be written, the next start reads what was
        # there before, as if the change had not been made.
        replace_file(self._disk, self._path + ".bak", text)
        replace_file(self._disk, self._path, text)
        self.content = content

    def _load(self) -> dict[str, Any]:
        disk, path = self._disk, self._path
        main, copy = _ConfigText.read(disk, path), _ConfigText.read(disk, path + ".bak")
        self.has_checksum = main.checksum is not None
        if main.content is not None:
            if copy.has_damaged_checksum_of(main):
                self._restore(main.text, _CHECKSUM_DAMAGED, ".bak")
            elif main.has_damaged_checksum_of(copy):
                self._restore(copy.text, _CHECKSUM_DAMAGED)
            elif copy.content is None and copy.problem != _MISSING:
                self._restore(main.text, f"{copy.problem}; the file itself is right", ".bak")
            return main.content
        self.was_intact = False
        if copy.content is not None:
            self._restore(copy.text, f"{main.problem}; its copy {self._path}.bak was read instead")
            return copy.content
        if main.text or copy.text:
            raise StoreDamaged(
                f"{self._path} {main.problem}, and its copy {self._path}.bak {copy.problem}; "
                "restore one of them from a backup, or remove both to start without their content"
            )
        return {}

    def _restore(self, text: bytes, description: str, suffix: str = "") -> None:
        """Report the file, or its copy, and write it again."""
        path = self._path + suffix
        if self._damage is not None:
            self._damage.add(DamageKind.CONFIG, path, description, is_repaired=True)
            with contextlib.suppress(StoreError):  # the next save writes it
                replace_file(self._disk, path, text)


class _ConfigText(NamedTuple):
    """The text of a file, taken apart. `content` is None if it cannot be used."""

    text: bytes
    checksum: bytes | None
    body: bytes  # what the checksum covers
    content: dict[str, Any] | None
    problem: str

    @classmethod
    def read(cls, disk: Disk, path: str) -> _ConfigText:
        try:
            return cls.parse(read_file(disk, path))
        except StoreError as error:
            return cls(b"?", None, b"", None, f"cannot be read: {error}")

    @classmethod
    def parse(cls, text: bytes | None) -> _ConfigText:
        if not text:
            return cls(b"", None, b"", None, _MISSING if text is None else "is empty")
        line = _CHECKSUM_LINE.match(text)
        checksum = None if line is None else line[1]
        body = text.split(b"\n", 2)[-1]  # behind the line with the checksum, damaged or not
        if checksum is not None and checksum != _checksum(body):
            problem = (
                f"has a wrong checksum (to use a file that you have edited, remove the line with "
                f"{CHECKSUM_FIELD})"
            )
            return cls(text, checksum, body, None, problem)
        content = _parse(text)
        if content is None:
            return cls(text, checksum, body, None, "is not a JSON object")
        content.pop(CHECKSUM_FIELD, None)
        return cls(text, checksum, body, content, "")

    def has_damaged_checksum_of(self, other: _ConfigText) -> bool:
        """Return whether only the first line, with the checksum, differs from the other file."""
        return (
            self.content is not None
            and self.checksum is None
            and other.content is not None
            and other.checksum is not None
            and self.body == other.body
        )


def config_problems(disk: Disk, path: str) -> tuple[str, str]:
    """Return what is wrong with a file and with its copy; an empty text if nothing is.

    A file that is missing cannot be read; a copy that is missing is no problem.
    """
    main, copy = _ConfigText.read(disk, path), _ConfigText.read(disk, path + ".bak")
    copy_problem = "" if main.content is not None and copy.problem == _MISSING else copy.problem
    return (
        _CHECKSUM_DAMAGED if main.has_damaged_checksum_of(copy) else main.problem,
        _CHECKSUM_DAMAGED if copy.has_damaged_checksum_of(main) else copy_problem,
    )


def _checksum(body: bytes) -> bytes:
    return b"%08x" % crc32(body)


def _encode(content: dict[str, Any]) -> bytes:
    """Return the text of a file, with its checksum as the first field."""
    text = msgspec.json.encode(content)
    if len(text) <= FORMATTED_BYTES_MAX:
        text = msgspec.json.format(text)
    if not content:
        return text
    body = text.removeprefix(b"{").removeprefix(b"\n")
    return b'{\n  "%s": "%s",\n%s' % (CHECKSUM_FIELD.encode(), _checksum(body), body)


TOPIC_TABLE_KEY: Final = "topicConfigTable"
# The names of topics that were deleted last. They may still have queues: a crash can interrupt a
# deletion, and a half message of a deleted topic can be committed. Any other queue without a topic
# means that the file was replaced by an older one.
REMOVED_TOPICS_KEY: Final = "escrowRemovedTopics"


def topics_file(disk: Disk, damage: DamageReports | None = None) -> ConfigFile:
    """Open the file with `topicConfigTable`: TopicConfig by name."""
    return ConfigFile(disk, "topics.json", damage)


def missing_topics(file: ConfigFile, queues: Iterable[tuple[str, int]]) -> dict[str, int]:
    """Return the topics of queues that topics.json should have, with their numbers of queues."""
    topics = {*file.table(TOPIC_TABLE_KEY), *file.names(REMOVED_TOPICS_KEY)}
    queue_counts: dict[str, int] = {}
    for topic, queue_id in queues:
        if topic not in topics and not topic.startswith(LIGHT_QUEUE_PREFIX):
            queue_counts[topic] = max(queue_counts.get(topic, 0), queue_id + 1)
    return dict(sorted(queue_counts.items()))


def groups_file(disk: Disk, damage: DamageReports | None = None) -> ConfigFile:
    """Open the file with `subscriptionGroupTable`: GroupConfig by name."""
    return ConfigFile(disk, "subscriptionGroup.json", damage)


def offsets_file(disk: Disk, damage: DamageReports | None = None) -> ConfigFile:
    """Open the file with `offsetTable`: how far each group has read each queue."""
    return ConfigFile(disk, "consumerOffset.json", damage)


def delay_offsets_file(disk: Disk, damage: DamageReports | None = None) -> ConfigFile:
    """Open the file with `offsetTable`: how far each delay level has been delivered."""
    return ConfigFile(disk, "delayOffset.json", damage)


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
    if isinstance(value, msgspec.Raw):
        return value  # its owner has encoded it
    if isinstance(value, dict):
        if type(next(iter(value.values()), None)) is int:
            # The offsets of a topic, one for each queue. msgspec writes such a table as it is; to
            # convert each number took a second for a million of them, and three times the memory.
            return dict(value)
        return {str(key): to_plain(item) for key, item in value.items()}
    return msgspec.to_builtins(value)


# --- deleted topics ------------------------------------------------------------------------------

_DELETED_TOPICS_KEY: Final = "deletedTopics"


class DeletedTopics:
    """How far into the log the records of deleted topics no longer count.

    The log keeps the records of a deleted topic until they expire, and recovery gives every record
    its queue entry. So a deletion is saved before anything is removed, and it stays saved until the
    last of these records has expired: config/escrowDeletedTopics.json, topic -> log offset.
    """

    def __init__(self, disk: Disk, damage: DamageReports | None = None) -> None:
        self._file = ConfigFile(disk, "escrowDeletedTopics.json", damage)
        self._log_ends = self._file.str_keys(_DELETED_TOPICS_KEY)

    def is_deleted(self, topic: str, log_offset: int) -> bool:
        """Return whether the record of a topic at a log offset was deleted with the topic."""
        return bool(self._log_ends) and log_offset < self._log_ends.get(topic, 0)

    def deleted_end(self, topic: str) -> int:
        """Return the log offset below which the records of a topic are deleted; 0 if none are."""
        return self._log_ends.get(topic, 0)

    def __contains__(self, topic: str) -> bool:
        return topic in self._log_ends

    def mark_deleted(self, topic: str, *, log_begin: int, log_end: int) -> None:
        """Delete all records of a topic below the end of the log, durably."""
        self._save({**self._remaining(log_begin, log_end), topic: log_end})

    def trim(self, *, log_begin: int, log_end: int) -> None:
        """Adapt the offsets to the log that recovery has found.

        The log may end below an offset that was saved, because a crash has cut it. New records that
        are appended there must not count as deleted.
        """
        remaining = self._remaining(log_begin, log_end)
        if remaining != self._log_ends:
            self._save(remaining)

    def _remaining(self, log_begin: int, log_end: int) -> dict[str, int]:
        return {
            topic: min(end, log_end) for topic, end in self._log_ends.items() if end > log_begin
        }

    def _save(self, log_ends: dict[str, int]) -> None:
        try:
            self._file.save(**{_DELETED_TOPICS_KEY: log_ends})
        except StoreError:
            # The new file may be there nevertheless, and the next start would believe it.
            with contextlib.suppress(StoreError):
                self._file.save(**{_DELETED_TOPICS_KEY: self._log_ends})
            raise
        self._log_ends = log_ends
