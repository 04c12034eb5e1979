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
from escrowmq.namesrv.route_table import (
    SILENT_MS_MAX,
    Registration,
    RouteTable,
    check_name,
    refuse,
    shown,
)
from escrowmq.remoting import bodies
from escrowmq.remoting import headers_admin as headers
from escrowmq.remoting import responses as answers
from escrowmq.remoting.bodies import decode_packed
from escrowmq.remoting.codes import RequestCode, ResponseCode, request_name
from escrowmq.remoting.requests import Request

ORDER_NAMESPACE: Final = "ORDER_TOPIC_CONFIG"
SETTINGS_MAX: Final = 100_000
VALUE_LENGTH_MAX: Final = 65_536


class _KvConfig(msgspec.Struct, rename="camel"):
    config_table: dict[str, dict[str, str]] = {}


class Settings:
    def __init__(self, *, settings_max: int = SETTINGS_MAX) -> None:
        self._settings_max = settings_max
        self._table: dict[str, dict[str, str]] = {}
        self.revision = 0

    @classmethod
    def load(cls, content: dict[str, Any], *, settings_max: int = SETTINGS_MAX) -> Settings:
        """Raises ConfigError if this is not what `dump` gives."""
        try:
            read = msgspec.convert(content, _KvConfig)
        except msgspec.ValidationError as error:
            raise ConfigError(f"kvConfig.json: {error}") from error
        settings = cls(settings_max=settings_max)
        settings._table = {name: dict(table) for name, table in read.config_table.items()}
        return settings

    def dump(self) -> dict[str, Any]:
        return {"configTable": {name: dict(table) for name, table in self._table.items()}}

    def put(self, namespace: str, key: str, value: str) -> None:
        check_name("namespace", namespace)
        check_name("key", key)
        if len(value) > VALUE_LENGTH_MAX:
            raise refuse(f"value has {len(value)} characters, the limit is {VALUE_LENGTH_MAX}")
        if self.get(namespace, key) is None and self.count >= self._settings_max:
            raise refuse(f"{self._settings_max} settings are kept, which is the limit")
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
VERSION_WITH_WRAPPER: Final = 37

UNIT: Final = 1
UNIT_SUBSCRIBED: Final = 2

_ZLIB_FIRST_BYTE = 0x78  # no JSON begins like this

Handler = Callable[[Request[Any], object, int], bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
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
        settings: Settings | None = None,
        config: Mapping[str, str] | None = None,
    ) -> None:
        """`config` is what GET_NAMESRV_CONFIG shows."""
        self.routes = routes or RouteTable()
        self.settings = settings or Settings()
        self._config = dict(config or {})
        self._refused = 0
        self._expired = 0
        self._handlers: dict[int, Handler] = {
            RequestCode.REGISTER_BROKER: self._register,
            RequestCode.UNREGISTER_BROKER: self._unregister,
            RequestCode.QUERY_DATA_VERSION: self._query_version,
            RequestCode.BROKER_HEARTBEAT: self._heartbeat,
            RequestCode.REGISTER_TOPIC_IN_NAMESRV: self._register_topic,
            RequestCode.DELETE_TOPIC_IN_NAMESRV: self._delete_topic,
            RequestCode.WIPE_WRITE_PERM_OF_BROKER: self._wipe_write,
            RequestCode.ADD_WRITE_PERM_OF_BROKER: self._add_write,
            RequestCode.GET_ROUTEINFO_BY_TOPIC: self._route,
            RequestCode.GET_BROKER_CLUSTER_INFO: self._clusters,
            RequestCode.GET_BROKER_MEMBER_GROUP: self._members,
            RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER: self._all_topics,
            RequestCode.GET_TOPICS_BY_CLUSTER: self._topics_of_cluster,
            RequestCode.GET_SYSTEM_TOPIC_LIST_FROM_NS: self._system_topics,
            RequestCode.GET_UNIT_TOPIC_LIST: self._unit_topics,
            RequestCode.GET_HAS_UNIT_SUB_TOPIC_LIST: self._unit_subscribed_topics,
            RequestCode.GET_HAS_UNIT_SUB_UNUNIT_TOPIC_LIST: self._unit_subscribed_plain_topics,
            RequestCode.PUT_KV_CONFIG: self._put_setting,
            RequestCode.GET_KV_CONFIG: self._get_setting,
            RequestCode.DELETE_KV_CONFIG: self._delete_setting,
            RequestCode.GET_KVLIST_BY_NAMESPACE: self._settings_of_namespace,
            RequestCode.UPDATE_NAMESRV_CONFIG: self._update_config,
            RequestCode.GET_NAMESRV_CONFIG: self._get_config,
        }

    def handle(self, request: Request[Any], line: object, *, now_ms: int) -> bytes:
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
            return handler(request, line, now_ms)
        except RequestRefused as error:
            refusal = error
        except BrokenBody as error:
            refusal = refuse(str(error))
        except LocalProtocolError as error:  # the answer would be longer than a frame can be
            refusal = refuse(f"cannot be answered: {error}")
        self._refused += 1
        return answers.refuse(request, refusal)

    def line_closed(self, line: object) -> list[str]:
        """The addresses of brokers that went with it."""
        return self.routes.close(line)

    def tick(self, *, now_ms: int) -> list[object]:
        """Forget brokers that are silent for too long; their lines, which are to be closed."""
        gone = self.routes.expire(now_ms=now_ms)
        self._expired += len(gone)
        return list({id(line): line for line in gone.values()}.values())

    def counts(self) -> Counts:
        return Counts(
            clusters=len(self.routes.clusters()),
            brokers=self.routes.broker_count,
            addresses=self.routes.address_count,
            topics=self.routes.topic_count,
            settings=self.settings.count,
            refused=self._refused,
            expired=self._expired,
        )

    # What brokers send.

    def _register(
        self, request: Request[headers.RegisterBroker], line: object, now_ms: int
    ) -> bytes:
        fields = request.head.fields
        topics = _registered_topics(request)
        timeout_ms = fields.heartbeat_timeout_millis
        registered = self.routes.register(
            Registration(
                cluster=fields.cluster_name,
                name=fields.broker_name,
                broker_id=fields.broker_id,
                address=fields.broker_addr,
                ha_address=fields.ha_server_addr,
                zone=fields.zone_name,
                acting_master=fields.enable_acting_master,
                silent_ms_max=SILENT_MS_MAX if timeout_ms is None else timeout_ms,
                topics=tuple(topics.topic_config_table.values()),
                version=topics.data_version,
            ),
            line,
            now_ms=now_ms,
        )
        ordered = self.settings.namespace(ORDER_NAMESPACE)
        return answers.answer(
            request,
            headers.RegisterBrokerAnswer(
                ha_server_addr=registered.master_ha_address, master_addr=registered.master_address
            ),
            body=b"" if ordered is None else bodies.encode_body(bodies.Settings(table=ordered)),
        )

    def _unregister(
        self, request: Request[headers.BrokerIdentity], _line: object, _now_ms: int
    ) -> bytes:
        fields = request.head.fields
        self.routes.unregister(fields.cluster_name, fields.broker_name, fields.broker_addr)
        return answers.succeed(request)

    def _query_version(
        self, request: Request[headers.BrokerIdentity], _line: object, now_ms: int
    ) -> bytes:
        fields = request.head.fields
        asked = bodies.decode_body(bodies.DataVersion, request.body)
        known = self.routes.heard_of(fields.cluster_name, fields.broker_addr, now_ms=now_ms)
        return answers.answer(
            request,
            headers.QueryDataVersionAnswer(changed=known != asked),
            body=b"" if known is None else bodies.encode_body(known),
        )

    def _heartbeat(
        self, request: Request[headers.BrokerHeartbeat], _line: object, now_ms: int
    ) -> bytes:
        fields = request.head.fields
        self.routes.heard_of(fields.cluster_name, fields.broker_addr, now_ms=now_ms)
        return answers.succeed(request)

    def _register_topic(
        self, request: Request[headers.RegisterTopic], _line: object, _now_ms: int
    ) -> bytes:
        route = bodies.decode_body(bodies.TopicRoute, request.body)
        self.routes.register_topic(request.head.fields.topic, route.queue_datas)
        return answers.succeed(request)

    # What operators send.

    def _delete_topic(
        self, request: Request[headers.DeleteTopicInNamesrv], _line: object, _now_ms: int
    ) -> bytes:
        fields = request.head.fields
        self.routes.delete_topic(fields.topic, cluster=fields.cluster_name or None)
        return answers.succeed(request)

    def _wipe_write(
        self, request: Request[headers.BrokerName], _line: object, _now_ms: int
    ) -> bytes:
        count = self.routes.wipe_write(request.head.fields.broker_name)
        return answers.answer(request, headers.WipeWritePermAnswer(wipe_topic_count=count))

    def _add_write(
        self, request: Request[headers.BrokerName], _line: object, _now_ms: int
    ) -> bytes:
        count = self.routes.add_write(request.head.fields.broker_name)
        return answers.answer(request, headers.AddWritePermAnswer(add_topic_count=count))

    def _put_setting(
        self, request: Request[headers.PutSetting], _line: object, _now_ms: int
    ) -> bytes:
        fields = request.head.fields
        self.settings.put(fields.namespace, fields.key, fields.value)
        return answers.succeed(request)

    def _get_setting(
        self, request: Request[headers.SettingKey], _line: object, _now_ms: int
    ) -> bytes:
        fields = request.head.fields
        value = self.settings.get(fields.namespace, fields.key)
        if value is None:
            raise _not_found(f"namespace {shown(fields.namespace)} has no {shown(fields.key)}")
        return answers.answer(request, headers.SettingAnswer(value=value))

    def _delete_setting(
        self, request: Request[headers.SettingKey], _line: object, _now_ms: int
    ) -> bytes:
        self.settings.delete(request.head.fields.namespace, request.head.fields.key)
        return answers.succeed(request)

    def _settings_of_namespace(
        self, request: Request[headers.SettingNamespace], _line: object, _now_ms: int
    ) -> bytes:
        namespace = request.head.fields.namespace
        table = self.settings.namespace(namespace)
        if table is None:
            raise _not_found(f"there is no namespace {shown(namespace)}")
        return _body(request, bodies.Settings(table=table))

    def _update_config(self, request: Request[Any], _line: object, _now_ms: int) -> bytes:
        raise RequestRefused(
            ResponseCode.NO_PERMISSION,
            "this name server is configured where it is started, not over the network",
        )

    def _get_config(self, request: Request[Any], _line: object, _now_ms: int) -> bytes:
        lines = [f"{name}={value}\n" for name, value in sorted(self._config.items())]
        return answers.answer(request, body="".join(lines).encode())

    # What everybody asks.

    def _route(self, request: Request[headers.GetRoute], _line: object, _now_ms: int) -> bytes:
        topic = request.head.fields.topic
        route = self.routes.route(topic)
        if route is None:
            raise RequestRefused(
                ResponseCode.TOPIC_NOT_EXIST,
                f"No topic route info in name server for the topic: {shown(topic)}",
            )
        order = self.settings.get(ORDER_NAMESPACE, topic)
        return _body(request, msgspec.structs.replace(route, order_topic_conf=order))

    def _clusters(self, request: Request[Any], _line: object, _now_ms: int) -> bytes:
        found = bodies.ClusterInfo(
            broker_addr_table=self.routes.brokers(), cluster_addr_table=self.routes.clusters()
        )
        return _body(request, found)

    def _members(
        self, request: Request[headers.GetBrokerMemberGroup], _line: object, _now_ms: int
    ) -> bytes:
        cluster, name = request.head.fields.cluster_name, request.head.fields.broker_name
        members = bodies.BrokerMembers(
            cluster=cluster, broker_name=name, broker_addrs=self.routes.members(cluster, name)
        )
        return _body(request, bodies.BrokerMemberGroup(broker_member_group=members))

    def _all_topics(self, request: Request[Any], _line: object, _now_ms: int) -> bytes:
        return _body(request, bodies.TopicList(topic_list=self.routes.topics()))

    def _topics_of_cluster(
        self, request: Request[headers.TopicsOfCluster], _line: object, _now_ms: int
    ) -> bytes:
        topics = self.routes.topics(cluster=request.head.fields.cluster)
        return _body(request, bodies.TopicList(topic_list=topics))

    def _system_topics(self, request: Request[Any], _line: object, _now_ms: int) -> bytes:
        """Clusters and brokers have a topic of their name; for others, a broker can be asked."""
        brokers = self.routes.brokers()
        names = {*self.routes.clusters(), *brokers}
        addresses = [route.broker_addrs[min(route.broker_addrs)] for route in brokers.values()]
        found = bodies.TopicList(
            topic_list=sorted(names), broker_addr=addresses[0] if addresses else None
        )
        return _body(request, found)

    def _unit_topics(self, request: Request[Any], _line: object, _now_ms: int) -> bytes:
        return self._flagged(request, lambda flag: bool(flag & UNIT))

    def _unit_subscribed_topics(self, request: Request[Any], _line: object, _now_ms: int) -> bytes:
        return self._flagged(request, lambda flag: bool(flag & UNIT_SUBSCRIBED))

    def _unit_subscribed_plain_topics(
        self, request: Request[Any], _line: object, _now_ms: int
    ) -> bytes:
        return self._flagged(request, lambda flag: flag & 3 == UNIT_SUBSCRIBED)

    def _flagged(self, request: Request[Any], is_wanted: Callable[[int], bool]) -> bytes:
        flags = self.routes.topic_flags()
        topics = [topic for topic, flag in flags.items() if is_wanted(flag)]
        return _body(request, bodies.TopicList(topic_list=topics))


def _registered_topics(request: Request[headers.RegisterBroker]) -> bodies.TopicConfigs:
    fields, body = request.head.fields, request.body
    if fields.body_crc32 and fields.body_crc32 != zlib.crc32(body) & 0x7FFFFFFF:
        raise refuse("bodyCrc32 does not fit the body")
    if not body:
        return bodies.TopicConfigs()
    if request.head.version < VERSION_WITH_WRAPPER:
        return bodies.decode_body(bodies.TopicConfigs, body)
    # 5.x brokers that compress do not say so in the header.
    if fields.compressed or body[0] == _ZLIB_FIRST_BYTE:
        return decode_packed(body).topic_config_serialize_wrapper
    return bodies.decode_registration(body).topic_config_serialize_wrapper


def _body(request: Request[Any], body: bodies.JsonBody) -> bytes:
    return answers.answer(request, body=bodies.encode_body(body))


def _not_found(remark: str) -> RequestRefused:
    return RequestRefused(ResponseCode.QUERY_NOT_FOUND, remark)
