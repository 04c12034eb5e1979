"""Rules from text: YAML, and so JSON too.

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

from typing import Any, Final, NoReturn

import msgspec
import yaml

from escrowmq.access.addresses import Addresses
from escrowmq.access.rules import Account, Action, Kind, PlainAccount, PolicyEntry, Rules, User
from escrowmq.errors import AccessRulesBroken
from escrowmq.secret import Secret

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
