"""Metrics of a real process: they agree with its work, and malformed scrapes disturb nothing."""

from __future__ import annotations

import socket
import subprocess
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import escrowmq.broker.metrics
import escrowmq.server.metrics
from docs.generate import declared_families
from tests.support.brokers import COMMAND, WAIT_S, Server, StartFailed, next_response, start_pull
from tests.support.ports import free_ports
from tests.support.scraping import Page, scrape

pytestmark = pytest.mark.slow

COMMON_LABELS = {"cluster", "node_type", "node_id"}


class BrokerWithMetrics(Server):
    def __init__(self, directory: Path, **options: Any) -> None:
        super().__init__(directory, **options)
        [port] = free_ports(1)
        self.metrics_address = f"127.0.0.1:{port}"
        self.arguments += ["--metrics-port", str(port)]

    def __enter__(self) -> BrokerWithMetrics:
        self.start()
        return self

    def page(self) -> Page:
        return scrape(self.metrics_address)

    def get(self, path: str) -> tuple[int, bytes]:
        try:
            with urllib.request.urlopen(
                f"http://{self.metrics_address}{path}", timeout=WAIT_S
            ) as response:
                return response.status, response.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()

    def send_bytes(self, data: bytes) -> socket.socket:
        """Open a connection to the metrics port, send the data, and return the connection."""
        host, _, port = self.metrics_address.rpartition(":")
        connection = socket.create_connection((host, int(port)), timeout=WAIT_S)
        connection.sendall(data)
        return connection


@pytest.fixture
def server(tmp_path: Path) -> Iterator[BrokerWithMetrics]:
    with BrokerWithMetrics(tmp_path) as server:
        yield server


def test_metrics_count_messages_sizes_requests_and_lag(server: BrokerWithMetrics) -> None:
    lag = "rocketmq_consumer_lag_messages"
    with server.client() as client:
        client.create_group("g")
        for number in range(7):
            client.send("orders", b"%d" % number)
        client.send("bills", b"x" * 5000)
        client.send("orders", b"later", {"DELAY": "18"})
        page = server.page()
        messages_in = "rocketmq_messages_in_total"
        assert page.value(messages_in, topic="orders", message_type="normal") == 7
        assert page.value(messages_in, topic="orders", message_type="delay") == 1
        assert page.value(messages_in, topic="bills") == 1
        assert page.value("rocketmq_message_size_bucket", topic="bills", le="4096") == 0
        assert page.value("rocketmq_message_size_bucket", topic="bills", le="524288") == 1
        assert page.value("escrowmq_send_seconds_count") == 9
        assert page.value("escrowmq_append_records_sum") == 9
        assert page.value("escrowmq_requests_total", request_code="send_message_v2") == 9
        labels = page.labels(messages_in)[0]
        assert labels["cluster"] == "DefaultCluster"
        assert (labels["node_type"], labels["node_id"]) == ("broker", "broker-a")

        client.commit_offset("g", "orders", 0, 0)
        assert server.page().value(lag, topic="orders", consumer_group="g") == 7
        response = client.pull("orders", 0, 0, group="g", max_messages=4)
        assert response.code == 0
        client.commit_offset("g", "orders", 0, 4)
        page = server.page()
        assert page.value(lag, topic="orders", consumer_group="g") == 3
        assert page.value("rocketmq_messages_out_total", topic="orders", consumer_group="g") == 4
        out_bytes = page.value("rocketmq_throughput_out_total", topic="orders", consumer_group="g")
        assert out_bytes == len(response.body)
        client.send("orders", b"one more")
        assert server.page().value(lag, topic="orders", consumer_group="g") == 4
        client.commit_offset("g", "orders", 0, 8)
        page = server.page()
        assert page.value(lag, topic="orders", consumer_group="g") == 0
        assert page.value("rocketmq_consumer_lag_latency", topic="orders") == 0


def test_connections_and_waiting_pulls_are_counted_while_they_last(
    server: BrokerWithMetrics,
) -> None:
    with server.client() as waiting:
        waiting.create_topic("orders")
        start_pull(waiting, "orders", 0)
        page = server.page()
        assert page.value("escrowmq_waiting_pulls") == 1
        assert page.value("escrowmq_connections", port="broker") == 1
        with server.client() as other:
            other.send("orders", b"1")
        assert next_response(waiting).code == 0
        page = server.page()
        assert page.value("escrowmq_waiting_pulls") == 0
        assert page.value("rocketmq_messages_out_total", consumer_group="waiting") == 1


def test_a_flush_that_a_send_waits_for_is_measured(tmp_path: Path) -> None:
    with BrokerWithMetrics(tmp_path, conf={"flushDiskType": "SYNC_FLUSH"}) as server:
        with server.client() as client:
            client.send("orders", b"1")
        page = server.page()
        assert page.value("escrowmq_flush_seconds_count", why="waited") == 1
        assert page.value("escrowmq_send_seconds_count") == 1
        assert page.value("rocketmq_storage_flush_behind_bytes") == 0


def test_a_deleted_topic_has_no_samples(server: BrokerWithMetrics) -> None:
    with server.client() as client:
        client.send("orders", b"1")
        client.pull("orders", 0, 0)
        assert server.page().values("rocketmq_messages_in_total", topic="orders")
        client.expect(215, {"topic": "orders"})
    topics = {labels.get("topic") for _, labels, _ in server.page().samples}
    assert "orders" not in topics


def test_health_endpoints_respond(server: BrokerWithMetrics) -> None:
    assert server.get("/health/live") == (200, b"ok\n")
    assert server.get("/health/ready") == (200, b"ok\n")
    assert server.get("/")[0] == 404


def test_malformed_scrapes_disturb_neither_the_broker_nor_other_scrapes(
    server: BrokerWithMetrics,
) -> None:
    stop, sent = threading.Event(), 0

    def send_until_stopped() -> None:
        nonlocal sent
        with server.client() as client:
            while not stop.is_set():
                client.send("orders", b"x")
                sent += 1

    sender = threading.Thread(target=send_until_stopped)
    sender.start()
    try:
        for request in (
            b"\0" * 1000 + b"\r\n\r\n",
            b"\xff\xfe GET / \r\n\r\n",
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" * 10,
            b"GET /metrics HTTP/1.1\r\nX: " + b"x" * 1_000_000,
            b"GET /" + b"x" * 100_000 + b" HTTP/1.1\r\n\r\n",
            b"POST /metrics HTTP/1.1\r\nContent-Length: 999999999\r\n\r\n",
            b"\r\n" * 1000,
        ):
            try:
                with server.send_bytes(request) as connection:
                    connection.shutdown(socket.SHUT_WR)
                    while connection.recv(65536):
                        pass
            except TimeoutError:
                raise
            except OSError:
                pass  # the server closed the connection while we sent, or before our shutdown
            assert server.page().value("rocketmq_broker_permission") == 6
        incomplete = [server.send_bytes(b"GET /metrics HT") for _ in range(4)]
        not_reading = [server.send_bytes(b"GET /metrics HTTP/1.1\r\n\r\n") for _ in range(2)]
        assert server.page().value("rocketmq_broker_permission") == 6
        for connection in (*incomplete, *not_reading):
            connection.close()
    finally:
        stop.set()
        sender.join(WAIT_S)
    assert not sender.is_alive()
    assert sent > 0
    assert server.page().value("rocketmq_messages_in_total", topic="orders") == sent


def test_idle_connections_to_the_metrics_port_do_not_block_clients(
    server: BrokerWithMetrics,
) -> None:
    idle = [server.send_bytes(b"") for _ in range(50)]
    with server.client() as client:
        assert client.send("orders", b"1").queue_offset == 0
    for connection in idle:
        connection.close()


def test_a_separate_name_server_has_metrics(tmp_path: Path) -> None:
    with BrokerWithMetrics(tmp_path, role="namesrv") as server:
        with server.namesrv_client() as client:
            client.route("none")
            page = server.page()
            assert page.value("escrowmq_connections", port="namesrv") == 1
        assert page.labels("escrowmq_connections")[0]["node_type"] == "nameserver"
        assert server.get("/health/ready") == (200, b"ok\n")


def test_metrics_are_off_by_default_and_with_port_0(tmp_path: Path) -> None:
    with Server(tmp_path) as server:
        assert "/metrics" not in server.errors
    server = BrokerWithMetrics(tmp_path, conf={"metricsExporterType": "PROM"})
    server.arguments[-1] = "0"
    with server:
        assert "/metrics" not in server.errors


def test_settings_of_rocketmq_switch_metrics_on(tmp_path: Path) -> None:
    [port] = free_ports(1)
    conf = {
        "metricsExporterType": "PROM",
        "metricsPromExporterPort": port,
        "metricsPromExporterHost": "127.0.0.1",
    }
    with Server(tmp_path, conf=conf) as server:
        assert scrape(f"127.0.0.1:{port}").value("rocketmq_broker_permission") == 6
        assert "warning" not in server.errors


def test_a_metrics_port_in_use_is_refused_and_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = str(listener.getsockname()[1])
        server = BrokerWithMetrics(tmp_path)
        server.arguments[-1] = port
        with pytest.raises(StartFailed) as refused:
            server.start()
    assert refused.value.exit_code == 2
    assert port in refused.value.errors.splitlines()[-1]
    assert "Traceback" not in refused.value.errors


def test_the_help_names_the_flag() -> None:
    result = subprocess.run(
        [COMMAND, "serve", "--help"], capture_output=True, text=True, timeout=WAIT_S, check=True
    )
    assert "--metrics-port N" in result.stdout


def test_the_page_has_the_declared_metrics_with_their_kinds_and_labels(
    server: BrokerWithMetrics,
) -> None:
    families = {
        family.name: family
        for module in (escrowmq.broker.metrics, escrowmq.server.metrics)
        for family in declared_families(module)
    }
    with server.client() as client:
        client.create_group("g")
        client.heartbeat("c", producer_groups=("p",))
        client.send("orders", b"1")
        client.send_half("orders", b"2", {"UNIQ_KEY": "A"}, group="p")
        client.pull("orders", 0, 0, group="g")
        client.pull("none", 0, 0, group="g")
        client.commit_offset("g", "orders", 0, 0)
        page = server.page()
    assert page.kinds == {name: family.kind for name, family in families.items()}
    with_samples = set()
    for sample_name, labels, _ in page.samples:
        name = sample_name if sample_name in families else sample_name.rpartition("_")[0]
        assert labels.keys() - COMMON_LABELS - {"le"} == set(families[name].labels), sample_name
        with_samples.add(name)
    # These have no samples before the first event that they count.
    assert families.keys() - with_samples == {
        "escrowmq_damage_found_total",
        "escrowmq_oldest_dead_letter_seconds",
        "escrowmq_open_dead_letters",
        "escrowmq_unreadable_requests_total",
        "rocketmq_commit_messages_total",
        "rocketmq_consumer_connections",
        "rocketmq_rollback_messages_total",
        "rocketmq_send_to_dlq_messages_total",
    }
