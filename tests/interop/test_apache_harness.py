"""The harness itself: a broker that we start keeps what it was sent, over a stop and a start.

And the fixtures: what a client was shown is what lies in the captured log.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.interop import fixtures
from tests.interop.apache import ApacheRocketMQ, ProcessFailed
from tests.interop.remoting import Client
from tests.interop.stores import log_records

BODIES = [b"first", b"second", "dritte, größer".encode()]


def bodies(rocketmq: ApacheRocketMQ) -> list[bytes]:
    with Client(rocketmq.address) as client:
        return [record.body for record in client.pull_all("orders", 0)]


@pytest.mark.apache
@pytest.mark.nightly
def test_messages_outlive_a_clean_restart_and_a_kill(version: str, tmp_path: Path) -> None:
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
        rocketmq.kill()  # quicker than a clean stop


@pytest.mark.apache
@pytest.mark.nightly
def test_a_broker_that_cannot_start_says_why(version: str, tmp_path: Path) -> None:
    rocketmq = ApacheRocketMQ(version, tmp_path, {"mappedFileSizeCommitLog": 1 << 20})
    (rocketmq.store / "commitlog").mkdir(parents=True)
    (rocketmq.store / "commitlog" / f"{0:020}").write_bytes(b"too short")
    with pytest.raises(ProcessFailed, match="length not matched"):
        rocketmq.start()


ORPHAN = """
import os, pathlib, sys
from tests.interop.apache import ChildProcess
leashed = ChildProcess(["sleep", "600"], name="sleeper", output=pathlib.Path(sys.argv[1]))
sys.stdout.write(str(leashed.pid))
sys.stdout.flush()
os.kill(os.getpid(), 9)
"""


def test_a_process_does_not_outlive_a_test_run_that_is_killed(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    ours = [sys.executable, "-c", ORPHAN, str(tmp_path / "out")]
    told = subprocess.run(ours, cwd=root, stdout=subprocess.PIPE, text=True, check=False)
    deadline = time.monotonic() + 10
    while lives(int(told.stdout)):
        assert time.monotonic() < deadline, "the leash did not end it"
        time.sleep(0.01)


def lives(pid: int) -> bool:
    told = subprocess.run(
        ["ps", "-o", "stat=", "-p", str(pid)], stdout=subprocess.PIPE, check=False
    )
    return told.stdout.strip()[:1] not in (b"", b"Z")  # gone, or dead and not yet buried


@pytest.mark.parametrize("ending", fixtures.SHUTDOWNS)
@pytest.mark.parametrize("captured", fixtures.VERSIONS)
def test_a_captured_log_holds_what_the_client_saw(
    captured: str, ending: fixtures.Shutdown, tmp_path: Path
) -> None:
    store = fixtures.unpack_store(captured, ending, tmp_path)
    stored = {record.log_offset: record for record in log_records(store / "commitlog")}
    seen = fixtures.expected(captured, ending)
    assert (store / "abort").exists() == (ending == "killed")
    assert len(list((store / "commitlog").iterdir())) >= 3

    shown = 0
    for queue in seen["queues"]:
        for message in queue.get("messages", []):
            record = stored[message["logOffset"]]
            assert (record.topic, record.queue_id) == (queue["topic"], queue["queueId"])
            assert record.queue_offset == message["queueOffset"]
            assert record.properties == message["properties"]
            shown += 1
    not_shown = sum(queue["maxOffset"] for queue in seen["queues"] if "messages" not in queue)
    assert shown + not_shown == len(stored)
