"""All consume queues of a store, by topic and queue id."""

from __future__ import annotations

import re
from collections.abc import Iterator

from escrowmq.errors import RecordRefused, StoreFailed
from escrowmq.message.record import TOPIC_BYTES_MAX
from escrowmq.store.consumequeue import DIRECTORY, ConsumeQueue, queue_directories
from escrowmq.store.deleted import DeletedTopics
from escrowmq.store.disk import Disk, OpenViews

# RocketMQ's rule; here it also keeps a topic from naming a path outside the store.
_TOPIC = re.compile(r"[%|a-zA-Z0-9_-]+")


class QueueTable:
    def __init__(
        self, disk: Disk, views: OpenViews, deleted: DeletedTopics, *, file_bytes: int
    ) -> None:
        self._disk = disk
        self.deleted = deleted
        self._views = views
        self._file_bytes = file_bytes
        self._queues: dict[tuple[str, int], ConsumeQueue] = {}
        self._is_closed = False
        self.dirty: set[ConsumeQueue] = set()  # those with entries that no file has yet

    def __iter__(self) -> Iterator[ConsumeQueue]:
        return iter(self._queues.values())

    def __len__(self) -> int:
        return len(self._queues)

    def find(self, topic: str, queue_id: int) -> ConsumeQueue | None:
        if self._is_closed:
            raise StoreFailed("the store is closed")
        return self._queues.get((topic, queue_id))

    def find_or_make(self, topic: str, queue_id: int) -> ConsumeQueue:
        queue = self._queues.get((topic, queue_id))
        if queue is None:
            refuse_bad_name(topic, queue_id)
            queue = ConsumeQueue(
                self._disk, self._views, topic, queue_id, file_bytes=self._file_bytes
            )
            self._queues[topic, queue_id] = queue
        return queue

    def close(self) -> None:
        """It looks empty from now on to nobody: whoever asks is refused."""
        self._is_closed = True

    def forget(self, queue: ConsumeQueue) -> None:
        """A queue that was made for a message which then was refused."""
        if queue.is_empty and not queue.next:
            self._queues.pop((queue.topic, queue.queue_id), None)

    def open(self) -> None:
        self._queues.clear()
        self.dirty.clear()
        for topic, queue_id in queue_directories(self._disk):
            if is_topic_name(topic):  # else somebody else's
                self.find_or_make(topic, queue_id)
        for queue in self:
            queue.refuse_other_lengths()
        # A crash may have left some files of a topic that was being deleted.
        for topic in {queue.topic for queue in self if queue.topic in self.deleted}:
            self._remove([q for q in self.of(topic) if q.is_older_than(self.deleted.end_of(topic))])

    def of(self, topic: str) -> list[ConsumeQueue]:
        return [queue for queue in self if queue.topic == topic]

    def remove_topic(self, topic: str) -> int:
        """The files of all its queues: how many queues those were."""
        gone = self.of(topic)
        self._remove(gone)
        return len(gone)

    def _remove(self, queues: list[ConsumeQueue]) -> None:
        for queue in queues:
            self._queues.pop((queue.topic, queue.queue_id), None)
            self.dirty.discard(queue)
            queue.delete()
        for topic in {queue.topic for queue in queues}:
            directory = f"{DIRECTORY}/{topic}"
            if self._disk.exists(directory):
                self._disk.sync_directory(directory)
                if not self._disk.names(directory):
                    self._disk.remove(directory)

    def believe(self, log_end: int) -> bool:
        """Trust the files as far as they speak of records below `log_end`; wipe the rest.
        Whether none of them is missing or cut short."""
        whole = True
        for queue in self:
            whole = queue.mend_lengths() and whole
            end = queue.find_end(log_end)
            if queue.has_leftovers():
                queue.rewind(end)
        return whole

    def totals(self, log_begin: int = 0) -> tuple[int, int, int]:
        """How many queues have had a message, how many messages all of them together, and the
        sum of where they begin, once what lies below `log_begin` is removed."""
        used = [queue for queue in self if queue.next]
        firsts = [queue.first_after(log_begin) for queue in used]
        return len(used), sum(queue.next for queue in used), sum(firsts)


def is_topic_name(topic: str) -> bool:
    return bool(_TOPIC.fullmatch(topic)) and len(topic) <= TOPIC_BYTES_MAX


def refuse_bad_name(topic: str, queue_id: int) -> None:
    if not is_topic_name(topic):
        raise RecordRefused(f"topic {topic[:300]!r}: only letters, digits and %|_- name one")
    if not 0 <= queue_id < 1 << 31:
        raise RecordRefused(f"queue id {queue_id} is not a queue's")
