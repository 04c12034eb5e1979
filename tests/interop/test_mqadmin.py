"""Apache's `mqadmin`, 4.9.7 and 5.5.0, against our broker and name server: every command that
docs/compatibility.md lists, judged by what it prints and by what has changed.

A command that fails prints an exception. The commands of one test run in one Java process.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.interop import jars
from tests.interop.apache import wait_for_route
from tests.interop.escrowmq_server import EscrowMQ
from tests.interop.jars import Unavailable
from tests.interop.mqadmin import MqAdmin, until
from tests.interop.remoting import Client

pytestmark = [pytest.mark.slow, pytest.mark.apache]

CLUSTER = "DefaultCluster"
BROKER = "broker-a"
QUEUES = 4
MESSAGES = 8
ATTEMPTS = 3
LATE = re.compile(r"timeout|TooMuchRequest", re.IGNORECASE)  # it waits three seconds, no more


class Site:
    """A broker of ours with a topic, and mqadmin of one release."""

    def __init__(self, version: str, ours: EscrowMQ, admin: MqAdmin) -> None:
        self.version = version
        self.ours = ours
        self.admin = admin
        self.sent: list[list[str]] = []  # number, unique key, offset id, queue, queue offset

    def run(self, command: str, *arguments: str) -> str:
        """A command that must succeed."""
        for _ in range(ATTEMPTS):
            told = self.admin(command, *arguments)
            if not LATE.search(told):
                break
        assert "Exception" not in told, f"{command} {' '.join(arguments)}:\n{told}"
        assert "not exist" not in told, told
        return told

    def refused(self, command: str, *arguments: str) -> str:
        told = self.admin(command, *arguments)
        assert "Exception" in told, f"{command} {' '.join(arguments)}:\n{told}"
        return told

    def await_told(self, says: Callable[[str], bool], command: str, *arguments: str) -> str:
        """Again and again, until it says so: a figure may be a moment late."""
        return until(lambda: self.admin(command, *arguments), says)

    def produce(self, topic: str = "orders", count: int = MESSAGES) -> None:
        told = self.admin.tell("produce", "makers", topic, str(count))
        assert "Exception" not in told, told
        self.sent += [line.split() for line in told.splitlines()]

    def consume(self, group: str = "takers", topic: str = "orders") -> None:
        self.admin.tell("consume", group, topic)
        self.await_got(MESSAGES)

    def await_got(self, count: int) -> list[str]:
        told = until(lambda: self.admin.tell("got"), lambda told: len(told.split("\n")) >= count)
        return told.split("\n")

    @property
    def by_topic(self) -> list[str]:
        """4.9 finds a message by its id alone."""
        return [] if self.version.startswith("4") else ["-t", "orders"]


@pytest.fixture(params=jars.VERSIONS)
def site(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Site]:
    if reason := jars.unavailable_reason():
        pytest.skip(reason)
    version: str = request.param
    with EscrowMQ(tmp_path / "ours") as ours:
        ours.create_topic("orders", queues=QUEUES)
        try:
            admin = MqAdmin(version, ours.namesrv_address, tmp_path / "admin")
        except Unavailable as reason:
            pytest.skip(f"mqadmin {version}: {reason}")
        with admin:
            yield Site(version, ours, admin)


def rows(told: str, *begin: str) -> list[list[str]]:
    """The words of the lines that begin so."""
    lines = [line.split() for line in told.splitlines()]
    return [words for words in lines if tuple(words[: len(begin)]) == begin]


def offsets_of(told: str) -> dict[int, tuple[int, int]]:
    """Of consumerProgress: by queue the broker's offset and the group's."""
    return {int(row[2]): (int(row[3]), int(row[4])) for row in rows(told, "orders", BROKER)}


# --- topics --------------------------------------------------------------------------------------


def test_topics_are_made_shown_and_changed(site: Site) -> None:
    address = site.ours.address
    assert "success" in site.run("updateTopic", "-b", address, "-t", "bills", "-r", "2", "-w", "2")
    assert "success" in site.run("updateTopic", "-c", CLUSTER, "-t", "ordered", "-o", "true")
    wait_for_route(site.ours.namesrv_address, "ordered", address)
    wait_for_route(site.ours.namesrv_address, "bills", address)
    names = site.run("topicList").split()
    assert {"orders", "bills", "ordered", "TBW102"} <= set(names)
    assert rows(site.run("topicList", "-c"), CLUSTER, "bills")
    assert f"{address}" in site.run("topicRoute", "-t", "bills")
    assert site.run("topicClusterList", "-t", "bills").split() == [CLUSTER]
    assert "from 6 to 4" in site.run("updateTopicPerm", "-b", address, "-t", "bills", "-p", "4")
    site.await_told(lambda told: '"perm":4' in told, "topicRoute", "-t", "bills")
    site.produce()
    status = rows(site.run("topicStatus", "-t", "orders"), BROKER)
    assert [row[1:4] for row in status] == [[str(n), "0", "2"] for n in range(QUEUES)]
    shared = site.run("allocateMQ", "-t", "orders", "-i", "10.0.0.1,10.0.0.2")
    assert shared.count('"topic":"orders"') == QUEUES
    assert f"{BROKER}:8" in site.run("updateOrderConf", "-t", "ordered", "-m", "get")


@pytest.mark.nightly
def test_a_deleted_topic_is_gone_also_after_a_restart(site: Site) -> None:
    site.produce()
    told = site.run("deleteTopic", "-c", CLUSTER, "-t", "orders")
    assert told.count("success") == 2
    assert "orders" not in site.run("topicList").split()
    assert "CODE: 17" in site.refused("topicRoute", "-t", "orders")
    assert not (site.ours.store / "consumequeue" / "orders").exists()
    for how in (site.ours.stop, site.ours.kill):
        how()
        site.ours.start()
        assert not (site.ours.store / "consumequeue" / "orders").exists()
        assert "orders" not in site.run("topicList").split()
    site.ours.create_topic("orders", queues=QUEUES)
    with Client(site.ours.address) as client:
        assert client.max_offset("orders", 0) == 0
        assert client.send("orders", b"new").queue_offset == 0


# --- the broker ----------------------------------------------------------------------------------


def test_the_broker_tells_about_itself(site: Site) -> None:
    address = site.ours.address
    site.produce()
    assert rows(site.run("clusterList"), CLUSTER, BROKER, "0", address)
    site.run("clusterList", "-m")
    told = site.run("brokerStatus", "-b", address)
    figures = dict(re.findall(r"^(\w+) *: (.*)$", told, re.MULTILINE))
    assert int(figures["msgPutTotalTodayNow"]) >= MESSAGES
    assert int(figures["commitLogMaxOffset"]) > 0
    assert len(figures["putTps"].split()) == 3
    assert abs(int(figures["bootTimestamp"]) / 1000 - time.time()) < 600
    assert address in site.run("brokerStatus", "-c", CLUSTER)
    assert rows(site.run("statsAll", "-t", "orders"), "orders")[0][-2:] == ["8", "NO_CONSUMER"]
    assert f"{BROKER}" in site.run("checkMsgSendRT", "-t", "orders", "-a", "3", "-s", "10")


@pytest.mark.nightly
def test_settings_are_shown_and_changed(site: Site) -> None:
    address = site.ours.address

    def value_of(key: str) -> list[str]:
        return rows(site.run("getBrokerConfig", "-b", address), key)[0][2:]

    def update(key: str, value: str) -> tuple[str, ...]:
        return ("updateBrokerConfig", "-b", address, "-k", key, "-v", value)

    assert value_of("maxMessageSize") == [str(4 << 20)]
    assert "success" in site.run(*update("maxMessageSize", "1000"))
    assert value_of("maxMessageSize") == ["1000"]
    with Client(site.ours.address) as client:
        assert client.send("orders", b"x" * 1000).queue_offset == 0
        fields = {"producerGroup": "g", "topic": "orders", "queueId": 0, "sysFlag": 0}
        fields |= {"defaultTopic": "TBW102", "defaultTopicQueueNums": 4, "bornTimestamp": 0}
        fields |= {"flag": 0, "properties": ""}
        assert client.request(10, fields, b"x" * 1001).code == 13
    assert "cannot change while" in site.refused(*update("listenPort", "1"))
    assert "there is no setting" in site.refused(*update("maxMesageSize", "1"))
    assert "must be" in site.refused(*update("maxMessageSize", "many"))
    site.ours.stop()
    assert "maxMessageSize=1000\n" in (site.ours.directory / "escrowmq.conf").read_text()


@pytest.mark.nightly
def test_keys_and_values_of_the_name_server(site: Site) -> None:
    assert "success" in site.run("updateKvConfig", "-s", "space", "-k", "colour", "-v", "red")
    with Client(site.ours.namesrv_address) as names:
        asked = {"namespace": "space", "key": "colour"}
        assert names.expect(101, asked).ext_fields["value"] == "red"
        assert "success" in site.run("deleteKvConfig", "-s", "space", "-k", "colour")
        names.expect(101, asked, allowed=(22,))
    assert "listenPort" in site.run("getNamesrvConfig")
    assert "CODE: 16" in site.refused("updateNamesrvConfig", "-k", "x", "-v", "y")
    assert "OK" in site.run("wipeWritePerm", "-b", BROKER)
    assert "OK" in site.run("addWritePerm", "-b", BROKER)


# --- messages ------------------------------------------------------------------------------------


@pytest.mark.nightly
def test_messages_are_found_sent_and_read(site: Site) -> None:
    site.produce()
    _, unique_key, offset_id, queue_id, _ = site.sent[3]
    about = site.run("queryMsgById", "-i", offset_id, *site.by_topic)
    assert re.search(r"Keys: +\[key-3\]", about)
    assert unique_key in site.run("queryMsgByKey", "-t", "orders", "-k", "key-3")
    assert "key-3" in site.run("queryMsgByUniqueKey", "-t", "orders", "-i", unique_key)
    place = ("-t", "orders", "-b", BROKER, "-i", queue_id, "-o", "0")
    assert unique_key in site.run("queryMsgByOffset", *place)
    assert site.run("printMsg", "-t", "orders", "-d", "true").count("BODY: message-") == MESSAGES
    assert "SEND_OK" in site.run("sendMessage", "-t", "orders", "-p", "by hand", "-k", "hand")
    assert "by hand" in site.run("consumeMessage", "-t", "orders")
    entries = ("-t", "orders", "-q", "0", "-i", "0", "-c", "10", "-b", site.ours.address)
    assert re.search(r"max: \d, min: 0", site.run("queryCq", *entries))


@pytest.mark.nightly
def test_a_trace_is_read_by_the_message_it_follows(site: Site) -> None:
    site.produce()
    site.consume()
    _, unique_key, *_ = site.sent[0]
    told = site.await_told(
        lambda told: bool(rows(told, "Pub", "makers") and rows(told, "Sub", "takers")),
        *("queryMsgTraceById", "-i", unique_key),
    )
    assert rows(told, "Pub", "makers")[0][-1] == "success"


# --- groups --------------------------------------------------------------------------------------


def test_who_is_connected_and_how_far_everybody_is(site: Site) -> None:
    address = site.ours.address
    site.produce()
    site.consume()
    told = site.await_told(
        lambda told: offsets_of(told) == dict.fromkeys(range(QUEUES), (2, 2)),
        *("consumerProgress", "-g", "takers"),
    )
    assert "Diff Total: 0" in told
    assert rows(site.run("consumerProgress"), "takers", "1")
    connected = site.run("consumerConnection", "-g", "takers")
    assert "JAVA" in connected
    assert "MessageModel: CLUSTERING" in connected
    assert rows(connected, "orders", "*")
    status = site.run("consumerStatus", "-g", "takers")
    assert "Same subscription" in status
    assert "Rebalance OK" in status
    assert "JAVA" in site.run("producerConnection", "-g", "makers", "-t", "orders")
    assert "producer group (makers)" in site.run("producer", "-b", address)
    stats = rows(site.run("statsAll", "-t", "orders"), "orders", "takers")
    assert stats[0][2] == "0"
    assert stats[0][-2:] == ["8", "8"]
    assert rows(site.run("topicList", "-c"), CLUSTER, "orders", "takers")
    by_id = site.run("queryMsgById", "-i", site.sent[0][2], *site.by_topic)
    assert "trackType=CONSUMED" in by_id


@pytest.mark.nightly
def test_a_group_with_nobody_is_sent_elsewhere(site: Site) -> None:
    site.produce()
    site.consume()
    progress = ("consumerProgress", "-g", "takers")
    at_end = dict.fromkeys(range(QUEUES), (2, 2))
    site.await_told(lambda told: offsets_of(told) == at_end, *progress)
    site.admin.tell("close")
    site.await_told(lambda told: "OFFLINE" in told, "consumerProgress")
    group = ("-g", "takers", "-t", "orders")
    site.run("resetOffsetByTime", *group, "-s", "0")
    assert offsets_of(site.run(*progress)) == dict.fromkeys(range(QUEUES), (2, 0))
    site.run("skipAccumulatedMessage", *group)
    assert offsets_of(site.run(*progress)) == at_end
    site.run("updateSubGroup", "-b", site.ours.address, "-g", "copies")
    site.run("cloneGroupOffset", "-s", "takers", "-d", "copies", "-t", "orders")
    with Client(site.ours.address) as client:
        assert client.committed_offset("copies", "orders", 0) == 2


@pytest.mark.nightly
def test_a_group_that_is_connected_is_sent_back(site: Site) -> None:
    """Its clients drop what they hold and begin again, some ten seconds later: their own pause."""
    site.produce()
    site.consume()
    site.await_told(
        lambda told: offsets_of(told) == dict.fromkeys(range(QUEUES), (2, 2)),
        *("consumerProgress", "-g", "takers"),
    )
    told = site.run("resetOffsetByTime", "-g", "takers", "-t", "orders", "-s", "0")
    assert [row[1:] for row in rows(told, BROKER)] == [[str(n), "0"] for n in range(QUEUES)]
    got = site.await_got(2 * MESSAGES)
    assert sorted(got)[::2] == sorted(set(got))


@pytest.mark.nightly
def test_groups_are_made_and_deleted(site: Site) -> None:
    address = site.ours.address
    assert "success" in site.run("updateSubGroup", "-b", address, "-g", "made", "-r", "5")
    assert "success" in site.run("updateSubGroup", "-c", CLUSTER, "-g", "made", "-r", "7")
    site.produce()
    site.consume()
    site.await_told(
        lambda told: offsets_of(told) == dict.fromkeys(range(QUEUES), (2, 2)),
        *("consumerProgress", "-g", "takers"),
    )
    site.admin.tell("close")
    site.await_told(lambda told: "OFFLINE" in told, "consumerProgress")
    told = site.run("deleteSubGroup", "-c", CLUSTER, "-g", "takers", "-r", "true")
    assert "success" in told
    for how in (site.ours.kill, site.ours.stop):
        how()
        site.ours.start()
        with Client(site.ours.address) as client:
            groups = client.expect(201, {}).body.decode()
            assert '"made"' in groups
            assert '"retryMaxTimes":7' in groups
            assert '"takers"' not in groups
            assert "takers" not in client.expect(300, {"topic": "orders"}).body.decode()


# --- users and policies --------------------------------------------------------------------------

USERS = """
globalWhiteRemoteAddresses: [127.0.0.1]
users:
- {username: alice, password: alice-secret-44}
- {username: root, password: root-secret-555, userType: Super, userStatus: disable}
acls:
- subject: User:alice
  policies:
  - entries:
    - {resource: "Topic:or*", actions: [Pub, Sub], sourceIps: [10.0.0.0/8], decision: Allow}
"""


@pytest.mark.nightly
def test_users_are_shown_without_secrets_and_not_changed(tmp_path: Path) -> None:
    if reason := jars.unavailable_reason():
        pytest.skip(reason)
    (tmp_path / "acl.yml").write_text(USERS)
    settings = {"aclEnable": "true", "escrowAclFile": tmp_path / "acl.yml"}
    with EscrowMQ(tmp_path / "ours", settings) as ours:
        try:
            admin = MqAdmin("5.5.0", ours.namesrv_address, tmp_path / "admin")
        except Unavailable as reason:
            pytest.skip(f"mqadmin: {reason}")
        with admin:
            site, at = Site("5.5.0", ours, admin), ("-b", ours.address)
            told = site.run("listUser", *at)
            assert rows(told, "alice") == [["alice", "***", "Normal", "enable"]]
            assert rows(told, "root") == [["root", "***", "Super", "disable"]]
            assert rows(site.run("getUser", *at, "-u", "alice"), "alice")
            assert not rows(site.run("getUser", *at, "-u", "nobody"), "nobody")
            for told in (
                site.run("listAcl", *at),
                site.run("getAcl", *at, "-s", "User:alice"),
                site.run("listAcl", "-c", CLUSTER, "-s", "alice"),
            ):
                assert "Topic:or*" in told
                assert "10.0.0.0/8" in told
            for command, *words in (
                ("createUser", "-u", "bob", "-p", "bob-secret-1"),
                ("updateUser", "-u", "alice", "-s", "disable"),
                ("deleteUser", "-u", "alice"),
                ("createAcl", "-s", "User:bob", "-r", "Topic:*", "-a", "Pub", "-d", "Allow"),
                ("updateAcl", "-s", "User:alice", "-r", "Topic:*", "-a", "Pub", "-d", "Deny"),
                ("deleteAcl", "-s", "User:alice"),
            ):
                assert "escrowAclFile" in site.refused(command, *at, *words)
