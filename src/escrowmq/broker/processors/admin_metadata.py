"""Looking after topics and groups: make, change, show, delete.

A deletion is answered when it is durable, in this order: offsets, settings, queues. Whatever a
crash leaves of it, no message is skipped, and the same request again finishes it.

Users and policies (5.x), for operators to look at. No secret leaves the broker.

They live in a file that its owner edits and the broker reads again when it changes, so there is
nothing here that changes them. Accounts of `plain_acl.yml` (4.x) are no users and are not shown.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec

from escrowmq.auth.acl import Action, PolicyEntry, User
from escrowmq.auth.validator import Guard
from escrowmq.broker.dispatch import Line
from escrowmq.broker.metadata import (
    Groups,
    Topics,
    is_group_name,
    is_system_group,
    is_system_topic,
    refuse_bad_topic_name,
)
from escrowmq.consume.offsets import ConsumerOffsets
from escrowmq.errors import BrokenBody, RequestRefused, StoreError
from escrowmq.parsing import lenient_json
from escrowmq.remoting.bodies import JsonBody, TopicList, encode_body
from escrowmq.remoting.bodies_admin import AclInfo, PolicyEntryInfo, PolicyInfo, UserInfo
from escrowmq.remoting.codes import RequestCode, ResponseCode
from escrowmq.remoting.headers_admin import (
    AclsLike,
    AclSubject,
    CreateTopic,
    DeleteGroup,
    GroupName,
    TopicName,
    UserName,
    UsersLike,
)
from escrowmq.remoting.requests import Request
from escrowmq.remoting.responses import answer, refuse, succeed
from escrowmq.store.config_files import GroupConfig, TopicConfig, plain
from escrowmq.store.store import MessageStore

QUEUES_MAX: Final = 65_536
ATTRIBUTES_MAX: Final = 100
DELETIONS_WAITING_MAX: Final = 1_000


class Admin:
    def __init__(
        self,
        store: MessageStore,
        topics: Topics,
        groups: Groups,
        offsets: ConsumerOffsets,
        save_offsets: Callable[[], None] = lambda: None,
    ) -> None:
        self._store = store
        self._topics = topics
        self._groups = groups
        self._offsets = offsets
        self._save_offsets = save_offsets
        self._deletions: list[tuple[Line, Request[TopicName]]] = []  # that wait for their files

    # --- topics ----------------------------------------------------------------------------------

    def create_topic(self, line: Line, request: Request[CreateTopic], now_ms: int) -> None:
        fields = request.head.fields
        _refuse_system_topic(fields.topic)
        for count in (fields.read_queue_nums, fields.write_queue_nums):
            if not 0 <= count <= QUEUES_MAX:
                raise _bad(f"{count} queues, not 0 to {QUEUES_MAX}")
        if not 0 <= fields.perm <= 7:
            raise _bad(f"perm {fields.perm}: 2 is write, 4 is read, 6 is both")
        known = self._topics.find(fields.topic)
        wanted = TopicConfig(
            topic_name=fields.topic,
            read_queue_nums=fields.read_queue_nums,
            write_queue_nums=fields.write_queue_nums,
            perm=fields.perm,
            topic_filter_type=fields.topic_filter_type,
            topic_sys_flag=fields.topic_sys_flag,
            order=fields.order,
            attributes=_changed({} if known is None else known.attributes, fields.attributes),
        )
        if wanted != known:
            self._topics.put(wanted, now_ms=now_ms)
        line.write(succeed(request))

    def delete_topic(self, line: Line, request: Request[TopicName], now_ms: int) -> None:
        _refuse_system_topic(request.head.fields.topic)
        if len(self._deletions) >= DELETIONS_WAITING_MAX:
            raise RequestRefused(ResponseCode.SYSTEM_BUSY, "too many topics are being deleted")
        self._deletions.append((line, request))
        self.tick(now_ms)

    def tick(self, now_ms: int) -> None:
        """Delete what waited until nobody writes to its files."""
        waiting, self._deletions = self._deletions, []
        for line, request in waiting:
            topic = request.head.fields.topic
            if not self._store.may_remove_topic(topic):
                self._deletions.append((line, request))
                continue
            try:
                self._delete(topic, now_ms)
            except StoreError as error:
                failed = RequestRefused(ResponseCode.SYSTEM_ERROR, f"{topic} not deleted: {error}")
                line.write(refuse(request, failed))
            else:
                line.write(succeed(request))

    def _delete(self, topic: str, now_ms: int) -> None:
        self._offsets.remove_topic(topic)
        self._save_offsets()
        if self._topics.remove(topic, now_ms=now_ms):
            self._topics.save()
        self._store.remove_topic(topic)

    def clean_unused(self, line: Line, request: Request[Any], now_ms: int) -> None:
        """Queues of topics that are not there."""
        known = self._topics.all()
        for topic in {topic for topic, _ in self._store.queues()} - set(known):
            if not is_system_topic(topic) and self._store.may_remove_topic(topic):
                self._store.remove_topic(topic)
        line.write(succeed(request))

    def topic_config(self, line: Line, request: Request[TopicName], now_ms: int) -> None:
        topic = request.head.fields.topic
        found = self._topics.find(topic)
        if found is None:
            raise RequestRefused(
                ResponseCode.TOPIC_NOT_EXIST, f"topic {topic[:100]} does not exist"
            )
        line.write(answer(request, body=_json(found)))

    def all_topics(self, line: Line, request: Request[Any], now_ms: int) -> None:
        table = {"topicConfigTable": self._topics.all(), "dataVersion": self._topics.version}
        line.write(answer(request, body=_json(table)))

    def system_topics(self, line: Line, request: Request[Any], now_ms: int) -> None:
        names = sorted(filter(self._topics.is_system, self._topics.all()))
        line.write(answer(request, body=encode_body(TopicList(topic_list=names))))

    # --- groups ----------------------------------------------------------------------------------

    def create_group(self, line: Line, request: Request[Any], now_ms: int) -> None:
        try:
            config = msgspec.convert(lenient_json(request.body), GroupConfig, strict=False)
        except (BrokenBody, msgspec.ValidationError, RecursionError) as error:
            raise RequestRefused(ResponseCode.SYSTEM_ERROR, f"the group: {error}") from error
        if not is_group_name(config.group_name):
            raise _bad(f"{config.group_name[:100]!r} names no group")
        if not 0 <= config.retry_queue_nums <= QUEUES_MAX:
            raise _bad(f"{config.retry_queue_nums} retry queues, not 0 to {QUEUES_MAX}")
        self._groups.put(config, now_ms=now_ms)
        line.write(succeed(request))

    def delete_group(self, line: Line, request: Request[DeleteGroup], now_ms: int) -> None:
        fields = request.head.fields
        name = fields.group_name
        if is_system_group(name):
            raise _bad(f"{name} belongs to the broker")
        try:
            if fields.clean_offset or fields.remove_offset:
                self._offsets.remove_group(name)
                self._save_offsets()
            if self._groups.remove(name, now_ms=now_ms):
                self._groups.save()
        except StoreError as error:
            raise RequestRefused(
                ResponseCode.SYSTEM_ERROR, f"{name[:100]} not deleted: {error}"
            ) from error
        line.write(succeed(request))

    def group_config(self, line: Line, request: Request[GroupName], now_ms: int) -> None:
        name = request.head.fields.group
        found = self._groups.find_or_make(name, now_ms=now_ms)
        if found is None:
            raise RequestRefused(
                ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST, f"group {name[:100]} does not exist"
            )
        line.write(answer(request, body=_json(found)))

    def all_groups(self, line: Line, request: Request[Any], now_ms: int) -> None:
        table = {
            "subscriptionGroupTable": self._groups.all(),
            "forbiddenTable": {},
            "dataVersion": self._groups.version,
        }
        line.write(answer(request, body=_json(table)))


def _bad(why: str) -> RequestRefused:
    return RequestRefused(ResponseCode.INVALID_PARAMETER, why)


def _refuse_system_topic(topic: str) -> None:
    refuse_bad_topic_name(topic)
    if is_system_topic(topic):
        raise _bad(f"{topic} belongs to the broker")


def _changed(attributes: dict[str, str], text: str | None) -> dict[str, str]:
    """`+name=value` sets one, `-name` takes it away; commas between them."""
    changed = dict(attributes)
    for part in filter(None, (text or "").split(",")):
        name, equals, value = part[1:].partition("=")
        if part[0] == "+" and equals and name:
            changed[name] = value
        elif part[0] == "-" and name and not equals:
            changed.pop(name, None)
        else:
            raise _bad(f"attribute {part[:100]!r} is neither +name=value nor -name")
    if len(changed) > ATTRIBUTES_MAX:
        raise _bad(f"{len(changed)} attributes, limit {ATTRIBUTES_MAX}")
    return changed


def _json(value: Any) -> bytes:
    return msgspec.json.encode(plain(value))


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
