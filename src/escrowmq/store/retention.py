"""Forget old messages: by age once a day, earlier when the disk fills up.

used more than         what happens
expire_ratio           files past their time go at any hour
force_expire_ratio     the oldest go, whatever their age
refuse_ratio           and no new message is taken
"""

from __future__ import annotations

from collections.abc import Callable

from escrowmq.config import StoreConfig
from escrowmq.message.record import LogOffset
from escrowmq.store.disk import DiskUsage
from escrowmq.store.store import MessageStore

SEGMENTS_PER_PASS_MAX = 10  # files per pass: no checkpoint is made meanwhile


def should_remove(
    modified_ms: int, *, now_ms: int, hour: int, used_ratio: float, config: StoreConfig
) -> bool:
    """Whether a log file that was last written then has to go now. Pure."""
    if used_ratio > config.force_expire_ratio:
        return True
    if now_ms - modified_ms <= config.retention_ms:
        return False
    return hour in config.delete_hours or used_ratio > config.expire_ratio


def update_disk_state(store: MessageStore, usage: DiskUsage) -> None:
    """Whether messages are taken, as full as the disk is."""
    store.has_disk_space = usage.used_ratio <= store.config.refuse_ratio


def is_expired(
    store: MessageStore,
    *,
    now_ms: int,
    hour: int,
    usage: DiskUsage,
    oldest_needed_offset: LogOffset | None = None,
) -> bool:
    """Whether the oldest file has to, as full as the disk is; and whether that is too full to
    take messages. Nothing from `keep_from` on ever has to."""
    config, used_ratio = store.config, usage.used_ratio
    update_disk_state(store, usage)
    base = store.begin
    end = base + config.segment_bytes
    # The file that is being written stays, and so does what no checkpoint covers yet.
    if end >= store.end or end > store.checkpointed_offset:
        return False
    if oldest_needed_offset is not None and end > oldest_needed_offset:
        return False
    return should_remove(
        store.modified_ms(base), now_ms=now_ms, hour=hour, used_ratio=used_ratio, config=config
    )


def expire(
    store: MessageStore,
    *,
    now_ms: int,
    hour: int,
    read_usage: Callable[[], DiskUsage],
    oldest_needed_offset: LogOffset | None = None,
) -> int:
    """One pass, oldest file first: how many went."""
    removed = 0
    while removed < SEGMENTS_PER_PASS_MAX and is_expired(
        store,
        now_ms=now_ms,
        hour=hour,
        usage=read_usage(),
        oldest_needed_offset=oldest_needed_offset,
    ):
        store.remove_oldest_file()
        removed += 1
    return removed
