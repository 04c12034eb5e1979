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

from escrowmq.errors import AccessRulesBroken
from escrowmq.secret import Secret

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
_Fits = Callable[[Address], bool]
_OUTSIDE_BRACES: Final = re.compile(r",(?![^{]*\})")
_PART: Final = re.compile(r"[0-9A-Fa-f]{1,4}|[0-9A-Fa-f]{1,4}-[0-9A-Fa-f]{1,4}|\*|\{[^{}]*\}")


class Addresses:
    """Those that one of the patterns fits. ValueError says which pattern cannot be read."""

    def __init__(self, patterns: Iterable[str]) -> None:
        self.patterns = tuple(pattern.strip() for pattern in patterns)
        self._fits = [
            _parse(part.strip())
            for pattern in self.patterns
            for part in _OUTSIDE_BRACES.split(pattern)
            if part.strip()
        ]

    def __contains__(self, host: str) -> bool:
        if not self._fits:
            return False
        address = _address(host)
        return address is not None and any(fits(address) for fits in self._fits)

    def __bool__(self) -> bool:
        return bool(self._fits)


def _address(host: str) -> Address | None:
    try:
        address = ipaddress.ip_address(host.strip("[]").partition("%")[0])
    except ValueError:
        return None
    mapped = getattr(address, "ipv4_mapped", None)
    return mapped or address


def _parse(pattern: str) -> _Fits:
    try:
        if pattern in ("*", "*.*.*.*", "*:*:*:*:*:*:*:*"):
            return lambda address: True
        if "/" in pattern:
            network = ipaddress.ip_network(pattern, strict=False)
            return lambda address: address in network
        exact = _address(pattern)
        if exact is not None:
            return lambda address: address == exact
        return _by_parts(pattern)
    except ValueError as error:
        raise ValueError(f"{pattern!r} is no pattern of addresses") from error


def _by_parts(pattern: str) -> _Fits:
    is_new = ":" in pattern
    count, base, most = (8, 16, 0xFFFF) if is_new else (4, 10, 255)
    texts = _parts(pattern, ":" if is_new else ".", count)
    allowed = [_numbers(text, base, most) for text in texts]
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


def _parts(pattern: str, separator: str, count: int) -> list[str]:
    if separator == ":" and "::" in pattern:
        head, _, tail = pattern.partition("::")
        before, after = head.split(":") if head else [], tail.split(":") if tail else []
        texts = [*before, *["0"] * (count - len(before) - len(after)), *after]
    else:
        texts = pattern.split(separator)
    if texts[-1] == "*":  # the rest too
        texts += ["*"] * (count - len(texts))
    if len(texts) != count or not all(_PART.fullmatch(text) for text in texts):
        raise ValueError(pattern)
    return texts


def _numbers(text: str, base: int, most: int) -> range | frozenset[int]:
    if text == "*":
        return range(most + 1)
    if text.startswith("{"):
        found = frozenset(int(part.strip(), base) for part in text[1:-1].split(","))
        if not all(0 <= number <= most for number in found):
            raise ValueError(text)
        return found
    first, _, last = text.partition("-")
    begin, end = int(first, base), int(last or first, base)
    if not 0 <= begin <= end <= most:
        raise ValueError(text)
    return range(begin, end + 1)


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


KEY_CHARS_MIN: Final = 7  # RocketMQ's
_PLAIN: Final = {
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
_KINDS: Final = {kind.value.lower(): kind for kind in Kind}


class _Shape(msgspec.Struct, rename="camel", forbid_unknown_fields=True, kw_only=True):
    pass


class _PlainAccount(_Shape):
    access_key: str
    secret_key: str
    white_remote_address: str = ""
    admin: bool = False
    default_topic_perm: str = "DENY"
    default_group_perm: str = "DENY"
    topic_perms: list[str] | str = []
    group_perms: list[str] | str = []


class _User(_Shape):
    username: str
    password: str
    user_type: str = "Normal"
    user_status: str = "enable"


class _Entry(_Shape):
    resource: str
    actions: list[str] | str
    decision: str
    source_ips: list[str] | str = []


class _Policy(_Shape):
    policy_type: str = "Custom"
    entries: list[_Entry] = []


class _Acl(_Shape):
    subject: str
    policies: list[_Policy] = []


class _File(_Shape):
    global_white_remote_addresses: list[str] | str = []
    accounts: list[_PlainAccount] | str = []
    data_version: Any = None  # RocketMQ's own note
    users: list[_User] | str = []
    acls: list[_Acl] | str = []


def read_rules(text: str) -> Rules:
    """Raises AccessRulesBroken, which says where."""
    try:
        # Every scalar is text: a secret of digits keeps its zeros.
        content = yaml.load(text, Loader=yaml.BaseLoader)
    except yaml.MarkedYAMLError as error:
        at = error.problem_mark
        where = f"line {at.line + 1}, column {at.column + 1}: " if at is not None else ""
        raise AccessRulesBroken(f"{where}{error.problem or 'not YAML'}") from None
    except (yaml.YAMLError, RecursionError, ValueError):
        raise AccessRulesBroken("not YAML") from None
    try:
        file = msgspec.convert(content or {}, _File, strict=False)
    except msgspec.ValidationError as error:
        raise AccessRulesBroken(str(error)) from None
    return _rules(file)


def _rules(file: _File) -> Rules:
    accounts: dict[str, Account] = {}
    entries = _entries_by_user(_some(file.acls))
    made: list[Account] = [_plain(account) for account in _some(file.accounts)]
    made += [_user(user, entries.pop(user.username, ([], []))) for user in _some(file.users)]
    for account in made:
        if account.access_key in accounts:
            raise AccessRulesBroken(f"{account.access_key} is there twice")
        accounts[account.access_key] = account
    if entries:
        raise AccessRulesBroken(f"acls: there is no user {min(entries)}")
    where = "globalWhiteRemoteAddresses"
    trusted = _addresses(_some(file.global_white_remote_addresses), where)
    return Rules(accounts=accounts, trusted_addresses=trusted)


def _plain(told: _PlainAccount) -> PlainAccount:
    key = told.access_key
    _refuse_short(key, told.secret_key)
    return PlainAccount(
        access_key=key,
        secret_key=Secret(told.secret_key),
        is_admin=told.admin,
        trusted_addresses=_addresses([told.white_remote_address], f"{key}: whiteRemoteAddress"),
        default_topic=_perm(told.default_topic_perm, f"{key}: defaultTopicPerm"),
        default_group=_perm(told.default_group_perm, f"{key}: defaultGroupPerm"),
        topics=dict(_named(perm, f"{key}: topicPerms") for perm in _some(told.topic_perms)),
        groups=dict(_named(perm, f"{key}: groupPerms") for perm in _some(told.group_perms)),
    )


def _named(text: str, where: str) -> tuple[str, Action]:
    name, equals, perm = (part.strip() for part in text.partition("="))
    if not name or not equals:
        raise AccessRulesBroken(f"{where}: must be name=PUB, SUB, PUB|SUB or DENY")
    return name, _perm(perm, f"{where}: {name}")


def _perm(text: str, where: str) -> Action:
    perm = _PLAIN.get(text.strip() or "DENY")
    if perm is None:
        raise AccessRulesBroken(f"{where}: must be PUB, SUB, PUB|SUB or DENY")
    return perm


def _user(told: _User, entries: tuple[list[PolicyEntry], list[PolicyEntry]]) -> User:
    name = told.username
    _refuse_short(name, told.password, name_chars_min=1)
    kind, status = told.user_type.lower(), told.user_status.lower()
    if kind not in ("super", "normal"):
        raise AccessRulesBroken(f"{name}: userType must be Super or Normal")
    if status not in ("enable", "disable"):
        raise AccessRulesBroken(f"{name}: userStatus must be enable or disable")
    return User(
        access_key=name,
        secret_key=Secret(told.password),
        is_super=kind == "super",
        is_enabled=status == "enable",
        custom=entries[0],
        default=entries[1],
    )


def _entries_by_user(acls: list[_Acl]) -> dict[str, tuple[list[PolicyEntry], list[PolicyEntry]]]:
    found: dict[str, tuple[list[PolicyEntry], list[PolicyEntry]]] = {}
    for acl in acls:
        kind, _, user = acl.subject.partition(":")
        if kind.lower() != "user" or not user:
            raise AccessRulesBroken("acls: a subject must be User:name")
        custom, default = found.setdefault(user, ([], []))
        for policy in acl.policies:
            match policy.policy_type.lower():
                case "custom":
                    into = custom
                case "default":
                    into = default
                case _:
                    raise AccessRulesBroken(f"{user}: policyType must be Custom or Default")
            into += (_entry(entry, user) for entry in policy.entries)
    return found


def _entry(told: _Entry, user: str) -> PolicyEntry:
    kind, name = _resource(told.resource, user)
    actions = Action.NONE
    for word in _words(told.actions):
        if word.lower() not in _ACTIONS:
            known = "Pub, Sub, Create, Update, Delete, Get, List or All"
            raise AccessRulesBroken(f"{user}: an action must be {known}")
        actions |= _ACTIONS[word.lower()]
    if told.decision.lower() not in ("allow", "deny"):
        raise AccessRulesBroken(f"{user}: decision must be Allow or Deny")
    patterns = _words(told.source_ips)
    return PolicyEntry(
        kind=kind,
        name=name,
        actions=actions,
        addresses=_addresses(patterns, f"{user}: sourceIps") if patterns else None,
        allows=told.decision.lower() == "allow",
    )


def _resource(text: str, user: str) -> tuple[Kind | None, str]:
    if text == "*":
        return None, "*"
    word, _, name = text.partition(":")
    kind = _KINDS.get(word.lower())
    if kind is None or not name or "*" in name[:-1]:
        _refuse_resource(user)
    return kind, name


def _refuse_resource(user: str) -> NoReturn:
    raise AccessRulesBroken(
        f"{user}: a resource must be *, Topic:name, Group:name or Cluster:name; "
        "a name may end with a star"
    )


def _refuse_short(name: str, secret: str, *, name_chars_min: int = KEY_CHARS_MIN) -> None:
    if len(name) < name_chars_min or not name.isprintable():
        raise AccessRulesBroken(f"an access key has {name_chars_min} characters at least")
    if len(secret) < KEY_CHARS_MIN:
        raise AccessRulesBroken(f"{name}: its secret has {KEY_CHARS_MIN} characters at least")


def _addresses(patterns: list[str], where: str) -> Addresses:
    try:
        return Addresses(patterns)
    except ValueError as error:
        raise AccessRulesBroken(f"{where}: {error}") from None


def _words(told: list[str] | str) -> list[str]:
    texts = told.split(",") if isinstance(told, str) else told
    return [text.strip() for text in texts if text.strip()]


def _some(told: list[Any] | str) -> list[Any]:
    """A key with nothing behind it is an empty list."""
    if isinstance(told, list):
        return told
    if told.strip():
        raise AccessRulesBroken("a list is expected where there is a text")
    return []
