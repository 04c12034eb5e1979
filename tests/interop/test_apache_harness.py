"""The harness starts, stops and kills Apache RocketMQ; the captured logs match what clients saw."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.interop import fixtures
from tests.interop.apache import ApacheRocketMQ, ProcessFailed
from tests.interop.remoting import Client
from tests.interop.stores import log_records
from tests.support.waiting import wait_until

BODIES = [b"first", b"second", "dritte, größer".encode()]


def bodies(rocketmq: ApacheRocketMQ) -> list[bytes]:
    with Client(rocketmq.address) as client:
        return [record.body for record in client.pull_all("orders", 0)]


@pytest.mark.apache
@pytest.mark.nightly
def test_messages_survive_a_clean_restart_and_a_kill(version: str, tmp_path: Path) -> None:
    with ApacheRocketMQ(version, tmp_path, {"mappedFileSizeCommitLog": 1 << 20}) as rocketmq:
        with Client(rocketmq.address) as client:
            client.create_topic("orders", queues=1)
            for body in BODIES:
                client.send("orders", body)
            assert [record.body for record in client.pull_all("orders", 0)] == BODIES

        rocketmq.stop()
        assert not (rocketmq.store / "abort").exists()
        rocketmq.restart()
        assert bodies(rocketmq) == BODIES

        rocketmq.kill()
        assert (rocketmq.store / "abort").exists()
        rocketmq.restart()
        assert bodies(rocketmq) == BODIES
        rocketmq.kill()  # quicker than the clean stop at the end of the block


@pytest.mark.apache
@pytest.mark.nightly
def test_a_broker_that_cannot_start_raises_with_its_log(version: str, tmp_path: Path) -> None:
    rocketmq = ApacheRocketMQ(version, tmp_path, {"mappedFileSizeCommitLog": 1 << 20})
    (rocketmq.store / "commitlog").mkdir(parents=True)
    (rocketmq.store / "commitlog" / f"{0:020}").write_bytes(b"too short")
    with pytest.raises(ProcessFailed, match="length not matched"):
        rocketmq.start()


START_CHILD_AND_DIE = """
import os, pathlib, sys
from tests.interop.apache import ChildProcess
child = ChildProcess(["sleep", "600"], name="sleeper", output=pathlib.Path(sys.argv[1]))
sys.stdout.write(str(child.pid))
sys.stdout.flush()
os.kill(os.getpid(), 9)
"""


def test_a_child_process_does_not_outlive_a_killed_test_run(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", START_CHILD_AND_DIE, str(tmp_path / "out")]
    parent = subprocess.run(command, cwd=root, stdout=subprocess.PIPE, text=True, check=False)
    child_pid = int(parent.stdout)
    wait_until(lambda: not is_running(child_pid), "the watchdog killed the child")


def is_running(pid: int) -> bool:
    ps = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], stdout=subprocess.PIPE, check=False)
    return ps.stdout.strip()[:1] not in (b"", b"Z")  # a zombie has ended but is not reaped yet


@pytest.mark.parametrize("shutdown", fixtures.SHUTDOWNS)
@pytest.mark.parametrize("captured", fixtures.VERSIONS)
def test_a_captured_log_contains_what_the_client_saw(
    captured: str, shutdown: fixtures.Shutdown, tmp_path: Path
) -> None:
    store = fixtures.unpack_store(captured, shutdown, tmp_path)
    stored = {record.log_offset: record for record in log_records(store / "commitlog")}
    view = fixtures.expected(captured, shutdown)
    assert (store / "abort").exists() == (shutdown == "killed")
    assert len(list((store / "commitlog").iterdir())) >= 3

    pulled_count = 0
    for queue in view["queues"]:
        for message in queue.get("messages", []):
            record = stored[message["logOffset"]]
            assert (record.topic, record.queue_id) == (queue["topic"], queue["queueId"])
            assert record.queue_offset == message["queueOffset"]
            assert record.properties == message["properties"]
            pulled_count += 1
    # 4.9.7 does not let clients pull from some topics.
    hidden_count = sum(queue["maxOffset"] for queue in view["queues"] if "messages" not in queue)
    assert pulled_count + hidden_count == len(stored)
