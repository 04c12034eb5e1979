"""`store backup` of a running broker, kill -9, then `store restore`: no message is missing."""

from __future__ import annotations

import json
import os
import subprocess
import threading
from pathlib import Path

import pytest

from escrowmq.store.backup import MANIFEST_PATH
from escrowmq.store.check import check_store
from escrowmq.store.disk import RealDisk
from escrowmq.store.store import INCOMPLETE_PATH
from tests.interop.remoting import COMMIT, Client
from tests.support.brokers import COMMAND, Server, StartFailed

pytestmark = pytest.mark.slow

SYNC = {"flushDiskType": "SYNC_FLUSH", "mappedFileSizeCommitLog": 1 << 20}


def run_store(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [COMMAND, "store", *map(str, arguments)], capture_output=True, text=True, timeout=60
    )


class Load(threading.Thread):
    """Send messages until `stop`. `acknowledged` has the bodies that the broker acknowledged."""

    def __init__(self, server: Server) -> None:
        super().__init__(daemon=True)
        self._server = server
        self._stop_requested = threading.Event()
        self.filled_a_segment = threading.Event()
        self.acknowledged: list[bytes] = []

    def run(self) -> None:
        with self._server.client() as client:
            number = 0
            while not self._stop_requested.is_set():
                body = b"%d " % number + b"x" * 2000
                client.send("orders", body, {"UNIQ_KEY": f"key-{number}"})
                self.acknowledged.append(body)
                number += 1
                if number == 700:  # of 2,000 bytes each: more than one segment of the log
                    self.filled_a_segment.set()

    def stop(self) -> None:
        self._stop_requested.set()
        self.join(30)


def test_a_backup_of_a_running_broker_has_every_acknowledged_message(tmp_path: Path) -> None:
    with Server(tmp_path / "first", conf=SYNC) as server:
        with server.client() as client:
            client.create_topic("orders")
            open_half = client.send_half("orders", b"open", {"UNIQ_KEY": "half-1"}, queue_id=1)
            other_half = client.send_half(
                "orders", b"committed", {"UNIQ_KEY": "half-2"}, queue_id=1
            )
            client.end_transaction(other_half, COMMIT, topic="orders")
            load = Load(server)
            load.start()
            assert load.filled_a_segment.wait(60)
            acknowledged = list(load.acknowledged)
            backup = run_store(
                "backup", server.data, tmp_path / "backup", "--broker", server.address
            )
            assert backup.returncode == 0, backup.stderr
            load.stop()
        server.kill()
    restore = run_store("restore", tmp_path / "backup", tmp_path / "second" / "data", "--json")
    assert restore.returncode == 0, restore.stderr
    assert json.loads(restore.stdout)["clean"] is True

    with Server(tmp_path / "second", conf=SYNC) as restored, restored.client() as client:
        bodies = [record.body for record in client.pull_all("orders", 0)]
        assert bodies[: len(acknowledged)] == acknowledged
        assert [record.body for record in client.pull_all("orders", 1)] == [b"committed"]
        assert [record.body for record in client.query_by_key("orders", "key-5", unique=True)]
        # The open half has the same position as before, so the producer can still end it.
        client.end_transaction(open_half, COMMIT, topic="orders")
        bodies = [record.body for record in client.pull_all("orders", 1)]
        assert bodies == [b"committed", b"open"]
    restored.assert_clean()


def test_a_store_without_a_running_broker_can_be_backed_up(tmp_path: Path) -> None:
    with Server(tmp_path / "first") as server, server.client() as client:
        client.create_topic("orders")
        client.send("orders", b"1")
    backup = run_store("backup", server.data, tmp_path / "backup", "--json")
    assert backup.returncode == 0, backup.stderr
    assert json.loads(backup.stdout)["records"] >= 1
    restore = run_store("restore", tmp_path / "backup", tmp_path / "second" / "data")
    assert restore.returncode == 0
    with Server(tmp_path / "second") as restored, restored.client() as client:
        assert [record.body for record in client.pull_all("orders", 0)] == [b"1"]


def test_a_backup_or_restore_that_is_not_possible_is_refused_with_the_reason(
    tmp_path: Path,
) -> None:
    with (
        Server(tmp_path / "first") as server,
        Server(tmp_path / "other") as other,
        Client(server.address) as client,
        Client(other.address) as other_client,
    ):
        client.create_topic("orders")
        for number in range(20):
            client.send("orders", b"%d" % number)
        other_client.create_topic("orders")
        other_client.send("orders", b"1")
        target = tmp_path / "backup"
        wrong_broker = run_store("backup", server.data, target / "1", "--broker", other.address)
        unreachable = run_store("backup", server.data, target / "2", "--broker", "127.0.0.1:1")
        not_empty = run_store("backup", server.data, tmp_path / "other", "--broker", server.address)
    no_store = run_store("backup", tmp_path / "nowhere", target / "3")
    incomplete = run_store("restore", target / "2", tmp_path / "third")
    no_backup = run_store("restore", tmp_path / "first" / "data", tmp_path / "third")
    for result, reason in (
        (wrong_broker, "does not run on"),
        (unreachable, "--broker HOST:PORT"),
        (not_empty, "is not empty"),
        (no_store, "not a store"),
        (incomplete, "contains the file escrowmq.backup"),
        (no_backup, "not a backup"),
    ):
        assert result.returncode == 2
        assert reason in result.stderr
        assert len(result.stderr.splitlines()) == 1


def test_a_damaged_store_is_backed_up_on_request_and_its_other_messages_are_restored(
    tmp_path: Path,
) -> None:
    with Server(tmp_path / "first") as server, server.client() as client:
        client.create_topic("orders")
        for number in range(20):
            client.send("orders", b"message %d" % number)
    [log] = (server.data / "commitlog").iterdir()
    content = log.read_bytes()
    with log.open("r+b") as file:  # the last one: what was acknowledged is no torn end
        file.seek(content.index(b"message 19"))
        file.write(b"MESSAGE 19")
    refused = run_store("backup", server.data, tmp_path / "refused")
    assert refused.returncode == 2
    assert "--allow-damage" in refused.stderr
    backup = run_store("backup", server.data, tmp_path / "backup", "--allow-damage", "--json")
    assert backup.returncode == 0, backup.stderr
    result = json.loads(backup.stdout)
    assert result["clean"] is False
    assert [damage["where"] for damage in result["damage"]] == [f"commitlog/{log.name}"]
    restore = run_store("restore", tmp_path / "backup", tmp_path / "second" / "data")
    assert restore.returncode == 0, restore.stderr
    assert "DAMAGE commitlog/" in restore.stdout
    with Server(tmp_path / "second") as restored, restored.client() as client:
        bodies = [record.body for record in client.pull_all("orders", 0)]
        assert bodies == [b"message %d" % number for number in range(19)]
        client.send("orders", b"new")
        assert client.pull_all("orders", 0)[-1].queue_offset == 20  # 19 stays what it was


def kill_at(count: int, target: Path, *arguments: str | Path) -> bool:
    """Kill a command when its target has so many files. Return whether it was still running."""
    process = subprocess.Popen(
        [COMMAND, "store", *map(str, arguments)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        while file_count(target) < count and process.poll() is None:
            pass  # no event tells how far it is, and a pause would miss the moment
        return process.poll() is None
    finally:
        process.kill()
        process.wait()


def file_count(directory: Path) -> int:
    return sum(len(files) for _, _, files in os.walk(directory))


def test_a_backup_or_restore_that_is_killed_is_complete_or_refused(tmp_path: Path) -> None:
    with Server(tmp_path / "first", conf=SYNC) as server, server.client() as client:
        client.create_topic("orders", queues=1)
        bodies = [b"%d " % number + b"x" * 200_000 for number in range(20)]
        for body in bodies:
            client.send("orders", body)
        broker = ("--broker", server.address)
        complete = tmp_path / "complete"
        assert run_store("backup", server.data, complete, *broker).returncode == 0
        last = file_count(complete)
        killed = 0
        for count in range(1, last + 1):
            backup = tmp_path / f"backup{count}"
            killed += kill_at(count, backup, "backup", server.data, backup, *broker)
            restored = tmp_path / f"restored{count}"
            result = run_store("restore", backup, restored)
            if (backup / MANIFEST_PATH).exists():
                assert result.returncode == 0, result.stderr
                assert check_store(RealDisk(restored)).is_clean
            else:
                assert result.returncode == 2
                assert f"a complete backup contains the file {MANIFEST_PATH}" in result.stderr
                assert not restored.exists()
        assert killed > last // 2
    refusals = 0
    for count in range(1, last + 1):
        second = tmp_path / f"second{count}"
        kill_at(count, second / "data", "restore", complete, second / "data")
        restored_server = Server(second, conf=SYNC)
        if (second / "data" / INCOMPLETE_PATH).exists():
            with pytest.raises(StartFailed, match="was interrupted") as failure:
                restored_server.start()
            assert failure.value.exit_code == 2  # the service is not started again and again
            refusals += 1
        else:
            with restored_server, restored_server.client() as client:
                assert [record.body for record in client.pull_all("orders", 0)] == bodies
    assert refusals > last // 2


def test_a_damaged_backup_is_not_restored(tmp_path: Path) -> None:
    with Server(tmp_path / "first") as server, server.client() as client:
        client.create_topic("orders")
        for number in range(20):
            client.send("orders", b"%d" % number * 100)
    assert run_store("backup", server.data, tmp_path / "backup").returncode == 0
    [log] = (tmp_path / "backup" / "commitlog").iterdir()
    with log.open("r+b") as file:
        file.seek(1000)
        file.write(b"\xff" * 300)
    refused = run_store("restore", tmp_path / "backup", tmp_path / "second")
    assert refused.returncode == 2
    assert "damaged" in refused.stderr
