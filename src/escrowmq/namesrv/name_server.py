"""The requests of the name server: one request in, one response out.

Every request gets a response: a result, or a code and a remark that says why not. A request that is
refused has changed nothing. Routes are strict JSON for every client; all known clients read that,
old ones too.

`NameServer` keeps brokers and topics in a `RouteTable` and the settings of operators in a
`KvConfig`. It opens no file: the owner saves `kv_config` when its revision has changed, and
responds afterwards.

A request about very many topics is handled in slices, so that others are served in between.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import zlib
from collections.abc import Callable, Generator, Mapping
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
from escrowmq.peer import Peer
from escrowmq.remoting import bodies
from escrowmq.remoting import headers_admin as headers
from escrowmq.remoting.codes import RequestCode, ResponseCode, request_name
from escrowmq.remoting.headers import Header
from escrowmq.remoting.requests import Request
from escrowmq.remoting.responses import encode_error, encode_response
from escrowmq.sliced_work import SlicedResult, run_to_end

log = logging.getLogger(__name__)

ORDER_NAMESPACE: Final = "ORDER_TOPIC_CONFIG"
KV_ENTRIES_MAX: Final = 100_000
VALUE_LENGTH_MAX: Final = 65_536
# Bytes of all settings as JSON. The whole file is written each time, and a namespace must fit into
# a response: that of ordered topics is part of the response to every registration.
KV_BYTES_MAX: Final = 4_000_000
TOPICS_PER_SLICE: Final = 1_000  # of a list that is encoded

# Brokers older than 3.0.11 send their topics without the wrapper around them.
VERSION_WITH_TOPIC_WRAPPER: Final = 37

# Bits of the system flag of a topic.
FLAG_UNIT: Final = 1
FLAG_UNIT_SUBSCRIBED: Final = 2

_ZLIB_FIRST_BYTE: Final = 0x78  # no JSON text begins with it


@dataclass(frozen=True, slots=True)
class NamesrvResponse:
    """What a handler returns for a request that succeeded."""

    header: Header | None = None
    body: bytes = b""


_SlicedResponse = Generator[None, None, NamesrvResponse]


@dataclass(frozen=True, slots=True)
class NamesrvHandler:
    """The function for one request code.

    It is called with the request, the channel it came over, and the time in milliseconds.
    """

    code: RequestCode
    function: Callable[[Request[Any], Peer, int], NamesrvResponse | _SlicedResponse]
    is_public: bool = False  # any account may send it, because clients need it


@dataclass(frozen=True, slots=True, kw_only=True)
class NamesrvCounters:
    clusters: int
    brokers: int  # broker names
    addresses: int
    topics: int
    settings: int
    refused: int  # requests since the start
    expired: int  # addresses since the start


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
        self._handlers: dict[int, NamesrvHandler] = {
            handler.code: handler for handler in self._all_handlers()
        }

    def _all_handlers(self) -> list[NamesrvHandler]:
        code, handler = RequestCode, NamesrvHandler
        return [
            # From brokers.
            handler(code.REGISTER_BROKER, self._register),
            handler(code.UNREGISTER_BROKER, self._unregister),
            handler(code.QUERY_DATA_VERSION, self._query_version, is_public=True),
            handler(code.BROKER_HEARTBEAT, self._heartbeat),
            handler(code.REGISTER_TOPIC_IN_NAMESRV, self._register_topic),
            # From clients and tools.
            handler(code.GET_ROUTEINFO_BY_TOPIC, self._route, is_public=True),
            handler(code.GET_BROKER_CLUSTER_INFO, self._clusters, is_public=True),
            handler(code.GET_BROKER_MEMBER_GROUP, self._members, is_public=True),
            handler(code.GET_ALL_TOPIC_LIST_FROM_NAMESERVER, self._all_topics, is_public=True),
            handler(code.GET_TOPICS_BY_CLUSTER, self._topics_of_cluster, is_public=True),
            handler(code.GET_SYSTEM_TOPIC_LIST_FROM_NS, self._system_topics, is_public=True),
            handler(code.GET_UNIT_TOPIC_LIST, self._unit_topics, is_public=True),
            handler(code.GET_HAS_UNIT_SUB_TOPIC_LIST, self._unit_subscribed_topics, is_public=True),
            handler(
                code.GET_HAS_UNIT_SUB_UNUNIT_TOPIC_LIST,
                self._unit_subscribed_plain_topics,
                is_public=True,
            ),
            handler(code.GET_KV_CONFIG, self._get_kv_config, is_public=True),
            handler(code.GET_KVLIST_BY_NAMESPACE, self._get_kv_namespace, is_public=True),
            # From operators.
            handler(code.DELETE_TOPIC_IN_NAMESRV, self._delete_topic),
            handler(code.WIPE_WRITE_PERM_OF_BROKER, self._wipe_write_perm),
            handler(code.ADD_WRITE_PERM_OF_BROKER, self._add_write_perm),
            handler(code.PUT_KV_CONFIG, self._put_kv_config),
            handler(code.DELETE_KV_CONFIG, self._delete_kv_config),
            handler(code.UPDATE_NAMESRV_CONFIG, self._update_config),
            handler(code.GET_NAMESRV_CONFIG, self._get_config),
        ]

    def handle(self, request: Request[Any], channel: Peer, *, now_ms: int) -> bytes:
        """Return the response as a frame; it is empty if the request was one-way.

        `channel` identifies the connection to the name server: a broker that registered over it is
        removed when `channel_closed` is called with it.
        """
        return run_to_end(self.handle_in_slices(request, channel, now_ms=now_ms))

    def handle_in_slices(
        self, request: Request[Any], channel: Peer, *, now_ms: int
    ) -> SlicedResult[bytes]:
        """Do the same as `handle` in slices."""
        try:
            handler = self._handlers.get(request.head.code)
            if handler is None:
                name = request_name(request.head.code)
                raise UnknownRequest(
                    ResponseCode.REQUEST_CODE_NOT_SUPPORTED,
                    f"the name server does not support {name}",
                )
            response = handler.function(request, channel, now_ms)
            if isinstance(response, Generator):
                response = yield from response
            return encode_response(request, response.header, body=response.body)
        except RequestRefused as error:
            # With its traceback it would be part of a cycle with this frame, and keep the request
            # in memory until the next garbage collection.
            refusal = error.with_traceback(None)
        except BrokenBody as error:
            refusal = system_error(str(error))
        except LocalProtocolError as error:
            # A frame cannot hold the response.
            refusal = system_error(f"the response cannot be sent: {error}")
        except Exception:  # a bug must cost one request, not the connection
            log.exception("request failed code=%d", request.head.code)
            refusal = system_error("internal error, see the name server's log")
        self._refused_count += 1
        return encode_error(request, refusal)

    def is_public(self, code: int) -> bool:
        """Return whether any account may send this request. Others need an administrator."""
        handler = self._handlers.get(code)
        return handler is not None and handler.is_public

    def channel_closed(self, channel: Peer) -> list[str]:
        """Remove the brokers of a closed connection and return their addresses."""
        return self.routes.channel_closed(channel)

    def tick(self, *, now_ms: int) -> list[Peer]:
        """Remove brokers whose heartbeat is overdue. Return their channels, to be closed."""
        expired = self.routes.expire(now_ms=now_ms)
        self._expired_count += len(expired)
        return list({id(channel): channel for channel in expired.values()}.values())

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

    # --- requests of brokers ---------------------------------------------------------------------

    def _register(
        self, request: Request[headers.RegisterBroker], channel: Peer, now_ms: int
    ) -> _SlicedResponse:
        fields = request.head.fields
        topics = yield from _registered_topics(request)
        timeout_ms = fields.heartbeat_timeout_millis
        master = yield from self.routes.register_in_slices(
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
        ordered_topics = self.kv_config.namespace(ORDER_NAMESPACE)
        return NamesrvResponse(
            headers.RegisterBrokerResponse(
                ha_server_addr=master.master_ha_address, master_addr=master.master_address
            ),
            b"" if ordered_topics is None else _encode(bodies.KvTable(table=ordered_topics)),
        )

    def _unregister(
        self, request: Request[headers.BrokerIdentity], _channel: Peer, _now_ms: int
    ) -> _SlicedResponse:
        fields = request.head.fields
        self.routes.unregister(fields.cluster_name, fields.broker_name, fields.broker_addr)
        yield from self.routes.remove_stale_routes()
        return NamesrvResponse()

    def _query_version(
        self, request: Request[headers.BrokerIdentity], _channel: Peer, now_ms: int
    ) -> NamesrvResponse:
        fields = request.head.fields
        version = bodies.decode_request_body(DataVersion, request.body)
        registered = self.routes.heartbeat(fields.cluster_name, fields.broker_addr, now_ms=now_ms)
        return NamesrvResponse(
            headers.QueryDataVersionResponse(changed=registered != version),
            b"" if registered is None else _encode(registered),
        )

    def _heartbeat(
        self, request: Request[headers.BrokerHeartbeat], _channel: Peer, now_ms: int
    ) -> NamesrvResponse:
        fields = request.head.fields
        self.routes.heartbeat(fields.cluster_name, fields.broker_addr, now_ms=now_ms)
        return NamesrvResponse()

    def _register_topic(
        self, request: Request[headers.RegisterTopic], _channel: Peer, _now_ms: int
    ) -> NamesrvResponse:
        route = bodies.decode_request_body(bodies.TopicRoute, request.body)
        self.routes.register_topic(request.head.fields.topic, route.queue_datas)
        return NamesrvResponse()

    # --- requests of clients and tools -----------------------------------------------------------

    def _route(
        self, request: Request[headers.GetRoute], _channel: Peer, _now_ms: int
    ) -> _SlicedResponse:
        topic = request.head.fields.topic
        route = yield from self.routes.route_in_slices(topic)
        if route is None:
            # RocketMQ's words: some clients look for them.
            raise RequestRefused(
                ResponseCode.TOPIC_NOT_EXIST,
                f"No topic route info in name server for the topic: {truncate_name(topic)}",
            )
        order = self.kv_config.get(ORDER_NAMESPACE, topic)
        return _body_response(msgspec.structs.replace(route, order_topic_conf=order))

    def _clusters(self, _request: Request[Any], _channel: Peer, _now_ms: int) -> NamesrvResponse:
        return _body_response(
            bodies.ClusterInfo(
                broker_addr_table=self.routes.brokers(), cluster_addr_table=self.routes.clusters()
            )
        )

    def _members(
        self, request: Request[headers.GetBrokerMemberGroup], _channel: Peer, _now_ms: int
    ) -> NamesrvResponse:
        cluster, name = request.head.fields.cluster_name, request.head.fields.broker_name
        members = bodies.BrokerMembers(
            cluster=cluster, broker_name=name, broker_addrs=self.routes.members(cluster, name)
        )
        return _body_response(bodies.BrokerMemberGroup(broker_member_group=members))

    def _all_topics(self, _request: Request[Any], _channel: Peer, _now_ms: int) -> _SlicedResponse:
        return _topic_list_response(self.routes.unsorted_topics())

    def _topics_of_cluster(
        self, request: Request[headers.GetTopicsByCluster], _channel: Peer, _now_ms: int
    ) -> _SlicedResponse:
        return _topic_list_response(
            self.routes.unsorted_topics(cluster=request.head.fields.cluster)
        )

    def _system_topics(
        self, _request: Request[Any], _channel: Peer, _now_ms: int
    ) -> NamesrvResponse:
        """Return the topics named after clusters and brokers, and who knows the others."""
        brokers = self.routes.brokers()
        names = {*self.routes.clusters(), *brokers}
        addresses = [route.broker_addrs[min(route.broker_addrs)] for route in brokers.values()]
        return _body_response(
            bodies.TopicList(
                topic_list=sorted(names), broker_addr=addresses[0] if addresses else None
            )
        )

    def _unit_topics(self, _request: Request[Any], _channel: Peer, _now_ms: int) -> _SlicedResponse:
        return self._topics_with_flag(lambda flag: bool(flag & FLAG_UNIT))

    def _unit_subscribed_topics(
        self, _request: Request[Any], _channel: Peer, _now_ms: int
    ) -> _SlicedResponse:
        return self._topics_with_flag(lambda flag: bool(flag & FLAG_UNIT_SUBSCRIBED))

    def _unit_subscribed_plain_topics(
        self, _request: Request[Any], _channel: Peer, _now_ms: int
    ) -> _SlicedResponse:
        both = FLAG_UNIT | FLAG_UNIT_SUBSCRIBED
        return self._topics_with_flag(lambda flag: flag & both == FLAG_UNIT_SUBSCRIBED)

    def _topics_with_flag(self, matches: Callable[[int], bool]) -> _SlicedResponse:
        topics = []
        for topic in self.routes.unsorted_topics():
            if matches(self.routes.topic_flag(topic)):
                topics.append(topic)
            yield
        return (yield from _topic_list_response(topics))

    def _get_kv_config(
        self, request: Request[headers.KvConfigKey], _channel: Peer, _now_ms: int
    ) -> NamesrvResponse:
        fields = request.head.fields
        value = self.kv_config.get(fields.namespace, fields.key)
        if value is None:
            raise _not_found(
                f"namespace {truncate_name(fields.namespace)} has no key "
                f"{truncate_name(fields.key)}"
            )
        return NamesrvResponse(headers.GetKvConfigResponse(value=value))

    def _get_kv_namespace(
        self, request: Request[headers.KvNamespace], _channel: Peer, _now_ms: int
    ) -> NamesrvResponse:
        namespace = request.head.fields.namespace
        table = self.kv_config.namespace(namespace)
        if table is None:
            raise _not_found(f"there is no namespace {truncate_name(namespace)}")
        return _body_response(bodies.KvTable(table=table))

    # --- requests of operators -------------------------------------------------------------------

    def _delete_topic(
        self, request: Request[headers.DeleteTopicInNamesrv], _channel: Peer, _now_ms: int
    ) -> NamesrvResponse:
        fields = request.head.fields
        self.routes.delete_topic(fields.topic, cluster=fields.cluster_name or None)
        return NamesrvResponse()

    def _wipe_write_perm(
        self, request: Request[headers.BrokerNameHeader], _channel: Peer, _now_ms: int
    ) -> NamesrvResponse:
        count = self.routes.wipe_write_perm(request.head.fields.broker_name)
        return NamesrvResponse(headers.WipeWritePermResponse(wipe_topic_count=count))

    def _add_write_perm(
        self, request: Request[headers.BrokerNameHeader], _channel: Peer, _now_ms: int
    ) -> NamesrvResponse:
        count = self.routes.add_write_perm(request.head.fields.broker_name)
        return NamesrvResponse(headers.AddWritePermResponse(add_topic_count=count))

    def _put_kv_config(
        self, request: Request[headers.PutKvConfig], _channel: Peer, _now_ms: int
    ) -> NamesrvResponse:
        fields = request.head.fields
        self.kv_config.put(fields.namespace, fields.key, fields.value)
        return NamesrvResponse()

    def _delete_kv_config(
        self, request: Request[headers.KvConfigKey], _channel: Peer, _now_ms: int
    ) -> NamesrvResponse:
        self.kv_config.delete(request.head.fields.namespace, request.head.fields.key)
        return NamesrvResponse()

    def _update_config(
        self, _request: Request[Any], _channel: Peer, _now_ms: int
    ) -> NamesrvResponse:
        raise RequestRefused(
            ResponseCode.NO_PERMISSION,
            "the settings of this name server cannot be changed over the network; "
            "change its configuration file and restart it",
        )

    def _get_config(self, _request: Request[Any], _channel: Peer, _now_ms: int) -> NamesrvResponse:
        lines = [f"{name}={value}\n" for name, value in sorted(self._config.items())]
        return NamesrvResponse(body="".join(lines).encode())


def _registered_topics(
    request: Request[headers.RegisterBroker],
) -> SlicedResult[bodies.TopicConfigs]:
    fields, body = request.head.fields, request.body
    if fields.body_crc32 and fields.body_crc32 != zlib.crc32(body) & 0x7FFFFFFF:
        raise system_error("bodyCrc32 is not the CRC of the body")
    if not body:
        return bodies.TopicConfigs()
    if request.head.version < VERSION_WITH_TOPIC_WRAPPER:
        return bodies.decode_request_body(bodies.TopicConfigs, body)
    # 5.x brokers that compress the body do not say so in the header.
    if fields.compressed or body[0] == _ZLIB_FIRST_BYTE:
        registration = yield from bodies.decode_packed_in_slices(body)
    else:
        registration = yield from bodies.decode_registration_in_slices(body)
    return registration.topic_config_serialize_wrapper


def _topic_list_response(topics: list[str]) -> _SlicedResponse:
    """Return the response with a bodies.TopicList, which is sorted and encoded in slices."""
    sorted_parts = []
    for begin in range(0, len(topics), TOPICS_PER_SLICE):
        sorted_parts.append(sorted(topics[begin : begin + TOPICS_PER_SLICE]))
        yield
    sorted_topics, pieces = heapq.merge(*sorted_parts), []
    while part := list(itertools.islice(sorted_topics, TOPICS_PER_SLICE)):
        pieces.append(msgspec.json.encode(part)[1:-1])  # without the brackets of the list
        yield
    return NamesrvResponse(body=b'{"topicList":[%b]}' % b",".join(pieces))


def _body_response(body: bodies.JsonBody) -> NamesrvResponse:
    return NamesrvResponse(body=_encode(body))


_encode = bodies.encode_body


def _not_found(remark: str) -> RequestRefused:
    return RequestRefused(ResponseCode.QUERY_NOT_FOUND, remark)


# --- key-value settings --------------------------------------------------------------------------


class _KvConfigFile(msgspec.Struct, rename="camel"):
    config_table: dict[str, dict[str, str]] = {}


class KvConfig:
    """Keys and values that operators store on a name server, by namespace.

    One namespace has a meaning: ORDER_TOPIC_CONFIG says how many queues each broker has of a topic
    whose order must survive the absence of a broker ("brokerA:4;brokerB:4"). The value is part of
    the topic's route and of the response to every registration.

    `revision` increases with every change.
    """

    def __init__(self, *, entries_max: int = KV_ENTRIES_MAX) -> None:
        self._entries_max = entries_max
        self._table: dict[str, dict[str, str]] = {}
        self._bytes = 0  # of all names and values together, as JSON
        self.revision = 0

    @classmethod
    def load(cls, content: dict[str, Any], *, entries_max: int = KV_ENTRIES_MAX) -> KvConfig:
        """Return the settings that `dump` has written. Raises ConfigError."""
        try:
            file = msgspec.convert(content, _KvConfigFile)
        except msgspec.ValidationError as error:
            raise ConfigError(f"kvConfig.json: {error}") from error
        kv_config = cls(entries_max=entries_max)
        kv_config._table = {name: dict(table) for name, table in file.config_table.items()}
        kv_config._bytes = kv_config._total_bytes()
        return kv_config

    def dump(self) -> dict[str, Any]:
        """Return the content of kvConfig.json, as RocketMQ writes it."""
        return {"configTable": {name: dict(table) for name, table in self._table.items()}}

    def restore(self, content: dict[str, Any]) -> None:
        """Undo what has changed since `dump` returned this content, because it was not saved."""
        self._table = {name: dict(table) for name, table in content["configTable"].items()}
        self._bytes = self._total_bytes()

    def put(self, namespace: str, key: str, value: str) -> None:
        """Set a value. Raises RequestRefused if a name or the value is too long, or a limit hit."""
        check_name("namespace", namespace)
        check_name("key", key)
        if len(value) > VALUE_LENGTH_MAX:
            raise system_error(
                f"value has {len(value)} characters, the limit is {VALUE_LENGTH_MAX}"
            )
        before = self.get(namespace, key)
        if before is None and self.count >= self._entries_max:
            raise system_error(f"there are {self._entries_max} settings, which is the limit")
        growth = _entry_bytes(namespace, key, value)
        if before is not None:
            growth -= _entry_bytes(namespace, key, before)
        if growth > 0 and self._bytes + growth > KV_BYTES_MAX:
            raise system_error(
                f"all settings would have {self._bytes + growth} bytes as JSON, "
                f"the limit is {KV_BYTES_MAX}"
            )
        self._bytes += growth
        self._table.setdefault(namespace, {})[key] = value
        self.revision += 1

    def delete(self, namespace: str, key: str) -> bool:
        """Remove a value. Return whether there was one."""
        table = self._table.get(namespace, {})
        if key not in table:
            return False
        self._bytes -= _entry_bytes(namespace, key, table.pop(key))
        if not table:
            del self._table[namespace]
        self.revision += 1
        return True

    def get(self, namespace: str, key: str) -> str | None:
        return self._table.get(namespace, {}).get(key)

    def namespace(self, namespace: str) -> dict[str, str] | None:
        """Return all keys and values of a namespace, or None if it has none."""
        table = self._table.get(namespace)
        return None if table is None else dict(table)

    @property
    def count(self) -> int:
        return sum(map(len, self._table.values()))

    def _total_bytes(self) -> int:
        return sum(
            _entry_bytes(name, key, value)
            for name, table in self._table.items()
            for key, value in table.items()
        )


def encode_kv_config_in_slices(content: dict[str, Any]) -> SlicedResult[list[bytes]]:
    """Return what `KvConfig.dump` has returned as JSON, in pieces; there may be megabytes of it.

    To join them takes as long as ten slices, so the caller does it in a thread.
    """
    encoded = [b'{"configTable":{']
    for number, (namespace, table) in enumerate(content["configTable"].items()):
        encoded.append(b"," if number else b"")
        encoded.append(msgspec.json.encode(namespace) + b":{")
        separator = b""
        for key, value in table.items():
            entry = msgspec.json.encode({key: value})[1:-1]  # without the braces
            encoded.append(separator + entry)
            separator = b","
            yield
        encoded.append(b"}")
    encoded.append(b"}}")
    return encoded


def _entry_bytes(namespace: str, key: str, value: str) -> int:
    return sum(len(msgspec.json.encode(text)) for text in (namespace, key, value))
