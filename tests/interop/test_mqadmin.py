"""Every command of Apache's `mqadmin` that docs/compatibility.md lists works with EscrowMQ.

The tests check the output and the effects of the commands, those of 4.9.7 and of 5.5.0. A command
that fails prints an exception. The commands of one test run in one Java process. CI shows topics
and groups to 4.9.7, which starts faster, and the broker to both releases.
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
from tests.interop.mqadmin import MqAdmin, wait_for_output
from tests.interop.releases import with_releases
from tests.interop.remoting import Client
from tests.interop.skipping import call_or_skip

pytestmark = [pytest.mark.slow, pytest.mark.apache]

CLUSTER = "DefaultCluster"
BROKER = "broker-a"
QUEUES = 4
MESSAGES = 8
ATTEMPTS = 3
# mqadmin gives up after three seconds, which a busy machine may exceed.
TIMED_OUT = re.compile(r"timeout|TooMuchRequest", re.IGNORECASE)
AT_END = dict.fromkeys(range(QUEUES), (2, 2))  # see `offsets_of`


class Cluster:
    """Our broker and name server with a topic, and mqadmin of one release."""

    def __init__(self, version: str, escrowmq: EscrowMQ, admin: MqAdmin) -> None:
        self.version = version
        self.escrowmq = escrowmq
        self.admin = admin
        self.sent: list[list[str]] = []  # number, unique key, offset id, queue, queue offset

    def run(self, command: str, *arguments: str) -> str:
        """Run a command, which must succeed, and return its output."""
        for _ in range(ATTEMPTS):
            output = self.admin(command, *arguments)
            if not TIMED_OUT.search(output):
                break
        assert "Exception" not in output, f"{command} {' '.join(arguments)}:\n{output}"
        assert "not exist" not in output, output
        return output

    def run_refused(self, command: str, *arguments: str) -> str:
        """Run a command, which must fail, and return its output."""
        output = self.admin(command, *arguments)
        assert "Exception" in output, f"{command} {' '.join(arguments)}:\n{output}"
        return output

    def wait_for(self, is_expected: Callable[[str], bool], command: str, *arguments: str) -> str:
        """Run a command until its output is as expected, and return the output."""
        return wait_for_output(lambda: self.admin(command, *arguments), is_expected)

    def produce(self, topic: str = "orders", count: int = MESSAGES) -> None:
        output = self.admin.run("produce", "producers", topic, str(count))
        assert "Exception" not in output, output
        self.sent += [line.split() for line in output.splitlines()]

    def consume(self, group: str = "consumers", topic: str = "orders") -> None:
        """Start a consumer and wait until it has received everything."""
        self.admin.run("consume", group, topic)
        self.wait_for_received(MESSAGES)

    def wait_for_received(self, count: int) -> list[str]:
        """Return the bodies that the consumers received, once there are `count` of them."""
        bodies = wait_for_output(
            lambda: self.admin.run("received"), lambda output: len(output.split("\n")) >= count
        )
        return bodies.split("\n")

    def wait_for_commit(self) -> str:
        """Wait until the group of `consume` has committed the end of every queue."""
        return self.wait_for(
            lambda output: offsets_of(output) == AT_END,
            *("consumerProgress", "-g", "consumers"),
        )

    def close_clients(self) -> None:
        """Stop producer and consumers, and wait until the broker has noticed."""
        self.admin.run("close")
        self.wait_for(lambda output: "OFFLINE" in output, "consumerProgress")

    @property
    def topic_option(self) -> list[str]:
        """Return the option with the topic of a message id; 4.9.7 does not have it."""
        return [] if self.version.startswith("4") else ["-t", "orders"]


@pytest.fixture(params=jars.VERSIONS)
def cluster(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Cluster]:
    version: str = request.param
    with EscrowMQ(tmp_path / "ours") as escrowmq:
        escrowmq.create_topic("orders", queues=QUEUES)
        with start_mqadmin(version, escrowmq, tmp_path / "admin") as admin:
            yield Cluster(version, escrowmq, admin)


def start_mqadmin(version: str, escrowmq: EscrowMQ, directory: Path) -> MqAdmin:
    return call_or_skip(
        f"mqadmin {version}", lambda: MqAdmin(version, escrowmq.namesrv_address, directory)
    )


def rows(output: str, *first_columns: str) -> list[list[str]]:
    """Return the rows of a table that have these first columns."""
    lines = [line.split() for line in output.splitlines()]
    return [row for row in lines if tuple(row[: len(first_columns)]) == first_columns]


def offsets_of(progress: str) -> dict[int, tuple[int, int]]:
    """Return the broker's offset and the group's by queue, from consumerProgress."""
    return {int(row[2]): (int(row[3]), int(row[4])) for row in rows(progress, "orders", BROKER)}


# --- topics --------------------------------------------------------------------------------------


@with_releases("cluster", in_ci=["4.9.7"])
def test_topics_are_created_shown_and_changed(cluster: Cluster) -> None:
    address = cluster.escrowmq.address
    assert "success" in cluster.run(
        "updateTopic", "-b", address, "-t", "bills", "-r", "2", "-w", "2"
    )
    assert "success" in cluster.run("updateTopic", "-c", CLUSTER, "-t", "ordered", "-o", "true")
    wait_for_route(cluster.escrowmq.namesrv_address, "ordered", address)
    wait_for_route(cluster.escrowmq.namesrv_address, "bills", address)
    names = cluster.run("topicList").split()
    assert {"orders", "bills", "ordered", "TBW102"} <= set(names)
    assert rows(cluster.run("topicList", "-c"), CLUSTER, "bills")
    assert f"{address}" in cluster.run("topicRoute", "-t", "bills")
    assert cluster.run("topicClusterList", "-t", "bills").split() == [CLUSTER]
    assert "from 6 to 4" in cluster.run("updateTopicPerm", "-b", address, "-t", "bills", "-p", "4")
    cluster.wait_for(lambda output: '"perm":4' in output, "topicRoute", "-t", "bills")
    cluster.produce()
    status = rows(cluster.run("topicStatus", "-t", "orders"), BROKER)
    assert [row[1:4] for row in status] == [[str(n), "0", "2"] for n in range(QUEUES)]
    allocation = cluster.run("allocateMQ", "-t", "orders", "-i", "10.0.0.1,10.0.0.2")
    assert allocation.count('"topic":"orders"') == QUEUES
    assert f"{BROKER}:8" in cluster.run("updateOrderConf", "-t", "ordered", "-m", "get")


@pytest.mark.nightly
def test_a_deleted_topic_stays_deleted_after_a_restart(cluster: Cluster) -> None:
    cluster.produce()
    output = cluster.run("deleteTopic", "-c", CLUSTER, "-t", "orders")
    assert output.count("success") == 2
    assert "orders" not in cluster.run("topicList").split()
    assert "CODE: 17" in cluster.run_refused("topicRoute", "-t", "orders")
    assert not (cluster.escrowmq.store / "consumequeue" / "orders").exists()
    for end in (cluster.escrowmq.stop, cluster.escrowmq.kill):
        end()
        cluster.escrowmq.start()
        assert not (cluster.escrowmq.store / "consumequeue" / "orders").exists()
        assert "orders" not in cluster.run("topicList").split()
    cluster.escrowmq.create_topic("orders", queues=QUEUES)
    with Client(cluster.escrowmq.address) as client:
        assert client.max_offset("orders", 0) == 0
        assert client.send("orders", b"new").queue_offset == 0


# --- the broker ----------------------------------------------------------------------------------


def test_the_status_of_the_broker_is_shown(cluster: Cluster) -> None:
    address = cluster.escrowmq.address
    cluster.produce()
    assert rows(cluster.run("clusterList"), CLUSTER, BROKER, "0", address)
    cluster.run("clusterList", "-m")
    status = cluster.run("brokerStatus", "-b", address)
    figures = dict(re.findall(r"^(\w+) *: (.*)$", status, re.MULTILINE))
    assert int(figures["msgPutTotalTodayNow"]) >= MESSAGES
    assert int(figures["commitLogMaxOffset"]) > 0
    assert len(figures["putTps"].split()) == 3
    assert abs(int(figures["bootTimestamp"]) / 1000 - time.time()) < 600
    assert address in cluster.run("brokerStatus", "-c", CLUSTER)
    assert rows(cluster.run("statsAll", "-t", "orders"), "orders")[0][-2:] == ["8", "NO_CONSUMER"]
    assert f"{BROKER}" in cluster.run("checkMsgSendRT", "-t", "orders", "-a", "3", "-s", "10")


@pytest.mark.nightly
def test_settings_are_shown_and_changed(cluster: Cluster) -> None:
    address = cluster.escrowmq.address

    def value_of(key: str) -> list[str]:
        return rows(cluster.run("getBrokerConfig", "-b", address), key)[0][2:]

    def update(key: str, value: str) -> tuple[str, ...]:
        return ("updateBrokerConfig", "-b", address, "-k", key, "-v", value)

    assert value_of("maxMessageSize") == [str(4 << 20)]
    assert "success" in cluster.run(*update("maxMessageSize", "1000"))
    assert value_of("maxMessageSize") == ["1000"]
    with Client(cluster.escrowmq.address) as client:
        assert client.send("orders", b"x" * 1000).queue_offset == 0
        fields = {"producerGroup": "g", "topic": "orders", "queueId": 0, "sysFlag": 0}
        fields |= {"defaultTopic": "TBW102", "defaultTopicQueueNums": 4, "bornTimestamp": 0}
        fields |= {"flag": 0, "properties": ""}
        assert client.request(10, fields, b"x" * 1001).code == 13
    assert "cannot change while" in cluster.run_refused(*update("listenPort", "1"))
    assert "there is no setting" in cluster.run_refused(*update("maxMesageSize", "1"))
    assert "must be" in cluster.run_refused(*update("maxMessageSize", "many"))
    cluster.escrowmq.stop()
    assert "maxMessageSize=1000\n" in (cluster.escrowmq.directory / "escrowmq.conf").read_text()


@pytest.mark.nightly
def test_the_configuration_of_the_name_server_is_shown_and_changed(cluster: Cluster) -> None:
    assert "success" in cluster.run("updateKvConfig", "-s", "space", "-k", "colour", "-v", "red")
    with Client(cluster.escrowmq.namesrv_address) as namesrv:
        query = {"namespace": "space", "key": "colour"}
        assert namesrv.expect(101, query).ext_fields["value"] == "red"
        assert "success" in cluster.run("deleteKvConfig", "-s", "space", "-k", "colour")
        namesrv.expect(101, query, allowed=(22,))
    assert "listenPort" in cluster.run("getNamesrvConfig")
    assert "CODE: 16" in cluster.run_refused("updateNamesrvConfig", "-k", "x", "-v", "y")
    assert "OK" in cluster.run("wipeWritePerm", "-b", BROKER)
    assert "OK" in cluster.run("addWritePerm", "-b", BROKER)


# --- messages ------------------------------------------------------------------------------------


@pytest.mark.nightly
def test_messages_are_found_sent_and_read(cluster: Cluster) -> None:
    cluster.produce()
    _, unique_key, offset_id, queue_id, _ = cluster.sent[3]
    message = cluster.run("queryMsgById", "-i", offset_id, *cluster.topic_option)
    assert re.search(r"Keys: +\[key-3\]", message)
    assert unique_key in cluster.run("queryMsgByKey", "-t", "orders", "-k", "key-3")
    assert "key-3" in cluster.run("queryMsgByUniqueKey", "-t", "orders", "-i", unique_key)
    position = ("-t", "orders", "-b", BROKER, "-i", queue_id, "-o", "0")
    assert unique_key in cluster.run("queryMsgByOffset", *position)
    assert cluster.run("printMsg", "-t", "orders", "-d", "true").count("BODY: message-") == MESSAGES
    assert "SEND_OK" in cluster.run(
        "sendMessage", "-t", "orders", "-p", "sent by mqadmin", "-k", "k"
    )
    assert "sent by mqadmin" in cluster.run("consumeMessage", "-t", "orders")
    entries = ("-t", "orders", "-q", "0", "-i", "0", "-c", "10", "-b", cluster.escrowmq.address)
    assert re.search(r"max: \d, min: 0", cluster.run("queryCq", *entries))


@pytest.mark.nightly
def test_the_trace_of_a_message_is_found_by_its_unique_key(cluster: Cluster) -> None:
    cluster.produce()
    cluster.consume()
    _, unique_key, *_ = cluster.sent[0]
    trace = cluster.wait_for(
        lambda output: bool(rows(output, "Pub", "producers") and rows(output, "Sub", "consumers")),
        *("queryMsgTraceById", "-i", unique_key),
    )
    assert rows(trace, "Pub", "producers")[0][-1] == "success"


# --- groups --------------------------------------------------------------------------------------


@with_releases("cluster", in_ci=["4.9.7"])
def test_connections_and_progress_of_groups_are_shown(cluster: Cluster) -> None:
    address = cluster.escrowmq.address
    cluster.produce()
    cluster.consume()
    assert "Diff Total: 0" in cluster.wait_for_commit()
    assert rows(cluster.run("consumerProgress"), "consumers", "1")
    connection = cluster.run("consumerConnection", "-g", "consumers")
    assert "JAVA" in connection
    assert "MessageModel: CLUSTERING" in connection
    assert rows(connection, "orders", "*")
    status = cluster.run("consumerStatus", "-g", "consumers")
    assert "Same subscription" in status
    assert "Rebalance OK" in status
    assert "JAVA" in cluster.run("producerConnection", "-g", "producers", "-t", "orders")
    assert "producer group (producers)" in cluster.run("producer", "-b", address)
    stats = rows(cluster.run("statsAll", "-t", "orders"), "orders", "consumers")
    assert stats[0][2] == "0"
    assert stats[0][-2:] == ["8", "8"]
    assert rows(cluster.run("topicList", "-c"), CLUSTER, "orders", "consumers")
    message = cluster.run("queryMsgById", "-i", cluster.sent[0][2], *cluster.topic_option)
    assert "trackType=CONSUMED" in message


@pytest.mark.nightly
def test_offsets_of_a_group_without_members_are_reset(cluster: Cluster) -> None:
    cluster.produce()
    cluster.consume()
    cluster.wait_for_commit()
    cluster.close_clients()
    progress = ("consumerProgress", "-g", "consumers")
    group = ("-g", "consumers", "-t", "orders")
    cluster.run("resetOffsetByTime", *group, "-s", "0")
    assert offsets_of(cluster.run(*progress)) == dict.fromkeys(range(QUEUES), (2, 0))
    cluster.run("skipAccumulatedMessage", *group)
    assert offsets_of(cluster.run(*progress)) == AT_END
    cluster.run("updateSubGroup", "-b", cluster.escrowmq.address, "-g", "copies")
    cluster.run("cloneGroupOffset", "-s", "consumers", "-d", "copies", "-t", "orders")
    with Client(cluster.escrowmq.address) as client:
        assert client.committed_offset("copies", "orders", 0) == 2


@pytest.mark.nightly
def test_a_connected_group_consumes_again_after_a_reset(cluster: Cluster) -> None:
    """The Java client drops its messages and starts again about ten seconds later."""
    cluster.produce()
    cluster.consume()
    cluster.wait_for_commit()
    output = cluster.run("resetOffsetByTime", "-g", "consumers", "-t", "orders", "-s", "0")
    assert [row[1:] for row in rows(output, BROKER)] == [[str(n), "0"] for n in range(QUEUES)]
    received = cluster.wait_for_received(2 * MESSAGES)
    assert sorted(received)[::2] == sorted(set(received))


@pytest.mark.nightly
def test_groups_are_created_and_deleted(cluster: Cluster) -> None:
    address = cluster.escrowmq.address
    assert "success" in cluster.run("updateSubGroup", "-b", address, "-g", "created", "-r", "5")
    assert "success" in cluster.run("updateSubGroup", "-c", CLUSTER, "-g", "created", "-r", "7")
    cluster.produce()
    cluster.consume()
    cluster.wait_for_commit()
    cluster.close_clients()
    output = cluster.run("deleteSubGroup", "-c", CLUSTER, "-g", "consumers", "-r", "true")
    assert "success" in output
    for end in (cluster.escrowmq.kill, cluster.escrowmq.stop):
        end()
        cluster.escrowmq.start()
        with Client(cluster.escrowmq.address) as client:
            groups = client.expect(201, {}).body.decode()
            assert '"created"' in groups
            assert '"retryMaxTimes":7' in groups
            assert '"consumers"' not in groups
            assert "consumers" not in client.expect(300, {"topic": "orders"}).body.decode()


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
def test_users_are_shown_without_secrets_and_cannot_be_changed(tmp_path: Path) -> None:
    (tmp_path / "acl.yml").write_text(USERS)
    settings = {"aclEnable": "true", "escrowAclFile": tmp_path / "acl.yml"}
    with (
        EscrowMQ(tmp_path / "ours", settings) as escrowmq,
        start_mqadmin("5.5.0", escrowmq, tmp_path / "admin") as admin,
    ):
        cluster, broker = Cluster("5.5.0", escrowmq, admin), ("-b", escrowmq.address)
        users = cluster.run("listUser", *broker)
        assert rows(users, "alice") == [["alice", "***", "Normal", "enable"]]
        assert rows(users, "root") == [["root", "***", "Super", "disable"]]
        assert rows(cluster.run("getUser", *broker, "-u", "alice"), "alice")
        assert not rows(cluster.run("getUser", *broker, "-u", "unknown"), "unknown")
        for policies in (
            cluster.run("listAcl", *broker),
            cluster.run("getAcl", *broker, "-s", "User:alice"),
            cluster.run("listAcl", "-c", CLUSTER, "-s", "alice"),
        ):
            assert "Topic:or*" in policies
            assert "10.0.0.0/8" in policies
        for command, *arguments in (
            ("createUser", "-u", "bob", "-p", "bob-secret-1"),
            ("updateUser", "-u", "alice", "-s", "disable"),
            ("deleteUser", "-u", "alice"),
            ("createAcl", "-s", "User:bob", "-r", "Topic:*", "-a", "Pub", "-d", "Allow"),
            ("updateAcl", "-s", "User:alice", "-r", "Topic:*", "-a", "Pub", "-d", "Deny"),
            ("deleteAcl", "-s", "User:alice"),
        ):
            assert "escrowAclFile" in cluster.run_refused(command, *broker, *arguments)
