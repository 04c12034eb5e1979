"""The route table: which broker has which topic, and at which address.

    cluster -> broker name -> broker id -> address         id 0 is the master, others are slaves
    topic -> broker name -> queues                         as the broker registered them
    address -> last heartbeat, channel, data version       live, until the heartbeat is overdue

What holds after every call:
  - a broker has at least one address, a topic has at least one broker;
  - an address belongs to one broker, and every address is live;
  - a registration that raises RequestRefused has changed nothing.

A broker name belongs to one cluster. Queues are taken from the master or, while there is none, from
the slave with the lowest id. They are never taken from a slave so old that it does not say whether
it may act as master. The table stores what brokers register and applies write bans only when a
route is read, so that lifting a ban restores exactly what was there before.

A broker may have very many topics. When it goes, they are not part of any route from then on, but
their entries are removed in slices: `remove_stale_routes`.

Only differences of times are used: any clock in milliseconds will do that does not jump.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final

import msgspec

from escrowmq.client_memory import ClientMemory, MemoryUse, text_bytes
from escrowmq.errors import RequestRefused, TableFull
from escrowmq.message.topic_config import PERM_WRITE, DataVersion, TopicConfig
from escrowmq.peer import Peer
from escrowmq.remoting.bodies import BrokerRoute, QueueRoute, TopicRoute
from escrowmq.remoting.codes import ResponseCode
from escrowmq.sliced_work import SlicedResult, SlicedWork, run_to_end

MASTER_ID: Final = 0
HEARTBEAT_TIMEOUT_MS: Final = 120_000

BROKERS_MAX: Final = 10_000
TOPICS_MAX: Final = 200_000
ROUTES_MAX: Final = 1_000_000  # topics of all brokers together: each may have every topic
# What is kept of a broker, and of each of its topics without the name. Measured on CPython 3.11 by
# tests/unit/test_memory_estimates.py, for topics of a single broker.
_BROKER_BYTES: Final = 4_000
_ROUTE_BYTES: Final = 600
_REMOVED_AT_ONCE: Final = 1_000  # entries of a broker that goes; others are removed in slices
QUEUES_MAX: Final = 65_536
PERM_MAX: Final = 15
HEARTBEAT_TIMEOUT_MS_MAX: Final = 24 * 3_600_000
BROKER_ID_MAX: Final = 2**63 - 1
NAME_LENGTH_MAX: Final = 512
_TRUNCATED_CHARS = 64  # of a name in a remark


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerRegistration:
    """What a broker registers. `topics` may be only those that have changed."""

    cluster: str
    name: str
    broker_id: int
    address: str
    ha_address: str = ""
    zone: str | None = None
    acting_master: bool | None = None  # None: the broker is too old to know this
    heartbeat_timeout_ms: int = HEARTBEAT_TIMEOUT_MS
    topics: tuple[TopicConfig, ...] = ()
    version: DataVersion = field(default_factory=DataVersion)


@dataclass(frozen=True, slots=True)
class MasterInfo:
    """The master of a slave. Empty for a master itself, and while there is none."""

    master_address: str | None = None
    master_ha_address: str | None = None


@dataclass(slots=True)
class _Broker:
    cluster: str
    name: str
    addresses: dict[int, str] = field(default_factory=dict)
    topics: set[str] = field(default_factory=set)
    acting_master: bool = False
    zone: str | None = None
    is_write_disabled: bool = False

    @property
    def is_writable(self) -> bool:
        # A slave that acts as master serves reads, but accepts no messages.
        return not self.is_write_disabled and (
            MASTER_ID in self.addresses or not self.acting_master
        )

    def route(self) -> BrokerRoute:
        return BrokerRoute(
            broker_name=self.name,
            cluster=self.cluster,
            broker_addrs=dict(sorted(self.addresses.items())),
            enable_acting_master=self.acting_master,
            zone_name=self.zone,
        )


@dataclass(slots=True, kw_only=True)
class _LiveBroker:
    name: str
    broker_id: int
    ha_address: str
    version: DataVersion
    channel: Peer
    last_heartbeat_ms: int
    heartbeat_timeout_ms: int
    retained_bytes: int  # that are counted for the channel


@dataclass(slots=True)
class _AddedTopics:
    """What the topics of a registration would add to the table."""

    topics: int = 0
    routes: int = 0
    bytes: int = 0


class RouteTable:
    """Live brokers and their topics. A `channel` is the connection of a broker."""

    def __init__(
        self,
        *,
        brokers_max: int = BROKERS_MAX,
        topics_max: int = TOPICS_MAX,
        routes_max: int = ROUTES_MAX,
        memory: ClientMemory | None = None,
    ) -> None:
        self._memory = ClientMemory() if memory is None else memory
        self._routes_max = routes_max
        self._route_count = 0
        self._brokers_max = brokers_max
        self._topics_max = topics_max
        self._brokers: dict[str, _Broker] = {}
        # An entry counts as long as its broker has the topic; the others are removed in time.
        self._topics: dict[str, dict[str, QueueRoute]] = {}
        self._stale: deque[tuple[str, Iterator[str]]] = deque()  # brokers that went: name, topics
        self._live_brokers: dict[str, _LiveBroker] = {}

    # --- brokers register ------------------------------------------------------------------------

    def register(
        self, registration: BrokerRegistration, channel: Peer, *, now_ms: int
    ) -> MasterInfo:
        """Add or update a broker. Raises RequestRefused, and has changed nothing then."""
        return run_to_end(self.register_in_slices(registration, channel, now_ms=now_ms))

    def register_in_slices(
        self, registration: BrokerRegistration, channel: Peer, *, now_ms: int
    ) -> SlicedResult[MasterInfo]:
        """Do the same in slices: its topics appear one after the other."""
        added = yield from self._check_topics(registration)
        self._check_registration(registration, added)
        before = self._live_brokers.get(registration.address)
        retained_bytes = self._reserve(added.bytes, before, channel)
        if before is not None and not self._belongs_to(
            before, registration.cluster, registration.name
        ):
            self._remove_address(registration.address)  # restarted with another name
            before = None

        broker = self._brokers.setdefault(
            registration.name, _Broker(registration.cluster, registration.name)
        )
        is_first = self._claim_broker_id(broker, registration, before)
        broker.acting_master = bool(registration.acting_master)
        broker.zone = registration.zone
        live = self._live_brokers[registration.address] = _LiveBroker(
            name=registration.name,
            broker_id=registration.broker_id,
            ha_address=registration.ha_address,
            version=registration.version,
            channel=channel,
            last_heartbeat_ms=now_ms,
            heartbeat_timeout_ms=registration.heartbeat_timeout_ms,
            retained_bytes=retained_bytes,
        )
        if _defines_topics(broker, registration):
            changed = is_first or before is None or before.version != registration.version
            for topic in registration.topics:
                if self._live_brokers.get(registration.address) is not live:
                    break  # removed, or registered again with newer topics
                if changed or topic.topic_name not in broker.topics:
                    self._put_queues(
                        broker, topic.topic_name, _make_queue_route(registration.name, topic)
                    )
                yield
        return self._master_for(broker, registration.broker_id)

    def heartbeat(self, cluster: str, address: str, *, now_ms: int) -> DataVersion | None:
        """Note that a broker is alive and return its registered data version.

        Return None if the address is not registered.
        """
        live = self._live_brokers.get(address)
        if live is None or not self._belongs_to(live, cluster, live.name):
            return None
        live.last_heartbeat_ms = now_ms
        return live.version

    # --- brokers go away -------------------------------------------------------------------------

    def unregister(self, cluster: str, name: str, address: str) -> bool:
        """Remove an address. Return whether it was registered by this broker."""
        live = self._live_brokers.get(address)
        if live is None or not self._belongs_to(live, cluster, name):
            return False
        self._remove_addresses([address])
        return True

    def channel_closed(self, channel: Peer) -> list[str]:
        """Remove the addresses that were registered over this channel, and return them."""
        addresses = [
            address for address, live in self._live_brokers.items() if live.channel is channel
        ]
        self._remove_addresses(addresses)
        return addresses

    def expire(self, *, now_ms: int) -> dict[str, Peer]:
        """Remove addresses whose heartbeat is overdue, and return them with their channels."""
        expired = {
            address: live.channel
            for address, live in self._live_brokers.items()
            if live.last_heartbeat_ms + live.heartbeat_timeout_ms < now_ms
        }
        self._remove_addresses(expired)
        return expired

    # --- topics ----------------------------------------------------------------------------------

    def register_topic(self, topic: str, routes: Iterable[QueueRoute]) -> None:
        """Add a topic to brokers that are registered already. Raises RequestRefused.

        If a limit is reached, the brokers before have the topic.
        """
        routes = list(routes)
        check_name("topicName", topic)
        for queues in routes:
            if queues.broker_name not in self._brokers:
                raise system_error(
                    f"topic {topic}: broker {truncate_name(queues.broker_name)} is not registered"
                )
            _check_queues(topic, queues)
        for queues in routes:
            added = _AddedTopics()
            self._count_added(added, queues.broker_name, topic)
            self._check_limits(queues.broker_name, added)
            if added.routes:
                self._reserve_topic(queues.broker_name, added.bytes)
            self._put_queues(self._brokers[queues.broker_name], topic, queues)

    def _reserve_topic(self, broker_name: str, count: int) -> None:
        """Count a topic for the connection over which its broker has registered."""
        addresses = self._brokers[broker_name].addresses
        live = self._live_brokers[addresses[min(addresses)]]
        self._reserve_bytes(live.channel, count)
        live.retained_bytes += count

    def delete_topic(self, topic: str, *, cluster: str | None = None) -> int:
        """Remove a topic and return from how many brokers.

        A broker that still has the topic adds it again with its next registration.
        """
        names = [
            name
            for name in self._brokers_of(topic)
            if cluster is None or self._brokers[name].cluster == cluster
        ]
        for name in names:
            self._brokers[name].topics.discard(topic)
            self._remove_queues(name, topic)
        return len(names)

    def wipe_write_perm(self, name: str) -> int:
        """Remove the write permission from all routes of a broker; return the count of its topics.

        The ban ends with `add_write_perm`, or when another master takes the name.
        """
        return self._set_write_disabled(name, True)

    def add_write_perm(self, name: str) -> int:
        """Lift the ban of `wipe_write_perm`; return the count of the broker's topics."""
        return self._set_write_disabled(name, False)

    # --- queries ---------------------------------------------------------------------------------

    def route(self, topic: str) -> TopicRoute | None:
        """Return the brokers and queues of a topic, or None if no broker has it."""
        return run_to_end(self.route_in_slices(topic))

    def route_in_slices(self, topic: str) -> SlicedResult[TopicRoute | None]:
        """Do the same in slices. A broker that goes meanwhile is left out."""
        queue_routes, broker_routes = [], []
        for name in sorted(self._brokers_of(topic)):
            if self._has_topic(name, topic):
                queue_routes.append(self._effective_queues(self._topics[topic][name]))
                broker_routes.append(self._brokers[name].route())
            yield
        if not queue_routes:
            return None
        return TopicRoute(queue_datas=queue_routes, broker_datas=broker_routes)

    def clusters(self) -> dict[str, list[str]]:
        """Return the broker names of each cluster."""
        names: dict[str, list[str]] = {}
        for name, broker in sorted(self._brokers.items()):
            names.setdefault(broker.cluster, []).append(name)
        return names

    def brokers(self) -> dict[str, BrokerRoute]:
        return {name: broker.route() for name, broker in sorted(self._brokers.items())}

    def topics(self, *, cluster: str | None = None) -> list[str]:
        """Return all topics, or those of one cluster, sorted."""
        return sorted(self.unsorted_topics(cluster=cluster))

    def unsorted_topics(self, *, cluster: str | None = None) -> list[str]:
        """Return the same topics in no particular order."""
        if cluster is None and not self._stale:
            return list(self._topics)
        if cluster is None:
            return [topic for topic in self._topics if self._brokers_of(topic)]
        topic_sets = (
            broker.topics for broker in self._brokers.values() if broker.cluster == cluster
        )
        return list(set().union(*topic_sets))

    def topic_flag(self, topic: str) -> int:
        """Return the system flag of a topic, as the first of its brokers has it; 0 if unknown."""
        names = self._brokers_of(topic)
        return 0 if not names else self._topics[topic][min(names)].topic_sys_flag

    def _brokers_of(self, topic: str) -> list[str]:
        """Return the names of the brokers that have a topic."""
        return [name for name in self._topics.get(topic, ()) if self._has_topic(name, topic)]

    def _has_topic(self, name: str, topic: str) -> bool:
        broker = self._brokers.get(name)
        return broker is not None and topic in broker.topics

    def members(self, cluster: str, name: str) -> dict[int, str]:
        """Return the addresses of a broker name by broker id."""
        broker = self._brokers.get(name)
        if broker is None or broker.cluster != cluster:
            return {}
        return dict(sorted(broker.addresses.items()))

    @property
    def broker_count(self) -> int:
        return len(self._brokers)

    @property
    def address_count(self) -> int:
        return len(self._live_brokers)

    @property
    def topic_count(self) -> int:
        return len(self._topics)

    # --- checks ----------------------------------------------------------------------------------

    def _check_topics(self, registration: BrokerRegistration) -> SlicedResult[_AddedTopics]:
        """Check the topics of a registration, and return what they would add."""
        added = _AddedTopics()
        for topic in registration.topics:
            _check_queues(topic.topic_name, topic)
            self._count_added(added, registration.name, topic.topic_name)
            yield
        return added

    def _count_added(self, added: _AddedTopics, broker_name: str, topic: str) -> None:
        added.bytes += _ROUTE_BYTES + text_bytes(topic)
        added.topics += topic not in self._topics
        added.routes += not self._has_topic(broker_name, topic)

    def _check_registration(self, registration: BrokerRegistration, added: _AddedTopics) -> None:
        check_name("brokerName", registration.name)
        check_name("clusterName", registration.cluster)
        check_name("brokerAddr", registration.address)
        check_name("haServerAddr", registration.ha_address, may_be_empty=True)
        check_name("zone", registration.zone or "", may_be_empty=True)
        check_number("brokerId", registration.broker_id, 0, BROKER_ID_MAX)
        check_number(
            "heartbeatTimeoutMillis", registration.heartbeat_timeout_ms, 1, HEARTBEAT_TIMEOUT_MS_MAX
        )
        if (
            registration.address not in self._live_brokers
            and len(self._live_brokers) >= self._brokers_max
        ):
            raise system_error(f"there are {self._brokers_max} brokers, which is the limit")
        self._check_limits(registration.name, added)
        self._check_conflicts(registration)

    def _reserve(self, topic_bytes: int, before: _LiveBroker | None, channel: Peer) -> int:
        """Count what is kept of a registration, and return it. Raise RequestRefused.

        Topics that the broker has registered before stay, so a registration never counts less than
        the one before it.
        """
        new_bytes = _BROKER_BYTES + topic_bytes
        before_bytes = 0
        if before is not None and before.channel is channel:
            before_bytes = before.retained_bytes
        elif before is not None:
            new_bytes = max(new_bytes, before.retained_bytes)
        added = max(0, new_bytes - before_bytes)
        self._reserve_bytes(channel, added)
        if before is not None and before.channel is not channel:
            self._release(before)
        return before_bytes + added

    def _reserve_bytes(self, channel: Peer, count: int) -> None:
        try:
            # A broker is no client: it may have as many topics as a registration can hold.
            self._memory.reserve(
                channel, MemoryUse.REGISTRATIONS, count, ignores_connection_max=True
            )
        except TableFull as error:
            raise RequestRefused(ResponseCode.SYSTEM_BUSY, str(error)) from None

    def _release(self, live_broker: _LiveBroker) -> None:
        self._memory.release(
            live_broker.channel, MemoryUse.REGISTRATIONS, live_broker.retained_bytes
        )
        live_broker.retained_bytes = 0

    def _check_limits(self, broker_name: str, added: _AddedTopics) -> None:
        if added.topics and len(self._topics) + added.topics > self._topics_max:
            raise system_error(
                f"{added.topics} new topics would exceed the limit of {self._topics_max} topics"
            )
        if added.routes and self._route_count + added.routes > self._routes_max:
            raise system_error(
                f"{added.routes} more topics of broker {truncate_name(broker_name)} would exceed "
                f"the limit of {self._routes_max} topics of all brokers together"
            )

    def _check_conflicts(self, registration: BrokerRegistration) -> None:
        broker = self._brokers.get(registration.name)
        if broker is None:
            return
        others = [
            address for address in broker.addresses.values() if address != registration.address
        ]
        if broker.cluster != registration.cluster and others:
            raise system_error(
                f"broker {registration.name} belongs to cluster {broker.cluster}, at {others[0]}"
            )
        rival = broker.addresses.get(registration.broker_id, registration.address)
        if rival == registration.address:
            return
        # Two processes claim the same broker id. A higher state version belongs to the newer one.
        rival_version = self._live_brokers[rival].version.state_version
        own_version = registration.version.state_version
        if rival_version > own_version:
            raise system_error(
                f"broker {registration.name} id {registration.broker_id} is at {rival} "
                f"with state version {rival_version}; {registration.address} has {own_version}"
            )

    # --- changes ---------------------------------------------------------------------------------

    def _belongs_to(self, live_broker: _LiveBroker, cluster: str, name: str) -> bool:
        return live_broker.name == name and self._brokers[name].cluster == cluster

    def _claim_broker_id(
        self, broker: _Broker, registration: BrokerRegistration, previous: _LiveBroker | None
    ) -> bool:
        """Store the address under its broker id, and remove the address that was there.

        Return whether the id was free.
        """
        if previous is not None and previous.broker_id != registration.broker_id:
            del broker.addresses[previous.broker_id]
        rival = broker.addresses.get(registration.broker_id)
        if rival != registration.address:
            if rival is not None:
                self._release(self._live_brokers.pop(rival))
            if registration.broker_id == MASTER_ID:
                broker.is_write_disabled = False  # the ban was for the previous master
        broker.addresses[registration.broker_id] = registration.address
        return rival is None

    def _remove_addresses(self, addresses: Iterable[str]) -> None:
        for address in addresses:
            self._remove_address(address)
        for _ in itertools.islice(self.remove_stale_routes(), _REMOVED_AT_ONCE):
            pass

    def _remove_address(self, address: str) -> None:
        live = self._live_brokers.pop(address)
        self._release(live)
        broker = self._brokers[live.name]
        del broker.addresses[live.broker_id]
        if not broker.addresses:
            del self._brokers[live.name]
            self._stale.append((live.name, iter(broker.topics)))

    def remove_stale_routes(self) -> SlicedWork:
        """Remove the entries of brokers that went, in slices."""
        while self._stale:
            name, topics = self._stale[0]
            topic = next(topics, None)
            if topic is None:
                self._stale.popleft()
            # The name may have been taken again meanwhile, with some of the topics.
            elif name in self._topics.get(topic, ()) and not self._has_topic(name, topic):
                self._remove_queues(name, topic)
            yield

    @property
    def has_stale_routes(self) -> bool:
        return bool(self._stale)

    def _put_queues(self, broker: _Broker, topic: str, queues: QueueRoute) -> None:
        broker.topics.add(topic)
        routes = self._topics.setdefault(topic, {})
        self._route_count += broker.name not in routes
        routes[broker.name] = queues

    def _remove_queues(self, name: str, topic: str) -> None:
        queues = self._topics[topic]
        del queues[name]
        self._route_count -= 1
        if not queues:
            del self._topics[topic]

    def _set_write_disabled(self, name: str, is_write_disabled: bool) -> int:
        broker = self._brokers.get(name)
        if broker is None:
            return 0
        broker.is_write_disabled = is_write_disabled
        return len(broker.topics)

    def _effective_queues(self, queues: QueueRoute) -> QueueRoute:
        if self._brokers[queues.broker_name].is_writable:
            return queues
        return msgspec.structs.replace(queues, perm=queues.perm & ~PERM_WRITE)

    def _master_for(self, broker: _Broker, broker_id: int) -> MasterInfo:
        address = broker.addresses.get(MASTER_ID)
        live = None if address is None else self._live_brokers.get(address)
        if broker_id == MASTER_ID or address is None or live is None:
            return MasterInfo()
        return MasterInfo(address, live.ha_address)


def _defines_topics(broker: _Broker, registration: BrokerRegistration) -> bool:
    """Return whether the queues of a broker are taken from this registration."""
    if registration.broker_id == MASTER_ID:
        return True
    return registration.acting_master is not None and registration.broker_id == min(
        broker.addresses
    )


def _make_queue_route(name: str, topic: TopicConfig) -> QueueRoute:
    return QueueRoute(
        broker_name=name,
        read_queue_nums=topic.read_queue_nums,
        write_queue_nums=topic.write_queue_nums,
        perm=topic.perm,
        topic_sys_flag=topic.topic_sys_flag,
    )


def _check_queues(topic: str, queues: TopicConfig | QueueRoute) -> None:
    # A registration may have ten thousand topics, so valid ones are passed by one condition.
    if (
        0 < len(topic) <= NAME_LENGTH_MAX
        and 0 <= queues.read_queue_nums <= QUEUES_MAX
        and 0 <= queues.write_queue_nums <= QUEUES_MAX
        and 0 <= queues.perm <= PERM_MAX
    ):
        return
    check_name("topicName", topic)
    try:
        check_number("readQueueNums", queues.read_queue_nums, 0, QUEUES_MAX)
        check_number("writeQueueNums", queues.write_queue_nums, 0, QUEUES_MAX)
        check_number("perm", queues.perm, 0, PERM_MAX)
    except RequestRefused as error:
        raise system_error(f"topic {topic}: {error.remark}") from None


# --- checks of single values, also of key-value settings ------------------------------------------


def system_error(remark: str) -> RequestRefused:
    """Return the error that RocketMQ's name server responds with to invalid values."""
    return RequestRefused(ResponseCode.SYSTEM_ERROR, remark)


def truncate_name(name: str) -> str:
    """Return a name for a remark: a name that is too long is cut off."""
    return name if len(name) <= NAME_LENGTH_MAX else f"{name[:_TRUNCATED_CHARS]}..."


def check_name(field_name: str, name: str, *, may_be_empty: bool = False) -> None:
    """Raise RequestRefused if a name is empty or too long."""
    if not name and not may_be_empty:
        raise system_error(f"{field_name} is empty")
    if len(name) > NAME_LENGTH_MAX:
        raise system_error(
            f"{field_name} has {len(name)} characters, the limit is {NAME_LENGTH_MAX}: "
            f"{truncate_name(name)}"
        )


def check_number(field_name: str, number: int, minimum: int, maximum: int) -> None:
    """Raise RequestRefused if a number is out of bounds."""
    if not minimum <= number <= maximum:
        raise system_error(f"{field_name} is {number}, not between {minimum} and {maximum}")
