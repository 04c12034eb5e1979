"""`serve --brokers N`: one cluster of several processes, which outlives any of them."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.request import urlopen

import pytest

from docs.generate import METRIC_MODULES, declared_families
from tests.interop.remoting import Client, loads
from tests.support.brokers import COMMAND, WAIT_S, NotStarted, Served
from tests.support.ports import free_ports
from tests.support.scraping import parse

pytestmark = pytest.mark.slow

LONG_S = 3 * WAIT_S


class Cluster(Served):
    def __init__(self, directory: Path, count: int) -> None:
        super().__init__(directory, wait_s=LONG_S)
        self.metrics_port = free_ports(1)[0]
        self.arguments[self.arguments.index("--port") + 1] = "0"
        self.arguments += ["--metrics-port", str(self.metrics_port), "--brokers", str(count)]

    def __enter__(self) -> Cluster:
        self.start()
        return self

    def addresses(self) -> dict[str, str]:
        with self.name_client() as names:
            info = loads(names.expect(106).body.decode())
        return {name: data["brokerAddrs"]["0"] for name, data in info["brokerAddrTable"].items()}

    def get(self, path: str) -> tuple[int, str]:
        try:
            with urlopen(f"http://127.0.0.1:{self.metrics_port}{path}", timeout=WAIT_S) as page:
                return page.status, page.read().decode()
        except HTTPError as error:
            return error.code, error.read().decode()

    def pids(self) -> dict[str, int]:
        """From its own log lines; the last start of each counts."""
        found = {}
        for line in self.errors.splitlines():
            if "broker started name=" in line:
                name, pid = line.split("name=")[1].split(" pid=")
                found[name] = int(pid)
        return found


def wait_until(holds: Callable[[], bool], cluster: Cluster) -> None:
    deadline_s = time.monotonic() + LONG_S
    while True:
        try:
            if holds():
                return
        except (OSError, URLError):
            pass
        assert time.monotonic() < deadline_s, cluster.errors


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
        with cluster.name_client() as names:
            wait_until(
                lambda: len((names.route("orders") or {}).get("queueDatas", [])) == 2, cluster
            )
        page = parse(cluster.get("/metrics")[1])
        families = itertools.chain(*map(declared_families, METRIC_MODULES.values()))
        assert page.kinds == {family.name: family.kind for family in families}
        told = {labels["node_id"] for labels in page.labels("rocketmq_topic_number")}
        assert told == {"broker-a-0", "broker-a-1"}
        assert cluster.get("/health/live")[0] == cluster.get("/health/ready")[0] == 200

        cluster.conf.write_text(cluster.conf.read_text() + "fileReservedTime=24\n")
        cluster.hang_up()
        changed = "fileReservedTime changed from 72 to 24"  # in the supervisor, and in each broker
        wait_until(lambda: cluster.errors.count(changed) == 3, cluster)

        before = cluster.pids()
        os.kill(before["broker-a-1"], signal.SIGKILL)
        wait_until(lambda: cluster.pids()["broker-a-1"] != before["broker-a-1"], cluster)
        wait_until(lambda: cluster.get("/health/ready")[0] == 200, cluster)

        def is_back() -> bool:
            with Client(cluster.addresses()["broker-a-1"], timeout_s=LONG_S) as client:
                return [record.body for record in client.pull_all("orders", 0)] == [b"1"]

        wait_until(is_back, cluster)
        assert cluster.pids()["broker-a-0"] == before["broker-a-0"]
        page = parse(cluster.get("/metrics")[1])
        assert page.value("escrowmq_broker_restarts_total", broker="broker-a-0") == 0
        assert page.value("escrowmq_broker_restarts_total", broker="broker-a-1") == 1
        after = cluster.pids()
    assert not any(map(is_alive, after.values()))
    assert not list(cluster.data.glob("broker-*/abort"))  # each stopped in order
    fewer_are_refused(cluster)


def fewer_are_refused(cluster: Cluster) -> None:
    """Messages in a directory that nobody would serve."""
    for arguments, why in (
        (["--brokers", "1"], "broker-1 holds messages, which would not be served with --brokers 1"),
        ([], "holds the messages of 2 brokers"),
    ):
        command = [str(COMMAND), "serve", "--data", str(cluster.data), "--port", "0", *arguments]
        refused = subprocess.run(command, capture_output=True, text=True, timeout=LONG_S)
        assert refused.returncode == 2
        assert why in refused.stderr
        assert "--brokers 2" in refused.stderr


def test_brokers_stop_in_order_when_their_supervisor_is_killed(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, 2)
    cluster.start()
    send_to_each(cluster, b"1")
    pids = cluster.pids()
    cluster.kill()
    wait_until(lambda: not any(map(is_alive, pids.values())), cluster)
    assert not list(cluster.data.glob("broker-*/abort"))
    with cluster:  # and can be started again
        assert set(cluster.addresses()) == set(pids)


def test_a_store_of_a_single_broker_is_not_hidden(tmp_path: Path) -> None:
    with Served(tmp_path) as served, served.client() as client:
        client.send("orders", b"1")
    served.arguments += ["--brokers", "2"]
    with pytest.raises(NotStarted, match="holds the messages of a single broker"):
        served.start()


def test_a_broker_that_cannot_start_ends_the_start_of_all(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, 2)
    (cluster.data).mkdir()
    (cluster.data / "broker-1").write_text("in the way")
    with pytest.raises(NotStarted) as refused:
        cluster.start()
    assert refused.value.exit_code == 2
    assert "could not start" in refused.value.errors
    assert not any(map(is_alive, cluster.pids().values()))
