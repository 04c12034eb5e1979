"""One request to the name server in, one answer out.

Every request is answered: with what was asked for, or with a code and a remark that says why not. A
request that is refused has changed nothing. Routes are strict JSON whoever asks; every client we
know reads that, old ones too.

`settings` is the owner's to save: when its revision has moved after `handle`.

Keys and values that operators keep on a name server, by namespace.

One namespace has a meaning here: ORDER_TOPIC_CONFIG says how many queues each broker has of a
topic whose order must survive a broker that is away ("brokerA:4;brokerB:4"). It is told to
whoever asks for the topic's route, and to every broker that registers.

`dump` gives what RocketMQ writes into kvConfig.json. `revision` moves with every change, so that
the owner of the file knows when to write it.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from escrowmq.errors import (
    BrokenBody,
    ConfigError,
    LocalProtocolError,
    RequestRefused,
    UnknownRequest,
)
from escrowmq.message.topic_config import DataVersion
from escrowmq.namesrv.route_table import (
    HEARTBEAT_TIMEOUT_MS,
    BrokerRegistration,
    RouteTable,
    check_name,
    system_error,
    truncate_name,
)
from escrowmq.remoting import bodies
from escrowmq.remoting import headers_admin as headers
from escrowmq.remoting import responses as answers
from escrowmq.remoting.bodies import decode_packed_registration
from escrowmq.remoting.codes import RequestCode, ResponseCode, request_name
from escrowmq.remoting.requests import Request

ORDER_NAMESPACE: Final = "ORDER_TOPIC_CONFIG"
KV_ENTRIES_MAX: Final = 100_000
VALUE_LENGTH_MAX: Final = 65_536


class _KvConfigFile(msgspec.Struct, rename="camel"):
    config_table: dict[str, dict[str, str]] = {}


class KvConfig:
    def __init__(self, *, entries_max: int = KV_ENTRIES_MAX) -> None:
        self._entries_max = entries_max
        self._table: dict[str, dict[str, str]] = {}
        self.revision = 0

    @classmethod
    def load(cls, content: dict[str, Any], *, entries_max: int = KV_ENTRIES_MAX) -> KvConfig:
        """Raises ConfigError if this is not what `dump` gives."""
        try:
            read = msgspec.convert(content, _KvConfigFile)
        except msgspec.ValidationError as error:
            raise ConfigError(f"kvConfig.json: {error}") from error
        settings = cls(entries_max=entries_max)
        settings._table = {name: dict(table) for name, table in read.config_table.items()}
        return settings

    def dump(self) -> dict[str, Any]:
        return {"configTable": {name: dict(table) for name, table in self._table.items()}}

    def put(self, namespace: str, key: str, value: str) -> None:
        check_name("namespace", namespace)
        check_name("key", key)
        if len(value) > VALUE_LENGTH_MAX:
            raise system_error(
                f"value has {len(value)} characters, the limit is {VALUE_LENGTH_MAX}"
            )
        if self.get(namespace, key) is None and self.count >= self._entries_max:
            raise system_error(f"{self._entries_max} settings are kept, which is the limit")
        self._table.setdefault(namespace, {})[key] = value
        self.revision += 1

    def delete(self, namespace: str, key: str) -> bool:
        table = self._table.get(namespace, {})
        if key not in table:
            return False
        del table[key]
        if not table:
            del self._table[namespace]
        self.revision += 1
        return True

    def get(self, namespace: str, key: str) -> str | None:
        return self._table.get(namespace, {}).get(key)

    def namespace(self, namespace: str) -> dict[str, str] | None:
        table = self._table.get(namespace)
        return None if table is None else dict(table)

    @property
    def count(self) -> int:
        return sum(map(len, self._table.values()))


# Below 3.0.11 the body of a registration is its topics alone.
VERSION_WITH_TOPIC_WRAPPER: Final = 37

FLAG_UNIT: Final = 1
FLAG_UNIT_SUBSCRIBED: Final = 2

_ZLIB_FIRST_BYTE = 0x78  # no JSON begins like this

Handler = Callable[[Request[Any], object, int], bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class NamesrvCounters:
    clusters: int
    brokers: int  # names
    addresses: int
    topics: int
    settings: int
    refused: int  # requests, since the start
    expired: int  # addresses, since the start


class NameServer:
    def __init__(
        self,
        *,
        routes: RouteTable | None = None,
        kv_config: KvConfig | None = None,
        config: Mapping[str, str] | None = None,
    ) -> None:
        """`config` is what GET_NAMESRV_CONFIG shows."""
        self.routes = routes or RouteTable()
        self.kv_config = kv_config or KvConfig()
        self._config = dict(config or {})
        self._refused_count = 0
        self._expired_count = 0
        self._handlers: dict[int, Handler] = {
            RequestCode.REGISTER_BROKER: self._register,
            RequestCode.UNREGISTER_BROKER: self._unregister,
            RequestCode.QUERY_DATA_VERSION: self._query_version,
            RequestCode.BROKER_HEARTBEAT: self._heartbeat,
            RequestCode.REGISTER_TOPIC_IN_NAMESRV: self._register_topic,
            RequestCode.DELETE_TOPIC_IN_NAMESRV: self._delete_topic,
            RequestCode.WIPE_WRITE_PERM_OF_BROKER: self._wipe_write_perm,
            RequestCode.ADD_WRITE_PERM_OF_BROKER: self._add_write_perm,
            RequestCode.GET_ROUTEINFO_BY_TOPIC: self._route,
            RequestCode.GET_BROKER_CLUSTER_INFO: self._clusters,
            RequestCode.GET_BROKER_MEMBER_GROUP: self._members,
            RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER: self._all_topics,
            RequestCode.GET_TOPICS_BY_CLUSTER: self._topics_of_cluster,
            RequestCode.GET_SYSTEM_TOPIC_LIST_FROM_NS: self._system_topics,
            RequestCode.GET_UNIT_TOPIC_LIST: self._unit_topics,
            RequestCode.GET_HAS_UNIT_SUB_TOPIC_LIST: self._unit_subscribed_topics,
            RequestCode.GET_HAS_UNIT_SUB_UNUNIT_TOPIC_LIST: self._unit_subscribed_plain_topics,
            RequestCode.PUT_KV_CONFIG: self._put_kv_config,
            RequestCode.GET_KV_CONFIG: self._get_kv_config,
            RequestCode.DELETE_KV_CONFIG: self._delete_kv_config,
            RequestCode.GET_KVLIST_BY_NAMESPACE: self._get_kv_namespace,
            RequestCode.UPDATE_NAMESRV_CONFIG: self._update_config,
            RequestCode.GET_NAMESRV_CONFIG: self._get_config,
        }

    def handle(self, request: Request[Any], channel: object, *, now_ms: int) -> bytes:
        """The frame to send back; empty if the request was one-way.

        `line` is whatever the caller calls this connection; brokers live and die with it.
        """
        try:
            handler = self._handlers.get(request.head.code)
            if handler is None:
                name = request_name(request.head.code)
                raise UnknownRequest(
                    ResponseCode.REQUEST_CODE_NOT_SUPPORTED, f"a name server does not answer {name}"
                )
            return handler(request, channel, now_ms)
        except RequestRefused as error:
            refusal = error
        except BrokenBody as error:
            refusal = system_error(str(error))
        except LocalProtocolError as error:  # the answer would be longer than a frame can be
            refusal = system_error(f"cannot be answered: {error}")
        self._refused_count += 1
        return answers.encode_error(request, refusal)

    def channel_closed(self, channel: object) -> list[str]:
        """The addresses of brokers that went with it."""
        return self.routes.channel_closed(channel)

    def tick(self, *, now_ms: int) -> list[object]:
        """Forget brokers that are silent for too long; their lines, which are to be closed."""
        gone = self.routes.expire(now_ms=now_ms)
        self._expired_count += len(gone)
        return list({id(line): line for line in gone.values()}.values())

    def counters(self) -> NamesrvCounters:
        return NamesrvCounters(
            clusters=len(self.routes.clusters()),
            brokers=self.routes.broker_count,
            addresses=self.routes.address_count,
            topics=self.routes.topic_count,
            settings=self.kv_config.count,
            refused=self._refused_count,
            expired=self._expired_count,
        )

    # What brokers send.

    def _register(
        self, request: Request[headers.RegisterBroker], channel: object, now_ms: int
    ) -> bytes:
        fields = request.head.fields
        topics = _registered_topics(request)
        timeout_ms = fields.heartbeat_timeout_millis
        registered = self.routes.register(
            BrokerRegistration(
                cluster=fields.cluster_name,
                name=fields.broker_name,
                broker_id=fields.broker_id,
                address=fields.broker_addr,
                ha_address=fields.ha_server_addr,
                zone=fields.zone_name,
                acting_master=fields.enable_acting_master,
                heartbeat_timeout_ms=HEARTBEAT_TIMEOUT_MS if timeout_ms is None else timeout_ms,
                topics=tuple(topics.topic_config_table.values()),
                version=topics.data_version,
            ),
            channel,
            now_ms=now_ms,
        )
        ordered = self.kv_config.namespace(ORDER_NAMESPACE)
        return answers.encode_response(
            request,
            headers.RegisterBrokerResponse(
                ha_server_addr=registered.master_ha_address, master_addr=registered.master_address
            ),
            body=b"" if ordered is None else bodies.encode_body(bodies.KvTable(table=ordered)),
        )

    def _unregister(
        self, request: Request[headers.BrokerIdentity], _channel: object, _now_ms: int
    ) -> bytes:
        fields = request.head.fields
        self.routes.unregister(fields.cluster_name, fields.broker_name, fields.broker_addr)
        return answers.encode_success(request)

    def _query_version(
        self, request: Request[headers.BrokerIdentity], _channel: object, now_ms: int
    ) -> bytes:
        fields = request.head.fields
        asked = bodies.decode_body(DataVersion, request.body)
        known = self.routes.heartbeat(fields.cluster_name, fields.broker_addr, now_ms=now_ms)
        return answers.encode_response(
            request,
            headers.QueryDataVersionResponse(changed=known != asked),
            body=b"" if known is None else bodies.encode_body(known),
        )

    def _heartbeat(
        self, request: Request[headers.BrokerHeartbeat], _channel: object, now_ms: int
    ) -> bytes:
        fields = request.head.fields
        self.routes.heartbeat(fields.cluster_name, fields.broker_addr, now_ms=now_ms)
        return answers.encode_success(request)

    def _register_topic(
        self, request: Request[headers.RegisterTopic], _channel: object, _now_ms: int
    ) -> bytes:
        route = bodies.decode_body(bodies.TopicRoute, request.body)
        self.routes.register_topic(request.head.fields.topic, route.queue_datas)
        return answers.encode_success(request)

    # What operators send.

    def _delete_topic(
        self, request: Request[headers.DeleteTopicInNamesrv], _channel: object, _now_ms: int
    ) -> bytes:
        fields = request.head.fields
        self.routes.delete_topic(fields.topic, cluster=fields.cluster_name or None)
        return answers.encode_success(request)

    def _wipe_write_perm(
        self, request: Request[headers.BrokerNameHeader], _channel: object, _now_ms: int
    ) -> bytes:
        count = self.routes.wipe_write_perm(request.head.fields.broker_name)
        return answers.encode_response(
            request, headers.WipeWritePermResponse(wipe_topic_count=count)
        )

    def _add_write_perm(
        self, request: Request[headers.BrokerNameHeader], _channel: object, _now_ms: int
    ) -> bytes:
        count = self.routes.add_write_perm(request.head.fields.broker_name)
        return answers.encode_response(request, headers.AddWritePermResponse(add_topic_count=count))

    def _put_kv_config(
        self, request: Request[headers.PutKvConfig], _channel: object, _now_ms: int
    ) -> bytes:
        fields = request.head.fields
        self.kv_config.put(fields.namespace, fields.key, fields.value)
        return answers.encode_success(request)

    def _get_kv_config(
        self, request: Request[headers.KvConfigKey], _channel: object, _now_ms: int
    ) -> bytes:
        fields = request.head.fields
        value = self.kv_config.get(fields.namespace, fields.key)
        if value is None:
            raise _not_found(
                f"namespace {truncate_name(fields.namespace)} has no {truncate_name(fields.key)}"
            )
        return answers.encode_response(request, headers.GetKvConfigResponse(value=value))

    def _delete_kv_config(
        self, request: Request[headers.KvConfigKey], _channel: object, _now_ms: int
    ) -> bytes:
        self.kv_config.delete(request.head.fields.namespace, request.head.fields.key)
        return answers.encode_success(request)

    def _get_kv_namespace(
        self, request: Request[headers.KvNamespace], _channel: object, _now_ms: int
    ) -> bytes:
        namespace = request.head.fields.namespace
        table = self.kv_config.namespace(namespace)
        if table is None:
            raise _not_found(f"there is no namespace {truncate_name(namespace)}")
        return _encode_body_response(request, bodies.KvTable(table=table))

    def _update_config(self, request: Request[Any], _channel: object, _now_ms: int) -> bytes:
        raise RequestRefused(
            ResponseCode.NO_PERMISSION,
            "this name server is configured where it is started, not over the network",
        )

    def _get_config(self, request: Request[Any], _channel: object, _now_ms: int) -> bytes:
        lines = [f"{name}={value}\n" for name, value in sorted(self._config.items())]
        return answers.encode_response(request, body="".join(lines).encode())

    # What everybody asks.

    def _route(self, request: Request[headers.GetRoute], _channel: object, _now_ms: int) -> bytes:
        topic = request.head.fields.topic
        route = self.routes.route(topic)
        if route is None:
            raise RequestRefused(
                ResponseCode.TOPIC_NOT_EXIST,
                f"No topic route info in name server for the topic: {truncate_name(topic)}",
            )
        order = self.kv_config.get(ORDER_NAMESPACE, topic)
        return _encode_body_response(
            request, msgspec.structs.replace(route, order_topic_conf=order)
        )

    def _clusters(self, request: Request[Any], _channel: object, _now_ms: int) -> bytes:
        found = bodies.ClusterInfo(
            broker_addr_table=self.routes.brokers(), cluster_addr_table=self.routes.clusters()
        )
        return _encode_body_response(request, found)

    def _members(
        self, request: Request[headers.GetBrokerMemberGroup], _channel: object, _now_ms: int
    ) -> bytes:
        cluster, name = request.head.fields.cluster_name, request.head.fields.broker_name
        members = bodies.BrokerMembers(
            cluster=cluster, broker_name=name, broker_addrs=self.routes.members(cluster, name)
        )
        return _encode_body_response(request, bodies.BrokerMemberGroup(broker_member_group=members))

    def _all_topics(self, request: Request[Any], _channel: object, _now_ms: int) -> bytes:
        return _encode_body_response(request, bodies.TopicList(topic_list=self.routes.topics()))

    def _topics_of_cluster(
        self, request: Request[headers.GetTopicsByCluster], _channel: object, _now_ms: int
    ) -> bytes:
        topics = self.routes.topics(cluster=request.head.fields.cluster)
        return _encode_body_response(request, bodies.TopicList(topic_list=topics))

    def _system_topics(self, request: Request[Any], _channel: object, _now_ms: int) -> bytes:
        """Clusters and brokers have a topic of their name; for others, a broker can be asked."""
        brokers = self.routes.brokers()
        names = {*self.routes.clusters(), *brokers}
        addresses = [route.broker_addrs[min(route.broker_addrs)] for route in brokers.values()]
        found = bodies.TopicList(
            topic_list=sorted(names), broker_addr=addresses[0] if addresses else None
        )
        return _encode_body_response(request, found)

    def _unit_topics(self, request: Request[Any], _channel: object, _now_ms: int) -> bytes:
        return self._topics_with_flag(request, lambda flag: bool(flag & FLAG_UNIT))

    def _unit_subscribed_topics(
        self, request: Request[Any], _channel: object, _now_ms: int
    ) -> bytes:
        return self._topics_with_flag(request, lambda flag: bool(flag & FLAG_UNIT_SUBSCRIBED))

    def _unit_subscribed_plain_topics(
        self, request: Request[Any], _channel: object, _now_ms: int
    ) -> bytes:
        return self._topics_with_flag(request, lambda flag: flag & 3 == FLAG_UNIT_SUBSCRIBED)

    def _topics_with_flag(self, request: Request[Any], matches: Callable[[int], bool]) -> bytes:
        flags = self.routes.topic_flags()
        topics = [topic for topic, flag in flags.items() if matches(flag)]
        return _encode_body_response(request, bodies.TopicList(topic_list=topics))


def _registered_topics(request: Request[headers.RegisterBroker]) -> bodies.TopicConfigs:
    fields, body = request.head.fields, request.body
    if fields.body_crc32 and fields.body_crc32 != zlib.crc32(body) & 0x7FFFFFFF:
        raise system_error("bodyCrc32 does not fit the body")
    if not body:
        return bodies.TopicConfigs()
    if request.head.version < VERSION_WITH_TOPIC_WRAPPER:
        return bodies.decode_body(bodies.TopicConfigs, body)
    # 5.x brokers that compress do not say so in the header.
    if fields.compressed or body[0] == _ZLIB_FIRST_BYTE:
        return decode_packed_registration(body).topic_config_serialize_wrapper
    return bodies.decode_registration(body).topic_config_serialize_wrapper


def _encode_body_response(request: Request[Any], body: bodies.JsonBody) -> bytes:
    return answers.encode_response(request, body=bodies.encode_body(body))


def _not_found(remark: str) -> RequestRefused:
    return RequestRefused(ResponseCode.QUERY_NOT_FOUND, remark)
