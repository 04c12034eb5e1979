"""Users and policies (5.x), for operators to look at. No secret leaves the broker.

They live in a file that its owner edits and the broker reads again when it changes, so there is
nothing here that changes them. Accounts of `plain_acl.yml` (4.x) are no users and are not shown.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from escrowmq.access.guard import Guard
from escrowmq.access.rules import Action, PolicyEntry, User
from escrowmq.broker.line import Line
from escrowmq.errors import RequestRefused
from escrowmq.wire.answers import answer
from escrowmq.wire.bodies import JsonBody, encode_body
from escrowmq.wire.bodies_access import AclInfo, PolicyEntryInfo, PolicyInfo, UserInfo
from escrowmq.wire.codes import RequestCode, ResponseCode
from escrowmq.wire.fastpath import Request
from escrowmq.wire.headers_admin import AclsLike, AclSubject, UserName, UsersLike

_CHANGES: Final = (
    RequestCode.AUTH_CREATE_USER,
    RequestCode.AUTH_UPDATE_USER,
    RequestCode.AUTH_DELETE_USER,
    RequestCode.AUTH_CREATE_ACL,
    RequestCode.AUTH_UPDATE_ACL,
    RequestCode.AUTH_DELETE_ACL,
)
_SUBJECT: Final = "User:"


def access_handlers(guard: Guard | None) -> dict[int, Callable[[Line, Request[Any], int], None]]:
    asked = AdminAccess(guard)
    return {
        **dict.fromkeys(_CHANGES, _refuse_change),
        RequestCode.AUTH_GET_USER: asked.user,
        RequestCode.AUTH_LIST_USER: asked.users,
        RequestCode.AUTH_GET_ACL: asked.acl,
        RequestCode.AUTH_LIST_ACL: asked.acls,
    }


def _refuse_change(line: Line, request: Request[Any], now_ms: int) -> None:
    raise RequestRefused(
        ResponseCode.REQUEST_CODE_NOT_SUPPORTED,
        "users and policies are changed in the file of escrowAclFile: the broker reads it again "
        "by itself",
    )


class AdminAccess:
    def __init__(self, guard: Guard | None) -> None:
        self._guard = guard

    def user(self, line: Line, request: Request[UserName], now_ms: int) -> None:
        found = self._find(request.head.fields.username)
        line.write(answer(request, body=b"" if found is None else encode_body(_user_info(found))))

    def users(self, line: Line, request: Request[UsersLike], now_ms: int) -> None:
        part = request.head.fields.filter
        found = [_user_info(user) for user in self._users() if part in user.access_key]
        line.write(answer(request, body=_array(found)))

    def acl(self, line: Line, request: Request[AclSubject], now_ms: int) -> None:
        found = self._find(request.head.fields.subject.removeprefix(_SUBJECT))
        info = None if found is None else _acl_info(found, "")
        line.write(answer(request, body=b"" if info is None else encode_body(info)))

    def acls(self, line: Line, request: Request[AclsLike], now_ms: int) -> None:
        fields = request.head.fields
        wanted = [user for user in self._users() if fields.subject_filter in _subject(user)]
        found = [_acl_info(user, fields.resource_filter) for user in wanted]
        line.write(answer(request, body=_array([info for info in found if info is not None])))

    def _users(self) -> list[User]:
        if self._guard is None:
            raise RequestRefused(
                ResponseCode.REQUEST_CODE_NOT_SUPPORTED,
                "this broker asks nobody who he is: set aclEnable and escrowAclFile first",
            )
        return [account for account in self._guard.accounts if isinstance(account, User)]

    def _find(self, name: str) -> User | None:
        return next((user for user in self._users() if user.access_key == name), None)


def _subject(user: User) -> str:
    return f"{_SUBJECT}{user.access_key}"


def _user_info(user: User) -> UserInfo:
    return UserInfo(
        username=user.access_key,
        user_type="Super" if user.is_super else "Normal",
        user_status="enable" if user.is_enabled else "disable",
    )


def _acl_info(user: User, resource_part: str) -> AclInfo | None:
    """None if it has no policy, or none for such a resource."""
    policies = []
    for kind, entries in (("Custom", user.custom), ("Default", user.default)):
        shown = [info for info in map(_entry_info, entries) if resource_part in info.resource]
        if shown:
            policies.append(PolicyInfo(policy_type=kind, entries=shown))
    return AclInfo(subject=_subject(user), policies=policies) if policies else None


def _entry_info(entry: PolicyEntry) -> PolicyEntryInfo:
    return PolicyEntryInfo(
        resource="*" if entry.kind is None else f"{entry.kind.value}:{entry.name}",
        actions=_actions(entry.actions),
        source_ips=None if entry.addresses is None else list(entry.addresses.patterns),
        decision="Allow" if entry.allows else "Deny",
    )


def _actions(actions: Action) -> list[str]:
    if actions == Action.ALL:
        return ["All"]
    return [str(action.name).capitalize() for action in actions]


def _array(bodies: Sequence[JsonBody]) -> bytes:
    return b"[%b]" % b",".join(map(encode_body, bodies))
