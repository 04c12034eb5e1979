"""Headers of the name server: routes, registration of brokers, key-value settings."""

from __future__ import annotations

from msgspec import field

from escrowmq.wire.command import Int32, Int64
from escrowmq.wire.headers import Header


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


class RegisterBrokerAnswer(Header, frozen=True, kw_only=True):
    ha_server_addr: str | None = None
    master_addr: str | None = None


class BrokerIdentity(Header, frozen=True, kw_only=True):
    """UNREGISTER_BROKER and QUERY_DATA_VERSION."""

    broker_name: str
    broker_addr: str
    cluster_name: str
    broker_id: Int64


class QueryDataVersionAnswer(Header, frozen=True, kw_only=True):
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


class BrokerName(Header, frozen=True, kw_only=True):
    """WIPE_WRITE_PERM_OF_BROKER and ADD_WRITE_PERM_OF_BROKER."""

    broker_name: str


class WipeWritePermAnswer(Header, frozen=True, kw_only=True):
    wipe_topic_count: Int32


class AddWritePermAnswer(Header, frozen=True, kw_only=True):
    add_topic_count: Int32


class RegisterTopic(Header, frozen=True, kw_only=True):
    topic: str


class DeleteTopicInNamesrv(Header, frozen=True, kw_only=True):
    topic: str
    cluster_name: str | None = None


class TopicsOfCluster(Header, frozen=True, kw_only=True):
    cluster: str


class PutSetting(Header, frozen=True, kw_only=True):
    namespace: str
    key: str
    value: str


class SettingKey(Header, frozen=True, kw_only=True):
    """GET_KV_CONFIG and DELETE_KV_CONFIG."""

    namespace: str
    key: str


class SettingAnswer(Header, frozen=True, kw_only=True):
    value: str | None = None


class SettingNamespace(Header, frozen=True, kw_only=True):
    namespace: str
