"""The typed headers of administration and of the name server.

The first part is what operators and tools send to a broker: topics, groups, offsets, statistics,
settings, users. The second part is what brokers and clients send to a name server: registration,
routes, key-value settings. How headers work is described in `headers.py`.
"""

from __future__ import annotations

from msgspec import field

from escrowmq.parsing import Int32, Int64
from escrowmq.remoting.codes import RequestCode
from escrowmq.remoting.headers import Header, NoFields, request

# --- topics and groups ---------------------------------------------------------------------------


@request(RequestCode.UPDATE_AND_CREATE_TOPIC)
class CreateTopic(Header, frozen=True, kw_only=True):
    topic: str
    default_topic: str = ""
    read_queue_nums: Int32
    write_queue_nums: Int32
    perm: Int32  # bits: 4 read, 2 write, 1 inherit
    topic_filter_type: str = "SINGLE_TAG"
    order: bool = False  # C++ clients leave this field and the next one out
    topic_sys_flag: Int32 = 0
    attributes: str | None = None  # +name=value,-name
    force: bool | None = None


@request(
    RequestCode.DELETE_TOPIC_IN_BROKER,
    RequestCode.GET_TOPIC_CONFIG,
    RequestCode.GET_TOPIC_STATS_INFO,
    RequestCode.QUERY_TOPIC_CONSUME_BY_WHO,
)
class TopicHeader(Header, frozen=True, kw_only=True):
    topic: str


@request(RequestCode.GET_SUBSCRIPTIONGROUP_CONFIG, RequestCode.QUERY_TOPICS_BY_CONSUMER)
class GroupHeader(Header, frozen=True, kw_only=True):
    group: str


@request(RequestCode.QUERY_CONSUME_TIME_SPAN, RequestCode.QUERY_SUBSCRIPTION_BY_CONSUMER)
class TopicGroupHeader(Header, frozen=True, kw_only=True):
    topic: str
    group: str


@request(RequestCode.DELETE_SUBSCRIPTIONGROUP)
class DeleteGroup(Header, frozen=True, kw_only=True):
    group_name: str
    clean_offset: bool = False  # also purge its offsets; the name of this field in 5.x
    remove_offset: bool = False  # the same in 4.9


@request(RequestCode.GET_PRODUCER_CONNECTION_LIST)
class ProducerGroupHeader(Header, frozen=True, kw_only=True):
    producer_group: str


class AllTopicsResponse(Header, frozen=True, kw_only=True):
    total_topic_num: Int32


class AllGroupsResponse(Header, frozen=True, kw_only=True):
    total_group_num: Int32


# RocketMQ 5.5 asks for these two in pages. They are responded to with everything, and the total
# says that no page follows.
request(RequestCode.GET_ALL_TOPIC_CONFIG, response=AllTopicsResponse)(NoFields)
request(RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG, response=AllGroupsResponse)(NoFields)
request(
    RequestCode.GET_SYSTEM_TOPIC_LIST_FROM_BROKER,
    RequestCode.CLEAN_UNUSED_TOPIC,
    RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP,
    RequestCode.GET_ALL_PRODUCER_INFO,
)(NoFields)


# --- offsets and statistics ----------------------------------------------------------------------


@request(RequestCode.GET_CONSUME_STATS)
class GetConsumeStats(Header, frozen=True, kw_only=True):
    consumer_group: str
    topic: str | None = None  # None: every topic that the group reads


@request(RequestCode.GET_BROKER_CONSUME_STATS)
class GetBrokerConsumeStats(Header, frozen=True, kw_only=True):
    is_order: bool = False


@request(RequestCode.INVOKE_BROKER_TO_RESET_OFFSET)
class ResetOffset(Header, frozen=True, kw_only=True):
    topic: str
    group: str
    timestamp: Int64  # -1: to the end of the queue
    is_force: bool = False  # also forwards
    queue_id: Int32 = -1  # -1: all queues
    offset: Int64 | None = None  # to this queue offset; the timestamp is ignored


@request(RequestCode.CLONE_GROUP_OFFSET)
class CloneGroupOffset(Header, frozen=True, kw_only=True):
    src_group: str
    dest_group: str
    topic: str | None = None
    offline: bool = False


@request(RequestCode.VIEW_BROKER_STATS_DATA)
class ViewBrokerStats(Header, frozen=True, kw_only=True):
    stats_name: str  # TOPIC_PUT_NUMS, GROUP_GET_NUMS and the like
    stats_key: str  # topic, or topic@group


@request(RequestCode.QUERY_CONSUME_QUEUE)
class QueryConsumeQueue(Header, frozen=True, kw_only=True):
    topic: str
    queue_id: Int32
    index: Int64
    count: Int32
    consumer_group: str | None = None


# --- the broker itself ---------------------------------------------------------------------------


class BrokerConfigResponse(Header, frozen=True, kw_only=True):
    version: str  # a DataVersion as JSON


request(RequestCode.GET_BROKER_CONFIG, response=BrokerConfigResponse)(NoFields)
request(
    RequestCode.UPDATE_BROKER_CONFIG,
    RequestCode.GET_BROKER_RUNTIME_INFO,
    RequestCode.CLEAN_EXPIRED_CONSUMEQUEUE,
    RequestCode.DELETE_EXPIRED_COMMITLOG,
)(NoFields)


class PrepareBackupResponse(Header, frozen=True, kw_only=True):
    log_begin: Int64
    log_end: Int64  # everything below is durable


@request(RequestCode.PREPARE_BACKUP, response=PrepareBackupResponse)
class PrepareBackup(Header, frozen=True, kw_only=True):
    # The broker writes the token into its directory, so that the caller can check that this broker
    # owns the directory it copies.
    token: str


# --- users and access rules ----------------------------------------------------------------------


@request(RequestCode.AUTH_GET_USER)
class UserHeader(Header, frozen=True, kw_only=True):
    username: str


@request(RequestCode.AUTH_LIST_USER)
class ListUsers(Header, frozen=True, kw_only=True):
    filter: str = ""  # a part of the name


@request(RequestCode.AUTH_GET_ACL)
class AclSubject(Header, frozen=True, kw_only=True):
    subject: str  # User:name


@request(RequestCode.AUTH_LIST_ACL)
class ListAcls(Header, frozen=True, kw_only=True):
    subject_filter: str = ""
    resource_filter: str = ""


# Accounts come from a file, so that these are refused, but by name and only after the permission
# of the caller was checked.
request(
    RequestCode.AUTH_CREATE_USER,
    RequestCode.AUTH_UPDATE_USER,
    RequestCode.AUTH_DELETE_USER,
    RequestCode.AUTH_CREATE_ACL,
    RequestCode.AUTH_UPDATE_ACL,
    RequestCode.AUTH_DELETE_ACL,
)(NoFields)


# --- name server: brokers ------------------------------------------------------------------------


class RegisterBrokerResponse(Header, frozen=True, kw_only=True):
    ha_server_addr: str | None = None
    master_addr: str | None = None


@request(RequestCode.REGISTER_BROKER, response=RegisterBrokerResponse)
class RegisterBroker(Header, frozen=True, kw_only=True):
    broker_name: str
    broker_addr: str  # ip:port
    cluster_name: str
    ha_server_addr: str = ""
    broker_id: Int64  # 0 is the master
    heartbeat_timeout_millis: Int64 | None = None
    enable_acting_master: bool | None = None
    compressed: bool = False
    body_crc32: Int32 = 0  # 0: do not check
    zone_name: str | None = field(default=None, name="__ZONE_NAME")


class QueryDataVersionResponse(Header, frozen=True, kw_only=True):
    changed: bool


@request(RequestCode.UNREGISTER_BROKER)
@request(RequestCode.QUERY_DATA_VERSION, response=QueryDataVersionResponse)
class BrokerIdentity(Header, frozen=True, kw_only=True):
    broker_name: str
    broker_addr: str
    cluster_name: str
    broker_id: Int64


@request(RequestCode.BROKER_HEARTBEAT)
class BrokerHeartbeat(Header, frozen=True, kw_only=True):
    cluster_name: str
    broker_addr: str
    broker_name: str
    broker_id: Int64 | None = None
    epoch: Int32 | None = None
    max_offset: Int64 | None = None
    confirm_offset: Int64 | None = None
    heartbeat_timeout_mills: Int64 | None = None


@request(RequestCode.GET_BROKER_MEMBER_GROUP)
class GetBrokerMemberGroup(Header, frozen=True, kw_only=True):
    cluster_name: str
    broker_name: str


class WipeWritePermResponse(Header, frozen=True, kw_only=True):
    wipe_topic_count: Int32


class AddWritePermResponse(Header, frozen=True, kw_only=True):
    add_topic_count: Int32


@request(RequestCode.WIPE_WRITE_PERM_OF_BROKER, response=WipeWritePermResponse)
@request(RequestCode.ADD_WRITE_PERM_OF_BROKER, response=AddWritePermResponse)
class BrokerNameHeader(Header, frozen=True, kw_only=True):
    broker_name: str


# --- name server: topics and routes --------------------------------------------------------------


@request(RequestCode.GET_ROUTEINFO_BY_TOPIC)
class GetRoute(Header, frozen=True, kw_only=True):
    topic: str
    accept_standard_json_only: bool = False


@request(RequestCode.REGISTER_TOPIC_IN_NAMESRV)
class RegisterTopic(Header, frozen=True, kw_only=True):
    topic: str


@request(RequestCode.DELETE_TOPIC_IN_NAMESRV)
class DeleteTopicInNamesrv(Header, frozen=True, kw_only=True):
    topic: str
    cluster_name: str | None = None


@request(RequestCode.GET_TOPICS_BY_CLUSTER)
class GetTopicsByCluster(Header, frozen=True, kw_only=True):
    cluster: str


request(
    RequestCode.GET_BROKER_CLUSTER_INFO,
    RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER,
    RequestCode.GET_SYSTEM_TOPIC_LIST_FROM_NS,
    RequestCode.GET_UNIT_TOPIC_LIST,
    RequestCode.GET_HAS_UNIT_SUB_TOPIC_LIST,
    RequestCode.GET_HAS_UNIT_SUB_UNUNIT_TOPIC_LIST,
)(NoFields)


# --- name server: settings -----------------------------------------------------------------------


@request(RequestCode.PUT_KV_CONFIG)
class PutKvConfig(Header, frozen=True, kw_only=True):
    namespace: str
    key: str
    value: str


class GetKvConfigResponse(Header, frozen=True, kw_only=True):
    value: str | None = None


@request(RequestCode.GET_KV_CONFIG, response=GetKvConfigResponse)
@request(RequestCode.DELETE_KV_CONFIG)
class KvConfigKey(Header, frozen=True, kw_only=True):
    namespace: str
    key: str


@request(RequestCode.GET_KVLIST_BY_NAMESPACE)
class KvNamespace(Header, frozen=True, kw_only=True):
    namespace: str


request(RequestCode.UPDATE_NAMESRV_CONFIG, RequestCode.GET_NAMESRV_CONFIG)(NoFields)
