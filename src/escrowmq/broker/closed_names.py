"""Refuse requests of clients that would change what belongs to the broker alone.

The broker believes its own topics and the offsets of its own groups, so no request may change
them: neither by a send, nor by a commit of an offset, however it comes, nor by a change or a
deletion. This holds for administrators too, and with and without access control. Reading is a
matter of permissions.

tests/unit/broker/test_closed_names.py tries every request code for every such name.
"""

from __future__ import annotations

from escrowmq.errors import RequestRefused
from escrowmq.message.names import is_closed_group, is_closed_topic
from escrowmq.remoting.codes import ResponseCode


def check_group_is_open(group: str) -> None:
    """Raise RequestRefused if only brokers may use the group."""
    if is_closed_group(group):
        raise _refusal(f"group {group} belongs to the broker, and clients cannot use it")


def check_offsets_are_open(topic: str, group: str) -> None:
    """Raise RequestRefused if clients cannot commit offsets of this group for this topic."""
    check_group_is_open(group)
    if is_closed_topic(topic):
        raise _refusal(f"topic {topic} belongs to the broker, and clients cannot commit offsets")


def check_records_are_open(topic: str) -> None:
    """Raise RequestRefused if the records of a topic must not be delivered to consumers."""
    if is_closed_topic(topic):
        raise _refusal("this message belongs to the broker, and is not delivered to consumers")


def _refusal(reason: str) -> RequestRefused:
    return RequestRefused(ResponseCode.NO_PERMISSION, reason)
