"""The route table against a model small enough to be obviously right.

The model is a list of brokers that are alive, and the topics each name has. Whatever brokers do, in
whatever order, the table shows what the model says, and its tables agree with each other.
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

names = st.sampled_from(["a", "b"])
clusters = st.sampled_from(["c", "c", "c", "d"])
addresses = st.sampled_from(["w:1", "x:1", "y:1", "z:1"])
ids = st.integers(0, 2)
lines = st.sampled_from(["line 1", "line 2"])
topics = st.dictionaries(
    st.sampled_from(["orders", "stock", "TBW102"]),
    st.tuples(st.integers(0, 3), st.sampled_from([4, 6, 7])),
    max_size=3,
)
versions = st.builds(DataVersion, state_version=st.integers(0, 1), counter=st.integers(0, 2))

Queues = tuple[int, int]  # how many, perm


@dataclass
class Alive:
    cluster: str
    name: str
    broker_id: int
    line: str
    version: DataVersion
    until_ms: int
    silent_ms_max: int


@dataclass
class Model:
    alive: dict[str, Alive] = field(default_factory=dict)
    topics: dict[str, dict[str, Queues]] = field(default_factory=dict)  # by broker name
    acting: dict[str, bool] = field(default_factory=dict)
    wiped: set[str] = field(default_factory=set)

    def of(self, name: str) -> dict[int, str]:
        return {each.broker_id: at for at, each in self.alive.items() if each.name == name}

    def remove(self, address: str) -> None:
        name = self.alive.pop(address).name
        if not self.of(name):
            self.topics.pop(name)
            self.wiped.discard(name)


class RouteMachine(RuleBasedStateMachine):
    @initialize()
    def start(self) -> None:
        self.routes = RouteTable()
        self.model = Model()
        self.now_ms = 0

    @rule(
        cluster=clusters,
        name=names,
        broker_id=ids,
        address=addresses,
        line=lines,
        acting=st.sampled_from([None, False, True]),
        silent_ms_max=st.sampled_from([10, 100]),
        told=topics,
        version=versions,
    )
    def register(
        self,
        cluster: str,
        name: str,
        broker_id: int,
        address: str,
        line: str,
        acting: bool | None,
        silent_ms_max: int,
        told: dict[str, Queues],
        version: DataVersion,
    ) -> None:
        new = BrokerRegistration(
            cluster=cluster,
            name=name,
            broker_id=broker_id,
            address=address,
            acting_master=acting,
            heartbeat_timeout_ms=silent_ms_max,
            topics=tuple(
                TopicConfig(
                    topic_name=topic, read_queue_nums=count, write_queue_nums=count, perm=perm
                )
                for topic, (count, perm) in told.items()
            ),
            version=version,
        )
        if self.is_refused(new):
            try:
                self.routes.register(new, line, now_ms=self.now_ms)
            except RequestRefused:
                return
            raise AssertionError("it should have been refused")
        registered = self.routes.register(new, line, now_ms=self.now_ms)
        self.take(new, line, told)
        master = self.model.of(name).get(0)
        assert registered.master_address == (None if broker_id == 0 else master)

    def is_refused(self, new: BrokerRegistration) -> bool:
        mates = {at: each for at, each in self.model.alive.items() if each.name == new.name}
        others = {at: each for at, each in mates.items() if at != new.address}
        if any(each.cluster != new.cluster for each in others.values()):
            return True
        return any(
            each.broker_id == new.broker_id
            and each.version.state_version > new.version.state_version
            for each in others.values()
        )

    def take(self, new: BrokerRegistration, line: str, told: dict[str, Queues]) -> None:
        model = self.model
        before = model.alive.get(new.address)
        if before and (before.cluster, before.name) != (new.cluster, new.name):
            model.remove(new.address)
            before = None
        rival = model.of(new.name).get(new.broker_id)
        if new.broker_id == 0 and rival != new.address:
            model.wiped.discard(new.name)
        model.topics.setdefault(new.name, {})
        if rival is not None:
            del model.alive[rival]
        model.alive[new.address] = Alive(
            new.cluster,
            new.name,
            new.broker_id,
            line,
            new.version,
            self.now_ms + new.heartbeat_timeout_ms,
            new.heartbeat_timeout_ms,
        )
        model.acting[new.name] = bool(new.acting_master)
        is_lowest = new.broker_id == min(model.of(new.name))
        if new.broker_id == 0 or (new.acting_master is not None and is_lowest):
            changed = rival is None or before is None or before.version != new.version
            known = model.topics[new.name]
            known |= {topic: each for topic, each in told.items() if changed or topic not in known}

    @rule(cluster=clusters, name=names, address=addresses)
    def unregister(self, cluster: str, name: str, address: str) -> None:
        alive = self.model.alive.get(address)
        is_known = alive is not None and (alive.cluster, alive.name) == (cluster, name)
        assert self.routes.unregister(cluster, name, address) == is_known
        if is_known:
            self.model.remove(address)

    @rule(cluster=clusters, address=addresses)
    def sign_of_life(self, cluster: str, address: str) -> None:
        alive = self.model.alive.get(address)
        known = self.routes.heartbeat(cluster, address, now_ms=self.now_ms)
        if alive is None or alive.cluster != cluster:
            assert known is None
        else:
            assert known == alive.version
            alive.until_ms = self.now_ms + alive.silent_ms_max

    @rule(line=lines)
    def close(self, line: str) -> None:
        gone = [address for address, each in self.model.alive.items() if each.line == line]
        assert sorted(self.routes.channel_closed(line)) == sorted(gone)
        for address in gone:
            self.model.remove(address)

    @rule(passed_ms=st.sampled_from([1, 10, 11, 101]))
    def expire(self, passed_ms: int) -> None:
        self.now_ms += passed_ms
        gone = {
            at: each.line for at, each in self.model.alive.items() if each.until_ms < self.now_ms
        }
        assert self.routes.expire(now_ms=self.now_ms) == gone
        for address in gone:
            self.model.remove(address)

    @rule(name=names, is_wiped=st.booleans())
    def wipe_or_add(self, name: str, is_wiped: bool) -> None:
        count = self.routes.wipe_write_perm(name) if is_wiped else self.routes.add_write_perm(name)
        assert count == len(self.model.topics.get(name, {}))
        if name in self.model.topics:
            (self.model.wiped.add if is_wiped else self.model.wiped.discard)(name)

    @rule(topic=st.sampled_from(["orders", "stock"]), cluster=st.none() | clusters)
    def delete(self, topic: str, cluster: str | None) -> None:
        hit = 0
        for name, known in self.model.topics.items():
            home = next(each.cluster for each in self.model.alive.values() if each.name == name)
            if cluster in (None, home):
                hit += known.pop(topic, None) is not None
        assert self.routes.delete_topic(topic, cluster=cluster) == hit

    @invariant()
    def brokers_are_those_that_live(self) -> None:
        shown = self.routes.brokers()
        assert {name: route.broker_addrs for name, route in shown.items()} == {
            name: self.model.of(name) for name in self.model.topics
        }
        by_cluster = self.routes.clusters()
        assert sorted(name for found in by_cluster.values() for name in found) == sorted(shown)
        assert all(route.broker_addrs for route in shown.values())
        assert self.routes.address_count == len(self.model.alive)

    @invariant()
    def routes_are_what_was_registered(self) -> None:
        everything = {topic for known in self.model.topics.values() for topic in known}
        assert self.routes.topics() == sorted(everything)
        for topic in ("orders", "stock", "TBW102"):
            route = self.routes.route(topic)
            expected = {
                name: (known[topic][0], self.shown_perm(name, known[topic][1]))
                for name, known in self.model.topics.items()
                if topic in known
            }
            if route is None:
                assert not expected
                continue
            found = {
                each.broker_name: (each.read_queue_nums, each.perm) for each in route.queue_datas
            }
            assert found == expected
            assert [each.broker_name for each in route.broker_datas] == sorted(found)

    def shown_perm(self, name: str, perm: int) -> int:
        headless = self.model.acting[name] and 0 not in self.model.of(name)
        return perm & ~2 if headless or name in self.model.wiped else perm


RouteMachine.TestCase.settings = settings(stateful_step_count=40)
TestRoutes = pytest.mark.slow(RouteMachine.TestCase)
