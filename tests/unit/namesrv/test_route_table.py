"""The route table: how brokers register, change and are removed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from escrowmq.client_memory import ClientMemory, MemoryLimits, MemoryUse
from escrowmq.errors import RequestRefused
from escrowmq.message.topic_config import DataVersion
from escrowmq.namesrv.route_table import BrokerRegistration, MasterInfo, RouteTable
from escrowmq.remoting.bodies import QueueRoute
from escrowmq.sliced_work import run_to_end
from tests.support.fake_peers import FakePeer
from tests.support.namesrv_requests import NOW_MS, data_version, topic_config

MASTER = BrokerRegistration(
    cluster="c",
    name="a",
    broker_id=0,
    address="m:1",
    ha_address="m:2",
    acting_master=False,
    topics=(topic_config("orders"), topic_config("TBW102", 8, perm=7)),
    version=data_version(1),
)
SLAVE = replace(MASTER, broker_id=1, address="s:1", ha_address="s:2")
OTHER = replace(
    MASTER, name="b", address="o:1", topics=(topic_config("orders", 2), topic_config("stock"))
)
CONNECTION, OTHER_CONNECTION = FakePeer("10.0.0.1:1"), FakePeer("10.0.0.2:1")


def table(*registrations: BrokerRegistration) -> RouteTable:
    routes = RouteTable()
    for registration in registrations:
        routes.register(registration, CONNECTION, now_ms=NOW_MS)
    return routes


def queues(routes: RouteTable, name: str, broker: str = "a") -> QueueRoute:
    route = routes.route(name)
    assert route is not None
    [queue_route] = [queues for queues in route.queue_datas if queues.broker_name == broker]
    return queue_route


def addresses(routes: RouteTable, broker: str = "a") -> dict[int, str]:
    return routes.members("c", broker)


# --- registration ------------------------------------------------------------------------------


def test_an_unknown_topic_has_no_route() -> None:
    assert table(MASTER).route("no-such-topic") is None


def test_a_first_registration_creates_a_route_for_every_topic() -> None:
    routes = table(MASTER)
    route = routes.route("TBW102")
    assert route is not None
    [broker] = route.broker_datas
    assert (broker.broker_name, broker.cluster, broker.broker_addrs) == ("a", "c", {0: "m:1"})
    assert queues(routes, "TBW102") == QueueRoute(
        broker_name="a", read_queue_nums=8, write_queue_nums=8, perm=7
    )


def test_a_first_registration_with_a_single_topic_is_accepted() -> None:
    assert table(replace(MASTER, topics=(topic_config("orders"),))).topics() == ["orders"]


def test_a_broker_without_topics_is_registered() -> None:
    routes = table(replace(MASTER, topics=()))
    assert routes.clusters() == {"c": ["a"]}
    assert routes.topics() == []


def test_a_topic_on_two_brokers_has_both_in_its_route() -> None:
    route = table(MASTER, OTHER).route("orders")
    assert route is not None
    assert [queues.broker_name for queues in route.queue_datas] == ["a", "b"]
    assert [broker.broker_name for broker in route.broker_datas] == ["a", "b"]


def test_a_changed_topic_is_accepted_with_a_new_data_version() -> None:
    changed = replace(MASTER, topics=(topic_config("orders", 16),), version=data_version(2))
    assert queues(table(MASTER, changed), "orders").read_queue_nums == 16


@pytest.mark.parametrize(
    "version",
    [
        DataVersion(state_version=1, timestamp=NOW_MS, counter=1),
        DataVersion(state_version=0, timestamp=NOW_MS + 1, counter=1),
        DataVersion(state_version=0, timestamp=NOW_MS, counter=0),
    ],
    ids=["state", "timestamp", "counter, downwards"],
)
def test_a_change_of_any_part_makes_a_new_data_version(version: DataVersion) -> None:
    changed = replace(MASTER, topics=(topic_config("orders", 16),), version=version)
    assert queues(table(MASTER, changed), "orders").read_queue_nums == 16


def test_a_changed_topic_is_ignored_with_the_same_data_version() -> None:
    changed = replace(MASTER, topics=(topic_config("orders", 16),))
    assert queues(table(MASTER, changed), "orders").read_queue_nums == 4


def test_a_new_topic_is_accepted_with_the_same_data_version() -> None:
    added = replace(MASTER, topics=(topic_config("stock"),))
    assert table(MASTER, added).topics() == ["TBW102", "orders", "stock"]


def test_topics_that_a_registration_omits_are_kept() -> None:
    second = replace(MASTER, topics=(topic_config("stock"),), version=data_version(2))
    assert table(MASTER, second).topics() == ["TBW102", "orders", "stock"]


def test_a_slave_gets_the_address_of_its_master() -> None:
    routes = RouteTable()
    assert routes.register(SLAVE, CONNECTION, now_ms=NOW_MS) == MasterInfo()
    assert routes.register(MASTER, CONNECTION, now_ms=NOW_MS) == MasterInfo()
    assert routes.register(SLAVE, CONNECTION, now_ms=NOW_MS) == MasterInfo("m:1", "m:2")
    assert addresses(routes) == {0: "m:1", 1: "s:1"}


def test_the_topics_of_a_slave_are_ignored_while_it_has_a_master() -> None:
    slave = replace(
        SLAVE, topics=(topic_config("orders", 16), topic_config("stock")), version=data_version(9)
    )
    routes = table(MASTER, slave)
    assert routes.topics() == ["TBW102", "orders"]
    assert queues(routes, "orders").read_queue_nums == 4


def test_without_a_master_the_lowest_slave_defines_the_topics() -> None:
    second = replace(SLAVE, broker_id=2, address="t:1", topics=(topic_config("stock"),))
    routes = table(SLAVE, second)
    assert routes.topics() == ["TBW102", "orders"]
    routes.unregister("c", "a", "s:1")
    routes.register(second, CONNECTION, now_ms=NOW_MS)
    assert "stock" in routes.topics()


def test_a_slave_too_old_to_act_as_master_never_defines_topics() -> None:
    assert table(replace(SLAVE, acting_master=None)).topics() == []


def test_a_slave_that_acts_as_master_is_not_writable() -> None:
    master, slave = replace(MASTER, acting_master=True), replace(SLAVE, acting_master=True)
    routes = table(master, slave)
    assert queues(routes, "orders").perm == 6
    routes.unregister("c", "a", "m:1")
    assert queues(routes, "orders").perm == 4
    routes.register(master, CONNECTION, now_ms=NOW_MS)
    assert queues(routes, "orders").perm == 6


# --- identity ----------------------------------------------------------------------------------


def test_an_address_with_a_new_id_is_moved_and_keeps_its_topics() -> None:
    routes = table(SLAVE, replace(SLAVE, broker_id=0, topics=()))
    assert addresses(routes) == {0: "s:1"}
    assert routes.topics() == ["TBW102", "orders"]


def test_an_address_with_a_new_name_is_removed_from_the_old_one() -> None:
    routes = table(MASTER, replace(MASTER, name="renamed", topics=(topic_config("stock"),)))
    assert routes.clusters() == {"c": ["renamed"]}
    assert routes.topics() == ["stock"]


def test_a_broker_can_move_to_another_cluster() -> None:
    routes = table(MASTER, replace(MASTER, cluster="d"))
    assert routes.clusters() == {"d": ["a"]}


def test_a_name_that_another_cluster_uses_is_refused() -> None:
    routes = table(MASTER)
    with pytest.raises(RequestRefused, match="belongs to cluster c, at m:1"):
        routes.register(replace(MASTER, cluster="d", address="n:1"), CONNECTION, now_ms=NOW_MS)
    assert routes.clusters() == {"c": ["a"]}


def test_a_new_address_with_the_same_id_replaces_the_old_one() -> None:
    routes = table(MASTER, replace(MASTER, address="n:1", topics=(topic_config("orders", 16),)))
    assert addresses(routes) == {0: "n:1"}
    assert queues(routes, "orders").read_queue_nums == 16
    assert routes.heartbeat("c", "m:1", now_ms=NOW_MS) is None


def test_a_new_address_with_a_lower_state_version_is_refused() -> None:
    routes = table(replace(MASTER, version=data_version(state=2)))
    with pytest.raises(RequestRefused, match="m:1 with state version 2; n:1 has 1"):
        routes.register(
            replace(MASTER, address="n:1", version=data_version(state=1)), CONNECTION, now_ms=NOW_MS
        )
    assert addresses(routes) == {0: "m:1"}


def test_a_refused_address_keeps_its_previous_id() -> None:
    routes = table(replace(MASTER, version=data_version(state=2)), SLAVE)
    with pytest.raises(RequestRefused):
        routes.register(replace(SLAVE, broker_id=0), CONNECTION, now_ms=NOW_MS)
    assert addresses(routes) == {0: "m:1", 1: "s:1"}


# --- removal -----------------------------------------------------------------------------------


def test_removing_the_last_address_removes_broker_and_topics() -> None:
    routes = table(MASTER, OTHER)
    assert routes.unregister("c", "a", "m:1")
    assert routes.clusters() == {"c": ["b"]}
    assert routes.topics() == ["orders", "stock"]
    assert routes.unregister("c", "b", "o:1")
    assert (routes.clusters(), routes.topics(), routes.brokers()) == ({}, [], {})


def test_topics_remain_while_a_slave_is_registered() -> None:
    routes = table(MASTER, SLAVE)
    routes.unregister("c", "a", "m:1")
    assert addresses(routes) == {1: "s:1"}
    assert queues(routes, "orders").perm == 6


@pytest.mark.parametrize(
    ("cluster", "name", "address"),
    [("c", "a", "n:1"), ("c", "b", "m:1"), ("d", "a", "m:1")],
)
def test_unregistering_another_broker_changes_nothing(
    cluster: str, name: str, address: str
) -> None:
    routes = table(MASTER)
    assert not routes.unregister(cluster, name, address)
    assert addresses(routes) == {0: "m:1"}


def test_a_broker_expires_after_120_seconds_without_a_heartbeat() -> None:
    routes = table(MASTER)
    assert routes.expire(now_ms=NOW_MS + 120_000) == {}
    assert routes.expire(now_ms=NOW_MS + 120_001) == {"m:1": CONNECTION}
    assert routes.topics() == []


def test_a_broker_can_set_its_own_heartbeat_timeout() -> None:
    routes = table(replace(MASTER, heartbeat_timeout_ms=10_000))
    assert routes.expire(now_ms=NOW_MS + 10_000) == {}
    assert routes.expire(now_ms=NOW_MS + 10_001) == {"m:1": CONNECTION}


def test_a_heartbeat_restarts_the_timeout() -> None:
    routes = table(MASTER)
    assert routes.heartbeat("c", "m:1", now_ms=NOW_MS + 100_000) == data_version(1)
    assert routes.expire(now_ms=NOW_MS + 220_000) == {}
    assert routes.expire(now_ms=NOW_MS + 220_001) == {"m:1": CONNECTION}


def test_a_heartbeat_of_an_unknown_broker_does_not_register_it() -> None:
    routes = table(MASTER)
    assert routes.heartbeat("c", "n:1", now_ms=NOW_MS) is None
    assert routes.heartbeat("d", "m:1", now_ms=NOW_MS) is None
    assert routes.address_count == 1


def test_the_brokers_of_a_closed_connection_are_removed_at_once() -> None:
    routes = table(MASTER, SLAVE)
    routes.register(OTHER, OTHER_CONNECTION, now_ms=NOW_MS)
    assert sorted(routes.channel_closed(CONNECTION)) == ["m:1", "s:1"]
    assert routes.clusters() == {"c": ["b"]}


def test_closing_an_old_connection_removes_nothing() -> None:
    routes = table(MASTER)
    routes.register(MASTER, OTHER_CONNECTION, now_ms=NOW_MS)
    assert routes.channel_closed(CONNECTION) == []
    assert addresses(routes) == {0: "m:1"}


# --- topics ------------------------------------------------------------------------------------


def test_wiping_removes_only_the_write_permission() -> None:
    routes = table(MASTER, OTHER)
    assert routes.wipe_write_perm("a") == 2
    assert queues(routes, "orders").perm == 4
    assert queues(routes, "TBW102").perm == 5
    assert queues(routes, "orders", "b").perm == 6


def test_adding_restores_the_previous_permissions() -> None:
    routes = table(
        replace(MASTER, topics=(topic_config("orders", perm=4), topic_config("TBW102", perm=7)))
    )
    routes.wipe_write_perm("a")
    assert routes.add_write_perm("a") == 2
    assert queues(routes, "orders").perm == 4
    assert queues(routes, "TBW102").perm == 7


def test_a_wiped_broker_stays_wiped_when_it_registers_again() -> None:
    routes = table(MASTER)
    routes.wipe_write_perm("a")
    routes.register(
        replace(MASTER, topics=(topic_config("stock"),), version=data_version(2)),
        CONNECTION,
        now_ms=NOW_MS,
    )
    assert queues(routes, "orders").perm == queues(routes, "stock").perm == 4


def test_a_master_that_registers_anew_is_not_wiped() -> None:
    routes = table(MASTER, SLAVE)
    routes.wipe_write_perm("a")
    routes.unregister("c", "a", "m:1")
    assert queues(routes, "orders").perm == 4
    routes.register(MASTER, CONNECTION, now_ms=NOW_MS)
    assert queues(routes, "orders").perm == 6


def test_wiping_an_unknown_broker_changes_no_topic() -> None:
    routes = table(MASTER)
    assert routes.wipe_write_perm("b") == routes.add_write_perm("b") == 0


def test_a_deleted_topic_has_no_route_until_its_broker_registers_it_again() -> None:
    routes = table(MASTER, OTHER)
    assert routes.delete_topic("orders") == 2
    assert routes.route("orders") is None
    routes.register(MASTER, CONNECTION, now_ms=NOW_MS)
    assert queues(routes, "orders").broker_name == "a"


def test_a_topic_can_be_deleted_in_one_cluster_only() -> None:
    routes = table(MASTER, replace(OTHER, cluster="d"))
    assert routes.delete_topic("orders", cluster="d") == 1
    route = routes.route("orders")
    assert route is not None
    assert [queues.broker_name for queues in route.queue_datas] == ["a"]
    assert routes.delete_topic("orders", cluster="e") == routes.delete_topic("none") == 0


def test_a_single_topic_is_registered_for_a_known_broker() -> None:
    routes = table(MASTER)
    queue_route = QueueRoute(broker_name="a", read_queue_nums=2, write_queue_nums=3, perm=6)
    routes.register_topic("stock", [queue_route])
    assert queues(routes, "stock") == queue_route
    routes.unregister("c", "a", "m:1")
    assert routes.topics() == []


def test_a_single_topic_with_one_unknown_broker_is_refused() -> None:
    routes = table(MASTER)
    known = QueueRoute(broker_name="a", read_queue_nums=2, write_queue_nums=3, perm=6)
    unknown = QueueRoute(broker_name="x", read_queue_nums=2, write_queue_nums=3, perm=6)
    with pytest.raises(RequestRefused, match="broker x is not registered"):
        routes.register_topic("stock", [known, unknown])
    assert routes.route("stock") is None


def test_topics_are_listed_by_cluster() -> None:
    routes = table(MASTER, replace(OTHER, cluster="d"))
    assert routes.topics(cluster="c") == ["TBW102", "orders"]
    assert routes.topics(cluster="d") == ["orders", "stock"]
    assert routes.topics(cluster="e") == []


def test_members_of_another_cluster_are_not_shown() -> None:
    assert table(MASTER).members("d", "a") == {}


# --- limits ------------------------------------------------------------------------------------


def test_the_number_of_brokers_is_limited() -> None:
    routes = RouteTable(brokers_max=1)
    routes.register(MASTER, CONNECTION, now_ms=NOW_MS)
    with pytest.raises(RequestRefused, match="there are 1 brokers"):
        routes.register(OTHER, CONNECTION, now_ms=NOW_MS)
    routes.register(MASTER, CONNECTION, now_ms=NOW_MS)
    assert routes.clusters() == {"c": ["a"]}


def test_the_number_of_topics_is_limited() -> None:
    routes = RouteTable(topics_max=2)
    routes.register(MASTER, CONNECTION, now_ms=NOW_MS)
    with pytest.raises(RequestRefused, match="1 new topics would exceed the limit of 2 topics"):
        routes.register(OTHER, CONNECTION, now_ms=NOW_MS)
    with pytest.raises(RequestRefused, match="exceed the limit"):
        routes.register_topic("stock", [queues(routes, "orders")])
    routes.register(replace(MASTER, version=data_version(2)), CONNECTION, now_ms=NOW_MS)
    assert (routes.broker_count, routes.topic_count) == (1, 2)


# --- very many topics --------------------------------------------------------------------------


def test_the_topics_of_a_large_broker_are_removed_in_slices_and_shown_no_more() -> None:
    topics = tuple(topic_config(f"t{number:04}") for number in range(5_000))
    routes = table(replace(MASTER, topics=topics), OTHER)
    routes.unregister("c", "a", MASTER.address)
    assert routes.topic_count > 2  # most entries are still there
    assert routes.topics() == ["orders", "stock"]
    assert routes.route("t4999") is None
    assert routes.topic_flag("t4999") == 0
    assert routes.delete_topic("t4999") == 0
    # The name is taken again before all entries are gone: it has only its new topics.
    routes.register(replace(MASTER, topics=topics[-2:]), CONNECTION, now_ms=NOW_MS)
    run_to_end(routes.remove_stale_routes())
    assert routes.topics() == ["orders", "stock", "t4998", "t4999"]
    assert routes.topic_count == 4


def test_a_topic_that_is_registered_alone_counts_for_its_broker() -> None:
    memory = ClientMemory(MemoryLimits(connection_max=1 << 20, hard_max=2_000_000))
    routes = RouteTable(memory=memory)
    routes.register(MASTER, CONNECTION, now_ms=NOW_MS)
    before = memory.bytes_for(MemoryUse.REGISTRATIONS)
    queue_route = QueueRoute(broker_name="a", read_queue_nums=1, write_queue_nums=1, perm=6)

    def register_many() -> None:
        for number in range(10_000):
            routes.register_topic(f"{number:0500}", [queue_route])

    with pytest.raises(RequestRefused, match="close to the limit"):
        register_many()
    assert before < memory.bytes_for(MemoryUse.REGISTRATIONS) <= 2_000_000
    routes.unregister("c", "a", MASTER.address)
    assert memory.bytes_for(MemoryUse.REGISTRATIONS) == 0
