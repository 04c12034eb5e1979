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
class RequestKind:
    request: type[Header] = NoFields
    answer: type[Header] = NoFields


_OFFSET = RequestKind(consume.QueueOf, consume.OffsetAnswer)

REQUESTS: dict[int, RequestKind] = {
    RequestCode.SEND_MESSAGE: RequestKind(send.SendMessage, send.SendMessageAnswer),
    RequestCode.SEND_MESSAGE_V2: RequestKind(send.SendMessageV2, send.SendMessageAnswer),
    RequestCode.SEND_BATCH_MESSAGE: RequestKind(send.SendMessageV2, send.SendMessageAnswer),
    RequestCode.SEND_REPLY_MESSAGE: RequestKind(send.SendMessage, send.SendMessageAnswer),
    RequestCode.SEND_REPLY_MESSAGE_V2: RequestKind(send.SendMessageV2, send.SendMessageAnswer),
    RequestCode.PUSH_REPLY_MESSAGE_TO_CLIENT: RequestKind(send.PushReplyMessage),
    RequestCode.CONSUMER_SEND_MSG_BACK: RequestKind(send.ConsumerSendMessageBack),
    RequestCode.RECALL_MESSAGE: RequestKind(send.RecallMessage, send.RecallMessageAnswer),
    RequestCode.END_TRANSACTION: RequestKind(send.EndTransaction, send.EndTransactionAnswer),
    RequestCode.CHECK_TRANSACTION_STATE: RequestKind(send.CheckTransactionState),
    RequestCode.RESUME_CHECK_HALF_MESSAGE: RequestKind(send.ResumeCheckHalfMessage),
    RequestCode.END_TRANSACTIONS: RequestKind(
        transaction.EndTransactions, transaction.EndTransactionsAnswer
    ),
    RequestCode.REGISTER_WRITER: RequestKind(transaction.RegisterWriter),
    RequestCode.DECIDE_BATCH: RequestKind(transaction.DecideBatch),
    RequestCode.QUERY_WRITER: RequestKind(transaction.WriterName),
    RequestCode.LIST_TRANSACTIONS: RequestKind(transaction.ListTransactions),
    RequestCode.SHOW_TRANSACTION: RequestKind(transaction.TransactionName),
    RequestCode.SETTLE_TRANSACTION: RequestKind(
        transaction.SettleTransaction, transaction.SettleTransactionAnswer
    ),
    RequestCode.RESUME_TRANSACTION: RequestKind(transaction.ResumeTransaction),
    RequestCode.PREPARE_BACKUP: RequestKind(admin.PrepareBackup, admin.PrepareBackupAnswer),
    RequestCode.HEART_BEAT: RequestKind(NoFields, consume.HeartbeatAnswer),
    RequestCode.UNREGISTER_CLIENT: RequestKind(consume.UnregisterClient),
    RequestCode.CHECK_CLIENT_CONFIG: RequestKind(),
    RequestCode.GET_CONSUMER_LIST_BY_GROUP: RequestKind(consume.ConsumerGroup),
    RequestCode.NOTIFY_CONSUMER_IDS_CHANGED: RequestKind(consume.ConsumerGroup),
    RequestCode.LOCK_BATCH_MQ: RequestKind(),
    RequestCode.UNLOCK_BATCH_MQ: RequestKind(),
    RequestCode.QUERY_ASSIGNMENT: RequestKind(),
    RequestCode.SET_MESSAGE_REQUEST_MODE: RequestKind(),
    RequestCode.PULL_MESSAGE: RequestKind(consume.PullMessage, consume.PullMessageAnswer),
    RequestCode.LITE_PULL_MESSAGE: RequestKind(consume.PullMessage, consume.PullMessageAnswer),
    RequestCode.QUERY_MESSAGE: RequestKind(consume.QueryMessage, consume.QueryMessageAnswer),
    RequestCode.VIEW_MESSAGE_BY_ID: RequestKind(consume.ViewMessage),
    RequestCode.QUERY_CONSUMER_OFFSET: RequestKind(
        consume.QueryConsumerOffset, consume.OffsetAnswer
    ),
    RequestCode.UPDATE_CONSUMER_OFFSET: RequestKind(consume.UpdateConsumerOffset),
    RequestCode.SEARCH_OFFSET_BY_TIMESTAMP: RequestKind(consume.SearchOffset, consume.OffsetAnswer),
    RequestCode.GET_MAX_OFFSET: _OFFSET,
    RequestCode.GET_MIN_OFFSET: _OFFSET,
    RequestCode.GET_EARLIEST_MSG_STORETIME: RequestKind(consume.QueueOf, consume.TimestampAnswer),
    RequestCode.POP_MESSAGE: RequestKind(consume.PopMessage, consume.PopMessageAnswer),
    RequestCode.ACK_MESSAGE: RequestKind(consume.AckMessage),
    RequestCode.CHANGE_MESSAGE_INVISIBLETIME: RequestKind(
        consume.ChangeInvisibleTime, consume.ChangeInvisibleTimeAnswer
    ),
    RequestCode.NOTIFICATION: RequestKind(consume.Notification, consume.NotificationAnswer),
    RequestCode.RESET_CONSUMER_CLIENT_OFFSET: RequestKind(consume.ResetConsumerOffset),
    RequestCode.GET_CONSUMER_STATUS_FROM_CLIENT: RequestKind(consume.ConsumerStatus),
    RequestCode.GET_CONSUMER_RUNNING_INFO: RequestKind(consume.ConsumerRunning),
    RequestCode.CONSUME_MESSAGE_DIRECTLY: RequestKind(consume.ConsumeDirectly),
    RequestCode.UPDATE_AND_CREATE_TOPIC: RequestKind(admin.CreateTopic),
    RequestCode.GET_ALL_TOPIC_CONFIG: RequestKind(),
    RequestCode.GET_ALL_CONSUMER_OFFSET: RequestKind(),
    RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP: RequestKind(),
    RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG: RequestKind(),
    RequestCode.DELETE_SUBSCRIPTIONGROUP: RequestKind(admin.DeleteGroup),
    RequestCode.DELETE_TOPIC_IN_BROKER: RequestKind(admin.TopicName),
    RequestCode.GET_SYSTEM_TOPIC_LIST_FROM_BROKER: RequestKind(),
    RequestCode.CLEAN_UNUSED_TOPIC: RequestKind(),
    RequestCode.AUTH_CREATE_USER: RequestKind(),
    RequestCode.AUTH_UPDATE_USER: RequestKind(),
    RequestCode.AUTH_DELETE_USER: RequestKind(),
    RequestCode.AUTH_GET_USER: RequestKind(admin.UserName),
    RequestCode.AUTH_LIST_USER: RequestKind(admin.UsersLike),
    RequestCode.AUTH_CREATE_ACL: RequestKind(),
    RequestCode.AUTH_UPDATE_ACL: RequestKind(),
    RequestCode.AUTH_DELETE_ACL: RequestKind(),
    RequestCode.AUTH_GET_ACL: RequestKind(admin.AclSubject),
    RequestCode.AUTH_LIST_ACL: RequestKind(admin.AclsLike),
    RequestCode.GET_TOPIC_CONFIG: RequestKind(admin.TopicName),
    RequestCode.GET_SUBSCRIPTIONGROUP_CONFIG: RequestKind(admin.GroupName),
    RequestCode.UPDATE_BROKER_CONFIG: RequestKind(),
    RequestCode.GET_BROKER_CONFIG: RequestKind(NoFields, admin.BrokerConfigAnswer),
    RequestCode.GET_BROKER_RUNTIME_INFO: RequestKind(),
    RequestCode.GET_TOPIC_STATS_INFO: RequestKind(admin.TopicName),
    RequestCode.GET_CONSUMER_CONNECTION_LIST: RequestKind(consume.ConsumerGroup),
    RequestCode.GET_PRODUCER_CONNECTION_LIST: RequestKind(admin.ProducerGroup),
    RequestCode.GET_CONSUME_STATS: RequestKind(admin.ConsumeStatsOf),
    RequestCode.INVOKE_BROKER_TO_RESET_OFFSET: RequestKind(admin.ResetOffset),
    RequestCode.QUERY_TOPIC_CONSUME_BY_WHO: RequestKind(admin.TopicName),
    RequestCode.QUERY_CONSUME_TIME_SPAN: RequestKind(admin.TopicAndGroup),
    RequestCode.CLEAN_EXPIRED_CONSUMEQUEUE: RequestKind(),
    RequestCode.CLONE_GROUP_OFFSET: RequestKind(admin.CloneGroupOffset),
    RequestCode.VIEW_BROKER_STATS_DATA: RequestKind(admin.StatsOf),
    RequestCode.GET_BROKER_CONSUME_STATS: RequestKind(admin.BrokerConsumeStats),
    RequestCode.QUERY_CONSUME_QUEUE: RequestKind(admin.QueryConsumeQueue),
    RequestCode.GET_ALL_PRODUCER_INFO: RequestKind(),
    RequestCode.DELETE_EXPIRED_COMMITLOG: RequestKind(),
    RequestCode.QUERY_TOPICS_BY_CONSUMER: RequestKind(admin.GroupName),
    RequestCode.QUERY_SUBSCRIPTION_BY_CONSUMER: RequestKind(admin.TopicAndGroup),
    RequestCode.PUT_KV_CONFIG: RequestKind(namesrv.PutSetting),
    RequestCode.GET_KV_CONFIG: RequestKind(namesrv.SettingKey, namesrv.SettingAnswer),
    RequestCode.DELETE_KV_CONFIG: RequestKind(namesrv.SettingKey),
    RequestCode.GET_KVLIST_BY_NAMESPACE: RequestKind(namesrv.SettingNamespace),
    RequestCode.REGISTER_BROKER: RequestKind(namesrv.RegisterBroker, namesrv.RegisterBrokerAnswer),
    RequestCode.UNREGISTER_BROKER: RequestKind(namesrv.BrokerIdentity),
    RequestCode.QUERY_DATA_VERSION: RequestKind(
        namesrv.BrokerIdentity, namesrv.QueryDataVersionAnswer
    ),
    RequestCode.BROKER_HEARTBEAT: RequestKind(namesrv.BrokerHeartbeat),
    RequestCode.GET_BROKER_MEMBER_GROUP: RequestKind(namesrv.GetBrokerMemberGroup),
    RequestCode.GET_ROUTEINFO_BY_TOPIC: RequestKind(namesrv.GetRoute),
    RequestCode.GET_BROKER_CLUSTER_INFO: RequestKind(),
    RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER: RequestKind(),
    RequestCode.WIPE_WRITE_PERM_OF_BROKER: RequestKind(
        namesrv.BrokerName, namesrv.WipeWritePermAnswer
    ),
    RequestCode.ADD_WRITE_PERM_OF_BROKER: RequestKind(
        namesrv.BrokerName, namesrv.AddWritePermAnswer
    ),
    RequestCode.REGISTER_TOPIC_IN_NAMESRV: RequestKind(namesrv.RegisterTopic),
    RequestCode.DELETE_TOPIC_IN_NAMESRV: RequestKind(namesrv.DeleteTopicInNamesrv),
    RequestCode.GET_TOPICS_BY_CLUSTER: RequestKind(namesrv.TopicsOfCluster),
    RequestCode.GET_SYSTEM_TOPIC_LIST_FROM_NS: RequestKind(),
    RequestCode.GET_UNIT_TOPIC_LIST: RequestKind(),
    RequestCode.GET_HAS_UNIT_SUB_TOPIC_LIST: RequestKind(),
    RequestCode.GET_HAS_UNIT_SUB_UNUNIT_TOPIC_LIST: RequestKind(),
    RequestCode.UPDATE_NAMESRV_CONFIG: RequestKind(),
    RequestCode.GET_NAMESRV_CONFIG: RequestKind(),
}


def request_kind(code: int) -> RequestKind:
    try:
        return REQUESTS[code]
    except KeyError:
        raise UnknownRequest(
            ResponseCode.REQUEST_CODE_NOT_SUPPORTED, f"request code {code} is not supported"
        ) from None


Body = bytes | memoryview


class Head(msgspec.Struct, Generic[H], frozen=True, kw_only=True, gc=False):
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
    head: Head[H]
    body: Body
    serializer: int  # the answer uses the same: C++ clients cannot read ROCKETMQ
    header: bytes = (
        b""  # as it came, if the connection keeps it: a signature is made over all of it
    )


class _CodeOnly(msgspec.Struct, gc=False):
    code: Int32


_Decode = Callable[[bytes], Head[Any]]

_decoders: dict[int, tuple[int, _Decode]] = {
    # mypy wants a name it can see between the brackets; msgspec wants the type.
    int(code): (int(code), msgspec.json.Decoder(Head[kind.request], strict=False).decode)  # type: ignore[name-defined]
    for code, kind in REQUESTS.items()
}
_decode_code = msgspec.json.Decoder(_CodeOnly, strict=False).decode

# Looked up by a prefix of fixed length, which is cheaper than finding where the number ends: 12
# characters hold a code of two digits and the next quote, or one of three; 15 hold one of six.
_openings = {
    (b'{"code":%d,"' % code)[: 15 if code > 999 else 12]: found for code, found in _decoders.items()
}


def decode_head(header: bytes) -> Head[Any] | None:
    """The request in this JSON header; None if it takes the slow way to tell."""
    try:
        # msgspec checks UTF-8 only in what it keeps; the slow way checks all of it.
        if not header.isascii():
            header.decode()
        found = _openings.get(header[:12])
        if found is None:
            found = _openings.get(header[:15]) or _decoders.get(_decode_code(header).code)
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


def head_of(command: Command) -> Head[Header]:
    """The slow way. Raises UnknownRequest or BadField, both of which can be answered."""
    return Head(
        code=command.code,
        opaque=command.opaque,
        flag=command.flag,
        version=command.version,
        remark=command.remark,
        language=LanguageName(command.language.name),
        fields=decode_header(request_kind(command.code).request, command.ext_fields),
    )
