"""What a request needs, and what an account grants.

Two kinds of account, as RocketMQ has them: one of `plain_acl.yml` (4.x), with a permission for each
topic and group and one for the rest; and a user with policies (5.x). Either is asked the same: may
it do one of these actions to this?

What no rule allows is refused.

Patterns of client addresses, as RocketMQ's two generations write them.

    *                       everybody               192.168.0.{1,7,9}     one of them
    192.168.0.7             one                     10.0.0.1,10.0.0.2     several
    192.168.0.*             a net                   192.168.1-10.*        a range, then all below
    192.168.0.0/24          a net (5.x)             fe80:0:0:0:1:*        the same with colons

A pattern that is empty fits nobody. An IPv4 address that came over IPv6 is an IPv4 address.

Rules from text: YAML, and so JSON too.

`globalWhiteRemoteAddresses` and `accounts` are RocketMQ's plain_acl.yml as it stands. `users` and
`acls` hold what its 5.x `mqadmin createUser` and `createAcl` send, under the same names:

    users:
      - {username: billing, password: 0123456789, userType: Normal, userStatus: enable}
    acls:
      - subject: User:billing
        policies:
          - policyType: Custom
            entries:
              - {resource: "Topic:o*", actions: [Sub], sourceIps: [10.0.0.0/8], decision: Allow}

A name that is not known here is an error: a rule that is misspelt must not be one that is missing.
No message repeats what the text says, but for names: there are secrets in it.
"""

from __future__ import annotations

import enum
import ipaddress
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, NoReturn, Protocol

import msgspec
import yaml

from escrowmq.errors import InvalidAccessRules
from escrowmq.secret import Secret

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
_Matcher = Callable[[Address], bool]
_COMMA_OUTSIDE_BRACES: Final = re.compile(r",(?![^{]*\})")
_PART_PATTERN: Final = re.compile(
    r"[0-9A-Fa-f]{1,4}|[0-9A-Fa-f]{1,4}-[0-9A-Fa-f]{1,4}|\*|\{[^{}]*\}"
)


class AddressPatterns:
    """Those that one of the patterns fits. ValueError says which pattern cannot be read."""

    def __init__(self, patterns: Iterable[str]) -> None:
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
        return address is not None and any(fits(address) for fits in self._matchers)

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
        raise ValueError(f"{pattern!r} is no pattern of addresses") from error


def _parse_parts_pattern(pattern: str) -> _Matcher:
    is_new = ":" in pattern
    count, base, most = (8, 16, 0xFFFF) if is_new else (4, 10, 255)
    texts = _split_parts(pattern, ":" if is_new else ".", count)
    allowed = [_parse_numbers(text, base, most) for text in texts]
    version = 6 if is_new else 4

    def fits(address: Address) -> bool:
        if address.version != version:
            return False
        packed, size = address.packed, 2 if is_new else 1
        return all(
            int.from_bytes(packed[at * size : (at + 1) * size]) in allowed[at]
            for at in range(count)
        )

    return fits


def _split_parts(pattern: str, separator: str, count: int) -> list[str]:
    if separator == ":" and "::" in pattern:
        head, _, tail = pattern.partition("::")
        before, after = head.split(":") if head else [], tail.split(":") if tail else []
        texts = [*before, *["0"] * (count - len(before) - len(after)), *after]
    else:
        texts = pattern.split(separator)
    if texts[-1] == "*":  # the rest too
        texts += ["*"] * (count - len(texts))
    if len(texts) != count or not all(_PART_PATTERN.fullmatch(text) for text in texts):
        raise ValueError(pattern)
    return texts


def _parse_numbers(text: str, base: int, maximum: int) -> range | frozenset[int]:
    if text == "*":
        return range(maximum + 1)
    if text.startswith("{"):
        found = frozenset(int(part.strip(), base) for part in text[1:-1].split(","))
        if not all(0 <= number <= maximum for number in found):
            raise ValueError(text)
        return found
    first, _, last = text.partition("-")
    begin, end = int(first, base), int(last or first, base)
    if not 0 <= begin <= end <= maximum:
        raise ValueError(text)
    return range(begin, end + 1)


NO_ADDRESSES: Final = AddressPatterns(())


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
    """One of these actions, on this."""

    resource_type: ResourceType
    name: str
    actions: Action

    def __str__(self) -> str:
        wanted = " or ".join(str(action.name) for action in Action if action & self.actions)
        return f"{wanted} on {self.resource_type.value.lower()} {self.name}"


class Account(Protocol):
    @property
    def access_key(self) -> str: ...
    @property
    def secret_key(self) -> Secret: ...
    @property
    def trusted_addresses(self) -> AddressPatterns:
        """From there it needs no signature, and may do everything."""

    @property
    def is_enabled(self) -> bool: ...
    def allows(self, permission: Permission, host: str) -> bool: ...


# --- 4.x -----------------------------------------------------------------------------------------

_CLIENT_ACTIONS: Final = (
    Action.PUB | Action.SUB | Action.GET
)  # what is not an administrator's alone


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainAccount:
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
        # As in RocketMQ: an administrator with no permissions of his own has all of them.
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


# --- 5.x -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyEntry:
    """`kind` None is any; `name` ends with a star if it is a prefix, and is one if it is any."""

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
        """The closest entry decides: a name, the longest prefix, a kind, anything. Of two that are
        as close, the one that denies."""
        is_name = self.resource_type is not None and not self.name.endswith("*")
        return self.resource_type is not None, is_name, len(self.name), not self.is_allow


@dataclass(frozen=True, slots=True, kw_only=True)
class User:
    access_key: str
    secret_key: Secret
    is_super: bool = False
    is_enabled: bool = True
    custom_policy: Sequence[PolicyEntry] = ()
    default_policy: Sequence[PolicyEntry] = ()  # asked if no custom one matches
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
    """`trusted_addresses`: whoever comes from there is not asked who he is."""

    accounts: Mapping[str, Account] = field(default_factory=dict)
    trusted_addresses: AddressPatterns = NO_ADDRESSES


KEY_CHARS_MIN: Final = 7  # RocketMQ's
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
_RESOURCE_TYPES: Final = {kind.value.lower(): kind for kind in ResourceType}


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
    data_version: Any = None  # RocketMQ's own note
    users: list[_User] | str = []
    acls: list[_Acl] | str = []


def parse_rules(text: str) -> AccessRules:
    """Raises AccessRulesBroken, which says where."""
    try:
        # Every scalar is text: a secret of digits keeps its zeros.
        content = yaml.load(text, Loader=yaml.BaseLoader)
    except yaml.MarkedYAMLError as error:
        at = error.problem_mark
        where = f"line {at.line + 1}, column {at.column + 1}: " if at is not None else ""
        raise InvalidAccessRules(f"{where}{error.problem or 'not YAML'}") from None
    except (yaml.YAMLError, RecursionError, ValueError):
        raise InvalidAccessRules("not YAML") from None
    try:
        file = msgspec.convert(content or {}, _File, strict=False)
    except msgspec.ValidationError as error:
        raise InvalidAccessRules(str(error)) from None
    return _make_rules(file)


def _make_rules(file: _File) -> AccessRules:
    accounts: dict[str, Account] = {}
    entries = _entries_by_user(_as_list(file.acls))
    made: list[Account] = [_make_plain_account(account) for account in _as_list(file.accounts)]
    made += [
        _make_user(user, entries.pop(user.username, ([], []))) for user in _as_list(file.users)
    ]
    for account in made:
        if account.access_key in accounts:
            raise InvalidAccessRules(f"{account.access_key} is there twice")
        accounts[account.access_key] = account
    if entries:
        raise InvalidAccessRules(f"acls: there is no user {min(entries)}")
    where = "globalWhiteRemoteAddresses"
    trusted = _parse_addresses(_as_list(file.global_white_remote_addresses), where)
    return AccessRules(accounts=accounts, trusted_addresses=trusted)


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
    perm = _PLAIN_PERMISSIONS.get(text.strip() or "DENY")
    if perm is None:
        raise InvalidAccessRules(f"{location}: must be PUB, SUB, PUB|SUB or DENY")
    return perm


def _make_user(user: _User, entries: tuple[list[PolicyEntry], list[PolicyEntry]]) -> User:
    name = user.username
    _check_lengths(name, user.password, name_chars_min=1)
    kind, status = user.user_type.lower(), user.user_status.lower()
    if kind not in ("super", "normal"):
        raise InvalidAccessRules(f"{name}: userType must be Super or Normal")
    if status not in ("enable", "disable"):
        raise InvalidAccessRules(f"{name}: userStatus must be enable or disable")
    return User(
        access_key=name,
        secret_key=Secret(user.password),
        is_super=kind == "super",
        is_enabled=status == "enable",
        custom_policy=entries[0],
        default_policy=entries[1],
    )


def _entries_by_user(acls: list[_Acl]) -> dict[str, tuple[list[PolicyEntry], list[PolicyEntry]]]:
    found: dict[str, tuple[list[PolicyEntry], list[PolicyEntry]]] = {}
    for acl in acls:
        kind, _, user = acl.subject.partition(":")
        if kind.lower() != "user" or not user:
            raise InvalidAccessRules("acls: a subject must be User:name")
        custom, default = found.setdefault(user, ([], []))
        for policy in acl.policies:
            match policy.policy_type.lower():
                case "custom":
                    into = custom
                case "default":
                    into = default
                case _:
                    raise InvalidAccessRules(f"{user}: policyType must be Custom or Default")
            into += (_make_entry(entry, user) for entry in policy.entries)
    return found


def _make_entry(entry: _Entry, username: str) -> PolicyEntry:
    kind, name = _parse_resource(entry.resource, username)
    actions = Action.NONE
    for word in _split_words(entry.actions):
        if word.lower() not in _ACTIONS:
            known = "Pub, Sub, Create, Update, Delete, Get, List or All"
            raise InvalidAccessRules(f"{username}: an action must be {known}")
        actions |= _ACTIONS[word.lower()]
    if entry.decision.lower() not in ("allow", "deny"):
        raise InvalidAccessRules(f"{username}: decision must be Allow or Deny")
    patterns = _split_words(entry.source_ips)
    return PolicyEntry(
        resource_type=kind,
        name=name,
        actions=actions,
        addresses=_parse_addresses(patterns, f"{username}: sourceIps") if patterns else None,
        is_allow=entry.decision.lower() == "allow",
    )


def _parse_resource(text: str, username: str) -> tuple[ResourceType | None, str]:
    if text == "*":
        return None, "*"
    word, _, name = text.partition(":")
    kind = _RESOURCE_TYPES.get(word.lower())
    if kind is None or not name or "*" in name[:-1]:
        _raise_invalid_resource(username)
    return kind, name


def _raise_invalid_resource(username: str) -> NoReturn:
    raise InvalidAccessRules(
        f"{username}: a resource must be *, Topic:name, Group:name or Cluster:name; "
        "a name may end with a star"
    )


def _check_lengths(name: str, secret: str, *, name_chars_min: int = KEY_CHARS_MIN) -> None:
    if len(name) < name_chars_min or not name.isprintable():
        raise InvalidAccessRules(f"an access key has {name_chars_min} characters at least")
    if len(secret) < KEY_CHARS_MIN:
        raise InvalidAccessRules(f"{name}: its secret has {KEY_CHARS_MIN} characters at least")


def _parse_addresses(patterns: list[str], location: str) -> AddressPatterns:
    try:
        return AddressPatterns(patterns)
    except ValueError as error:
        raise InvalidAccessRules(f"{location}: {error}") from None


def _split_words(value: list[str] | str) -> list[str]:
    texts = value.split(",") if isinstance(value, str) else value
    return [text.strip() for text in texts if text.strip()]


def _as_list(value: list[Any] | str) -> list[Any]:
    """A key with nothing behind it is an empty list."""
    if isinstance(value, list):
        return value
    if value.strip():
        raise InvalidAccessRules("a list is expected where there is a text")
    return []
