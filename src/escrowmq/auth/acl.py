"""Accounts, their permissions, and the ACL file that lists them.

RocketMQ has two kinds of account, and one file may contain both:

    PlainAccount   plain_acl.yml of 4.x: one permission per topic and group, and a default
    User           users of 5.x: policies with patterns, client addresses, Allow and Deny

Both implement `Account.allows()`. What no rule allows is refused.

The file is YAML, and so JSON is accepted too. `globalWhiteRemoteAddresses` and `accounts` are
RocketMQ's plain_acl.yml unchanged. `users` and `acls` contain what its 5.x commands `mqadmin
createUser` and `createAcl` send, under the same names:

    users:
      - {username: billing, password: 0123456789, userType: Normal, userStatus: enable}
    acls:
      - subject: User:billing
        policies:
          - policyType: Custom
            entries:
              - {resource: "Topic:o*", actions: [Sub], sourceIps: [10.0.0.0/8], decision: Allow}

An unknown key is an error: a misspelt rule must not count as a missing one.
"""

from __future__ import annotations

import enum
import ipaddress
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, NoReturn, Protocol, TypeAlias

import msgspec
import yaml

from escrowmq.errors import InvalidAccessRules
from escrowmq.secret import Secret

# --- client addresses ----------------------------------------------------------------------------

Address: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address
_Matcher: TypeAlias = Callable[[Address], bool]
_COMMA_OUTSIDE_BRACES: Final = re.compile(r",(?![^{]*\})")
_PART_PATTERN: Final = re.compile(
    r"[0-9A-Fa-f]{1,4}|[0-9A-Fa-f]{1,4}-[0-9A-Fa-f]{1,4}|\*|\{[^{}]*\}"
)


class AddressPatterns:
    """A set of client addresses, in the notations of both RocketMQ generations.

        *                 all addresses           192.168.0.{1,7,9}     alternatives
        192.168.0.7       one address             10.0.0.1,10.0.0.2     several patterns
        192.168.0.*       a network               192.168.1-10.*        a range
        192.168.0.0/24    a network (5.x)         fe80:0:0:0:1:*        IPv6

    An empty pattern matches no address. An IPv4 address that is mapped into IPv6 counts as IPv4.
    """

    def __init__(self, patterns: Iterable[str]) -> None:
        """Raise ValueError for a pattern that cannot be read."""
        self.patterns = tuple(pattern.strip() for pattern in patterns)
        self._matchers = [
            _parse_pattern(part.strip())
            for pattern in self.patterns
            for part in _COMMA_OUTSIDE_BRACES.split(pattern)
            if part.strip()
        ]

    def __contains__(self, host: str) -> bool:
        if not self._matchers:
            return False
        address = _parse_address(host)
        return address is not None and any(matches(address) for matches in self._matchers)

    def __bool__(self) -> bool:
        return bool(self._matchers)


def _parse_address(host: str) -> Address | None:
    try:
        address = ipaddress.ip_address(host.strip("[]").partition("%")[0])
    except ValueError:
        return None
    mapped = getattr(address, "ipv4_mapped", None)
    return mapped or address


def _parse_pattern(pattern: str) -> _Matcher:
    try:
        if pattern in ("*", "*.*.*.*", "*:*:*:*:*:*:*:*"):
            return lambda address: True
        if "/" in pattern:
            network = ipaddress.ip_network(pattern, strict=False)
            return lambda address: address in network
        exact = _parse_address(pattern)
        if exact is not None:
            return lambda address: address == exact
        return _parse_parts_pattern(pattern)
    except ValueError as error:
        raise ValueError(f"{pattern!r} is not an address pattern") from error


def _parse_parts_pattern(pattern: str) -> _Matcher:
    is_ipv6 = ":" in pattern
    count, base, maximum = (8, 16, 0xFFFF) if is_ipv6 else (4, 10, 255)
    texts = _split_parts(pattern, ":" if is_ipv6 else ".", count)
    allowed = [_parse_numbers(text, base, maximum) for text in texts]
    version, size = (6, 2) if is_ipv6 else (4, 1)

    def matches(address: Address) -> bool:
        packed = address.packed
        return address.version == version and all(
            int.from_bytes(packed[index * size : (index + 1) * size]) in allowed[index]
            for index in range(count)
        )

    return matches


def _split_parts(pattern: str, separator: str, count: int) -> list[str]:
    if separator == ":" and "::" in pattern:
        head, _, tail = pattern.partition("::")
        before, after = head.split(":") if head else [], tail.split(":") if tail else []
        texts = [*before, *["0"] * (count - len(before) - len(after)), *after]
    else:
        texts = pattern.split(separator)
    if texts[-1] == "*":  # it stands for all remaining parts
        texts += ["*"] * (count - len(texts))
    if len(texts) != count or not all(_PART_PATTERN.fullmatch(text) for text in texts):
        raise ValueError(pattern)
    return texts


def _parse_numbers(text: str, base: int, maximum: int) -> range | frozenset[int]:
    if text == "*":
        return range(maximum + 1)
    if text.startswith("{"):
        numbers = frozenset(int(part.strip(), base) for part in text[1:-1].split(","))
        if not all(0 <= number <= maximum for number in numbers):
            raise ValueError(text)
        return numbers
    first, _, last = text.partition("-")
    begin, end = int(first, base), int(last or first, base)
    if not 0 <= begin <= end <= maximum:
        raise ValueError(text)
    return range(begin, end + 1)


NO_ADDRESSES: Final = AddressPatterns(())

# --- permissions ---------------------------------------------------------------------------------


class ResourceType(enum.Enum):
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


class Permission(NamedTuple):
    """Any one of these actions on a resource."""

    resource_type: ResourceType
    name: str
    actions: Action
    # Whether the client does not know the name: it refers to a record by an offset, and a refusal
    # must not tell what is stored there.
    is_hidden: bool = False

    def __str__(self) -> str:
        actions = " or ".join(str(action.name) for action in Action if action & self.actions)
        return f"{actions} on {self.resource_type.value.lower()} {self.name}"


class Account(Protocol):
    """What a client authenticates as."""

    @property
    def access_key(self) -> str: ...
    @property
    def secret_key(self) -> Secret: ...
    @property
    def trusted_addresses(self) -> AddressPatterns:
        """From these addresses the account needs no signature and may do everything."""

    @property
    def is_enabled(self) -> bool: ...
    def allows(self, permission: Permission, host: str) -> bool: ...


# --- accounts of 4.x -----------------------------------------------------------------------------

# All other actions are for administrators.
_CLIENT_ACTIONS: Final = Action.PUB | Action.SUB | Action.GET


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainAccount:
    """An account of plain_acl.yml."""

    access_key: str
    secret_key: Secret
    is_admin: bool = False
    trusted_addresses: AddressPatterns = NO_ADDRESSES
    default_topic_actions: Action = Action.NONE
    default_group_actions: Action = Action.NONE
    topic_actions: Mapping[str, Action] = field(default_factory=dict)
    group_actions: Mapping[str, Action] = field(default_factory=dict)
    is_enabled: bool = True

    def allows(self, permission: Permission, host: str) -> bool:
        # As in RocketMQ: an administrator without listed permissions has all of them.
        if self.is_admin and not self.topic_actions and not self.group_actions:
            return True
        if (
            permission.resource_type is ResourceType.CLUSTER
            or not permission.actions & _CLIENT_ACTIONS
        ):
            return self.is_admin
        if permission.resource_type is ResourceType.TOPIC:
            granted = self.topic_actions.get(permission.name, self.default_topic_actions)
        else:
            granted = self.group_actions.get(permission.name, self.default_group_actions)
        return bool(permission.actions & granted)


# --- users of 5.x --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyEntry:
    """One rule of a policy.

    A `resource_type` of None matches every resource. A `name` that ends with a star is a prefix.
    """

    resource_type: ResourceType | None
    name: str
    actions: Action
    addresses: AddressPatterns | None = None
    is_allow: bool = True

    def matches(self, permission: Permission, host: str) -> bool:
        if not self.actions & permission.actions:
            return False
        if self.addresses is not None and host not in self.addresses:
            return False
        if self.resource_type is None:
            return True
        if self.resource_type is not permission.resource_type:
            return False
        if self.name.endswith("*"):
            return permission.name.startswith(self.name[:-1])
        return permission.name == self.name

    @property
    def specificity(self) -> tuple[bool, bool, int, bool]:
        """Return a sort key: the matching entry with the greatest one decides.

        A name is more specific than a prefix, a longer prefix than a shorter one, a resource type
        than none. Of two entries that are equally specific, the one that denies decides.
        """
        is_name = self.resource_type is not None and not self.name.endswith("*")
        return self.resource_type is not None, is_name, len(self.name), not self.is_allow


@dataclass(frozen=True, slots=True, kw_only=True)
class User:
    """A user with policies."""

    access_key: str
    secret_key: Secret
    is_super: bool = False
    is_enabled: bool = True
    custom_policy: Sequence[PolicyEntry] = ()
    default_policy: Sequence[PolicyEntry] = ()  # applies if no custom entry matches
    trusted_addresses: AddressPatterns = NO_ADDRESSES

    def allows(self, permission: Permission, host: str) -> bool:
        if self.is_super:
            return True
        for entries in (self.custom_policy, self.default_policy):
            matching = [entry for entry in entries if entry.matches(permission, host)]
            if matching:
                return max(matching, key=lambda entry: entry.specificity).is_allow
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessRules:
    """The content of an ACL file. Requests from `trusted_addresses` are not checked."""

    accounts: Mapping[str, Account] = field(default_factory=dict)
    trusted_addresses: AddressPatterns = NO_ADDRESSES


# --- the ACL file --------------------------------------------------------------------------------

KEY_CHARS_MIN: Final = 7  # as RocketMQ
_PLAIN_PERMISSIONS: Final = {
    "DENY": Action.NONE,
    "PUB": Action.PUB,
    "SUB": Action.SUB | Action.GET,
    "PUB|SUB": Action.PUB | Action.SUB | Action.GET,
    "SUB|PUB": Action.PUB | Action.SUB | Action.GET,
}
_ACTIONS: Final = {
    **{str(action.name).lower(): action for action in Action},
    "all": Action.ALL,
    "any": Action.ALL,
}
_RESOURCE_TYPES: Final = {member.value.lower(): member for member in ResourceType}


def parse_rules(text: str) -> AccessRules:
    """Parse an ACL file. Raise InvalidAccessRules with the location of the mistake.

    The message quotes names but no other values, because the file contains secrets. For the same
    reason the original error is suppressed: its traceback would show the text.
    """
    try:
        # The base loader reads every scalar as text: a secret of digits keeps its leading zeros.
        content = yaml.load(text, Loader=yaml.BaseLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        location = f"line {mark.line + 1}, column {mark.column + 1}: " if mark is not None else ""
        raise InvalidAccessRules(f"{location}{error.problem or 'not YAML'}") from None
    except (yaml.YAMLError, RecursionError, ValueError):
        raise InvalidAccessRules("not YAML") from None
    try:
        file = msgspec.convert(content or {}, _File, strict=False)
    except msgspec.ValidationError as error:
        raise InvalidAccessRules(str(error)) from None
    return _make_rules(file)


class _FileStruct(msgspec.Struct, rename="camel", forbid_unknown_fields=True, kw_only=True):
    pass


class _PlainAccount(_FileStruct):
    access_key: str
    secret_key: str
    white_remote_address: str = ""
    admin: bool = False
    default_topic_perm: str = "DENY"
    default_group_perm: str = "DENY"
    topic_perms: list[str] | str = []
    group_perms: list[str] | str = []


class _User(_FileStruct):
    username: str
    password: str
    user_type: str = "Normal"
    user_status: str = "enable"


class _Entry(_FileStruct):
    resource: str
    actions: list[str] | str
    decision: str
    source_ips: list[str] | str = []


class _Policy(_FileStruct):
    policy_type: str = "Custom"
    entries: list[_Entry] = []


class _Acl(_FileStruct):
    subject: str
    policies: list[_Policy] = []


class _File(_FileStruct):
    global_white_remote_addresses: list[str] | str = []
    accounts: list[_PlainAccount] | str = []
    data_version: Any = None  # written by RocketMQ's tools, not used
    users: list[_User] | str = []
    acls: list[_Acl] | str = []


def _make_rules(file: _File) -> AccessRules:
    entries = _entries_by_user(_as_list(file.acls))
    accounts: list[Account] = [_make_plain_account(account) for account in _as_list(file.accounts)]
    accounts += [
        _make_user(user, entries.pop(user.username, ([], []))) for user in _as_list(file.users)
    ]
    by_key: dict[str, Account] = {}
    for account in accounts:
        if account.access_key in by_key:
            raise InvalidAccessRules(f"{account.access_key} is listed twice")
        by_key[account.access_key] = account
    if entries:
        raise InvalidAccessRules(f"acls: there is no user {min(entries)}")
    trusted = _parse_addresses(
        _as_list(file.global_white_remote_addresses), "globalWhiteRemoteAddresses"
    )
    return AccessRules(accounts=by_key, trusted_addresses=trusted)


def _make_plain_account(account: _PlainAccount) -> PlainAccount:
    key = account.access_key
    _check_lengths(key, account.secret_key)
    return PlainAccount(
        access_key=key,
        secret_key=Secret(account.secret_key),
        is_admin=account.admin,
        trusted_addresses=_parse_addresses(
            [account.white_remote_address], f"{key}: whiteRemoteAddress"
        ),
        default_topic_actions=_parse_permission(
            account.default_topic_perm, f"{key}: defaultTopicPerm"
        ),
        default_group_actions=_parse_permission(
            account.default_group_perm, f"{key}: defaultGroupPerm"
        ),
        topic_actions=dict(
            _parse_named_permission(perm, f"{key}: topicPerms")
            for perm in _as_list(account.topic_perms)
        ),
        group_actions=dict(
            _parse_named_permission(perm, f"{key}: groupPerms")
            for perm in _as_list(account.group_perms)
        ),
    )


def _parse_named_permission(text: str, location: str) -> tuple[str, Action]:
    name, equals, perm = (part.strip() for part in text.partition("="))
    if not name or not equals:
        raise InvalidAccessRules(f"{location}: must be name=PUB, SUB, PUB|SUB or DENY")
    return name, _parse_permission(perm, f"{location}: {name}")


def _parse_permission(text: str, location: str) -> Action:
    actions = _PLAIN_PERMISSIONS.get(text.strip() or "DENY")
    if actions is None:
        raise InvalidAccessRules(f"{location}: must be PUB, SUB, PUB|SUB or DENY")
    return actions


def _make_user(user: _User, entries: tuple[list[PolicyEntry], list[PolicyEntry]]) -> User:
    name = user.username
    _check_lengths(name, user.password, name_chars_min=1)
    user_type, status = user.user_type.lower(), user.user_status.lower()
    if user_type not in ("super", "normal"):
        raise InvalidAccessRules(f"{name}: userType must be Super or Normal")
    if status not in ("enable", "disable"):
        raise InvalidAccessRules(f"{name}: userStatus must be enable or disable")
    return User(
        access_key=name,
        secret_key=Secret(user.password),
        is_super=user_type == "super",
        is_enabled=status == "enable",
        custom_policy=entries[0],
        default_policy=entries[1],
    )


def _entries_by_user(acls: list[_Acl]) -> dict[str, tuple[list[PolicyEntry], list[PolicyEntry]]]:
    """Return the custom and the default entries of each user."""
    by_user: dict[str, tuple[list[PolicyEntry], list[PolicyEntry]]] = {}
    for acl in acls:
        subject_type, _, user = acl.subject.partition(":")
        if subject_type.lower() != "user" or not user:
            raise InvalidAccessRules("acls: a subject must be User:name")
        custom, default = by_user.setdefault(user, ([], []))
        for policy in acl.policies:
            match policy.policy_type.lower():
                case "custom":
                    entries = custom
                case "default":
                    entries = default
                case _:
                    raise InvalidAccessRules(f"{user}: policyType must be Custom or Default")
            entries += (_make_entry(entry, user) for entry in policy.entries)
    return by_user


def _make_entry(entry: _Entry, username: str) -> PolicyEntry:
    resource_type, name = _parse_resource(entry.resource, username)
    actions = Action.NONE
    for word in _split_words(entry.actions):
        if word.lower() not in _ACTIONS:
            names = "Pub, Sub, Create, Update, Delete, Get, List or All"
            raise InvalidAccessRules(f"{username}: an action must be {names}")
        actions |= _ACTIONS[word.lower()]
    if entry.decision.lower() not in ("allow", "deny"):
        raise InvalidAccessRules(f"{username}: decision must be Allow or Deny")
    patterns = _split_words(entry.source_ips)
    return PolicyEntry(
        resource_type=resource_type,
        name=name,
        actions=actions,
        addresses=_parse_addresses(patterns, f"{username}: sourceIps") if patterns else None,
        is_allow=entry.decision.lower() == "allow",
    )


def _parse_resource(text: str, username: str) -> tuple[ResourceType | None, str]:
    if text == "*":
        return None, "*"
    type_name, _, name = text.partition(":")
    resource_type = _RESOURCE_TYPES.get(type_name.lower())
    if resource_type is None or not name or "*" in name[:-1]:
        _raise_invalid_resource(username)
    return resource_type, name


def _raise_invalid_resource(username: str) -> NoReturn:
    raise InvalidAccessRules(
        f"{username}: a resource must be *, Topic:name, Group:name or Cluster:name; "
        "a name may end with a star"
    )


def _check_lengths(name: str, secret: str, *, name_chars_min: int = KEY_CHARS_MIN) -> None:
    if len(name) < name_chars_min or not name.isprintable():
        raise InvalidAccessRules(f"an access key has less than {name_chars_min} characters")
    if len(secret) < KEY_CHARS_MIN:
        raise InvalidAccessRules(f"{name}: the secret key has less than {KEY_CHARS_MIN} characters")


def _parse_addresses(patterns: list[str], location: str) -> AddressPatterns:
    try:
        return AddressPatterns(patterns)
    except ValueError as error:
        raise InvalidAccessRules(f"{location}: {error}") from None


def _split_words(value: list[str] | str) -> list[str]:
    texts = value.split(",") if isinstance(value, str) else value
    return [text.strip() for text in texts if text.strip()]


def _as_list(value: list[Any] | str) -> list[Any]:
    """Return the list. A YAML key without a value arrives as an empty text."""
    if isinstance(value, list):
        return value
    if value.strip():
        raise InvalidAccessRules("expected a list, found a text")
    return []
