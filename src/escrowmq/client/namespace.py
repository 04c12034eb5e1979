"""Namespaces: several tenants with the same names on one broker, told apart by a prefix.

    orders            ns%orders
    %RETRY%billing    %RETRY%ns%billing
    TBW102            TBW102               the broker's own names are everybody's

The form is RocketMQ's, so its clients with the same namespace meet ours.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

SEPARATOR: Final = "%"
INSTANCE_ID: Final = "INSTANCE_ID"  # the property that names the namespace of a message
_PREFIXES: Final = ("%RETRY%", "%DLQ%")
_SYSTEM_PREFIXES: Final = ("rmq_sys_", "CID_RMQ_SYS_")
_SYSTEM_NAMES: Final = frozenset(
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


@dataclass(frozen=True, slots=True)
class Namespace:
    """Of one client. Without a name it changes nothing."""

    name: str = ""

    def __post_init__(self) -> None:
        if SEPARATOR in self.name:
            raise ValueError(f"a namespace has no {SEPARATOR} in it: {self.name!r}")

    def wrap(self, plain: str) -> str:
        """A topic or a group as the broker knows it. Wrapping twice is wrapping once."""
        if not self.name or not plain or is_system(plain):
            return plain
        prefix, rest = _cut(plain)
        if rest.startswith(self.name + SEPARATOR):
            return plain
        return f"{prefix}{self.name}{SEPARATOR}{rest}"

    def unwrap(self, wrapped: str) -> str:
        """As its users know it; a name of another namespace stays as it is."""
        if not self.name:
            return wrapped
        prefix, rest = _cut(wrapped)
        return prefix + rest.removeprefix(self.name + SEPARATOR)


def wrap(namespace: str, plain: str) -> str:
    return Namespace(namespace).wrap(plain)


def unwrap(namespace: str, wrapped: str) -> str:
    return Namespace(namespace).unwrap(wrapped)


def is_system(name: str) -> bool:
    """Whether it belongs to the broker, whatever the namespace."""
    return name in _SYSTEM_NAMES or name.startswith(_SYSTEM_PREFIXES)


def _cut(name: str) -> tuple[str, str]:
    for prefix in _PREFIXES:
        if name.startswith(prefix):
            return prefix, name[len(prefix) :]
    return "", name
