"""The route table against a small model.

The model is a table of live brokers, and the topics of each broker name. Whatever the brokers do,
in any order, the route table shows the same brokers and topics, and its parts agree.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from escrowmq.errors import RequestRefused
from escrowmq.message.topic_config import DataVersion, TopicConfig
from escrowmq.namesrv.route_table import BrokerRegistration, RouteTable
from tests.support.fake_peers import FakePeer

TOPICS = ("orders", "stock", "TBW102")

names = st.sampled_from(["a", "b"])
clusters = st.sampled_from(["c", "c", "c", "d"])
addresses = st.sampled_from(["w:1", "x:1", "y:1", "z:1"])
broker_ids = st.integers(0, 2)
channels = st.sampled_from([FakePeer("channel 1"), FakePeer("channel 2")])
topic_tables = st.dictionaries(
    st.sampled_from(TOPICS),
    st.tuples(st.integers(0, 3), st.sampled_from([4, 6, 7])),
    max_size=3,
)
versions = st.builds(DataVersion, state_version=st.integers(0, 1), counter=st.integers(0, 2))

TopicTable = dict[str, tuple[int, int]]  # topic -> number of queues, perm


@dataclass
class LiveBroker:
    cluster: str
    name: str
    broker_id: int
    channel: FakePeer
    version: DataVersion
    expires_ms: int
    timeout_ms: int


@dataclass
class Model:
    brokers: dict[str, LiveBroker] = field(default_factory=dict)  # by address
    topics: dict[str, TopicTable] = field(default_factory=dict)  # by broker name
    has_acting_master: dict[str, bool] = field(default_factory=dict)  # by broker name
    wiped_names: set[str] = field(default_factory=set)  # without write permission

    def addresses_of(self, name: str) -> dict[int, str]:
        """Return the addresses of a broker name by broker id."""
        return {
            broker.broker_id: address
            for address, broker in self.brokers.items()
            if broker.name == name
        }

    def cluster_of(self, name: str) -> str:
        return next(broker.cluster for broker in self.brokers.values() if broker.name == name)

    def remove(self, address: str) -> None:
        name = self.brokers.pop(address).name
        if not self.addresses_of(name):
            self.topics.pop(name)
            self.wiped_names.discard(name)

    def refuses(self, new: BrokerRegistration) -> bool:
        others = [
            broker
            for address, broker in self.brokers.items()
            if broker.name == new.name and address != new.address
        ]
        return any(
            broker.cluster != new.cluster
            or (
                broker.broker_id == new.broker_id
                and broker.version.state_version > new.version.state_version
            )
            for broker in others
        )

    def register(
        self, new: BrokerRegistration, channel: FakePeer, topics: TopicTable, now_ms: int
    ) -> None:
        previous = self.brokers.get(new.address)
        if previous and (previous.cluster, previous.name) != (new.cluster, new.name):
            self.remove(new.address)
            previous = None
        replaced_address = self.addresses_of(new.name).get(new.broker_id)
        if new.broker_id == 0 and replaced_address != new.address:
            self.wiped_names.discard(new.name)
        name_topics = self.topics.setdefault(new.name, {})
        if replaced_address is not None:
            del self.brokers[replaced_address]
        self.brokers[new.address] = LiveBroker(
            cluster=new.cluster,
            name=new.name,
            broker_id=new.broker_id,
            channel=channel,
            version=new.version,
            expires_ms=now_ms + new.heartbeat_timeout_ms,
            timeout_ms=new.heartbeat_timeout_ms,
        )
        self.has_acting_master[new.name] = bool(new.acting_master)
        is_lowest = new.broker_id == min(self.addresses_of(new.name))
        if new.broker_id == 0 or (new.acting_master is not None and is_lowest):
            has_changed = (
                replaced_address is None or previous is None or previous.version != new.version
            )
            for topic, queues_and_perm in topics.items():
                if has_changed or topic not in name_topics:
                    name_topics[topic] = queues_and_perm

    def visible_perm(self, name: str, perm: int) -> int:
        """Return a perm without the write bit if the broker name accepts no writes."""
        has_no_master = self.has_acting_master[name] and 0 not in self.addresses_of(name)
        return perm & ~2 if has_no_master or name in self.wiped_names else perm


class RouteMachine(RuleBasedStateMachine):
    @initialize()
    def start(self) -> None:
        self.routes = RouteTable()
        self.model = Model()
        self.now_ms = 0

    @rule(
        cluster=clusters,
        name=names,
        broker_id=broker_ids,
        address=addresses,
        channel=channels,
        acting_master=st.sampled_from([None, False, True]),
        timeout_ms=st.sampled_from([10, 100]),
        topics=topic_tables,
        version=versions,
    )
    def register(
        self,
        cluster: str,
        name: str,
        broker_id: int,
        address: str,
        channel: FakePeer,
        acting_master: bool | None,
        timeout_ms: int,
        topics: TopicTable,
        version: DataVersion,
    ) -> None:
        registration = BrokerRegistration(
            cluster=cluster,
            name=name,
            broker_id=broker_id,
            address=address,
            acting_master=acting_master,
            heartbeat_timeout_ms=timeout_ms,
            topics=tuple(
                TopicConfig(
                    topic_name=topic, read_queue_nums=count, write_queue_nums=count, perm=perm
                )
                for topic, (count, perm) in topics.items()
            ),
            version=version,
        )
        if self.model.refuses(registration):
            with pytest.raises(RequestRefused):
                self.routes.register(registration, channel, now_ms=self.now_ms)
            return
        result = self.routes.register(registration, channel, now_ms=self.now_ms)
        self.model.register(registration, channel, topics, self.now_ms)
        master_address = self.model.addresses_of(name).get(0)
        assert result.master_address == (None if broker_id == 0 else master_address)

    @rule(cluster=clusters, name=names, address=addresses)
    def unregister(self, cluster: str, name: str, address: str) -> None:
        broker = self.model.brokers.get(address)
        is_registered = broker is not None and (broker.cluster, broker.name) == (cluster, name)
        assert self.routes.unregister(cluster, name, address) == is_registered
        if is_registered:
            self.model.remove(address)

    @rule(cluster=clusters, address=addresses)
    def heartbeat(self, cluster: str, address: str) -> None:
        broker = self.model.brokers.get(address)
        version = self.routes.heartbeat(cluster, address, now_ms=self.now_ms)
        if broker is None or broker.cluster != cluster:
            assert version is None
        else:
            assert version == broker.version
            broker.expires_ms = self.now_ms + broker.timeout_ms

    @rule(channel=channels)
    def close(self, channel: FakePeer) -> None:
        closed_addresses = [
            address for address, broker in self.model.brokers.items() if broker.channel == channel
        ]
        assert sorted(self.routes.channel_closed(channel)) == sorted(closed_addresses)
        for address in closed_addresses:
            self.model.remove(address)

    @rule(elapsed_ms=st.sampled_from([1, 10, 11, 101]))
    def expire(self, elapsed_ms: int) -> None:
        self.now_ms += elapsed_ms
        expired_channels = {
            address: broker.channel
            for address, broker in self.model.brokers.items()
            if broker.expires_ms < self.now_ms
        }
        assert self.routes.expire(now_ms=self.now_ms) == expired_channels
        for address in expired_channels:
            self.model.remove(address)

    @rule(name=names)
    def wipe_write_perm(self, name: str) -> None:
        assert self.routes.wipe_write_perm(name) == len(self.model.topics.get(name, {}))
        if name in self.model.topics:
            self.model.wiped_names.add(name)

    @rule(name=names)
    def add_write_perm(self, name: str) -> None:
        assert self.routes.add_write_perm(name) == len(self.model.topics.get(name, {}))
        self.model.wiped_names.discard(name)

    @rule(topic=st.sampled_from(["orders", "stock"]), cluster=st.none() | clusters)
    def delete(self, topic: str, cluster: str | None) -> None:
        deleted_count = 0
        for name, topics in self.model.topics.items():
            if cluster in (None, self.model.cluster_of(name)):
                deleted_count += topics.pop(topic, None) is not None
        assert self.routes.delete_topic(topic, cluster=cluster) == deleted_count

    @invariant()
    def brokers_are_the_live_brokers(self) -> None:
        brokers = self.routes.brokers()
        assert {name: route.broker_addrs for name, route in brokers.items()} == {
            name: self.model.addresses_of(name) for name in self.model.topics
        }
        clusters = self.routes.clusters()
        assert sorted(name for names in clusters.values() for name in names) == sorted(brokers)
        assert all(route.broker_addrs for route in brokers.values())
        assert self.routes.address_count == len(self.model.brokers)

    @invariant()
    def routes_are_the_registered_topics(self) -> None:
        all_topics = {topic for topics in self.model.topics.values() for topic in topics}
        assert self.routes.topics() == sorted(all_topics)
        for topic in TOPICS:
            expected = {
                name: (topics[topic][0], self.model.visible_perm(name, topics[topic][1]))
                for name, topics in self.model.topics.items()
                if topic in topics
            }
            route = self.routes.route(topic)
            if route is None:
                assert not expected
                continue
            actual = {
                queues.broker_name: (queues.read_queue_nums, queues.perm)
                for queues in route.queue_datas
            }
            assert actual == expected
            assert [broker.broker_name for broker in route.broker_datas] == sorted(actual)


RouteMachine.TestCase.settings = settings(stateful_step_count=40)
TestRoutes = pytest.mark.slow(RouteMachine.TestCase)
