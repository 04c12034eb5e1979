"""Topics that were deleted, so that recovery does not restore their queues."""

from __future__ import annotations

from typing import Final

from escrowmq.store.config_files import ConfigFile
from escrowmq.store.damage import DamageReports
from escrowmq.store.disk import Disk

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
        self._file.save(**{_DELETED_TOPICS_KEY: log_ends})
        self._log_ends = log_ends
