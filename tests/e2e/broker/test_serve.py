"""`escrowmq serve` as an operator knows it: what it prints, what it refuses, how it ends."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import threading
import time
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
    NotStarted,
    Served,
    begin_pull,
    next_answer,
)
from tests.support.ports import free_ports
from tests.support.stores import HOST, assert_clean

pytestmark = pytest.mark.slow


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    with Served(tmp_path) as server:
        yield server


def routed_within(names: Client, topic: str, *, seconds: float) -> bool:
    """Asked again and again: the name server hears of a topic by and by."""
    deadline_s = time.monotonic() + seconds
    while names.route(topic) is None:
        if time.monotonic() > deadline_s:
            return False
    return True


# --- starting ------------------------------------------------------------------------------------


def test_in_an_empty_directory_it_starts_with_nothing_but_ports(tmp_path: Path) -> None:
    served = Served(tmp_path)
    served.conf.unlink()
    served.arguments = served.arguments[served.arguments.index("--port") :]
    with served:
        with served.client() as client:
            assert client.send("orders", b"1").queue_offset == 0
        assert sorted(path.name for path in tmp_path.iterdir()) == ["escrowmq-data", "serve.err"]
    assert_clean(tmp_path / "escrowmq-data", type(SETTINGS)())


def test_it_is_ready_within_some_seconds_and_says_where_it_listens(served: Served) -> None:
    assert served.namesrv_address in served.said
    assert f"broker listens address={served.address}" in served.errors
    assert f"name server listens address={served.namesrv_address}" in served.errors
    assert "Try it" in served.said


def test_with_port_0_message_ids_carry_the_port_that_was_chosen(tmp_path: Path) -> None:
    served = Served(tmp_path)
    begin = served.arguments.index("--port")
    served.arguments[begin:] = ["--port", "0", "--namesrv-port", "0"]
    with served:
        found = re.search(r"broker listens address=(\S+)", served.errors)
        assert found is not None
        served.address = found[1]
        with served.client() as client:
            sent = client.send("orders", b"1")
    port = int(served.address.rpartition(":")[2])
    assert int(sent.message_id[8:16], 16) == port


def test_a_second_server_on_the_same_data_is_refused(served: Served, tmp_path: Path) -> None:
    second = Served(tmp_path / "second")
    second.arguments[second.arguments.index("--data") + 1] = str(served.data)
    with pytest.raises(NotStarted) as refused:
        second.start()
    assert refused.value.exit_code == 2
    last = refused.value.errors.splitlines()[-1]
    assert last.startswith("escrowmq: ")
    assert "Traceback" not in refused.value.errors
    assert re.search(r"lock|in use|another", last), last
    with served.client() as client:
        client.send("orders", b"the first one goes on")


@pytest.mark.parametrize("flag", ["--port", "--namesrv-port"])
def test_a_port_in_use_is_refused_and_named(tmp_path: Path, flag: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = str(taken.getsockname()[1])
        served = Served(tmp_path)
        served.arguments[served.arguments.index(flag) + 1] = number
        with pytest.raises(NotStarted) as refused:
            served.start()
    assert refused.value.exit_code == 2
    last = refused.value.errors.splitlines()[-1]
    assert last.startswith("escrowmq: ")
    assert number in last
    assert "Traceback" not in refused.value.errors
    served.arguments[served.arguments.index(flag) + 1] = str(free_ports(1)[0])
    with served:
        pass  # what was begun before the refusal stands in nobody's way
    served.assert_clean()


def test_a_key_that_nobody_has_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    served = Served(tmp_path, conf={"flushDiskTipe": "SYNC_FLUSH"})
    with pytest.raises(NotStarted) as refused:
        served.start()
    assert refused.value.exit_code == 2
    assert "flushDiskType" in refused.value.errors
    assert not served.data.exists()


# --- stopping ------------------------------------------------------------------------------------


def test_a_stopped_server_leaves_a_clean_store_and_no_abort_file(tmp_path: Path) -> None:
    with Served(tmp_path) as served, served.client() as client:
        assert (served.data / "abort").exists()
        for number in range(20):
            client.send("orders", b"%d" % number)
    assert not (served.data / "abort").exists()
    assert served.assert_clean().records == 20
    store = MessageStore.open(RealDisk(served.data), SETTINGS, store_host=HOST)
    assert store.recovery.was_clean
    store.close()


def test_a_killed_server_leaves_its_abort_file_and_starts_again(tmp_path: Path) -> None:
    with Served(tmp_path) as served:
        with served.client() as client:
            client.send("orders", b"1")
        served.kill()
        assert (served.data / "abort").exists()
        served.start()
        with served.client() as client:
            assert [record.body for record in client.pull_all("orders", 0)] == [b"1"]
    served.assert_clean()


def test_a_held_pull_is_answered_when_the_server_stops(served: Served) -> None:
    with served.client() as waiting, served.client() as other:
        other.create_topic("orders")
        begin_pull(waiting, "orders", 0)
        served.terminate()
        assert next_answer(waiting).code == 19


@pytest.mark.parametrize("flush", ["ASYNC_FLUSH", "SYNC_FLUSH"])
def test_whatever_was_stored_before_the_stop_was_answered(tmp_path: Path, flush: str) -> None:
    """Ten lines send as fast as they are answered; one message each may be under way."""
    answered: list[bytes] = []
    began = threading.Barrier(11)

    def send_on(client: Client, name: int) -> None:
        number = 0
        try:
            while True:
                body = b"%d-%d" % (name, number)
                client.send("orders", body)
                answered.append(body)
                number += 1
                if number == 20:
                    began.wait(WAIT_S)
        except OSError:
            pass
        finally:
            client.close()

    with Served(tmp_path, conf={"flushDiskType": flush}) as served:
        threads = [
            threading.Thread(target=send_on, args=(served.client(), name)) for name in range(10)
        ]
        for thread in threads:
            thread.start()
        began.wait(WAIT_S)
        served.terminate()
        for thread in threads:
            thread.join(WAIT_S)
    served.assert_clean()
    store = MessageStore.open(RealDisk(served.data), SETTINGS, store_host=HOST)
    stored = [bytes(record.body) for record in store.records()]
    store.close()
    assert set(answered) <= set(stored)
    assert sorted(stored) == sorted(answered)


def test_a_stop_in_the_middle_of_a_checkpoint_is_a_clean_one(tmp_path: Path) -> None:
    """With a checkpoint after each millisecond there is nearly always one under way."""
    conf = {"escrowCheckpointInterval": 1, "flushIntervalCommitLog": 1}
    served = Served(tmp_path, conf=conf)
    for _ in range(5):
        with served, served.client() as client:
            for number in range(20):
                client.send("orders", b"%d" % number)
        assert not (served.data / "abort").exists()
    served.assert_clean()


# --- what it stores ------------------------------------------------------------------------------


@pytest.mark.parametrize("is_rebuilt", [False, True], ids=["appended", "rebuilt"])
def test_the_queue_entry_of_a_delayed_message_has_its_due_time(
    tmp_path: Path, is_rebuilt: bool
) -> None:
    """Apache RocketMQ delivers by this entry when it opens the directory."""
    with Served(tmp_path, conf={"messageDelayLevel": "1h 7h"}) as served:
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


def test_a_broker_registers_with_the_name_server_of_its_file(tmp_path: Path) -> None:
    with Served(tmp_path / "names", role="namesrv") as names:
        conf = {"namesrvAddr": names.namesrv_address, "brokerName": "broker-x"}
        assert not names.data.exists()  # a name server keeps nothing
        with Served(tmp_path / "broker", role="broker", conf=conf) as broker:
            with names.name_client() as asking, broker.client() as client:
                client.create_topic("orders", queues=3)
                assert routed_within(asking, "orders", seconds=5)
                route = asking.route("orders")
            assert route is not None
            [data] = route["brokerDatas"]
            assert (data["brokerName"], data["brokerAddrs"]) == ("broker-x", {"0": broker.address})
            [queues] = route["queueDatas"]
            assert (queues["readQueueNums"], queues["writeQueueNums"], queues["perm"]) == (3, 3, 6)
            with pytest.raises(OSError, match="refused"):
                broker.name_client()  # it has none of its own
        with names.name_client() as asking:
            assert asking.route("orders") is None  # it said goodbye
        with pytest.raises(OSError, match="refused"):
            names.client()
    broker.assert_clean()


def test_a_broker_starts_although_its_name_server_is_not_there_yet(tmp_path: Path) -> None:
    names = Served(tmp_path / "names", role="namesrv")
    conf = {"namesrvAddr": names.namesrv_address}
    with Served(tmp_path / "broker", role="broker", conf=conf) as broker:
        with broker.client() as client:
            client.send("orders", b"1")
        with names, names.name_client() as asking:
            assert routed_within(asking, "orders", seconds=10)


def test_all_roles_register_with_the_files_name_servers_too(tmp_path: Path) -> None:
    with (
        Served(tmp_path / "names", role="namesrv") as names,
        Served(tmp_path / "all", conf={"namesrvAddr": names.namesrv_address}) as served,
        names.name_client() as theirs,
        served.name_client() as ours,
        served.client() as client,
    ):
        client.create_topic("orders")
        assert routed_within(ours, "orders", seconds=1)
        assert routed_within(theirs, "orders", seconds=5)


def test_new_topics_are_in_the_route_within_a_second(served: Served) -> None:
    with served.client() as client, served.name_client() as names:
        assert names.route("TBW102") is not None
        assert names.route("made") is None
        client.create_topic("made")
        assert routed_within(names, "made", seconds=1)
        client.send("made-by-the-first-message", b"1")
        assert routed_within(names, "made-by-the-first-message", seconds=1)


def test_flags_win_over_the_file(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    conf = {"storePathRootDir": elsewhere, "listenPort": 1}
    with Served(tmp_path, conf=conf) as served, served.client() as client:
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


# --- bounds --------------------------------------------------------------------------------------


def test_one_line_too_many_is_closed_and_the_others_go_on(tmp_path: Path) -> None:
    with Served(tmp_path, conf={"escrowConnectionsMax": 3}) as served:
        lines = [served.client() for _ in range(3)]
        for line in lines:
            line.max_offset("x", 0)
        with served.client() as refused, pytest.raises(ConnectionError):
            refused.max_offset("x", 0)
        lines.pop().close()
        for _ in range(2):  # by then the server knows
            lines[0].max_offset("x", 0)
        with served.client() as welcome:
            welcome.max_offset("x", 0)
        for line in lines:
            line.max_offset("x", 0)
            line.close()


def test_a_silent_line_is_closed_and_a_waiting_one_is_not(tmp_path: Path) -> None:
    with (
        Served(tmp_path, conf={"serverChannelMaxIdleTimeSeconds": 1}) as served,
        served.client(timeout_s=5) as silent,
        served.client() as waiting,
    ):
        waiting.create_topic("orders")
        silent.max_offset("orders", 0)
        for _ in range(4):  # 400 ms each: it speaks often enough
            begin_pull(waiting, "orders", 0, wait_ms=400)
            assert next_answer(waiting).code == 19
        assert silent.socket.recv(1) == b""


def test_a_setting_of_the_file_has_its_effect(tmp_path: Path) -> None:
    conf = {
        "longPollingEnable": False,
        "shortPollingTimeMills": 200,
        "maxTransferCountOnMessageInMemory": 2,
        "clusterTopicEnable": False,
        "brokerTopicEnable": False,
        "timerWheelEnable": False,
        "messageIndexEnable": False,
    }
    wrong = []
    with Served(tmp_path, conf=conf) as served, served.client() as client:
        client.create_topic("orders")
        began_s = time.monotonic()
        begin_pull(client, "orders", 0)
        next_answer(client)
        if time.monotonic() - began_s > 0.7:
            wrong.append("shortPollingTimeMills")
        for _ in range(3):
            client.send("orders", b"x")
        if client.pull("orders", 0, 0).ext_fields["nextBeginOffset"] != "2":
            wrong.append("maxTransferCountOnMessageInMemory")
        client.send("orders", b"x", {"KEYS": "k"}, queue_id=1)
        if client.query_by_key("orders", "k"):
            wrong.append("messageIndexEnable")
        for name, topic in (
            ("clusterTopicEnable", "DefaultCluster"),
            ("brokerTopicEnable", "broker-a"),
        ):
            if client.pull(topic, 0, 0).code != 17:
                wrong.append(name)
        delayed = encode_properties({"TIMER_DELAY_MS": "10"})
        fields = {"a": "p", "b": "orders", "c": "TBW102", "d": 4, "e": 0, "f": 0, "g": 0, "h": 0}
        if client.request(310, {**fields, "i": delayed}, b"x").code == 0:
            wrong.append("timerWheelEnable")
    assert wrong == []


def test_a_stop_that_comes_while_it_registers_is_a_stop(tmp_path: Path) -> None:
    with Served(tmp_path / "all") as names:
        conf = {"namesrvAddr": names.namesrv_address, "brokerName": "broker-b"}
        for number in range(3):
            with Served(tmp_path / str(number), role="broker", conf=conf):
                pass  # ready, and not registered yet
