"""How the store lays out its files and what it accepts. `conf` is RocketMQ's name for a setting."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from escrowmq.errors import ConfigError

QUEUE_ENTRY_BYTES = 20


def _setting(default: int | float | bool, *, conf: str, minimum: float = 0) -> Any:
    return field(default=default, metadata={"conf": conf, "at_least": minimum})


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreSettings:
    segment_bytes: int = _setting(1 << 30, conf="mappedFileSizeCommitLog", minimum=4096)
    queue_file_bytes: int = _setting(6_000_000, conf="mappedFileSizeConsumeQueue", minimum=20)
    is_index_enabled: bool = _setting(True, conf="messageIndexEnable")
    index_slots: int = _setting(5_000_000, conf="maxHashSlotNum", minimum=1)
    index_entries: int = _setting(20_000_000, conf="maxIndexNum", minimum=2)
    message_bytes_max: int = _setting(4 << 20, conf="maxMessageSize", minimum=1)
    append_crc: bool = _setting(False, conf="enabledAppendPropCRC")
    retention_hours: int = _setting(72, conf="fileReservedTime", minimum=1)
    delete_hours: tuple[int, ...] = field(default=(4,), metadata={"conf": "deleteWhen"})
    expire_ratio: float = _setting(0.75, conf="diskMaxUsedSpaceRatio")
    force_expire_ratio: float = _setting(0.85, conf="diskSpaceCleanForciblyRatio")
    refuse_ratio: float = _setting(0.90, conf="diskSpaceWarningLevelRatio")

    def __post_init__(self) -> None:
        for item in fields(self):
            at_least = item.metadata.get("at_least")
            if at_least is not None and getattr(self, item.name) < at_least:
                raise ConfigError(f"{item.name} must be at least {at_least}")
        if self.queue_file_bytes % QUEUE_ENTRY_BYTES:
            raise ConfigError(f"queue_file_bytes must be a multiple of {QUEUE_ENTRY_BYTES}")
        if not all(0 <= hour <= 23 for hour in self.delete_hours):
            raise ConfigError("delete_hours must be 0 to 23, each")

    @property
    def record_bytes_max(self) -> int:
        """A record may be this much: the body's limit, and room for everything around it."""
        return min(self.message_bytes_max + 64 * 1024, self.segment_bytes - 8)

    @property
    def queue_file_entries(self) -> int:
        return self.queue_file_bytes // QUEUE_ENTRY_BYTES
