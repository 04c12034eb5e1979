"""Bodies about users and their policies, as RocketMQ 5's tools read them."""

from __future__ import annotations

from escrowmq.wire.bodies import JsonBody

HIDDEN = "***"


class UserInfo(JsonBody, frozen=True, kw_only=True):
    username: str
    password: str = HIDDEN  # RocketMQ shows it
    user_type: str  # Super, Normal
    user_status: str  # enable, disable


class PolicyEntryInfo(JsonBody, frozen=True, kw_only=True):
    resource: str  # Topic:name, Topic:prefix*, *
    actions: list[str]
    source_ips: list[str] | None = None
    decision: str  # Allow, Deny


class PolicyInfo(JsonBody, frozen=True, kw_only=True):
    policy_type: str  # Custom, Default
    entries: list[PolicyEntryInfo]


class AclInfo(JsonBody, frozen=True, kw_only=True):
    subject: str
    policies: list[PolicyInfo]
