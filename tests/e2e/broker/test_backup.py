"""`store backup` of a running broker, kill -9, `store restore`: nothing is missing."""

from __future__ import annotations

import json
import subprocess
import threading
from pathlib import Path

import pytest

from tests.interop.remoting import COMMIT, Client
from tests.support.brokers import COMMAND, Server

pytestmark = pytest.mark.slow

SYNC = {"flushDiskType": "SYNC_FLUSH", "mappedFileSizeCommitLog": 1 << 20}


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [COMMAND, "store", *map(str, arguments)], capture_output=True, text=True, timeout=60
    )


class Load(threading.Thread):
    """Send until `stop`; `acknowledged` are the bodies that the broker has acknowledged."""

    def __init__(self, served: Server) -> None:
        super().__init__(daemon=True)
        self._served = served
        self._stop_requested = threading.Event()
        self.began = threading.Event()
        self.acknowledged: list[bytes] = []

    def run(self) -> None:
        with self._served.client() as client:
            number = 0
            while not self._stop_requested.is_set():
                body = b"%d " % number + b"x" * 2000
                client.send("orders", body, {"UNIQ_KEY": f"key-{number}"})
                self.acknowledged.append(body)
                number += 1
                if number == 700:  # more than one file of the log
                    self.began.set()

    def stop(self) -> None:
        self._stop_requested.set()
        self.join(30)


def test_a_backup_of_a_running_broker_has_every_acknowledged_message(tmp_path: Path) -> None:
    with Server(tmp_path / "first", conf=SYNC) as served:
        with served.client() as client:
            client.create_topic("orders")
            kept = client.send_half("orders", b"open", {"UNIQ_KEY": "half-1"}, queue_id=1)
            settled = client.send_half("orders", b"settled", {"UNIQ_KEY": "half-2"}, queue_id=1)
            client.end_transaction(settled, COMMIT, topic="orders")
            load = Load(served)
            load.start()
            assert load.began.wait(60)
            before = list(load.acknowledged)
            made = run("backup", served.data, tmp_path / "backup", "--broker", served.address)
            assert made.returncode == 0, made.stderr
            load.stop()
        served.kill()
    restored = run("restore", tmp_path / "backup", tmp_path / "second" / "data", "--json")
    assert restored.returncode == 0, restored.stderr
    assert json.loads(restored.stdout)["clean"] is True

    with Server(tmp_path / "second", conf=SYNC) as again, again.client() as client:
        found = [record.body for record in client.pull_all("orders", 0)]
        assert found[: len(before)] == before
        assert [record.body for record in client.pull_all("orders", 1)] == [b"settled"]
        assert [record.body for record in client.query_by_key("orders", "key-5", unique=True)]
        client.end_transaction(kept, COMMIT, topic="orders")  # the half is where it was
        bodies = [record.body for record in client.pull_all("orders", 1)]
        assert bodies == [b"settled", b"open"]
    again.assert_clean()


def test_a_store_that_nobody_runs_on_is_backed_up_too(tmp_path: Path) -> None:
    with Server(tmp_path / "first") as served, served.client() as client:
        client.create_topic("orders")
        client.send("orders", b"1")
    made = run("backup", served.data, tmp_path / "backup", "--json")
    assert made.returncode == 0, made.stderr
    assert json.loads(made.stdout)["records"] >= 1
    assert run("restore", tmp_path / "backup", tmp_path / "second" / "data").returncode == 0
    with Server(tmp_path / "second") as again, again.client() as other:
        assert [record.body for record in other.pull_all("orders", 0)] == [b"1"]


def test_what_cannot_be_backed_up_or_restored_is_said(tmp_path: Path) -> None:
    with (
        Server(tmp_path / "first") as served,
        Server(tmp_path / "other") as other,
        Client(served.address) as client,
        Client(other.address) as at_other,
    ):
        client.create_topic("orders")
        for number in range(20):
            client.send("orders", b"%d" % number)
        at_other.create_topic("orders")
        at_other.send("orders", b"1")
        target = tmp_path / "backup"
        wrong = run("backup", served.data, target / "1", "--broker", other.address)
        unreachable = run("backup", served.data, target / "2", "--broker", "127.0.0.1:1")
        taken = run("backup", served.data, tmp_path / "other", "--broker", served.address)
    for result, expected in (
        (wrong, "does not run on"),
        (unreachable, "--broker HOST:PORT"),
        (taken, "is not empty"),
        (run("backup", tmp_path / "nowhere", target / "3"), "not a store"),
        (run("restore", target / "2", tmp_path / "third"), "contains the file escrowmq.backup"),
        (run("restore", tmp_path / "first" / "data", tmp_path / "third"), "not a backup"),
    ):
        assert result.returncode == 2
        assert expected in result.stderr
        assert len(result.stderr.splitlines()) == 1


def test_a_backup_that_was_damaged_is_not_restored(tmp_path: Path) -> None:
    with Server(tmp_path / "first") as served, served.client() as client:
        client.create_topic("orders")
        for number in range(20):
            client.send("orders", b"%d" % number * 100)
    assert run("backup", served.data, tmp_path / "backup").returncode == 0
    [log] = (tmp_path / "backup" / "commitlog").iterdir()
    with log.open("r+b") as file:
        file.seek(1000)
        file.write(b"\xff" * 300)
    refused = run("restore", tmp_path / "backup", tmp_path / "second")
    assert refused.returncode == 2
    assert "damaged" in refused.stderr
