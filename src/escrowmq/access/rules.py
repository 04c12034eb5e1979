"""What a request needs, and what an account grants.

Two kinds of account, as RocketMQ has them: one of `plain_acl.yml` (4.x), with a permission for each
topic and group and one for the rest; and a user with policies (5.x). Either is asked the same: may
it do one of these actions to this?

What no rule allows is refused.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Protocol

from escrowmq.access.addresses import Addresses
from escrowmq.secret import Secret

NOBODY: Final = Addresses(())


class Kind(enum.Enum):
    TOPIC = "Topic"
    GROUP = "Group"
    CLUSTER = "Cluster"


class Action(enum.IntFlag):
    NONE = 0
    PUB = 1
    SUB = 2
    CREATE = 4
    UPDATE = 8
    DELETE = 16
    GET = 32
    LIST = 64
    ALL = 127


class Need(NamedTuple):
    """One of these actions, on this."""

    kind: Kind
    name: str
    actions: Action

    def __str__(self) -> str:
        wanted = " or ".join(str(action.name) for action in Action if action & self.actions)
        return f"{wanted} on {self.kind.value.lower()} {self.name}"


class Account(Protocol):
    @property
    def access_key(self) -> str: ...
    @property
    def secret_key(self) -> Secret: ...
    @property
    def trusted_addresses(self) -> Addresses:
        """From there it needs no signature, and may do everything."""

    @property
    def is_enabled(self) -> bool: ...
    def allows(self, need: Need, host: str) -> bool: ...


# --- 4.x -----------------------------------------------------------------------------------------

_EVERYDAY: Final = Action.PUB | Action.SUB | Action.GET  # what is not an administrator's alone


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainAccount:
    access_key: str
    secret_key: Secret
    is_admin: bool = False
    trusted_addresses: Addresses = NOBODY
    default_topic: Action = Action.NONE
    default_group: Action = Action.NONE
    topics: Mapping[str, Action] = field(default_factory=dict)
    groups: Mapping[str, Action] = field(default_factory=dict)
    is_enabled: bool = True

    def allows(self, need: Need, host: str) -> bool:
        # As in RocketMQ: an administrator with no permissions of his own has all of them.
        if self.is_admin and not self.topics and not self.groups:
            return True
        if need.kind is Kind.CLUSTER or not need.actions & _EVERYDAY:
            return self.is_admin
        if need.kind is Kind.TOPIC:
            granted = self.topics.get(need.name, self.default_topic)
        else:
            granted = self.groups.get(need.name, self.default_group)
        return bool(need.actions & granted)


# --- 5.x -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyEntry:
    """`kind` None is any; `name` ends with a star if it is a prefix, and is one if it is any."""

    kind: Kind | None
    name: str
    actions: Action
    addresses: Addresses | None = None
    allows: bool = True

    def matches(self, need: Need, host: str) -> bool:
        if not self.actions & need.actions:
            return False
        if self.addresses is not None and host not in self.addresses:
            return False
        if self.kind is None:
            return True
        if self.kind is not need.kind:
            return False
        if self.name.endswith("*"):
            return need.name.startswith(self.name[:-1])
        return need.name == self.name

    @property
    def closeness(self) -> tuple[bool, bool, int, bool]:
        """The closest entry decides: a name, the longest prefix, a kind, anything. Of two that are
        as close, the one that denies."""
        is_name = self.kind is not None and not self.name.endswith("*")
        return self.kind is not None, is_name, len(self.name), not self.allows


@dataclass(frozen=True, slots=True, kw_only=True)
class User:
    access_key: str
    secret_key: Secret
    is_super: bool = False
    is_enabled: bool = True
    custom: Sequence[PolicyEntry] = ()
    default: Sequence[PolicyEntry] = ()  # asked if no custom one matches
    trusted_addresses: Addresses = NOBODY

    def allows(self, need: Need, host: str) -> bool:
        if self.is_super:
            return True
        for entries in (self.custom, self.default):
            matching = [entry for entry in entries if entry.matches(need, host)]
            if matching:
                return max(matching, key=lambda entry: entry.closeness).allows
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """`trusted_addresses`: whoever comes from there is not asked who he is."""

    accounts: Mapping[str, Account] = field(default_factory=dict)
    trusted_addresses: Addresses = NOBODY
