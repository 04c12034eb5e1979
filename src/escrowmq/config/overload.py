"""Settings of what is refused before memory or disk is at risk."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from escrowmq.config.groups import FRAME_BYTES_MAX, _Group, _setting
from escrowmq.config.kinds import Whole


def _a_second(conf: str, unit: str, what: str) -> Any:
    return _setting(0, Whole(0), conf, unit, what)


@dataclass(frozen=True, slots=True, kw_only=True)
class OverloadConfig(_Group):
    """More than this is answered with SYSTEM_BUSY; 0 is no limit."""

    unflushed_bytes_max: int = _setting(
        1 << 30,
        Whole(FRAME_BYTES_MAX),
        "escrowUnflushedBytesMax",
        "bytes",
        "No sends while more of the log than this is not on the disk yet.",
    )
    connection_sends_max: int = _a_second(
        "escrowConnectionSendsMax", "messages/s", "What one connection may send."
    )
    connection_send_bytes_max: int = _a_second(
        "escrowConnectionSendBytesMax", "bytes/s", "The same in bytes of bodies."
    )
    topic_sends_max: int = _a_second(
        "escrowTopicSendsMax", "messages/s", "What all together may send to one topic."
    )
    topic_send_bytes_max: int = _a_second(
        "escrowTopicSendBytesMax", "bytes/s", "The same in bytes of bodies."
    )
