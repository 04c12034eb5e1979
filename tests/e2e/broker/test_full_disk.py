"""A start on a full disk: the broker serves reads, or refuses to start and says what to do."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos.faults import SmallDisk
from tests.interop.remoting import COMMIT, ResponseError
from tests.support.brokers import Server, StartFailed
from tests.support.waiting import wait_until_async

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

NOT_AVAILABLE = 14
CONF = {"cleanResourceInterval": 100, "diskSpaceCleanForciblyRatio": 100}


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    with SmallDisk(tmp_path / "data", mib=64) as disk:
        if disk.file_system != "ext4":
            pytest.skip(f"no small disk: {disk.mount_error}")
        yield disk


def send_code(server: Server) -> int:
    """Send a message and return the code of the response, also that of a refusal."""
    with server.client() as client:
        try:
            client.send("t", b"more")
        except ResponseError as refused:
            return refused.response.code
    return 0


async def test_a_broker_killed_on_a_full_disk_starts_and_serves_reads(
    tmp_path: Path, disk: SmallDisk
) -> None:
    sent = [b"%d" % number for number in range(50)]
    with Server(tmp_path, conf=CONF) as server:
        with server.client() as client:
            client.create_topic("t", queues=1)
            for body in sent:
                client.send("t", body)
            half = client.send_half("t", b"half", {"UNIQ_KEY": "7F00000100010000000000000001"})
            disk.fill()
        server.kill()
        server.start()
        assert send_code(server) == NOT_AVAILABLE
        with server.client() as client:
            assert [record.body for record in client.pull_all("t", 0)] == sent
            assert client.end_transaction(half, COMMIT, topic="t").code != 0
        server.stop()  # without a checkpoint: the disk has no space for one
        server.start()
        with server.client() as client:
            assert [record.body for record in client.pull_all("t", 0)] == sent
        disk.free()
        await wait_until_async(lambda: send_code(server) == 0)
        with server.client() as client:
            assert client.end_transaction(half, COMMIT, topic="t").code == 0
            bodies = [record.body for record in client.pull_all("t", 0)]
    assert bodies == [*sent, b"more", b"half"]
    server.assert_clean()


def test_a_first_start_on_a_full_disk_is_refused_with_what_to_do(
    tmp_path: Path, disk: SmallDisk
) -> None:
    disk.fill()
    server = Server(tmp_path, conf=CONF)
    with pytest.raises(StartFailed) as refused:
        server.start()
    assert refused.value.exit_code == 1  # it passes: start again
    last_line = refused.value.errors.splitlines()[-1]
    assert "No space left on device" in last_line
    assert f"free 64 MiB in {server.data}" in last_line
    assert "Traceback" not in refused.value.errors
