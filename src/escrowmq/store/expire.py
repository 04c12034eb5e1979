"""Forget old messages: by age once a day, earlier when the disk fills up.

used more than         what happens
expire_ratio           files past their time go at any hour
force_expire_ratio     the oldest go, whatever their age
refuse_ratio           and no new message is taken
"""

from __future__ import annotations

from collections.abc import Callable

from escrowmq.message.offsets import LogOffset
from escrowmq.store.disk import Usage
from escrowmq.store.settings import StoreSettings
from escrowmq.store.store import MessageStore

REMOVED_MAX = 10  # files per pass: removing a gigabyte can take the file system a while


def may_remove(
    modified_ms: int, *, now_ms: int, hour: int, used_ratio: float, settings: StoreSettings
) -> bool:
    """Whether a log file that was last written then has to go now. Pure."""
    if used_ratio > settings.force_expire_ratio:
        return True
    if now_ms - modified_ms <= settings.reserved_hours * 3_600_000:
        return False
    return hour in settings.delete_hours or used_ratio > settings.expire_ratio


def expire(
    store: MessageStore,
    *,
    now_ms: int,
    hour: int,
    usage: Callable[[], Usage],
    keep_from: LogOffset | None = None,
) -> int:
    """One pass, oldest file first: how many went. Nothing from `keep_from` on is touched."""
    removed = 0
    used_ratio = usage().used_ratio
    store.accepts_writes = used_ratio <= store.settings.refuse_ratio
    # The file that is being written stays, and so does what no checkpoint covers yet.
    for base, modified_ms in store.log_files()[:-1]:
        end = base + store.settings.segment_bytes
        if removed == REMOVED_MAX or end > store.checkpointed:
            break
        if keep_from is not None and end > keep_from:
            break
        if not may_remove(
            modified_ms, now_ms=now_ms, hour=hour, used_ratio=used_ratio, settings=store.settings
        ):
            break
        store.remove_oldest_file()
        removed += 1
        used_ratio = usage().used_ratio
    return removed
