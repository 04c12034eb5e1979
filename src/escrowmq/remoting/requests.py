"""Read a JSON request header in one step: one typed decoder per request code.

    {"code":310,"extFields":{"a":"group","b":"topic",...},"flag":0,"opaque":7,...}
    ^^^^^^^^^^^^ picks the decoder; every client we know writes the code first

The decoder builds the typed header straight from the bytes and skips what it does not know, so no
map of strings is made. It is never the judge: what it refuses, or what turns out to be an
answer, is read again the slow way, by command.py and headers.py. What it accepts, the slow way
reads as the same value; tests/property/test_fastpath.py holds it to that.

Every request we know: its code, the header it comes with, the header of its answer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic

import msgspec

from escrowmq.errors import UnknownRequest
from escrowmq.remoting import headers as consume
from escrowmq.remoting import headers as send
from escrowmq.remoting import headers as transaction
from escrowmq.remoting import headers_admin as admin
from escrowmq.remoting import headers_admin as namesrv
from escrowmq.remoting.codes import (
    FLAG_ONEWAY,
    FLAG_RESPONSE,
    LanguageName,
    RequestCode,
    ResponseCode,
)
from escrowmq.remoting.command import Command, Int32
from escrowmq.remoting.headers import H, Header, NoFields, decode_header


@dataclass(frozen=True, slots=True)
class HeaderTypes:
    request: type[Header] = NoFields
    response: type[Header] = NoFields


_OFFSET_TYPES = HeaderTypes(consume.QueueHeader, consume.OffsetResponse)

REQUESTS: dict[int, HeaderTypes] = {
    RequestCode.SEND_MESSAGE: HeaderTypes(send.SendMessage, send.SendMessageResponse),
    RequestCode.SEND_MESSAGE_V2: HeaderTypes(send.SendMessageV2, send.SendMessageResponse),
    RequestCode.SEND_BATCH_MESSAGE: HeaderTypes(send.SendMessageV2, send.SendMessageResponse),
    RequestCode.SEND_REPLY_MESSAGE: HeaderTypes(send.SendMessage, send.SendMessageResponse),
    RequestCode.SEND_REPLY_MESSAGE_V2: HeaderTypes(send.SendMessageV2, send.SendMessageResponse),
    RequestCode.PUSH_REPLY_MESSAGE_TO_CLIENT: HeaderTypes(send.PushReplyMessage),
    RequestCode.CONSUMER_SEND_MSG_BACK: HeaderTypes(send.ConsumerSendMessageBack),
    RequestCode.RECALL_MESSAGE: HeaderTypes(send.RecallMessage, send.RecallMessageResponse),
    RequestCode.END_TRANSACTION: HeaderTypes(send.EndTransaction, send.EndTransactionResponse),
    RequestCode.CHECK_TRANSACTION_STATE: HeaderTypes(send.CheckTransactionState),
    RequestCode.RESUME_CHECK_HALF_MESSAGE: HeaderTypes(send.ResumeCheckHalfMessage),
    RequestCode.END_TRANSACTIONS: HeaderTypes(
        transaction.EndTransactions, transaction.EndTransactionsResponse
    ),
    RequestCode.REGISTER_WRITER: HeaderTypes(transaction.RegisterWriter),
    RequestCode.DECIDE_BATCH: HeaderTypes(transaction.DecideBatch),
    RequestCode.QUERY_WRITER: HeaderTypes(transaction.WriterHeader),
    RequestCode.LIST_TRANSACTIONS: HeaderTypes(transaction.ListTransactions),
    RequestCode.SHOW_TRANSACTION: HeaderTypes(transaction.TransactionHeader),
    RequestCode.SETTLE_TRANSACTION: HeaderTypes(
        transaction.SettleTransaction, transaction.SettleTransactionResponse
    ),
    RequestCode.RESUME_TRANSACTION: HeaderTypes(transaction.ResumeTransaction),
    RequestCode.PREPARE_BACKUP: HeaderTypes(admin.PrepareBackup, admin.PrepareBackupResponse),
    RequestCode.HEART_BEAT: HeaderTypes(NoFields, consume.HeartbeatResponse),
    RequestCode.UNREGISTER_CLIENT: HeaderTypes(consume.UnregisterClient),
    RequestCode.CHECK_CLIENT_CONFIG: HeaderTypes(),
    RequestCode.GET_CONSUMER_LIST_BY_GROUP: HeaderTypes(consume.ConsumerGroupHeader),
    RequestCode.NOTIFY_CONSUMER_IDS_CHANGED: HeaderTypes(consume.ConsumerGroupHeader),
    RequestCode.LOCK_BATCH_MQ: HeaderTypes(),
    RequestCode.UNLOCK_BATCH_MQ: HeaderTypes(),
    RequestCode.QUERY_ASSIGNMENT: HeaderTypes(),
    RequestCode.SET_MESSAGE_REQUEST_MODE: HeaderTypes(),
    RequestCode.PULL_MESSAGE: HeaderTypes(consume.PullMessage, consume.PullMessageResponse),
    RequestCode.LITE_PULL_MESSAGE: HeaderTypes(consume.PullMessage, consume.PullMessageResponse),
    RequestCode.QUERY_MESSAGE: HeaderTypes(consume.QueryMessage, consume.QueryMessageResponse),
    RequestCode.VIEW_MESSAGE_BY_ID: HeaderTypes(consume.ViewMessage),
    RequestCode.QUERY_CONSUMER_OFFSET: HeaderTypes(
        consume.QueryConsumerOffset, consume.OffsetResponse
    ),
    RequestCode.UPDATE_CONSUMER_OFFSET: HeaderTypes(consume.UpdateConsumerOffset),
    RequestCode.SEARCH_OFFSET_BY_TIMESTAMP: HeaderTypes(
        consume.SearchOffset, consume.OffsetResponse
    ),
    RequestCode.GET_MAX_OFFSET: _OFFSET_TYPES,
    RequestCode.GET_MIN_OFFSET: _OFFSET_TYPES,
    RequestCode.GET_EARLIEST_MSG_STORETIME: HeaderTypes(
        consume.QueueHeader, consume.TimestampResponse
    ),
    RequestCode.POP_MESSAGE: HeaderTypes(consume.PopMessage, consume.PopMessageResponse),
    RequestCode.ACK_MESSAGE: HeaderTypes(consume.AckMessage),
    RequestCode.CHANGE_MESSAGE_INVISIBLETIME: HeaderTypes(
        consume.ChangeInvisibleTime, consume.ChangeInvisibleTimeResponse
    ),
    RequestCode.NOTIFICATION: HeaderTypes(consume.Notification, consume.NotificationResponse),
    RequestCode.RESET_CONSUMER_CLIENT_OFFSET: HeaderTypes(consume.ResetConsumerOffset),
    RequestCode.GET_CONSUMER_STATUS_FROM_CLIENT: HeaderTypes(consume.GetConsumerStatus),
    RequestCode.GET_CONSUMER_RUNNING_INFO: HeaderTypes(consume.GetConsumerRunningInfo),
    RequestCode.CONSUME_MESSAGE_DIRECTLY: HeaderTypes(consume.ConsumeMessageDirectly),
    RequestCode.UPDATE_AND_CREATE_TOPIC: HeaderTypes(admin.CreateTopic),
    RequestCode.GET_ALL_TOPIC_CONFIG: HeaderTypes(),
    RequestCode.GET_ALL_CONSUMER_OFFSET: HeaderTypes(),
    RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP: HeaderTypes(),
    RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG: HeaderTypes(),
    RequestCode.DELETE_SUBSCRIPTIONGROUP: HeaderTypes(admin.DeleteGroup),
    RequestCode.DELETE_TOPIC_IN_BROKER: HeaderTypes(admin.TopicHeader),
    RequestCode.GET_SYSTEM_TOPIC_LIST_FROM_BROKER: HeaderTypes(),
    RequestCode.CLEAN_UNUSED_TOPIC: HeaderTypes(),
    RequestCode.AUTH_CREATE_USER: HeaderTypes(),
    RequestCode.AUTH_UPDATE_USER: HeaderTypes(),
    RequestCode.AUTH_DELETE_USER: HeaderTypes(),
    RequestCode.AUTH_GET_USER: HeaderTypes(admin.UserHeader),
    RequestCode.AUTH_LIST_USER: HeaderTypes(admin.ListUsers),
    RequestCode.AUTH_CREATE_ACL: HeaderTypes(),
    RequestCode.AUTH_UPDATE_ACL: HeaderTypes(),
    RequestCode.AUTH_DELETE_ACL: HeaderTypes(),
    RequestCode.AUTH_GET_ACL: HeaderTypes(admin.AclSubject),
    RequestCode.AUTH_LIST_ACL: HeaderTypes(admin.ListAcls),
    RequestCode.GET_TOPIC_CONFIG: HeaderTypes(admin.TopicHeader),
    RequestCode.GET_SUBSCRIPTIONGROUP_CONFIG: HeaderTypes(admin.GroupHeader),
    RequestCode.UPDATE_BROKER_CONFIG: HeaderTypes(),
    RequestCode.GET_BROKER_CONFIG: HeaderTypes(NoFields, admin.BrokerConfigResponse),
    RequestCode.GET_BROKER_RUNTIME_INFO: HeaderTypes(),
    RequestCode.GET_TOPIC_STATS_INFO: HeaderTypes(admin.TopicHeader),
    RequestCode.GET_CONSUMER_CONNECTION_LIST: HeaderTypes(consume.ConsumerGroupHeader),
    RequestCode.GET_PRODUCER_CONNECTION_LIST: HeaderTypes(admin.ProducerGroupHeader),
    RequestCode.GET_CONSUME_STATS: HeaderTypes(admin.GetConsumeStats),
    RequestCode.INVOKE_BROKER_TO_RESET_OFFSET: HeaderTypes(admin.ResetOffset),
    RequestCode.QUERY_TOPIC_CONSUME_BY_WHO: HeaderTypes(admin.TopicHeader),
    RequestCode.QUERY_CONSUME_TIME_SPAN: HeaderTypes(admin.TopicGroupHeader),
    RequestCode.CLEAN_EXPIRED_CONSUMEQUEUE: HeaderTypes(),
    RequestCode.CLONE_GROUP_OFFSET: HeaderTypes(admin.CloneGroupOffset),
    RequestCode.VIEW_BROKER_STATS_DATA: HeaderTypes(admin.ViewBrokerStats),
    RequestCode.GET_BROKER_CONSUME_STATS: HeaderTypes(admin.GetBrokerConsumeStats),
    RequestCode.QUERY_CONSUME_QUEUE: HeaderTypes(admin.QueryConsumeQueue),
    RequestCode.GET_ALL_PRODUCER_INFO: HeaderTypes(),
    RequestCode.DELETE_EXPIRED_COMMITLOG: HeaderTypes(),
    RequestCode.QUERY_TOPICS_BY_CONSUMER: HeaderTypes(admin.GroupHeader),
    RequestCode.QUERY_SUBSCRIPTION_BY_CONSUMER: HeaderTypes(admin.TopicGroupHeader),
    RequestCode.PUT_KV_CONFIG: HeaderTypes(namesrv.PutKvConfig),
    RequestCode.GET_KV_CONFIG: HeaderTypes(namesrv.KvConfigKey, namesrv.GetKvConfigResponse),
    RequestCode.DELETE_KV_CONFIG: HeaderTypes(namesrv.KvConfigKey),
    RequestCode.GET_KVLIST_BY_NAMESPACE: HeaderTypes(namesrv.KvNamespace),
    RequestCode.REGISTER_BROKER: HeaderTypes(
        namesrv.RegisterBroker, namesrv.RegisterBrokerResponse
    ),
    RequestCode.UNREGISTER_BROKER: HeaderTypes(namesrv.BrokerIdentity),
    RequestCode.QUERY_DATA_VERSION: HeaderTypes(
        namesrv.BrokerIdentity, namesrv.QueryDataVersionResponse
    ),
    RequestCode.BROKER_HEARTBEAT: HeaderTypes(namesrv.BrokerHeartbeat),
    RequestCode.GET_BROKER_MEMBER_GROUP: HeaderTypes(namesrv.GetBrokerMemberGroup),
    RequestCode.GET_ROUTEINFO_BY_TOPIC: HeaderTypes(namesrv.GetRoute),
    RequestCode.GET_BROKER_CLUSTER_INFO: HeaderTypes(),
    RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER: HeaderTypes(),
    RequestCode.WIPE_WRITE_PERM_OF_BROKER: HeaderTypes(
        namesrv.BrokerNameHeader, namesrv.WipeWritePermResponse
    ),
    RequestCode.ADD_WRITE_PERM_OF_BROKER: HeaderTypes(
        namesrv.BrokerNameHeader, namesrv.AddWritePermResponse
    ),
    RequestCode.REGISTER_TOPIC_IN_NAMESRV: HeaderTypes(namesrv.RegisterTopic),
    RequestCode.DELETE_TOPIC_IN_NAMESRV: HeaderTypes(namesrv.DeleteTopicInNamesrv),
    RequestCode.GET_TOPICS_BY_CLUSTER: HeaderTypes(namesrv.GetTopicsByCluster),
    RequestCode.GET_SYSTEM_TOPIC_LIST_FROM_NS: HeaderTypes(),
    RequestCode.GET_UNIT_TOPIC_LIST: HeaderTypes(),
    RequestCode.GET_HAS_UNIT_SUB_TOPIC_LIST: HeaderTypes(),
    RequestCode.GET_HAS_UNIT_SUB_UNUNIT_TOPIC_LIST: HeaderTypes(),
    RequestCode.UPDATE_NAMESRV_CONFIG: HeaderTypes(),
    RequestCode.GET_NAMESRV_CONFIG: HeaderTypes(),
}


def header_types(code: int) -> HeaderTypes:
    try:
        return REQUESTS[code]
    except KeyError:
        raise UnknownRequest(
            ResponseCode.REQUEST_CODE_NOT_SUPPORTED, f"request code {code} is not supported"
        ) from None


Body = bytes | memoryview


class RequestHead(msgspec.Struct, Generic[H], frozen=True, kw_only=True, gc=False):
    """A request's header, typed."""

    code: Int32
    opaque: Int32 = 0
    flag: Int32 = 0
    version: Int32 = 0
    remark: str = ""
    language: LanguageName = LanguageName.OTHER
    fields: H = msgspec.field(name="extFields")

    @property
    def is_oneway(self) -> bool:
        return bool(self.flag & FLAG_ONEWAY)


class Request(msgspec.Struct, Generic[H], frozen=True, gc=False):
    head: RequestHead[H]
    body: Body
    serializer: int  # the answer uses the same: C++ clients cannot read ROCKETMQ
    raw_header: bytes = (
        b""  # as it came, if the connection keeps it: a signature is made over all of it
    )


class _CodeOnly(msgspec.Struct, gc=False):
    code: Int32


_Decode = Callable[[bytes], RequestHead[Any]]

_decoders: dict[int, tuple[int, _Decode]] = {
    # mypy wants a name it can see between the brackets; msgspec wants the type.
    int(code): (int(code), msgspec.json.Decoder(RequestHead[kind.request], strict=False).decode)  # type: ignore[name-defined]
    for code, kind in REQUESTS.items()
}
_decode_code = msgspec.json.Decoder(_CodeOnly, strict=False).decode

# Looked up by a prefix of fixed length, which is cheaper than finding where the number ends: 12
# characters hold a code of two digits and the next quote, or one of three; 15 hold one of six.
_decoders_by_prefix = {
    (b'{"code":%d,"' % code)[: 15 if code > 999 else 12]: found for code, found in _decoders.items()
}


def decode_request_head(header: bytes) -> RequestHead[Any] | None:
    """The request in this JSON header; None if it takes the slow way to tell."""
    try:
        # msgspec checks UTF-8 only in what it keeps; the slow way checks all of it.
        if not header.isascii():
            header.decode()
        found = _decoders_by_prefix.get(header[:12])
        if found is None:
            found = _decoders_by_prefix.get(header[:15]) or _decoders.get(_decode_code(header).code)
            if found is None:
                return None
        code, decode = found
        head = decode(header)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    # A header may hold `code` twice: the last one counts, and it may need another decoder.
    if head.code != code or head.flag & FLAG_RESPONSE:
        return None
    return head


def request_head_from_command(command: Command) -> RequestHead[Header]:
    """The slow way. Raises UnknownRequest or BadField, both of which can be answered."""
    return RequestHead(
        code=command.code,
        opaque=command.opaque,
        flag=command.flag,
        version=command.version,
        remark=command.remark,
        language=LanguageName(command.language.name),
        fields=decode_header(header_types(command.code).request, command.ext_fields),
    )
