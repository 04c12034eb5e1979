"""How far each group has read each queue: the offset it wants next.

    topic@group -> queue id -> queue offset        as consumerOffset.json has it

Whoever calls has checked that topic, group and queue exist; that bounds this table.
"""

from __future__ import annotations

from collections.abc import Mapping

from escrowmq.message.record import QueueOffset

_SEPARATOR = "@"  # in neither name


class ConsumerOffsets:
    """`version` moves with every change; what `dump` gave is saved if it has not moved since."""

    def __init__(self, table: Mapping[str, Mapping[int, int]] | None = None) -> None:
        self.version = 0
        self._table: dict[str, dict[int, int]] = {}
        self._topics: dict[str, set[str]] = {}  # by group
        self._resets: dict[tuple[str, str, int], QueueOffset] = {}
        for key, queues in (table or {}).items():
            topic, separator, group = key.partition(_SEPARATOR)
            self._table[key] = dict(queues)
            if separator:  # a key of another kind is only carried along
                self._topics.setdefault(group, set()).add(topic)

    def dump(self) -> dict[str, dict[int, int]]:
        """A copy, to be saved while commits go on."""
        return {key: dict(queues) for key, queues in self._table.items()}

    def commit(self, topic: str, group: str, queue_id: int, queue_offset: int) -> bool:
        """Whether it was taken.

        A negative offset is a client that does not know yet. While a reset waits to be
        picked up, commits speak of a position that the group is about to leave. Going back is fine.
        """
        if queue_offset < 0 or (self._resets and (topic, group, queue_id) in self._resets):
            return False
        self._put(topic, group, queue_id, queue_offset)
        return True

    def query(self, topic: str, group: str, queue_id: int) -> QueueOffset | None:
        found = self._table.get(topic + _SEPARATOR + group, {}).get(queue_id)
        return None if found is None else QueueOffset(found)

    def queue_offsets(self, topic: str, group: str) -> dict[int, QueueOffset]:
        table = self._table.get(topic + _SEPARATOR + group, {})
        return {queue_id: QueueOffset(found) for queue_id, found in table.items()}

    def group_offsets(self, group: str) -> dict[str, dict[int, QueueOffset]]:
        """By topic."""
        return {
            topic: self.queue_offsets(topic, group) for topic in sorted(self._topics.get(group, ()))
        }

    def topics_of(self, group: str) -> list[str]:
        """The topics that a group has read."""
        return list(self._topics.get(group, ()))

    def groups_of(self, topic: str) -> list[str]:
        """The groups that have read a topic."""
        return sorted(group for group, topics in self._topics.items() if topic in topics)

    def clone(self, topic: str, from_group: str, to_group: str) -> None:
        """Another group goes on where this one is."""
        for queue_id, queue_offset in self.queue_offsets(topic, from_group).items():
            self._put(topic, to_group, queue_id, queue_offset)

    def remove_group(self, group: str) -> None:
        for topic in self._topics.pop(group, set()):
            self._drop(topic, group)

    def remove_topic(self, topic: str) -> None:
        for group in self.groups_of(topic):
            topics = self._topics[group]
            topics.discard(topic)
            if not topics:
                del self._topics[group]
            self._drop(topic, group)

    def reset(self, topic: str, group: str, queue_id: int, queue_offset: int) -> None:
        """Send the group elsewhere: it learns of it with its next pull of this queue."""
        self._put(topic, group, queue_id, queue_offset)
        self._resets[topic, group, queue_id] = QueueOffset(queue_offset)

    def set_offset(self, topic: str, group: str, queue_id: int, queue_offset: int) -> None:
        """The same for a group of which nobody is connected: it begins there when it comes."""
        self._put(topic, group, queue_id, queue_offset)
        self._resets.pop((topic, group, queue_id), None)

    def take_reset(self, topic: str, group: str, queue_id: int) -> QueueOffset | None:
        """Where to send the pull that asks, once."""
        return self._resets.pop((topic, group, queue_id), None) if self._resets else None

    def _put(self, topic: str, group: str, queue_id: int, queue_offset: int) -> None:
        key = topic + _SEPARATOR + group
        queues = self._table.get(key)
        if queues is None:
            queues = self._table[key] = {}
            self._topics.setdefault(group, set()).add(topic)
        if queues.get(queue_id) != queue_offset:
            queues[queue_id] = queue_offset
            self.version += 1

    def _drop(self, topic: str, group: str) -> None:
        del self._table[topic + _SEPARATOR + group]
        for key in [key for key in self._resets if key[:2] == (topic, group)]:
            del self._resets[key]
        self.version += 1


def initial_offset(
    committed: QueueOffset | None, min_offset: int, set_zero_if_not_found: bool, is_young: bool
) -> QueueOffset | None:
    """Where a group begins to read a queue; None leaves it to the client (its first or last).

    In a queue that still has all its messages, not far from the end of the log, it is zero, even
    for a group that wants only what is new: what was sent just before it connected is not skipped.
    An empty queue is young.
    """
    if committed is not None:
        return committed
    if set_zero_if_not_found and min_offset <= 0 and is_young:
        return QueueOffset(0)
    return None
