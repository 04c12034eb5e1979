"""Administration of topics, groups and users.

    MetadataAdmin   create, change, show and delete topics and subscription groups
    AccessAdmin     show users and policies of 5.x

A change is responded to when it is durable. If it cannot be saved, it is undone in memory and the
client gets an error. A deletion removes offsets, settings and queues, in this order. After a crash
in between no message is skipped, and the same request completes it.

A topic may have thousands of queues, each with files. So deletions are done in slices, one after
the other, and are finished even if the client that asked for one has gone.

Users and policies live in the ACL file, which operators edit and the broker reloads. Requests that
would change them are refused. No secret leaves the broker. Accounts of plain_acl.yml (4.x) are not
users and are not shown.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

import msgspec

from escrowmq.auth.acl import Action, PolicyEntry, User
from escrowmq.auth.validator import AccessValidator
from escrowmq.broker.closed_names import check_group_is_open
from escrowmq.broker.dispatch import (
    Channel,
    ErrorCodes,
    Handler,
    RequestPermissions,
    respond_failure,
)
from escrowmq.broker.metadata import (
    SubscriptionGroups,
    TopicTable,
    check_topic_name,
    is_valid_group_name,
)
from escrowmq.client_memory import name_error
from escrowmq.consume.offsets import ConsumerOffsets
from escrowmq.errors import BrokenBody, RequestRefused, StoreError
from escrowmq.message.names import is_closed_group, is_closed_topic, is_system_group
from escrowmq.message.topic_config import ConfigEntry, TopicConfig
from escrowmq.parsing import parse_lenient_json
from escrowmq.remoting.bodies import LENIENT_BODY_BYTES_MAX, JsonBody, TopicList, encode_body
from escrowmq.remoting.bodies_admin import (
    AclInfo,
    PolicyEntryInfo,
    PolicyInfo,
    UserInfo,
    encode_table_in_slices,
)
from escrowmq.remoting.codes import RequestCode, ResponseCode
from escrowmq.remoting.headers_admin import (
    AclSubject,
    AllGroupsResponse,
    AllTopicsResponse,
    CreateTopic,
    DeleteGroup,
    GroupHeader,
    ListAcls,
    ListUsers,
    TopicHeader,
    UserHeader,
)
from escrowmq.remoting.requests import Request
from escrowmq.sliced_work import SlicedResult, SlicedWork, SliceScheduler
from escrowmq.store.config_files import GroupConfig, to_plain
from escrowmq.store.store import MessageStore

QUEUES_MAX: Final = 65_536
ATTRIBUTES_MAX: Final = 100
TOPIC_FILTER_TYPES: Final = ("SINGLE_TAG", "MULTI_TAG")  # as in RocketMQ
PENDING_DELETIONS_MAX: Final = 1_000
# Part of a change may be durable, so no error may say that nothing happened.
CHANGE_ERRORS: Final[ErrorCodes] = {StoreError: ResponseCode.SYSTEM_ERROR}


class MetadataAdmin:
    def __init__(
        self,
        store: MessageStore,
        topics: TopicTable,
        groups: SubscriptionGroups,
        offsets: ConsumerOffsets,
        background_work: SliceScheduler,
        save_offsets: Callable[[], None] = lambda: None,
    ) -> None:
        self._store = store
        self._topics = topics
        self._groups = groups
        self._offsets = offsets
        self._save_offsets = save_offsets
        self._background_work = background_work
        # Deletions that have not begun: others come first, or a checkpoint writes to the files.
        self._pending_deletions: list[_PendingDeletion] = []
        self._is_deleting = False
        # Changes that the end of the turn saves: one write for all of them.
        self._unsaved_changes: list[tuple[Channel, Request[Any]]] = []

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
            Handler(code.DELETE_SUBSCRIPTIONGROUP, self.delete_group, errors=CHANGE_ERRORS),
            Handler(code.GET_SUBSCRIPTIONGROUP_CONFIG, self.get_group_config),
            Handler(code.GET_ALL_SUBSCRIPTIONGROUP_CONFIG, self.list_groups),
        ]

    # --- topics ----------------------------------------------------------------------------------

    def create_topic(self, channel: Channel, request: Request[CreateTopic], now_ms: int) -> None:
        fields = request.head.fields
        self._check_topic(fields.topic)
        for count in (fields.read_queue_nums, fields.write_queue_nums):
            if not 0 <= count <= QUEUES_MAX:
                raise _invalid_parameter(f"{count} queues; a topic has 0 to {QUEUES_MAX}")
        if not 0 <= fields.perm <= 7:
            raise _invalid_parameter(
                f"perm {fields.perm} is not valid: 2 is write, 4 is read, 6 is both"
            )
        if fields.topic_filter_type not in TOPIC_FILTER_TYPES:
            raise _invalid_parameter(
                f"topicFilterType {fields.topic_filter_type[:100]!r} is none of "
                f"{', '.join(TOPIC_FILTER_TYPES)}"
            )
        existing = self._topics.find(fields.topic)
        config = TopicConfig(
            topic_name=fields.topic,
            read_queue_nums=fields.read_queue_nums,
            write_queue_nums=fields.write_queue_nums,
            perm=fields.perm,
            topic_filter_type=fields.topic_filter_type,
            topic_sys_flag=fields.topic_sys_flag,
            order=fields.order,
            attributes=_update_attributes(
                {} if existing is None else existing.attributes, fields.attributes
            ),
        )
        if config != existing:
            self._topics.put(config, now_ms=now_ms)
        self._unsaved_changes.append((channel, request))

    def respond_changes(self, error: StoreError | None) -> None:
        """Respond to the changes of this turn: they are durable, or undone because of an error."""
        changes, self._unsaved_changes = self._unsaved_changes, []
        for channel, request in changes:
            if error is None:
                channel.respond(request)
            else:
                remark = f"the change was not saved, and was undone: {error}"
                channel.respond(request, code=ResponseCode.SYSTEM_ERROR, remark=remark)

    def delete_topic(self, channel: Channel, request: Request[TopicHeader], now_ms: int) -> None:
        topic = request.head.fields.topic
        self._check_topic(topic)
        delete = partial(self._delete_topic, topic)
        self._add_deletion(_PendingDeletion(channel, request, f"topic {topic}", delete), now_ms)

    def clean_unused_topics(self, channel: Channel, request: Request[Any], now_ms: int) -> None:
        """Delete the queues of topics that do not exist."""
        delete = self._delete_unused_topics
        self._add_deletion(_PendingDeletion(channel, request, "unused topics", delete), now_ms)

    def _add_deletion(self, deletion: _PendingDeletion, now_ms: int) -> None:
        if len(self._pending_deletions) >= PENDING_DELETIONS_MAX:
            raise RequestRefused(
                ResponseCode.SYSTEM_BUSY,
                f"{PENDING_DELETIONS_MAX} topics are being deleted; retry later",
            )
        self._pending_deletions.append(deletion)
        self.tick(now_ms)

    def tick(self, now_ms: int) -> None:
        """Let the topics be deleted whose files are not in use any more."""
        if self._pending_deletions and not self._is_deleting:
            self._is_deleting = True
            self._background_work.add(self._delete_pending(now_ms))

    @property
    def has_pending_deletions(self) -> bool:
        """Whether deletions wait for the next tick, because files were in use."""
        return bool(self._pending_deletions)

    def _delete_pending(self, now_ms: int) -> SlicedWork:
        postponed: list[_PendingDeletion] = []
        try:
            while self._pending_deletions:
                deletion = self._pending_deletions.pop(0)
                channel, request = deletion.channel, deletion.request
                try:
                    is_done = yield from deletion.delete(now_ms)
                    if is_done:
                        channel.respond(request)
                    else:
                        postponed.append(deletion)
                except StoreError as error:
                    remark = f"{deletion.subject} not deleted: {error}"
                    channel.respond(request, code=ResponseCode.SYSTEM_ERROR, remark=remark)
                except Exception as error:  # it costs this request, not the other deletions
                    respond_failure(channel, request, error)
                yield
        finally:
            self._pending_deletions += postponed
            self._is_deleting = False

    def _delete_topic(self, topic: str, now_ms: int) -> SlicedResult[bool]:
        """Delete a topic. Return False if its files are in use."""
        if not self._store.can_remove_topic(topic):
            return False
        with changed_offsets(self._offsets):
            self._offsets.remove_topic(topic)
            self._save_offsets()
            config = self._topics.find(topic)
            try:
                if config is not None:
                    self._topics.remove(topic, now_ms=now_ms)
                    self._topics.save()
                # The first slice deletes the topic durably. The others only remove its files.
                removal = self._store.remove_topic_in_slices(topic)
                next(removal, None)
            except StoreError:
                # If the store has failed, the next start completes the deletion. Otherwise nothing
                # of the topic was removed yet, so it stays as it was.
                if config is not None and not self._store.has_failed:
                    self._topics.put(config, now_ms=now_ms)
                    with contextlib.suppress(StoreError):  # a later save writes it
                        self._topics.save()
                raise
        yield from removal
        return True

    def _delete_unused_topics(self, now_ms: int) -> SlicedResult[bool]:
        existing = set(self._topics.configs())
        for topic in sorted({topic for topic, _ in self._store.queues()} - existing):
            yield
            is_unused = self._topics.find(topic) is None and not self._topics.is_system(topic)
            if is_unused and self._store.can_remove_topic(topic):
                yield from self._store.remove_topic_in_slices(topic)
        return True

    def get_topic_config(
        self, channel: Channel, request: Request[TopicHeader], now_ms: int
    ) -> None:
        config = self._topics.get(request.head.fields.topic)
        channel.respond(request, body=_encode_json(config))

    def list_topics(self, channel: Channel, request: Request[Any], now_ms: int) -> SlicedWork:
        topics, version = self._topics.configs(), self._topics.version
        body = yield from encode_table_in_slices(
            "topicConfigTable", _encode_entries(topics), dataVersion=version
        )
        channel.respond(request, AllTopicsResponse(total_topic_num=len(topics)), body=body)

    def list_system_topics(
        self, channel: Channel, request: Request[Any], now_ms: int
    ) -> SlicedWork:
        names = []
        for topic in self._topics.configs():
            if self._topics.is_system(topic):
                names.append(topic)
            yield
        channel.respond(request, body=encode_body(TopicList(topic_list=sorted(names))))

    def _check_topic(self, topic: str) -> None:
        check_topic_name(topic)
        if self._topics.is_system(topic) or is_closed_topic(topic):
            raise _invalid_parameter(f"{topic} is a system topic")

    # --- groups ----------------------------------------------------------------------------------

    def create_group(self, channel: Channel, request: Request[Any], now_ms: int) -> None:
        if len(request.body) > LENIENT_BODY_BYTES_MAX:
            raise BrokenBody(
                f"the group has {len(request.body)} bytes, the limit is {LENIENT_BODY_BYTES_MAX}"
            )
        try:
            config = msgspec.convert(parse_lenient_json(request.body), GroupConfig, strict=False)
        except (BrokenBody, msgspec.ValidationError, RecursionError) as error:
            raise BrokenBody(f"the body is not a group: {error}") from error
        if not is_valid_group_name(config.group_name):
            raise _invalid_parameter(f"{config.group_name[:100]!r} is not a valid group name")
        check_group_is_open(config.group_name)
        if not 0 <= config.retry_queue_nums <= QUEUES_MAX:
            raise _invalid_parameter(
                f"{config.retry_queue_nums} retry queues; a group has 0 to {QUEUES_MAX}"
            )
        self._groups.put(config, now_ms=now_ms)
        self._unsaved_changes.append((channel, request))

    def delete_group(self, channel: Channel, request: Request[DeleteGroup], now_ms: int) -> None:
        fields = request.head.fields
        name = fields.group_name
        if is_system_group(name) or is_closed_group(name):
            raise _invalid_parameter(f"{name} is a system group")
        with changed_offsets(self._offsets):
            if fields.clean_offset or fields.remove_offset:
                self._offsets.remove_group(name)
                self._save_offsets()
            config = self._groups.find(name)
            if config is not None:
                self._groups.remove(name, now_ms=now_ms)
                try:
                    self._groups.save()
                except StoreError:
                    self._groups.put(config, now_ms=now_ms)
                    raise
        channel.respond(request)

    def get_group_config(
        self, channel: Channel, request: Request[GroupHeader], now_ms: int
    ) -> None:
        name = request.head.fields.group
        config = self._groups.get_or_create(name, now_ms=now_ms)
        if config is None:
            raise self._groups.not_found(name)
        channel.respond(request, body=_encode_json(config))

    def list_groups(self, channel: Channel, request: Request[Any], now_ms: int) -> SlicedWork:
        groups, version = self._groups.configs(), self._groups.version
        body = yield from encode_table_in_slices(
            "subscriptionGroupTable",
            _encode_entries(groups),
            forbiddenTable={},
            dataVersion=version,
        )
        channel.respond(request, AllGroupsResponse(total_group_num=len(groups)), body=body)


class _PendingDeletion(NamedTuple):
    channel: Channel
    request: Request[Any]
    subject: str
    delete: Callable[[int], SlicedResult[bool]]  # with the time; returns False to be tried again


@contextlib.contextmanager
def changed_offsets(offsets: ConsumerOffsets) -> Iterator[None]:
    """Undo the changes of offsets in the block if it raises, because they were not saved."""
    offsets.begin_changes()
    is_kept = False
    try:
        yield
        is_kept = True
    finally:
        offsets.end_changes(is_kept=is_kept)


def _encode_entries(entries: Mapping[str, ConfigEntry]) -> Iterator[tuple[bytes, bytes]]:
    return ((_encode_json(name), _encode_json(entry)) for name, entry in entries.items())


def _invalid_parameter(reason: str) -> RequestRefused:
    return RequestRefused(ResponseCode.INVALID_PARAMETER, reason)


def _update_attributes(attributes: dict[str, str], text: str | None) -> dict[str, str]:
    """Apply comma-separated changes: `+name=value` sets an attribute, `-name` removes it."""
    updated = dict(attributes)
    for part in filter(None, (text or "").split(",")):
        name, equals, value = part[1:].partition("=")
        if error := name_error("an attribute's name", name) or name_error("an attribute", value):
            raise _invalid_parameter(error)
        if part[0] == "+" and equals and name:
            updated[name] = value
        elif part[0] == "-" and name and not equals:
            updated.pop(name, None)
        else:
            raise _invalid_parameter(f"attribute {part[:100]!r} is neither +name=value nor -name")
    if len(updated) > ATTRIBUTES_MAX:
        raise _invalid_parameter(f"{len(updated)} attributes, the limit is {ATTRIBUTES_MAX}")
    return updated


def _encode_json(value: Any) -> bytes:
    return msgspec.json.encode(to_plain(value))


# --- users and policies --------------------------------------------------------------------------

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
        "users and policies are changed in the ACL file (escrowAclFile); the broker reloads it",
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
        user = self._find_user(request.head.fields.username)
        channel.respond(request, body=b"" if user is None else encode_body(_user_info(user)))

    def list_users(self, channel: Channel, request: Request[ListUsers], now_ms: int) -> None:
        name_part = request.head.fields.filter
        infos = [_user_info(user) for user in self._users() if name_part in user.access_key]
        channel.respond(request, body=_encode_array(infos))

    def get_acl(self, channel: Channel, request: Request[AclSubject], now_ms: int) -> None:
        user = self._find_user(request.head.fields.subject.removeprefix(_SUBJECT_PREFIX))
        info = None if user is None else _acl_info(user, "")
        channel.respond(request, body=b"" if info is None else encode_body(info))

    def list_acls(self, channel: Channel, request: Request[ListAcls], now_ms: int) -> None:
        fields = request.head.fields
        users = [user for user in self._users() if fields.subject_filter in _subject(user)]
        infos = [_acl_info(user, fields.resource_filter) for user in users]
        channel.respond(request, body=_encode_array([info for info in infos if info is not None]))

    def _users(self) -> list[User]:
        if self._access_validator is None:
            raise RequestRefused(
                ResponseCode.REQUEST_CODE_NOT_SUPPORTED,
                "access control is disabled; set aclEnable and escrowAclFile",
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
    """Return the policies of a user, or None if none is for such a resource."""
    policies = []
    for policy_type, entries in (("Custom", user.custom_policy), ("Default", user.default_policy)):
        shown = [info for info in map(_entry_info, entries) if resource_filter in info.resource]
        if shown:
            policies.append(PolicyInfo(policy_type=policy_type, entries=shown))
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
