"""`escrowmq serve` from an operator's view: output, refusals, stops, roles and limits."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from escrowmq.store.disk import RealDisk
from escrowmq.store.store import MessageStore
from tests.interop.records import encode_properties
from tests.interop.remoting import Client
from tests.support.brokers import (
    COMMAND,
    SETTINGS,
    WAIT_S,
    Server,
    StartFailed,
    next_response,
    start_pull,
)
from tests.support.ports import free_ports
from tests.support.stores import HOST, assert_clean
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Server]:
    with Server(tmp_path) as server:
        yield server


def wait_for_route(name_server: Client, topic: str, *, timeout_s: float) -> None:
    """Wait until a broker has registered the topic, which it does a moment after its creation."""
    wait_until(
        lambda: name_server.route(topic) is not None,
        f"{topic} has a route",
        timeout_s=timeout_s,
    )


def wait_until_stopped(served: Server) -> None:
    """Wait for the end of a stop: a second SIGTERM at its very end would kill the process."""
    wait_until(lambda: not served.is_alive, "the server has stopped")


# --- starting ------------------------------------------------------------------------------------


def test_ports_are_enough_to_start_in_an_empty_directory(tmp_path: Path) -> None:
    served = Server(tmp_path)
    served.conf.unlink()
    served.arguments = served.arguments[served.arguments.index("--port") :]
    with served:
        with served.client() as client:
            assert client.send("orders", b"1").queue_offset == 0
        assert sorted(path.name for path in tmp_path.iterdir()) == ["escrowmq-data", "serve.err"]
    assert_clean(tmp_path / "escrowmq-data", type(SETTINGS)())


def test_a_start_prints_and_logs_the_addresses(served: Server) -> None:
    assert served.namesrv_address in served.startup_output
    assert f"broker listens address={served.address}" in served.errors
    assert f"name server listens address={served.namesrv_address}" in served.errors
    assert "Try it" in served.startup_output


def test_with_port_0_message_ids_contain_the_chosen_port(tmp_path: Path) -> None:
    served = Server(tmp_path)
    begin = served.arguments.index("--port")
    served.arguments[begin:] = ["--port", "0", "--namesrv-port", "0"]
    with served:
        match = re.search(r"broker listens address=(\S+)", served.errors)
        assert match is not None
        served.address = match[1]
        with served.client() as client:
            sent = client.send("orders", b"1")
    port = int(served.address.rpartition(":")[2])
    assert int(sent.message_id[8:16], 16) == port


def test_a_second_server_on_the_same_data_is_refused(served: Server, tmp_path: Path) -> None:
    second = Server(tmp_path / "second")
    second.arguments[second.arguments.index("--data") + 1] = str(served.data)
    with pytest.raises(StartFailed) as refused:
        second.start()
    assert refused.value.exit_code == 2
    last_line = refused.value.errors.splitlines()[-1]
    assert last_line.startswith("escrowmq: ")
    assert "Traceback" not in refused.value.errors
    assert re.search(r"lock|in use|another", last_line), last_line
    with served.client() as client:
        client.send("orders", b"the first server still works")


@pytest.mark.parametrize("flag", ["--port", "--namesrv-port"])
def test_a_port_in_use_is_refused_and_named(tmp_path: Path, flag: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = str(listener.getsockname()[1])
        served = Server(tmp_path)
        served.arguments[served.arguments.index(flag) + 1] = port
        with pytest.raises(StartFailed) as refused:
            served.start()
    assert refused.value.exit_code == 2
    last_line = refused.value.errors.splitlines()[-1]
    assert last_line.startswith("escrowmq: ")
    assert port in last_line
    assert "Traceback" not in refused.value.errors
    served.arguments[served.arguments.index(flag) + 1] = str(free_ports(1)[0])
    with served:
        pass  # what the refused start left behind does not prevent the next one
    served.assert_clean()


def test_an_unknown_setting_is_refused_before_any_file_is_created(tmp_path: Path) -> None:
    served = Server(tmp_path, conf={"flushDiskTipe": "SYNC_FLUSH"})
    with pytest.raises(StartFailed) as refused:
        served.start()
    assert refused.value.exit_code == 2
    assert "flushDiskType" in refused.value.errors
    assert not served.data.exists()


# --- stopping ------------------------------------------------------------------------------------


def test_a_stopped_server_leaves_a_clean_store_and_no_abort_file(tmp_path: Path) -> None:
    with Server(tmp_path) as served, served.client() as client:
        assert (served.data / "abort").exists()
        for number in range(20):
            client.send("orders", b"%d" % number)
    assert not (served.data / "abort").exists()
    assert served.assert_clean().records == 20
    store = MessageStore.open(RealDisk(served.data), SETTINGS, store_host=HOST)
    assert store.recovery.was_clean
    store.close()


def test_a_killed_server_leaves_its_abort_file_and_starts_again(tmp_path: Path) -> None:
    with Server(tmp_path) as served:
        with served.client() as client:
            client.send("orders", b"1")
        served.kill()
        assert (served.data / "abort").exists()
        served.start()
        with served.client() as client:
            assert [record.body for record in client.pull_all("orders", 0)] == [b"1"]
    served.assert_clean()


def test_a_held_pull_gets_a_response_when_the_server_stops(served: Server) -> None:
    with served.client() as waiting, served.client() as other:
        other.create_topic("orders")
        start_pull(waiting, "orders", 0)
        served.terminate()
        assert next_response(waiting).code == 19
    wait_until_stopped(served)


@pytest.mark.parametrize("flush", ["ASYNC_FLUSH", "SYNC_FLUSH"])
def test_every_message_stored_before_a_stop_was_acknowledged(tmp_path: Path, flush: str) -> None:
    """Ten connections send without a pause, so each may have one message in flight at the stop."""
    acknowledged: list[bytes] = []
    all_have_sent = threading.Barrier(11)

    def send_until_closed(client: Client, sender: int) -> None:
        number = 0
        try:
            while True:
                body = b"%d-%d" % (sender, number)
                client.send("orders", body)
                acknowledged.append(body)
                number += 1
                if number == 20:
                    all_have_sent.wait(WAIT_S)
        except OSError:
            pass  # the server stopped
        finally:
            client.close()

    with Server(tmp_path, conf={"flushDiskType": flush}) as served:
        threads = [
            threading.Thread(target=send_until_closed, args=(served.client(), sender))
            for sender in range(10)
        ]
        for thread in threads:
            thread.start()
        all_have_sent.wait(WAIT_S)
        served.terminate()
        for thread in threads:
            thread.join(WAIT_S)
        wait_until_stopped(served)
    served.assert_clean()
    store = MessageStore.open(RealDisk(served.data), SETTINGS, store_host=HOST)
    stored = [bytes(record.body) for record in store.records()]
    store.close()
    assert sorted(stored) == sorted(acknowledged)


def test_a_stop_during_a_checkpoint_is_clean(tmp_path: Path) -> None:
    """With a checkpoint every millisecond, one is nearly always running."""
    conf = {"escrowCheckpointInterval": 1, "flushIntervalCommitLog": 1}
    served = Server(tmp_path, conf=conf)
    for _ in range(5):
        with served, served.client() as client:
            for number in range(20):
                client.send("orders", b"%d" % number)
        assert not (served.data / "abort").exists()
    served.assert_clean()


# --- files ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_rebuilt", [False, True], ids=["appended", "rebuilt"])
def test_the_queue_entry_of_a_delayed_message_has_its_due_time(
    tmp_path: Path, is_rebuilt: bool
) -> None:
    """Apache RocketMQ uses this entry to deliver the message when it opens the directory."""
    with Server(tmp_path, conf={"messageDelayLevel": "1h 7h"}) as served:
        with served.client() as client:
            client.send("orders", b"later", {"DELAY": "2"})
        if is_rebuilt:
            served.stop()
            shutil.rmtree(served.data / "consumequeue")
            served.start()
    store = MessageStore.open(RealDisk(served.data), SETTINGS, store_host=HOST)
    [(log_offset, _, tags_code)] = store.entries("SCHEDULE_TOPIC_XXXX", 1, 0, 2)
    stored_ms = store.record_at(log_offset).stored_ms
    store.close()
    assert tags_code - stored_ms == 7 * 3_600_000


# --- roles, and the name server ------------------------------------------------------------------


def test_a_broker_registers_with_the_name_server_of_its_configuration(tmp_path: Path) -> None:
    with Server(tmp_path / "names", role="namesrv") as name_server:
        conf = {"namesrvAddr": name_server.namesrv_address, "brokerName": "broker-x"}
        assert not name_server.data.exists()  # a name server stores no routes
        with Server(tmp_path / "broker", role="broker", conf=conf) as broker:
            with name_server.namesrv_client() as namesrv_client, broker.client() as client:
                client.create_topic("orders", queues=3)
                wait_for_route(namesrv_client, "orders", timeout_s=5)
                route = namesrv_client.route("orders")
            assert route is not None
            [data] = route["brokerDatas"]
            assert (data["brokerName"], data["brokerAddrs"]) == ("broker-x", {"0": broker.address})
            [queues] = route["queueDatas"]
            assert (queues["readQueueNums"], queues["writeQueueNums"], queues["perm"]) == (3, 3, 6)
            with pytest.raises(OSError, match="refused"):
                broker.namesrv_client()  # this process has no name server
        with name_server.namesrv_client() as namesrv_client:
            assert namesrv_client.route("orders") is None  # the broker unregistered when it stopped
        with pytest.raises(OSError, match="refused"):
            name_server.client()
    broker.assert_clean()


def test_a_broker_starts_before_its_name_server(tmp_path: Path) -> None:
    name_server = Server(tmp_path / "names", role="namesrv")
    conf = {"namesrvAddr": name_server.namesrv_address}
    with Server(tmp_path / "broker", role="broker", conf=conf) as broker:
        with broker.client() as client:
            client.send("orders", b"1")
        with name_server, name_server.namesrv_client() as namesrv_client:
            wait_for_route(namesrv_client, "orders", timeout_s=10)


def test_a_server_with_all_roles_also_registers_with_configured_name_servers(
    tmp_path: Path,
) -> None:
    with (
        Server(tmp_path / "names", role="namesrv") as name_server,
        Server(tmp_path / "all", conf={"namesrvAddr": name_server.namesrv_address}) as served,
        name_server.namesrv_client() as configured,
        served.namesrv_client() as own,
        served.client() as client,
    ):
        client.create_topic("orders")
        wait_for_route(own, "orders", timeout_s=1)
        wait_for_route(configured, "orders", timeout_s=5)


def test_new_topics_have_a_route_within_a_second(served: Server) -> None:
    with served.client() as client, served.namesrv_client() as name_server:
        assert name_server.route("TBW102") is not None
        assert name_server.route("created") is None
        client.create_topic("created")
        wait_for_route(name_server, "created", timeout_s=1)
        client.send("created-by-a-message", b"1")
        wait_for_route(name_server, "created-by-a-message", timeout_s=1)


def test_options_override_the_configuration_file(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    conf = {"storePathRootDir": elsewhere, "listenPort": 1}
    with Server(tmp_path, conf=conf) as served, served.client() as client:
        client.send("orders", b"1")
    assert not elsewhere.exists()
    served.assert_clean()


def test_an_unknown_role_is_refused(tmp_path: Path) -> None:
    result = subprocess.run(
        [COMMAND, "serve", "--role", "proxy"],
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        cwd=tmp_path,
        env=os.environ,
        check=False,
    )
    assert result.returncode == 2
    assert "proxy" in result.stderr
    assert list(tmp_path.iterdir()) == []


# --- limits and settings -------------------------------------------------------------------------


def test_a_connection_above_the_limit_is_closed_and_the_others_still_work(tmp_path: Path) -> None:
    with Server(tmp_path, conf={"escrowConnectionsMax": 3}) as served:
        clients = [served.client() for _ in range(3)]
        for client in clients:
            client.max_offset("x", 0)
        with served.client() as refused, pytest.raises(ConnectionError):
            refused.max_offset("x", 0)
        clients.pop().close()
        for _ in range(2):  # after two more responses the server has seen the close
            clients[0].max_offset("x", 0)
        with served.client() as accepted:
            accepted.max_offset("x", 0)
        for client in clients:
            client.max_offset("x", 0)
            client.close()


def test_an_idle_connection_is_closed_and_one_with_a_waiting_pull_is_not(tmp_path: Path) -> None:
    with (
        Server(tmp_path, conf={"serverChannelMaxIdleTimeSeconds": 1}) as served,
        served.client(timeout_s=5) as idle,
        served.client() as waiting,
    ):
        waiting.create_topic("orders")
        idle.max_offset("orders", 0)
        for _ in range(4):  # a pull every 400 ms is often enough
            start_pull(waiting, "orders", 0, wait_ms=400)
            assert next_response(waiting).code == 19
        assert idle.socket.recv(1) == b""


def test_settings_of_the_configuration_file_take_effect(tmp_path: Path) -> None:
    conf = {
        "longPollingEnable": False,
        "shortPollingTimeMills": 0,
        "maxTransferCountOnMessageInMemory": 2,
        "clusterTopicEnable": False,
        "brokerTopicEnable": False,
        "timerWheelEnable": False,
        "messageIndexEnable": False,
    }
    with Server(tmp_path, conf=conf) as served, served.client() as client:
        client.create_topic("orders")
        # The pull is not held, so its response comes before the one that start_pull waits for.
        start_pull(client, "orders", 0)
        assert len(client.pending_frames) == 1, "shortPollingTimeMills"
        assert next_response(client).code == 19
        for _ in range(3):
            client.send("orders", b"x")
        next_offset = client.pull("orders", 0, 0).ext_fields["nextBeginOffset"]
        assert next_offset == "2", "maxTransferCountOnMessageInMemory"
        client.send("orders", b"x", {"KEYS": "k"}, queue_id=1)
        assert client.query_by_key("orders", "k") == [], "messageIndexEnable"
        assert client.pull("DefaultCluster", 0, 0).code == 17, "clusterTopicEnable"
        assert client.pull("broker-a", 0, 0).code == 17, "brokerTopicEnable"
        delayed = encode_properties({"TIMER_DELAY_MS": "10"})
        fields = {"a": "p", "b": "orders", "c": "TBW102", "d": 4, "e": 0, "f": 0, "g": 0, "h": 0}
        response = client.request(310, {**fields, "i": delayed}, b"x")
        assert response.code != 0, "timerWheelEnable"


def test_a_broker_stops_cleanly_while_it_registers(tmp_path: Path) -> None:
    with Server(tmp_path / "all") as name_server:
        conf = {"namesrvAddr": name_server.namesrv_address, "brokerName": "broker-b"}
        for number in range(3):
            with Server(tmp_path / str(number), role="broker", conf=conf):
                pass  # it is ready, and may not be registered yet
