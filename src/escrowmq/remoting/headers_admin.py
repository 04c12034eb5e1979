"""Headers of what operators ask a broker: topics, groups, offsets, figures, settings.

Headers of the name server: routes, registration of brokers, key-value settings.
"""

from __future__ import annotations

from msgspec import field

from escrowmq.remoting.command import Int32, Int64
from escrowmq.remoting.headers import Header


class CreateTopic(Header, frozen=True, kw_only=True):
    topic: str
    default_topic: str = ""
    read_queue_nums: Int32
    write_queue_nums: Int32
    perm: Int32  # 4 read, 2 write, 1 inherit
    topic_filter_type: str = "SINGLE_TAG"
    order: bool = False  # C++ leaves it out, and the next
    topic_sys_flag: Int32 = 0
    attributes: str | None = None  # +name=value,-name
    force: bool | None = None


class TopicHeader(Header, frozen=True, kw_only=True):
    topic: str


class PrepareBackup(Header, frozen=True, kw_only=True):
    token: str  # the broker leaves it in its directory, so that the asker knows whose it is


class PrepareBackupResponse(Header, frozen=True, kw_only=True):
    log_begin: Int64
    log_end: Int64  # everything below is durable


class GroupHeader(Header, frozen=True, kw_only=True):
    group: str


class TopicGroupHeader(Header, frozen=True, kw_only=True):
    topic: str
    group: str


class ProducerGroupHeader(Header, frozen=True, kw_only=True):
    producer_group: str


class DeleteGroup(Header, frozen=True, kw_only=True):
    group_name: str
    clean_offset: bool = False  # also forget how far it has read; so 5.x calls it
    remove_offset: bool = False  # and so 4.9


class BrokerConfigResponse(Header, frozen=True, kw_only=True):
    version: str  # a data version, as JSON


class GetConsumeStats(Header, frozen=True, kw_only=True):
    consumer_group: str
    topic: str | None = None  # none: of every topic that it reads


class ResetOffset(Header, frozen=True, kw_only=True):
    topic: str
    group: str
    timestamp: Int64  # -1: to the end
    is_force: bool = False  # also forwards
    queue_id: Int32 = -1  # all of them
    offset: Int64 | None = None  # there, whatever the timestamp says


class CloneGroupOffset(Header, frozen=True, kw_only=True):
    src_group: str
    dest_group: str
    topic: str | None = None
    offline: bool = False


class ViewBrokerStats(Header, frozen=True, kw_only=True):
    stats_name: str  # TOPIC_PUT_NUMS, GROUP_GET_NUMS and the like
    stats_key: str  # topic, or topic@group


class GetBrokerConsumeStats(Header, frozen=True, kw_only=True):
    is_order: bool = False


class QueryConsumeQueue(Header, frozen=True, kw_only=True):
    topic: str
    queue_id: Int32
    index: Int64
    count: Int32
    consumer_group: str | None = None


class UserHeader(Header, frozen=True, kw_only=True):
    username: str


class ListUsers(Header, frozen=True, kw_only=True):
    filter: str = ""  # a part of the name


class AclSubject(Header, frozen=True, kw_only=True):
    subject: str  # User:name


class ListAcls(Header, frozen=True, kw_only=True):
    subject_filter: str = ""
    resource_filter: str = ""


class GetRoute(Header, frozen=True, kw_only=True):
    topic: str
    accept_standard_json_only: bool = False


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


class RegisterBrokerResponse(Header, frozen=True, kw_only=True):
    ha_server_addr: str | None = None
    master_addr: str | None = None


class BrokerIdentity(Header, frozen=True, kw_only=True):
    """UNREGISTER_BROKER and QUERY_DATA_VERSION."""

    broker_name: str
    broker_addr: str
    cluster_name: str
    broker_id: Int64


class QueryDataVersionResponse(Header, frozen=True, kw_only=True):
    changed: bool


class BrokerHeartbeat(Header, frozen=True, kw_only=True):
    cluster_name: str
    broker_addr: str
    broker_name: str
    broker_id: Int64 | None = None
    epoch: Int32 | None = None
    max_offset: Int64 | None = None
    confirm_offset: Int64 | None = None
    heartbeat_timeout_mills: Int64 | None = None


class GetBrokerMemberGroup(Header, frozen=True, kw_only=True):
    cluster_name: str
    broker_name: str


class BrokerNameHeader(Header, frozen=True, kw_only=True):
    """WIPE_WRITE_PERM_OF_BROKER and ADD_WRITE_PERM_OF_BROKER."""

    broker_name: str


class WipeWritePermResponse(Header, frozen=True, kw_only=True):
    wipe_topic_count: Int32


class AddWritePermResponse(Header, frozen=True, kw_only=True):
    add_topic_count: Int32


class RegisterTopic(Header, frozen=True, kw_only=True):
    topic: str


class DeleteTopicInNamesrv(Header, frozen=True, kw_only=True):
    topic: str
    cluster_name: str | None = None


class GetTopicsByCluster(Header, frozen=True, kw_only=True):
    cluster: str


class PutKvConfig(Header, frozen=True, kw_only=True):
    namespace: str
    key: str
    value: str


class KvConfigKey(Header, frozen=True, kw_only=True):
    """GET_KV_CONFIG and DELETE_KV_CONFIG."""

    namespace: str
    key: str


class GetKvConfigResponse(Header, frozen=True, kw_only=True):
    value: str | None = None


class KvNamespace(Header, frozen=True, kw_only=True):
    namespace: str
