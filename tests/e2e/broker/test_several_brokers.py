"""`serve --brokers N`: a cluster of several processes. A broker that is killed is restarted."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest

from docs.generate import METRIC_MODULES, declared_families
from tests.interop.remoting import Client, loads
from tests.support.brokers import COMMAND, WAIT_S, Server, StartFailed
from tests.support.ports import free_ports
from tests.support.scraping import parse
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow

LONG_S = 3 * WAIT_S


class Cluster(Server):
    def __init__(
        self, directory: Path, count: int, *, environment: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(directory, wait_s=LONG_S, environment=environment)
        self.metrics_port = free_ports(1)[0]
        self.arguments[self.arguments.index("--port") + 1] = "0"
        self.arguments += ["--metrics-port", str(self.metrics_port), "--brokers", str(count)]

    def __enter__(self) -> Cluster:
        self.start()
        return self

    def addresses(self) -> dict[str, str]:
        with self.namesrv_client() as names:
            info = loads(names.expect(106).body.decode())
        return {name: data["brokerAddrs"]["0"] for name, data in info["brokerAddrTable"].items()}

    def get(self, path: str) -> tuple[int, str]:
        try:
            with urlopen(f"http://127.0.0.1:{self.metrics_port}{path}", timeout=WAIT_S) as page:
                return page.status, page.read().decode()
        except HTTPError as error:
            return error.code, error.read().decode()

    def pids(self) -> dict[str, int]:
        """Return the process id of each broker, from the log line of its last start."""
        pids = {}
        for line in self.errors.splitlines():
            if "broker started name=" in line:
                name, pid = line.split("name=")[1].split(" pid=")
                pids[name] = int(pid)
        return pids

    def wait_until(self, condition: Callable[[], bool], description: str) -> None:
        """Wait for a condition. An error of a connection counts as not yet."""

        def holds() -> bool:
            try:
                return condition()
            except OSError:
                return False

        wait_until(holds, lambda: f"{description}; the log:\n{self.errors}", timeout_s=LONG_S)


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"


def send_to_each(cluster: Cluster, body: bytes) -> None:
    for address in cluster.addresses().values():
        with Client(address, timeout_s=LONG_S) as client:
            client.create_topic("orders")
            client.send("orders", body)


def test_clients_see_one_cluster_and_a_broker_that_is_killed_comes_back(tmp_path: Path) -> None:
    with Cluster(tmp_path, 2) as cluster:
        assert set(cluster.addresses()) == {"broker-a-0", "broker-a-1"}
        send_to_each(cluster, b"1")
        with cluster.namesrv_client() as name_server:
            cluster.wait_until(
                lambda: len((name_server.route("orders") or {}).get("queueDatas", [])) == 2,
                "both brokers are in the route",
            )
        page = parse(cluster.get("/metrics")[1])
        families = itertools.chain(*map(declared_families, METRIC_MODULES.values()))
        assert page.kinds == {family.name: family.kind for family in families}
        node_ids = {labels["node_id"] for labels in page.labels("rocketmq_topic_number")}
        assert node_ids == {"broker-a-0", "broker-a-1"}
        assert cluster.get("/health/live")[0] == cluster.get("/health/ready")[0] == 200

        cluster.conf.write_text(cluster.conf.read_text() + "fileReservedTime=24\n")
        cluster.reload()
        changed = "fileReservedTime changed from 72 to 24"
        cluster.wait_until(
            lambda: cluster.errors.count(changed) == 3,
            "the supervisor and both brokers have read the configuration again",
        )

        old_pids = cluster.pids()
        os.kill(old_pids["broker-a-1"], signal.SIGKILL)
        cluster.wait_until(
            lambda: cluster.pids()["broker-a-1"] != old_pids["broker-a-1"],
            "the killed broker is started again",
        )
        cluster.wait_until(lambda: cluster.get("/health/ready")[0] == 200, "the cluster is ready")

        def has_its_message() -> bool:
            with Client(cluster.addresses()["broker-a-1"], timeout_s=LONG_S) as client:
                return [record.body for record in client.pull_all("orders", 0)] == [b"1"]

        cluster.wait_until(has_its_message, "the restarted broker serves its message")
        new_pids = cluster.pids()
        assert new_pids["broker-a-0"] == old_pids["broker-a-0"]
        page = parse(cluster.get("/metrics")[1])
        assert page.value("escrowmq_broker_restarts_total", broker="broker-a-0") == 0
        assert page.value("escrowmq_broker_restarts_total", broker="broker-a-1") == 1
    assert not any(map(is_alive, new_pids.values()))
    assert not list(cluster.data.glob("broker-*/abort"))  # each broker stopped cleanly
    assert_fewer_brokers_are_refused(cluster)


def assert_fewer_brokers_are_refused(cluster: Cluster) -> None:
    """With fewer brokers, the messages in a directory would not be served."""
    for arguments, reason in (
        (["--brokers", "1"], "broker-1 holds messages, which would not be served with --brokers 1"),
        ([], "holds the messages of 2 brokers"),
    ):
        command = [str(COMMAND), "serve", "--data", str(cluster.data), "--port", "0", *arguments]
        refused = subprocess.run(command, capture_output=True, text=True, timeout=LONG_S)
        assert refused.returncode == 2
        assert reason in refused.stderr
        assert "--brokers 2" in refused.stderr


def test_brokers_stop_cleanly_when_their_supervisor_is_killed(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, 2)
    cluster.start()
    send_to_each(cluster, b"1")
    pids = cluster.pids()
    cluster.kill()
    cluster.wait_until(lambda: not any(map(is_alive, pids.values())), "the brokers have stopped")
    assert not list(cluster.data.glob("broker-*/abort"))
    with cluster:  # the same directories can be started again
        assert set(cluster.addresses()) == set(pids)


def test_several_brokers_are_refused_where_a_single_broker_has_messages(tmp_path: Path) -> None:
    with Server(tmp_path) as server, server.client() as client:
        client.send("orders", b"1")
    server.arguments += ["--brokers", "2"]
    with pytest.raises(StartFailed, match="holds the messages of a single broker"):
        server.start()


def test_a_broker_that_cannot_start_makes_the_whole_start_fail(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, 2)
    cluster.data.mkdir()
    (cluster.data / "broker-1").write_text("in the way")
    with pytest.raises(StartFailed) as refused:
        cluster.start()
    assert refused.value.exit_code == 2
    assert "could not start" in refused.value.errors
    assert not any(map(is_alive, cluster.pids().values()))
