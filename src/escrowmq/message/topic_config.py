"""The configuration of a topic, and the version by which others notice that it has changed.

A broker stores both in config/topics.json, returns them to tools, and registers them with name
servers; the JSON is the same in all three places.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from escrowmq.parsing import Int32, Int64

# The bits of `perm` of topics and brokers.
PERM_READ: Final = 4
PERM_WRITE: Final = 2
PERM_INHERIT: Final = 1  # new topics may be created from this one
PERM_READ_WRITE: Final = PERM_READ | PERM_WRITE


class ConfigEntry(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """Base of the entries of a configuration file.

    `other` holds the fields that EscrowMQ does not know, so that a file of another version keeps
    them. It is unset if there are none, and is never encoded under its own name.
    """

    other: dict[str, Any] | msgspec.UnsetType = msgspec.field(default=msgspec.UNSET, name="(other)")


class TopicConfig(ConfigEntry, frozen=True, kw_only=True, rename="camel"):
    topic_name: str
    read_queue_nums: Int32 = 16
    write_queue_nums: Int32 = 16
    perm: Int32 = PERM_READ_WRITE
    topic_filter_type: str = "SINGLE_TAG"
    topic_sys_flag: Int32 = 0
    order: bool = False
    attributes: dict[str, str] = {}


class DataVersion(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """Increases with every change of a table, so that name servers notice the change."""

    state_version: Int64 = 0
    timestamp: Int64 = 0
    counter: Int64 = 0

    def next(self, now_ms: int) -> DataVersion:
        """Return the version after a change at this time."""
        return DataVersion(
            state_version=self.state_version, timestamp=now_ms, counter=self.counter + 1
        )
