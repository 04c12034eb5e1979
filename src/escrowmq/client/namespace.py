"""Namespaces: several tenants on one broker. `orders` of namespace `ns` is `ns%orders` on the wire.

The marks of retries and dead letters stay in front: `%RETRY%ns%group`. What belongs to the broker
itself has no namespace.
"""

from __future__ import annotations

from typing import Final

_MARKS: Final = ("%RETRY%", "%DLQ%")
_SYSTEM_PREFIXES: Final = ("rmq_sys_", "CID_RMQ_SYS_")
_SYSTEM: Final = frozenset(
    (
        "BenchmarkTest",
        "OFFSET_MOVED_EVENT",
        "RMQ_SYS_TRACE_TOPIC",
        "RMQ_SYS_TRANS_HALF_TOPIC",
        "RMQ_SYS_TRANS_OP_HALF_TOPIC",
        "SCHEDULE_TOPIC_XXXX",
        "SELF_TEST_TOPIC",
        "TBW102",
        "TRANS_CHECK_MAX_TIME_TOPIC",
    )
)


def wrap(namespace: str, name: str) -> str:
    """A topic or a group as it is called on the wire. One that is wrapped already stays so."""
    if not namespace or not name or name in _SYSTEM or name.startswith(_SYSTEM_PREFIXES):
        return name
    mark, rest = _cut(name)
    return name if rest.startswith(f"{namespace}%") else f"{mark}{namespace}%{rest}"


def unwrap(namespace: str, name: str) -> str:
    """As its user calls it."""
    if not namespace:
        return name
    mark, rest = _cut(name)
    return mark + rest.removeprefix(f"{namespace}%")


def _cut(name: str) -> tuple[str, str]:
    mark = next((mark for mark in _MARKS if name.startswith(mark)), "")
    return mark, name[len(mark) :]
