"""Headers of looking after the topics of a broker."""

from __future__ import annotations

from escrowmq.wire.command import Int32, Int64
from escrowmq.wire.headers import Header


class CreateTopic(Header, frozen=True, kw_only=True):
    topic: str
    default_topic: str = ""
    read_queue_nums: Int32
    write_queue_nums: Int32
    perm: Int32  # 4 read, 2 write, 1 inherit
    topic_filter_type: str = "SINGLE_TAG"
    order: bool = False  # C++ leaves it out, and the next
    topic_sys_flag: Int32 = 0
    attributes: str | None = None  # +name=value,-name
    force: bool | None = None


class DeleteTopicInBroker(Header, frozen=True, kw_only=True):
    topic: str


class PrepareBackup(Header, frozen=True, kw_only=True):
    token: str  # the broker leaves it in its directory, so that the asker knows whose it is


class PrepareBackupAnswer(Header, frozen=True, kw_only=True):
    log_begin: Int64
    log_end: Int64  # everything below is durable
