"""Which broker has which topic, and where it is.

    cluster -> broker name -> broker id -> address          0 is the master, others its slaves
    topic -> broker name -> queues                          as the broker registered them
    address -> last heard of, line, data version            alive, until silent for too long

What holds after every call:
  - a broker has at least one address, a topic at least one broker;
  - an address belongs to one broker, and every address is alive;
  - a call that raises RequestRefused has changed nothing.

A name belongs to one cluster. Queues are taken from the master, or, while there is none, from the
slave with the lowest id; from a slave so old that it does not say whether it may act as master
they are never taken. What a broker registered is kept as it is; whether clients may write to it is
worked out when they ask, so lifting a ban gives back exactly what was there before.

Times are differences only: any clock in milliseconds will do that does not jump.

What a name server takes from the network, and what it refuses.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

import msgspec

from escrowmq.errors import RequestRefused
from escrowmq.remoting.bodies import BrokerRoute, DataVersion, QueueRoute, TopicConfig, TopicRoute
from escrowmq.remoting.codes import ResponseCode

NAME_LENGTH_MAX: Final = 512
_SHOWN_MAX = 64  # of a name in a remark


def refuse(remark: str) -> RequestRefused:
    return RequestRefused(ResponseCode.SYSTEM_ERROR, remark)


def shown(name: str) -> str:
    """For a remark: all of a name that we would take, the beginning of one that is too long."""
    return name if len(name) <= NAME_LENGTH_MAX else f"{name[:_SHOWN_MAX]}..."


def check_name(what: str, name: str, *, may_be_empty: bool = False) -> None:
    if not name and not may_be_empty:
        raise refuse(f"{what} is empty")
    if len(name) > NAME_LENGTH_MAX:
        raise refuse(
            f"{what} has {len(name)} characters, the limit is {NAME_LENGTH_MAX}: {shown(name)}"
        )


def check_number(what: str, number: int, least: int, most: int) -> None:
    if not least <= number <= most:
        raise refuse(f"{what} is {number}, not between {least} and {most}")


MASTER: Final = 0
WRITE: Final = 2
SILENT_MS_MAX: Final = 120_000

BROKERS_MAX: Final = 10_000
TOPICS_MAX: Final = 200_000
QUEUES_MAX: Final = 65_536
PERM_MAX: Final = 15
HEARTBEAT_TIMEOUT_MS_MAX: Final = 24 * 3_600_000
BROKER_ID_MAX: Final = 2**63 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Registration:
    """What a broker says of itself. `topics` may be only those that have changed."""

    cluster: str
    name: str
    broker_id: int
    address: str
    ha_address: str = ""
    zone: str | None = None
    acting_master: bool | None = None  # None: a broker that knows nothing of this
    silent_ms_max: int = SILENT_MS_MAX
    topics: tuple[TopicConfig, ...] = ()
    version: DataVersion = field(default_factory=DataVersion)


@dataclass(frozen=True, slots=True)
class Registered:
    """Told to a slave: where its master is. Empty for a master, and while there is none."""

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
    is_wiped: bool = False

    @property
    def is_writable(self) -> bool:
        # A slave that acts as master serves reads; it takes no messages.
        return not self.is_wiped and (MASTER in self.addresses or not self.acting_master)

    def route(self) -> BrokerRoute:
        return BrokerRoute(
            broker_name=self.name,
            cluster=self.cluster,
            broker_addrs=dict(sorted(self.addresses.items())),
            enable_acting_master=self.acting_master,
            zone_name=self.zone,
        )


@dataclass(slots=True, kw_only=True)
class _Alive:
    name: str
    broker_id: int
    ha_address: str
    version: DataVersion
    line: object
    heard_ms: int
    silent_ms_max: int


class RouteTable:
    def __init__(self, *, brokers_max: int = BROKERS_MAX, topics_max: int = TOPICS_MAX) -> None:
        self._brokers_max = brokers_max
        self._topics_max = topics_max
        self._brokers: dict[str, _Broker] = {}
        self._topics: dict[str, dict[str, QueueRoute]] = {}
        self._alive: dict[str, _Alive] = {}

    # Brokers come.

    def register(self, new: Registration, line: object, *, now_ms: int) -> Registered:
        self._check(new)
        before = self._alive.get(new.address)
        if before is not None and not self._is_of(before, new.cluster, new.name):
            self._drop(new.address)  # it was restarted under another name
            before = None

        broker = self._brokers.setdefault(new.name, _Broker(new.cluster, new.name))
        is_first = self._take_place(broker, new, before)
        broker.acting_master = bool(new.acting_master)
        broker.zone = new.zone
        if _speaks_for(broker, new):
            changed = is_first or before is None or before.version != new.version
            known = broker.topics
            for topic in new.topics:
                if changed or topic.topic_name not in known:
                    self._put_queues(broker, topic.topic_name, _queues(new.name, topic))
        self._alive[new.address] = _Alive(
            name=new.name,
            broker_id=new.broker_id,
            ha_address=new.ha_address,
            version=new.version,
            line=line,
            heard_ms=now_ms,
            silent_ms_max=new.silent_ms_max,
        )
        return self._master_for(broker, new.broker_id)

    def heard_of(self, cluster: str, address: str, *, now_ms: int) -> DataVersion | None:
        """It is alive; its data version as last registered. None: nothing is known of it."""
        alive = self._alive.get(address)
        if alive is None or not self._is_of(alive, cluster, alive.name):
            return None
        alive.heard_ms = now_ms
        return alive.version

    # Brokers go.

    def unregister(self, cluster: str, name: str, address: str) -> bool:
        alive = self._alive.get(address)
        if alive is None or not self._is_of(alive, cluster, name):
            return False
        self._drop(address)
        return True

    def close(self, line: object) -> list[str]:
        """The addresses that were registered over this line, and now are not."""
        gone = [address for address, alive in self._alive.items() if alive.line is line]
        for address in gone:
            self._drop(address)
        return gone

    def expire(self, *, now_ms: int) -> dict[str, object]:
        """Addresses that have been silent for too long, each with the line it came over."""
        silent = {
            address: alive.line
            for address, alive in self._alive.items()
            if alive.heard_ms + alive.silent_ms_max < now_ms
        }
        for address in silent:
            self._drop(address)
        return silent

    # Topics.

    def register_topic(self, topic: str, queues: Iterable[QueueRoute]) -> None:
        queues = list(queues)
        check_name("topicName", topic)
        for each in queues:
            if each.broker_name not in self._brokers:
                raise refuse(f"topic {topic}: broker {shown(each.broker_name)} is not registered")
            _check_queues(topic, each)
        self._check_room((topic,))
        for each in queues:
            self._put_queues(self._brokers[each.broker_name], topic, each)

    def delete_topic(self, topic: str, *, cluster: str | None = None) -> int:
        """From how many brokers it was taken. One that still has it brings it back."""
        names = [
            name
            for name in self._topics.get(topic, ())
            if cluster is None or self._brokers[name].cluster == cluster
        ]
        for name in names:
            self._brokers[name].topics.discard(topic)
            self._forget_queues(name, topic)
        return len(names)

    def wipe_write(self, name: str) -> int:
        """Nobody is told to write to it, until `add_write` or another master. Its topics' count."""
        return self._set_wiped(name, True)

    def add_write(self, name: str) -> int:
        return self._set_wiped(name, False)

    # Questions.

    def route(self, topic: str) -> TopicRoute | None:
        queues = self._topics.get(topic)
        if queues is None:
            return None
        names = sorted(queues)
        return TopicRoute(
            queue_datas=[self._shown(queues[name]) for name in names],
            broker_datas=[self._brokers[name].route() for name in names],
        )

    def clusters(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for name, broker in sorted(self._brokers.items()):
            found.setdefault(broker.cluster, []).append(name)
        return found

    def brokers(self) -> dict[str, BrokerRoute]:
        return {name: broker.route() for name, broker in sorted(self._brokers.items())}

    def topics(self, *, cluster: str | None = None) -> list[str]:
        if cluster is None:
            return sorted(self._topics)
        mine = [broker.topics for broker in self._brokers.values() if broker.cluster == cluster]
        return sorted(set().union(*mine))

    def topic_flags(self) -> Mapping[str, int]:
        """Every topic's system flag, as the first of its brokers has it."""
        return {
            topic: queues[min(queues)].topic_sys_flag
            for topic, queues in sorted(self._topics.items())
        }

    def members(self, cluster: str, name: str) -> dict[int, str]:
        broker = self._brokers.get(name)
        if broker is None or broker.cluster != cluster:
            return {}
        return dict(sorted(broker.addresses.items()))

    @property
    def broker_count(self) -> int:
        return len(self._brokers)

    @property
    def address_count(self) -> int:
        return len(self._alive)

    @property
    def topic_count(self) -> int:
        return len(self._topics)

    # Is it allowed?

    def _check(self, new: Registration) -> None:
        check_name("brokerName", new.name)
        check_name("clusterName", new.cluster)
        check_name("brokerAddr", new.address)
        check_name("haServerAddr", new.ha_address, may_be_empty=True)
        check_name("zone", new.zone or "", may_be_empty=True)
        check_number("brokerId", new.broker_id, 0, BROKER_ID_MAX)
        check_number("heartbeatTimeoutMillis", new.silent_ms_max, 1, HEARTBEAT_TIMEOUT_MS_MAX)
        for topic in new.topics:
            _check_queues(topic.topic_name, topic)
        if new.address not in self._alive and len(self._alive) >= self._brokers_max:
            raise refuse(f"{self._brokers_max} brokers are registered, which is the limit")
        self._check_room(topic.topic_name for topic in new.topics)
        self._check_rivals(new)

    def _check_room(self, topics: Iterable[str]) -> None:
        more = len(set(topics) - self._topics.keys())
        if len(self._topics) + more > self._topics_max:
            raise refuse(f"{more} more topics would be over the limit of {self._topics_max}")

    def _check_rivals(self, new: Registration) -> None:
        broker = self._brokers.get(new.name)
        if broker is None:
            return
        others = [address for address in broker.addresses.values() if address != new.address]
        if broker.cluster != new.cluster and others:
            raise refuse(f"broker {new.name} belongs to cluster {broker.cluster}, at {others[0]}")
        rival = broker.addresses.get(new.broker_id, new.address)
        if rival == new.address:
            return
        known, told = self._alive[rival].version.state_version, new.version.state_version
        if known > told:
            raise refuse(
                f"broker {new.name} id {new.broker_id} is at {rival} with state version {known}; "
                f"{new.address} has {told}"
            )

    # Changes.

    def _is_of(self, alive: _Alive, cluster: str, name: str) -> bool:
        return alive.name == name and self._brokers[name].cluster == cluster

    def _take_place(self, broker: _Broker, new: Registration, before: _Alive | None) -> bool:
        """Put the address under its id, whoever was there. Was nobody?"""
        if before is not None and before.broker_id != new.broker_id:
            del broker.addresses[before.broker_id]
        rival = broker.addresses.get(new.broker_id)
        if rival != new.address:
            if rival is not None:
                del self._alive[rival]
            if new.broker_id == MASTER:
                broker.is_wiped = False  # that was said of another
        broker.addresses[new.broker_id] = new.address
        return rival is None

    def _drop(self, address: str) -> None:
        alive = self._alive.pop(address)
        broker = self._brokers[alive.name]
        del broker.addresses[alive.broker_id]
        if not broker.addresses:
            del self._brokers[alive.name]
            for topic in broker.topics:
                self._forget_queues(alive.name, topic)

    def _put_queues(self, broker: _Broker, topic: str, queues: QueueRoute) -> None:
        broker.topics.add(topic)
        self._topics.setdefault(topic, {})[broker.name] = queues

    def _forget_queues(self, name: str, topic: str) -> None:
        queues = self._topics[topic]
        del queues[name]
        if not queues:
            del self._topics[topic]

    def _set_wiped(self, name: str, is_wiped: bool) -> int:
        broker = self._brokers.get(name)
        if broker is None:
            return 0
        broker.is_wiped = is_wiped
        return len(broker.topics)

    def _shown(self, queues: QueueRoute) -> QueueRoute:
        if self._brokers[queues.broker_name].is_writable:
            return queues
        return msgspec.structs.replace(queues, perm=queues.perm & ~WRITE)

    def _master_for(self, broker: _Broker, broker_id: int) -> Registered:
        address = broker.addresses.get(MASTER)
        if broker_id == MASTER or address is None:
            return Registered()
        return Registered(address, self._alive[address].ha_address)


def _speaks_for(broker: _Broker, new: Registration) -> bool:
    if new.broker_id == MASTER:
        return True
    return new.acting_master is not None and new.broker_id == min(broker.addresses)


def _queues(name: str, topic: TopicConfig) -> QueueRoute:
    return QueueRoute(
        broker_name=name,
        read_queue_nums=topic.read_queue_nums,
        write_queue_nums=topic.write_queue_nums,
        perm=topic.perm,
        topic_sys_flag=topic.topic_sys_flag,
    )


def _check_queues(topic: str, queues: TopicConfig | QueueRoute) -> None:
    # A registration may have ten thousand topics, so what is right is passed quickly.
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
        raise refuse(f"topic {topic}: {error.remark}") from None
