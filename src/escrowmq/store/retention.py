"""Retention: remove old segments of the log, by age once a day and earlier if the disk fills up.

The age of a segment is measured (store/log_ages.py): how long a broker has been seen to run since
the segment was complete. A clock that jumps, or that is wrong at one start and right at the next,
does not change it, so nothing is removed because of a clock.

    disk used more than      effect
    expire_ratio             segments older than the retention time are removed at any hour
    force_expire_ratio       the oldest segments are removed whatever their age
    refuse_ratio             new messages are refused as well

A segment is removed only if a checkpoint covers it and if it contains no open half and no message
that waits for its delivery (`oldest_needed_offset`). Queue and index files that describe
only removed segments go with the next checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable

from escrowmq.config import StoreConfig
from escrowmq.message.record import LogOffset
from escrowmq.store.disk import DiskUsage
from escrowmq.store.store import MessageStore

SEGMENTS_PER_PASS_MAX = 10  # no checkpoint is made during a pass, so it must be short


def should_remove(age_ms: int, *, hour: int, used_ratio: float, config: StoreConfig) -> bool:
    """Return whether a segment that is at least `age_ms` old is to be removed now."""
    if used_ratio > config.force_expire_ratio:
        return True
    if age_ms <= config.retention_ms:
        return False
    return hour in config.delete_hours or used_ratio > config.expire_ratio


def update_disk_state(store: MessageStore, usage: DiskUsage) -> None:
    """Let the store accept or refuse messages, depending on how full the disk is."""
    store.has_disk_space = usage.used_ratio <= store.config.refuse_ratio


def is_expired(
    store: MessageStore,
    *,
    age_of: Callable[[int], int],
    hour: int,
    usage: DiskUsage,
    oldest_needed_offset: LogOffset | None = None,
) -> bool:
    """Return whether the oldest segment is to be removed now.

    `age_of`: how many milliseconds ago, at least, the log below an offset was complete. `hour`: the
    hour of the day in local time. Segments that contain `oldest_needed_offset` or anything above it
    stay. The disk state of the store is updated as well, see `update_disk_state`.
    """
    config, used_ratio = store.config, usage.used_ratio
    update_disk_state(store, usage)
    base = store.begin
    end = base + config.segment_bytes
    # The segment that is being written stays. A segment without a checkpoint stays too: its queue
    # entries may not be durable, and without the log they could not be restored.
    if end >= store.end or end > store.checkpointed_offset:
        return False
    if oldest_needed_offset is not None and end > oldest_needed_offset:
        return False
    return should_remove(age_of(end), hour=hour, used_ratio=used_ratio, config=config)


def expire(
    store: MessageStore,
    *,
    age_of: Callable[[int], int],
    hour: int,
    read_usage: Callable[[], DiskUsage],
    oldest_needed_offset: LogOffset | None = None,
) -> int:
    """Remove expired segments, the oldest first. Return how many."""
    removed = 0
    while removed < SEGMENTS_PER_PASS_MAX and is_expired(
        store,
        age_of=age_of,
        hour=hour,
        usage=read_usage(),
        oldest_needed_offset=oldest_needed_offset,
    ):
        store.remove_oldest_file()
        removed += 1
    return removed
