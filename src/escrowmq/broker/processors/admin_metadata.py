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
from escrowmq.auth.validator import AccessValidator
from escrowmq.broker.dispatch import Channel, ErrorCodes, Handler, RequestPermissions
from escrowmq.broker.metadata import (
    SubscriptionGroups,
    TopicTable,
    check_topic_name,
    is_valid_group_name,
)
from escrowmq.consume.offsets import ConsumerOffsets
from escrowmq.errors import BrokenBody, RequestRefused, StoreError
from escrowmq.message.names import is_system_group, is_system_topic
from escrowmq.message.topic_config import TopicConfig
from escrowmq.parsing import parse_lenient_json
from escrowmq.remoting.bodies import JsonBody, TopicList, encode_body
from escrowmq.remoting.bodies_admin import AclInfo, PolicyEntryInfo, PolicyInfo, UserInfo
from escrowmq.remoting.codes import RequestCode, ResponseCode
from escrowmq.remoting.headers_admin import (
    AclSubject,
    CreateTopic,
    DeleteGroup,
    GroupHeader,
    ListAcls,
    ListUsers,
    TopicHeader,
    UserHeader,
)
from escrowmq.remoting.requests import Request
from escrowmq.store.config_files import GroupConfig, to_plain
from escrowmq.store.store import MessageStore

QUEUES_MAX: Final = 65_536
ATTRIBUTES_MAX: Final = 100
PENDING_DELETIONS_MAX: Final = 1_000
# Part of a deletion may be durable, so no error may say that nothing happened.
_DELETE_ERRORS: Final[ErrorCodes] = {StoreError: ResponseCode.SYSTEM_ERROR}


class MetadataAdmin:
    def __init__(
        self,
        store: MessageStore,
        topics: TopicTable,
        groups: SubscriptionGroups,
        offsets: ConsumerOffsets,
        save_offsets: Callable[[], None] = lambda: None,
    ) -> None:
        self._store = store
        self._topics = topics
        self._groups = groups
        self._offsets = offsets
        self._save_offsets = save_offsets
        self._pending_deletions: list[
            tuple[Channel, Request[TopicHeader]]
        ] = []  # that wait for their files

    def handlers(self) -> list[Handler]:
        code, permissions = RequestCode, RequestPermissions
        return [
            Handler(code.UPDATE_AND_CREATE_TOPIC, self.create_topic, permissions.create_topic),
            Handler(code.DELETE_TOPIC_IN_BROKER, self.delete_topic, permissions.delete_topic),
            Handler(code.GET_TOPIC_CONFIG, self.get_topic_config),
            Handler(code.GET_ALL_TOPIC_CONFIG, self.list_topics),
            Handler(code.GET_SYSTEM_TOPIC_LIST_FROM_BROKER, self.list_system_topics),
            Handler(code.CLEAN_UNUSED_TOPIC, self.clean_unused_topics),
            Handler(code.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, self.create_group),
            Handler(code.DELETE_SUBSCRIPTIONGROUP, self.delete_group, errors=_DELETE_ERRORS),
            Handler(code.GET_SUBSCRIPTIONGROUP_CONFIG, self.get_group_config),
            Handler(code.GET_ALL_SUBSCRIPTIONGROUP_CONFIG, self.list_groups),
        ]

    # --- topics ----------------------------------------------------------------------------------

    def create_topic(self, channel: Channel, request: Request[CreateTopic], now_ms: int) -> None:
        fields = request.head.fields
        _check_topic(fields.topic)
        for count in (fields.read_queue_nums, fields.write_queue_nums):
            if not 0 <= count <= QUEUES_MAX:
                raise _invalid_parameter(f"{count} queues, not 0 to {QUEUES_MAX}")
        if not 0 <= fields.perm <= 7:
            raise _invalid_parameter(f"perm {fields.perm}: 2 is write, 4 is read, 6 is both")
        known = self._topics.find(fields.topic)
        wanted = TopicConfig(
            topic_name=fields.topic,
            read_queue_nums=fields.read_queue_nums,
            write_queue_nums=fields.write_queue_nums,
            perm=fields.perm,
            topic_filter_type=fields.topic_filter_type,
            topic_sys_flag=fields.topic_sys_flag,
            order=fields.order,
            attributes=_update_attributes(
                {} if known is None else known.attributes, fields.attributes
            ),
        )
        if wanted != known:
            self._topics.put(wanted, now_ms=now_ms)
        channel.respond(request)

    def delete_topic(self, channel: Channel, request: Request[TopicHeader], now_ms: int) -> None:
        _check_topic(request.head.fields.topic)
        if len(self._pending_deletions) >= PENDING_DELETIONS_MAX:
            raise RequestRefused(ResponseCode.SYSTEM_BUSY, "too many topics are being deleted")
        self._pending_deletions.append((channel, request))
        self.tick(now_ms)

    def tick(self, now_ms: int) -> None:
        """Delete what waited until nobody writes to its files."""
        waiting, self._pending_deletions = self._pending_deletions, []
        for line, request in waiting:
            topic = request.head.fields.topic
            if not self._store.can_remove_topic(topic):
                self._pending_deletions.append((line, request))
                continue
            try:
                self._delete_topic(topic, now_ms)
            except StoreError as error:
                failed = RequestRefused(ResponseCode.SYSTEM_ERROR, f"{topic} not deleted: {error}")
                line.respond(request, code=failed.code, remark=failed.remark)
            else:
                line.respond(request)

    def _delete_topic(self, topic: str, now_ms: int) -> None:
        self._offsets.remove_topic(topic)
        self._save_offsets()
        if self._topics.remove(topic, now_ms=now_ms):
            self._topics.save()
        self._store.remove_topic(topic)

    def clean_unused_topics(self, channel: Channel, request: Request[Any], now_ms: int) -> None:
        """Queues of topics that are not there."""
        known = self._topics.configs()
        for topic in {topic for topic, _ in self._store.queues()} - set(known):
            if not is_system_topic(topic) and self._store.can_remove_topic(topic):
                self._store.remove_topic(topic)
        channel.respond(request)

    def get_topic_config(
        self, channel: Channel, request: Request[TopicHeader], now_ms: int
    ) -> None:
        topic = request.head.fields.topic
        found = self._topics.find(topic)
        if found is None:
            raise RequestRefused(
                ResponseCode.TOPIC_NOT_EXIST, f"topic {topic[:100]} does not exist"
            )
        channel.respond(request, body=_encode_json(found))

    def list_topics(self, channel: Channel, request: Request[Any], now_ms: int) -> None:
        table = {"topicConfigTable": self._topics.configs(), "dataVersion": self._topics.version}
        channel.respond(request, body=_encode_json(table))

    def list_system_topics(self, channel: Channel, request: Request[Any], now_ms: int) -> None:
        names = sorted(filter(self._topics.is_system, self._topics.configs()))
        channel.respond(request, body=encode_body(TopicList(topic_list=names)))

    # --- groups ----------------------------------------------------------------------------------

    def create_group(self, channel: Channel, request: Request[Any], now_ms: int) -> None:
        try:
            config = msgspec.convert(parse_lenient_json(request.body), GroupConfig, strict=False)
        except (BrokenBody, msgspec.ValidationError, RecursionError) as error:
            raise BrokenBody(f"the group: {error}") from error
        if not is_valid_group_name(config.group_name):
            raise _invalid_parameter(f"{config.group_name[:100]!r} names no group")
        if not 0 <= config.retry_queue_nums <= QUEUES_MAX:
            raise _invalid_parameter(
                f"{config.retry_queue_nums} retry queues, not 0 to {QUEUES_MAX}"
            )
        self._groups.put(config, now_ms=now_ms)
        channel.respond(request)

    def delete_group(self, channel: Channel, request: Request[DeleteGroup], now_ms: int) -> None:
        fields = request.head.fields
        name = fields.group_name
        if is_system_group(name):
            raise _invalid_parameter(f"{name} belongs to the broker")
        if fields.clean_offset or fields.remove_offset:
            self._offsets.remove_group(name)
            self._save_offsets()
        if self._groups.remove(name, now_ms=now_ms):
            self._groups.save()
        channel.respond(request)

    def get_group_config(
        self, channel: Channel, request: Request[GroupHeader], now_ms: int
    ) -> None:
        name = request.head.fields.group
        found = self._groups.get_or_create(name, now_ms=now_ms)
        if found is None:
            raise RequestRefused(
                ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST, f"group {name[:100]} does not exist"
            )
        channel.respond(request, body=_encode_json(found))

    def list_groups(self, channel: Channel, request: Request[Any], now_ms: int) -> None:
        table = {
            "subscriptionGroupTable": self._groups.configs(),
            "forbiddenTable": {},
            "dataVersion": self._groups.version,
        }
        channel.respond(request, body=_encode_json(table))


def _invalid_parameter(reason: str) -> RequestRefused:
    return RequestRefused(ResponseCode.INVALID_PARAMETER, reason)


def _check_topic(topic: str) -> None:
    check_topic_name(topic)
    if is_system_topic(topic):
        raise _invalid_parameter(f"{topic} belongs to the broker")


def _update_attributes(attributes: dict[str, str], text: str | None) -> dict[str, str]:
    """`+name=value` sets one, `-name` takes it away; commas between them."""
    changed = dict(attributes)
    for part in filter(None, (text or "").split(",")):
        name, equals, value = part[1:].partition("=")
        if part[0] == "+" and equals and name:
            changed[name] = value
        elif part[0] == "-" and name and not equals:
            changed.pop(name, None)
        else:
            raise _invalid_parameter(f"attribute {part[:100]!r} is neither +name=value nor -name")
    if len(changed) > ATTRIBUTES_MAX:
        raise _invalid_parameter(f"{len(changed)} attributes, limit {ATTRIBUTES_MAX}")
    return changed


def _encode_json(value: Any) -> bytes:
    return msgspec.json.encode(to_plain(value))


_CHANGE_CODES: Final = (
    RequestCode.AUTH_CREATE_USER,
    RequestCode.AUTH_UPDATE_USER,
    RequestCode.AUTH_DELETE_USER,
    RequestCode.AUTH_CREATE_ACL,
    RequestCode.AUTH_UPDATE_ACL,
    RequestCode.AUTH_DELETE_ACL,
)
_SUBJECT_PREFIX: Final = "User:"


def _refuse_change(channel: Channel, request: Request[Any], now_ms: int) -> None:
    raise RequestRefused(
        ResponseCode.REQUEST_CODE_NOT_SUPPORTED,
        "users and policies are changed in the file of escrowAclFile: the broker reads it again "
        "by itself",
    )


class AccessAdmin:
    def __init__(self, access_validator: AccessValidator | None) -> None:
        self._access_validator = access_validator

    def handlers(self) -> list[Handler]:
        code = RequestCode
        return [
            *(Handler(change, _refuse_change) for change in _CHANGE_CODES),
            Handler(code.AUTH_GET_USER, self.get_user),
            Handler(code.AUTH_LIST_USER, self.list_users),
            Handler(code.AUTH_GET_ACL, self.get_acl),
            Handler(code.AUTH_LIST_ACL, self.list_acls),
        ]

    def get_user(self, channel: Channel, request: Request[UserHeader], now_ms: int) -> None:
        found = self._find_user(request.head.fields.username)
        channel.respond(request, body=b"" if found is None else encode_body(_user_info(found)))

    def list_users(self, channel: Channel, request: Request[ListUsers], now_ms: int) -> None:
        part = request.head.fields.filter
        found = [_user_info(user) for user in self._users() if part in user.access_key]
        channel.respond(request, body=_encode_array(found))

    def get_acl(self, channel: Channel, request: Request[AclSubject], now_ms: int) -> None:
        found = self._find_user(request.head.fields.subject.removeprefix(_SUBJECT_PREFIX))
        info = None if found is None else _acl_info(found, "")
        channel.respond(request, body=b"" if info is None else encode_body(info))

    def list_acls(self, channel: Channel, request: Request[ListAcls], now_ms: int) -> None:
        fields = request.head.fields
        wanted = [user for user in self._users() if fields.subject_filter in _subject(user)]
        found = [_acl_info(user, fields.resource_filter) for user in wanted]
        channel.respond(request, body=_encode_array([info for info in found if info is not None]))

    def _users(self) -> list[User]:
        if self._access_validator is None:
            raise RequestRefused(
                ResponseCode.REQUEST_CODE_NOT_SUPPORTED,
                "this broker asks nobody who he is: set aclEnable and escrowAclFile first",
            )
        return [account for account in self._access_validator.accounts if isinstance(account, User)]

    def _find_user(self, name: str) -> User | None:
        return next((user for user in self._users() if user.access_key == name), None)


def _subject(user: User) -> str:
    return f"{_SUBJECT_PREFIX}{user.access_key}"


def _user_info(user: User) -> UserInfo:
    return UserInfo(
        username=user.access_key,
        user_type="Super" if user.is_super else "Normal",
        user_status="enable" if user.is_enabled else "disable",
    )


def _acl_info(user: User, resource_filter: str) -> AclInfo | None:
    """None if it has no policy, or none for such a resource."""
    policies = []
    for kind, entries in (("Custom", user.custom_policy), ("Default", user.default_policy)):
        shown = [info for info in map(_entry_info, entries) if resource_filter in info.resource]
        if shown:
            policies.append(PolicyInfo(policy_type=kind, entries=shown))
    return AclInfo(subject=_subject(user), policies=policies) if policies else None


def _entry_info(entry: PolicyEntry) -> PolicyEntryInfo:
    return PolicyEntryInfo(
        resource="*"
        if entry.resource_type is None
        else f"{entry.resource_type.value}:{entry.name}",
        actions=_action_names(entry.actions),
        source_ips=None if entry.addresses is None else list(entry.addresses.patterns),
        decision="Allow" if entry.is_allow else "Deny",
    )


def _action_names(actions: Action) -> list[str]:
    if actions == Action.ALL:
        return ["All"]
    return [str(action.name).capitalize() for action in actions]


def _encode_array(bodies: Sequence[JsonBody]) -> bytes:
    return b"[%b]" % b",".join(map(encode_body, bodies))
