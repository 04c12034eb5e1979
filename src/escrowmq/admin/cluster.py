"""Find the brokers, topics and routes of a cluster, and put a question to all brokers.

with Cluster("10.0.0.1:9876;10.0.0.2:9876", Access(...)) as cluster:
    for broker, runtime in cluster.ask_all(queries.broker_runtime):
        ...
    for failure in cluster.failures:
        print(failure)
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Final, NamedTuple, Self, TypeVar

from escrowmq.client.access import NO_ACCESS, Access
from escrowmq.client.sync_connection import DEFAULT_TIMEOUT_S, SyncConnection
from escrowmq.errors import (
    BrokenBody,
    EscrowError,
    NoRoute,
    NotSent,
    OutcomeUnknown,
    RequestRefused,
    TransportError,
)
from escrowmq.parsing import parse_servers
from escrowmq.remoting.bodies import ClusterInfo, TopicList, TopicRoute, decode_body
from escrowmq.remoting.codes import RequestCode, ResponseCode
from escrowmq.remoting.connection import Reply
from escrowmq.remoting.headers import Header
from escrowmq.remoting.headers_admin import GetRoute

if TYPE_CHECKING:
    from escrowmq.client.topic_route import Route

T = TypeVar("T")

_MASTER_ID: Final = 0

_NO_SERVER: Final = "name server: -n HOST:PORT, or one broker: --broker HOST:PORT"


class BrokerAddress(NamedTuple):
    """A broker's name and the address of its master."""

    name: str
    address: str


class BrokerFailure(NamedTuple):
    """A broker that could not answer a question of `Cluster.ask_all`."""

    broker: BrokerAddress
    error: EscrowError

    def __str__(self) -> str:
        text = error_text(self.error)
        return text if self.broker.address in text else f"{self.broker.address}: {text}"


class Cluster:
    """The brokers that the name servers know.

    `servers` are the addresses of name servers; they are asked in this order until one answers.
    `broker` limits the cluster to one broker: its name, or its HOST:PORT, and then no name server
    is asked. Connections stay open until `close`. Raises ValueError if `servers` is not a list of
    addresses. Not thread-safe.
    """

    def __init__(
        self,
        servers: str | Sequence[str],
        access: Access = NO_ACCESS,
        *,
        broker: str | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        is_address = broker is not None and ":" in broker
        self.servers = [] if is_address else parse_servers(servers)
        self.access = access
        self.timeout_s = timeout_s
        self.failures: list[BrokerFailure] = []  # of ask_all, each once
        self.selected_broker = broker
        self._brokers: list[BrokerAddress] | None = None
        self._connections: dict[str, SyncConnection] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections."""
        for connection in self._connections.values():
            connection.close()
        self._connections.clear()

    # --- name servers ----------------------------------------------------------------------------

    def brokers(self, *, fresh: bool = False) -> list[BrokerAddress]:
        """Return the masters, sorted by name. The list is cached; `fresh` asks again.

        Raises NotSent if no name server answers, or none knows such a broker, and RequestRefused
        if a name server refuses access.
        """
        if self._brokers is None or fresh:
            self._brokers = self._find_brokers()
        return self._brokers

    def broker_names(self) -> str:
        """Return the names of the brokers, for messages: `a, b`."""
        return ", ".join(broker.name for broker in self.brokers())

    def info(self) -> ClusterInfo:
        """Return what the first name server says that knows any broker.

        Raises NotSent if none does, and RequestRefused if a name server refuses access.
        """
        failures: list[str] = []
        for address in self.servers:
            try:
                body = self.connection(address).call(RequestCode.GET_BROKER_CLUSTER_INFO).body
                info = decode_body(ClusterInfo, body)
            except (TransportError, RequestRefused, BrokenBody) as error:
                if isinstance(error, RequestRefused) and error.code == ResponseCode.NO_PERMISSION:
                    raise
                failures.append(error_text(error))
                continue
            if masters(info):
                return info
            failures.append(f"{address} knows no broker")
        reason = "; ".join(failures) or "no name server is given"
        raise NotSent(f"{reason} ({_NO_SERVER})")

    def route(self, topic: str, *, include_replicas: bool = False) -> Route:
        """Return the queues of a topic and the addresses of their brokers.

        With `include_replicas`, a broker without a master can be read from a replica. Raises
        NoRoute if there is no such topic.
        """
        # Imported here because topic_route.py brings the client's message types along, which most
        # commands do not need, and commands start quickly.
        from escrowmq.client.topic_route import parse_route

        header = GetRoute(topic=topic, accept_standard_json_only=True)
        try:
            reply = self.call_name_server(RequestCode.GET_ROUTEINFO_BY_TOPIC, header)
        except RequestRefused as error:
            if error.code != ResponseCode.TOPIC_NOT_EXIST:
                raise
            raise NoRoute(f"no broker has a topic {topic!r}") from error
        topic_route = decode_body(TopicRoute, reply.body)
        return parse_route(topic, topic_route, include_replicas=include_replicas)

    def topics(self) -> list[str]:
        """Return the names of all topics, sorted, with those of the system."""
        reply = self.call_name_server(RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER)
        return sorted(decode_body(TopicList, reply.body).topic_list)

    def server_names(self) -> list[str]:
        """Return the names of all clusters and brokers. Each of them has a topic of this name."""
        # RocketMQ's name for this request is misleading: a name server knows no other system topic.
        reply = self.call_name_server(RequestCode.GET_SYSTEM_TOPIC_LIST_FROM_NS)
        return decode_body(TopicList, reply.body).topic_list

    def call_name_server(self, code: int, header: Header | None = None) -> Reply:
        """Call the first name server that answers. Raises RequestRefused, or NotSent if none."""
        failures: list[str] = []
        for address in self.servers:
            try:
                return self.connection(address).call(code, header)
            except TransportError as error:
                failures.append(str(error))
        reason = "; ".join(failures) or "no name server is given"
        raise NotSent(f"no name server answers: {reason}")

    def _find_brokers(self) -> list[BrokerAddress]:
        if self.selected_broker is None:
            return masters(self.info())
        if ":" in self.selected_broker:
            return [BrokerAddress(self.selected_broker, self.selected_broker)]
        named = [broker for broker in masters(self.info()) if broker.name == self.selected_broker]
        if not named:
            raise NotSent(
                f"no broker is named {self.selected_broker!r}: `escrowmq broker list` shows them"
            )
        return named

    # --- brokers ---------------------------------------------------------------------------------

    def connection(self, address: str) -> SyncConnection:
        """Return an open connection. Raises NotSent.

        A connection that was closed while it was idle is replaced.
        """
        connection = self._connections.get(address)
        if connection is None or not connection.is_usable():
            if connection is not None:
                connection.close()
            connection = SyncConnection(address, self.access, self.timeout_s)
            self._connections[address] = connection
        return connection

    def ask_all(
        self,
        question: Callable[[SyncConnection], T],
        *,
        brokers: Iterable[BrokerAddress] | None = None,
        ignored_codes: Collection[int] = (),
    ) -> list[tuple[BrokerAddress, T]]:
        """Return what the question returns for each broker, or for these `brokers` only.

        A broker that fails is added to `failures` and does not hide the answers of the others. A
        broker that refuses with one of `ignored_codes` has nothing to say, and is left out.
        """
        answers = []
        for broker in self.brokers() if brokers is None else brokers:
            try:
                answers.append((broker, question(self.connection(broker.address))))
            except EscrowError as error:
                if not isinstance(error, RequestRefused) or error.code not in ignored_codes:
                    self.report_failure(broker, error)
        return answers

    def report_failure(self, broker: BrokerAddress, error: EscrowError) -> None:
        """Add a failure to `failures`, unless it is there already."""
        failure = BrokerFailure(broker, error)
        if str(failure) not in map(str, self.failures):
            self.failures.append(failure)

    def require_all_answered(self) -> None:
        """Raise OutcomeUnknown if a broker failed, before a change that needs all answers."""
        if self.failures:
            reasons = "; ".join(map(str, self.failures))
            raise OutcomeUnknown(
                f"{reasons}: nothing was changed; use --broker to change other brokers alone"
            )


def masters(info: ClusterInfo) -> list[BrokerAddress]:
    """Return the brokers that have a master, sorted by name."""
    return [
        BrokerAddress(name, route.broker_addrs[_MASTER_ID])
        for name, route in sorted(info.broker_addr_table.items())
        if _MASTER_ID in route.broker_addrs
    ]


def error_text(error: EscrowError) -> str:
    """Return the error in one line, for people: without the code of a refusal."""
    return error.remark if isinstance(error, RequestRefused) else str(error)
