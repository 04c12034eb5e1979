"""Committed offsets: for each group and queue, the queue offset of the next message to read.

    topic@group -> queue id -> queue offset        the format of consumerOffset.json

Callers check that topic, group and queue exist before they commit. A client could still commit for
every pair of a group and a queue, so the number of offsets is limited.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Final

import msgspec

from escrowmq.errors import TableFull
from escrowmq.message.record import QueueOffset

OFFSETS_MAX: Final = 200_000
_SEPARATOR = "@"  # neither topics nor groups may contain it
_Resets = dict[int, QueueOffset]


class ConsumerOffsets:
    """The committed offsets of all groups.

    `version` grows with every change. Compare it with its value at the time of `dump` to find out
    whether there is something new to save.
    """

    def __init__(
        self,
        table: Mapping[str, Mapping[int, int]] | None = None,
        *,
        offsets_max: int = OFFSETS_MAX,
    ) -> None:
        self.version = 0
        self.offsets_max = offsets_max
        self.refused = 0  # commits, because there are too many offsets
        self._table: dict[str, dict[int, int]] = {}
        self._topics: dict[str, set[str]] = {}  # by group
        self._resets: dict[str, _Resets] = {}  # with the keys of the table
        # Functions that undo each change since `begin_changes`, to be called in reverse.
        self._undo_steps: list[Callable[[], None]] | None = None
        for key, queues in (table or {}).items():
            topic, separator, group = key.partition(_SEPARATOR)
            self._table[key] = dict(queues)
            if separator:  # keys of another form are preserved but not used
                self._topics.setdefault(group, set()).add(topic)
        self._count = _count_offsets(self._table)

    def __len__(self) -> int:
        """Return the number of offsets, one for each group and queue."""
        return self._count

    def dump(self) -> dict[str, dict[int, int]]:
        """Return a copy."""
        return {key: dict(queues) for key, queues in self._table.items()}

    def encode(self) -> bytes:
        """Return all offsets as JSON, to be saved. There may be hundreds of thousands."""
        return msgspec.json.encode(self._table)

    def begin_changes(self) -> None:
        """Remember what an administrator changes from now on, so that `end_changes` can undo it.

        No offset may be committed in between.
        """
        self._undo_steps = []

    def end_changes(self, *, is_kept: bool) -> None:
        """Keep what was changed since `begin_changes`, or undo it because it was not saved."""
        steps, self._undo_steps = self._undo_steps or [], None
        if is_kept:
            return
        for undo in reversed(steps):
            undo()
        self.version += 1  # the file may have what is undone here, so it has to be saved again

    def _restore(
        self, topic: str, group: str, queues: dict[int, int] | None, resets: _Resets | None
    ) -> None:
        """Set the offsets of a group in a topic to what they were; None if there were none."""
        key = topic + _SEPARATOR + group
        if key in self._table:
            self._drop(topic, group)
        if queues is not None:
            self._table[key] = queues
            self._count += len(queues)
            self._topics.setdefault(group, set()).add(topic)
        if resets is not None:
            self._resets[key] = resets

    def commit(self, topic: str, group: str, queue_id: int, queue_offset: int) -> bool:
        """Store an offset. Return whether it was accepted.

        A negative offset means that the client does not know its own yet. While a reset is waiting
        for the group, commits are refused: they belong to the position that the group is about to
        leave. A lower offset than before is accepted. Raises TableFull if there are too many
        offsets to store another one.
        """
        if queue_offset < 0 or (
            self._resets and queue_id in self._resets.get(topic + _SEPARATOR + group, ())
        ):
            return False
        if self._count >= self.offsets_max and self.query(topic, group, queue_id) is None:
            self.refused += 1
            raise TableFull(
                f"the offset of group {group} for queue {queue_id} of topic {topic} is not stored: "
                f"there are escrowOffsetsMax={self.offsets_max} offsets or more; delete groups, or "
                "raise the limit"
            )
        self._put(topic, group, queue_id, queue_offset)
        return True

    def query(self, topic: str, group: str, queue_id: int) -> QueueOffset | None:
        """Return the committed offset; None if the group has not committed any for this queue."""
        queue_offset = self._table.get(topic + _SEPARATOR + group, {}).get(queue_id)
        return None if queue_offset is None else QueueOffset(queue_offset)

    def queue_offsets(self, topic: str, group: str) -> dict[int, QueueOffset]:
        """Return the committed offsets by queue id."""
        table = self._table.get(topic + _SEPARATOR + group, {})
        return {queue_id: QueueOffset(queue_offset) for queue_id, queue_offset in table.items()}

    def group_offsets(self, group: str) -> dict[str, dict[int, QueueOffset]]:
        """Return the committed offsets of a group by topic and queue id."""
        return {
            topic: self.queue_offsets(topic, group) for topic in sorted(self._topics.get(group, ()))
        }

    def topics_of(self, group: str) -> list[str]:
        """Return the topics for which a group has committed offsets."""
        return list(self._topics.get(group, ()))

    def groups_of(self, topic: str) -> list[str]:
        """Return the groups that have committed offsets for a topic, sorted."""
        return sorted(group for group, topics in self._topics.items() if topic in topics)

    def put_topics(self, group: str, offsets: Mapping[str, Mapping[int, int]]) -> None:
        """Set offsets of a group in many topics, at once; `offsets` has them by topic and queue."""
        table, suffix = self._table, _SEPARATOR + group
        before = {topic: table.get(topic + suffix) for topic in offsets}
        resets = {
            topic: dict(self._resets[topic + suffix])
            for topic in offsets
            if self._resets and topic + suffix in self._resets
        }
        for topic, queues in offsets.items():
            # A new dict, so that `before` keeps what there was.
            table[topic + suffix] = {**(before[topic] or {}), **queues}
            self._count += len(table[topic + suffix]) - len(before[topic] or ())
        if offsets:
            self._topics.setdefault(group, set()).update(offsets)
            self.version += 1

        def undo() -> None:
            for topic, queues in before.items():
                self._restore(topic, group, queues, resets.get(topic))

        if self._undo_steps is not None:
            self._undo_steps.append(undo)

    def remove_group(self, group: str) -> None:
        """Remove all offsets of a group, at once: it may have offsets of ten thousand topics."""
        topics = self._topics.pop(group, None)
        if not topics:
            return
        take, suffix = self._table.pop, _SEPARATOR + group
        removed = {topic: take(topic + suffix) for topic in topics}
        removed_resets = {}
        if self._resets:
            removed_resets = {topic: self._resets.pop(topic + suffix, None) for topic in topics}
        self._count -= _count_offsets(removed)
        self.version += 1

        def undo() -> None:
            for topic, queues in removed.items():
                self._restore(topic, group, queues, removed_resets.get(topic))

        if self._undo_steps is not None:
            self._undo_steps.append(undo)

    def remove_topic(self, topic: str) -> None:
        for group in self.groups_of(topic):
            self._drop(topic, group)

    def reset(self, topic: str, group: str, offsets: Mapping[int, int]) -> None:
        """Move a connected group to other offsets. Its next pull of each queue is sent there."""
        self._put_all(topic, group, offsets)
        resets = self._resets.setdefault(topic + _SEPARATOR + group, {})
        resets.update((queue_id, QueueOffset(offset)) for queue_id, offset in offsets.items())

    def set_offsets(self, topic: str, group: str, offsets: Mapping[int, int]) -> None:
        """Move a group without connected members: it begins at these offsets when it connects."""
        self._put_all(topic, group, offsets)
        if topic + _SEPARATOR + group in self._resets:
            for queue_id in offsets:
                self.take_reset(topic, group, queue_id)

    @property
    def has_resets(self) -> bool:
        """Return whether any reset is waiting."""
        return bool(self._resets)

    def take_reset(self, topic: str, group: str, queue_id: int) -> QueueOffset | None:
        """Return the offset of a waiting reset, once; None if there is none."""
        if not self._resets:
            return None
        key = topic + _SEPARATOR + group
        resets = self._resets.get(key, {})
        queue_offset = resets.pop(queue_id, None)
        if not resets:
            self._resets.pop(key, None)
        return queue_offset

    def _put(self, topic: str, group: str, queue_id: int, queue_offset: int) -> None:
        key = topic + _SEPARATOR + group
        queues = self._table.get(key)
        if queues is None:
            queues = self._table[key] = {}
            self._topics.setdefault(group, set()).add(topic)
        if queues.get(queue_id) != queue_offset:
            self._count += queue_id not in queues
            queues[queue_id] = queue_offset
            self.version += 1

    def _put_all(self, topic: str, group: str, offsets: Mapping[int, int]) -> None:
        if not offsets:
            return
        key = topic + _SEPARATOR + group
        if self._undo_steps is not None:
            queues, resets = self._table.get(key), self._resets.get(key)
            self._undo_steps.append(
                partial(
                    self._restore,
                    topic,
                    group,
                    None if queues is None else dict(queues),
                    None if resets is None else dict(resets),
                )
            )
        queues = self._table.setdefault(key, {})
        before = len(queues)
        # The cursors of transactions are set every second, and rarely change.
        if any(queues.get(queue_id) != offset for queue_id, offset in offsets.items()):
            queues.update(offsets)
            self.version += 1
        self._count += len(queues) - before
        self._topics.setdefault(group, set()).add(topic)

    def _drop(self, topic: str, group: str) -> None:
        key = topic + _SEPARATOR + group
        queues, resets = self._table.pop(key), self._resets.pop(key, None)
        if self._undo_steps is not None:
            self._undo_steps.append(partial(self._restore, topic, group, queues, resets))
        self._count -= len(queues)
        topics = self._topics[group]
        topics.discard(topic)
        if not topics:
            del self._topics[group]
        self.version += 1


def _count_offsets(table: Mapping[str, Mapping[int, int]]) -> int:
    return sum(map(len, table.values()))


def initial_offset(
    committed: QueueOffset | None, min_offset: int, set_zero_if_not_found: bool, is_young: bool
) -> QueueOffset | None:
    """Return where a group begins to read a queue.

    None leaves the choice to the client, which begins at the first or the last message. A queue is
    young if it still has all its messages and they are close to the end of the log, or if it is
    empty. Groups begin to read it at 0 even if they want only new messages: otherwise a message
    that was sent just before the group connected would be skipped.
    """
    if committed is not None:
        return committed
    if set_zero_if_not_found and min_offset <= 0 and is_young:
        return QueueOffset(0)
    return None
