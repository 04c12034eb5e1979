"""ACL files in the formats of RocketMQ 4 and 5: permissions, and files that are refused."""

from __future__ import annotations

import pytest

from escrowmq.auth.acl import Action, AddressPatterns, Permission, ResourceType, parse_rules
from escrowmq.errors import InvalidAccessRules

PLAIN_ACL = """
globalWhiteRemoteAddresses:
- 10.10.103.*
- 192.168.0.*
accounts:
- accessKey: RocketMQ
  secretKey: 01234567
  whiteRemoteAddress:
  admin: false
  defaultTopicPerm: DENY
  defaultGroupPerm: SUB
  topicPerms:
  - topicA=DENY
  - topicB=PUB|SUB
  - topicC=SUB
  groupPerms:
  - groupA=DENY
  - groupB=PUB|SUB
- accessKey: rocketmq2
  secretKey: 12345678
  whiteRemoteAddress: 192.168.1.*
  admin: true
"""
LOCALHOST = "127.0.0.1"


def topic(name: str, actions: Action) -> Permission:
    return Permission(ResourceType.TOPIC, name, actions)


def group(name: str, actions: Action) -> Permission:
    return Permission(ResourceType.GROUP, name, actions)


ADMIN = Permission(ResourceType.CLUSTER, "DefaultCluster", Action.UPDATE)


@pytest.mark.parametrize(
    ("permission", "is_granted"),
    [
        (topic("topicA", Action.PUB), False),
        (topic("topicA", Action.SUB), False),
        (topic("topicB", Action.PUB), True),
        (topic("topicB", Action.SUB), True),
        (topic("topicC", Action.PUB), False),
        (topic("topicC", Action.SUB | Action.GET), True),
        (topic("another", Action.PUB), False),
        (topic("topicB", Action.CREATE), False),
        (topic("topicB", Action.DELETE), False),
        (group("groupA", Action.SUB), False),
        (group("groupB", Action.PUB), True),
        (group("another", Action.SUB), True),
        (group("another", Action.PUB), False),
        (ADMIN, False),
    ],
    ids=str,
)
def test_a_plain_account_has_the_permissions_that_are_listed(
    permission: Permission, is_granted: bool
) -> None:
    rules = parse_rules(PLAIN_ACL)
    assert rules.accounts["RocketMQ"].allows(permission, LOCALHOST) is is_granted
    assert rules.accounts["rocketmq2"].allows(permission, LOCALHOST) is True


def test_a_secret_of_digits_keeps_its_leading_zero() -> None:
    assert parse_rules(PLAIN_ACL).accounts["RocketMQ"].secret_key.reveal() == "01234567"


def test_an_administrator_with_listed_permissions_has_only_those() -> None:
    """RocketMQ does the same."""
    account = parse_rules(
        "accounts: [{accessKey: operator, secretKey: 12345678, admin: true, topicPerms: [a=SUB]}]"
    ).accounts["operator"]
    assert account.allows(ADMIN, LOCALHOST)
    assert account.allows(topic("a", Action.SUB), LOCALHOST)
    assert not account.allows(topic("b", Action.PUB), LOCALHOST)


USERS = """
users:
- {username: root, password: rootroot, userType: Super}
- {username: former, password: formerformer, userType: Super, userStatus: disable}
- {username: alice, password: alicealice}
acls:
- subject: User:alice
  policies:
  - policyType: Default
    entries:
    - {resource: "Topic:*", actions: [Get], decision: Allow}
  - policyType: Custom
    entries:
    - {resource: "Topic:order*", actions: "Pub,Sub", decision: Allow}
    - {resource: "Topic:orders-secret", actions: [All], decision: Deny}
    - {resource: "Topic:inner", actions: [Sub], sourceIps: [10.0.0.0/8], decision: Allow}
    - {resource: "Group:*", actions: [Sub], decision: Allow}
    - {resource: "Group:*", actions: [Sub], sourceIps: [192.168.9.9], decision: Deny}
    - {resource: "Cluster:DefaultCluster", actions: [Get], decision: Allow}
"""


@pytest.mark.parametrize(
    ("permission", "host", "is_granted"),
    [
        (topic("orders", Action.PUB), LOCALHOST, True),
        (topic("orders-secret", Action.PUB), LOCALHOST, False),  # the most specific entry decides
        (topic("inner", Action.SUB), "10.1.2.3", True),
        (topic("inner", Action.SUB), "11.1.2.3", False),
        (topic("any", Action.GET), LOCALHOST, True),  # no custom entry matches
        (topic("any", Action.PUB), LOCALHOST, False),
        (topic("orders", Action.GET), LOCALHOST, True),
        (group("g", Action.SUB), LOCALHOST, True),
        (group("g", Action.SUB), "192.168.9.9", False),  # Deny wins over an equally specific Allow
        (Permission(ResourceType.CLUSTER, "DefaultCluster", Action.GET), LOCALHOST, True),
        (ADMIN, LOCALHOST, False),
    ],
    ids=str,
)
def test_a_user_has_the_permissions_of_its_policies(
    permission: Permission, host: str, is_granted: bool
) -> None:
    rules = parse_rules(USERS)
    assert rules.accounts["alice"].allows(permission, host) is is_granted
    assert rules.accounts["root"].allows(permission, host) is True
    assert rules.accounts["former"].is_enabled is False


SECRET = "hush-hush-1234"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("accounts: [{accessKey: abcdefg}]", "secretKey"),
        ("accounts: [{accessKey: abc, secretKey: hush-hush-1234}]", "less than 7 characters"),
        ("accounts: [{accessKey: abcdefg, secretKey: hush}]", "less than 7 characters"),
        ("accounts: [{accessKey: abcdefg, secretKey: hush-hush-1234, admn: true}]", "admn"),
        ("accounts: [{accessKey: abcdefg, secretKey: hush-hush-1234, admin: maybe}]", "bool"),
        ("accounts: [{accessKey: abcdefg, secretKey: hush-hush-1234, topicPerms: [a]}]", "name="),
        ("accounts: [{accessKey: abcdefg, secretKey: hush-hush-1234, topicPerms: [a=X]}]", "PUB"),
        ("accounts: [{accessKey: abcdefg, secretKey: hush-hush-1234\n", "line"),
        ("acounts: []", "acounts"),
        ("globalWhiteRemoteAddresses: [10.0.0.300]", "not an address pattern"),
        ("[1, 2]", "object"),
        ("users: [{username: a, password: hush-hush-1234, userType: King}]", "userType"),
        ("acls: [{subject: 'User:missing'}]", "no user missing"),
        (
            "users: [{username: a, password: hush-hush-1234}, "
            "{username: a, password: hush-hush-1234}]",
            "twice",
        ),
        (
            "users: [{username: a, password: hush-hush-1234}]\n"
            "acls: [{subject: 'User:a', policies: [{entries: "
            "[{resource: 'Tpic:x', actions: [Pub], decision: Allow}]}]}]",
            "resource must be",
        ),
    ],
)
def test_an_invalid_file_is_refused_without_quoting_secrets(text: str, message: str) -> None:
    with pytest.raises(InvalidAccessRules, match=message) as refused:
        parse_rules(text)
    assert SECRET not in f"{refused.value!r}"
    assert refused.value.__context__ is None or refused.value.__suppress_context__


def test_rules_do_not_show_their_secrets() -> None:
    assert "01234567" not in repr(parse_rules(PLAIN_ACL))
    assert "alicealice" not in repr(parse_rules(USERS))


@pytest.mark.parametrize(
    ("pattern", "matching", "not_matching"),
    [
        ("*", ["1.2.3.4", "::1"], ["", "name"]),
        ("192.168.0.7", ["192.168.0.7", "::ffff:192.168.0.7"], ["192.168.0.70", "92.168.0.7"]),
        ("192.168.0.*", ["192.168.0.0", "192.168.0.255"], ["192.168.1.0"]),
        ("192.168.*", ["192.168.7.1"], ["192.169.0.1"]),
        ("192.168.1-10.*", ["192.168.1.1", "192.168.10.255"], ["192.168.11.1", "192.168.0.1"]),
        ("10.0.0.{1,7}", ["10.0.0.1", "10.0.0.7"], ["10.0.0.17", "10.0.0.2"]),
        ("10.0.0.1,10.0.0.2", ["10.0.0.1", "10.0.0.2"], ["10.0.0.3"]),
        ("10.0.0.0/8", ["10.255.0.1"], ["11.0.0.1", "::1"]),
        ("fe80:0:0:0:1:*", ["fe80::1:2:3:4"], ["fe80::2:2:3:4", "10.0.0.1"]),
        ("fe80::{1,2}", ["fe80::2"], ["fe80::3"]),
        ("", [], ["127.0.0.1"]),
    ],
)
def test_a_pattern_matches_its_addresses(
    pattern: str, matching: list[str], not_matching: list[str]
) -> None:
    addresses = AddressPatterns([pattern])
    assert [host for host in matching if host not in addresses] == []
    assert [host for host in not_matching if host in addresses] == []


@pytest.mark.parametrize(
    "pattern", ["10.0.0", "10.0.0.256", "10.0.0.9-1", "a.b.c.d", "10.0.0.{}", "10.0.0.0/64", "1:2"]
)
def test_an_invalid_pattern_is_refused(pattern: str) -> None:
    with pytest.raises(ValueError, match="not an address pattern"):
        AddressPatterns([pattern])
