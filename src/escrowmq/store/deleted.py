"""Topics that were deleted: how far into the log their records count no more.

The log keeps a deleted topic's records until they expire, and recovery gives every record of the
log its queue entry. So a deletion is noted before anything is removed, and the note stays until the
last of these records is gone: `config/escrowDeletedTopics.json`, topic -> log offset.
"""

from __future__ import annotations

from escrowmq.store.configfiles import ConfigFile
from escrowmq.store.disk import Disk

_TABLE = "deletedTopics"


class DeletedTopics:
    def __init__(self, disk: Disk) -> None:
        self._file = ConfigFile(disk, "escrowDeletedTopics.json")
        self._ends = self._file.marks(_TABLE)

    def covers(self, topic: str, log_offset: int) -> bool:
        """Whether a record of this topic, there in the log, was deleted with it."""
        return bool(self._ends) and log_offset < self._ends.get(topic, 0)

    def end_of(self, topic: str) -> int:
        return self._ends.get(topic, 0)

    def __contains__(self, topic: str) -> bool:
        return topic in self._ends

    def note(self, topic: str, *, log_begin: int, log_end: int) -> None:
        """From now on, also after a crash, nothing below the end of the log is of this topic."""
        self._save({**self._kept(log_begin, log_end), topic: log_end})

    def opened(self, *, log_begin: int, log_end: int) -> None:
        """Once the log's end is known: it may be before what a crash has torn off, and what is
        appended there must not count as deleted."""
        kept = self._kept(log_begin, log_end)
        if kept != self._ends:
            self._save(kept)

    def _kept(self, log_begin: int, log_end: int) -> dict[str, int]:
        return {topic: min(end, log_end) for topic, end in self._ends.items() if end > log_begin}

    def _save(self, ends: dict[str, int]) -> None:
        self._file.save(**{_TABLE: ends})
        self._ends = ends
