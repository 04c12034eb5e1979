"""A broker is killed, a bit of its log is flipped, and it starts again: one message is lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from escrowmq.message.record import NewRecord, StoredRecord, encode_record
from escrowmq.store.disk import RealDisk
from escrowmq.store.log_files import LogFiles
from tests.support.brokers import Server
from tests.support.store_damage import edit_file
from tests.support.stores import HOST, NOW_MS

pytestmark = pytest.mark.slow

COUNT = 10
NO_CHECKPOINT = {"escrowCheckpointInterval": 3_600_000}


def stored_records(store: Path) -> list[StoredRecord]:
    files = LogFiles(RealDisk(store))
    try:
        return [item for item in files.scan() if isinstance(item, StoredRecord)]
    finally:
        files.close()


@pytest.mark.parametrize("flush_mode", ["SYNC_FLUSH", "ASYNC_FLUSH"])
@pytest.mark.parametrize("position", [0, 24, 60], ids=lambda byte: f"byte {byte}")
def test_a_flipped_bit_costs_its_own_message(
    tmp_path: Path, flush_mode: str, position: int
) -> None:
    with Server(tmp_path, conf={"flushDiskType": flush_mode, **NO_CHECKPOINT}) as server:
        bodies = [b"message %d" % number for number in range(COUNT)]
        with server.client() as client:
            client.create_topic("orders", queues=1)
            for body in bodies:
                client.send("orders", body, {}, queue_id=0)
        server.kill()
        hit = next(r for r in stored_records(server.data) if r.body == bodies[3])
        log_file = server.data / f"commitlog/{0:020d}"
        edit_file(log_file, hit.log_offset + position, lambda byte: bytes([byte[0] ^ 4]))
        server.start()
        with server.client() as client:
            found = [record.body for record in client.pull_all("orders", 0)]
            client.send("orders", b"later", {}, queue_id=0)
            assert client.pull_all("orders", 0)[-1].body == b"later"
    assert found == bodies[:3] + bodies[4:]
    assert f"log_offset={hit.log_offset}" in server.errors


def test_a_record_inside_a_body_does_not_surface(tmp_path: Path) -> None:
    with Server(tmp_path, conf=NO_CHECKPOINT) as server:
        with server.client() as client:
            client.create_topic("orders", queues=1)
            client.create_topic("victim", queues=1)
            client.send("orders", b"first", {}, queue_id=0)
            [first] = [r for r in stored_records(server.data) if r.body == b"first"]
            outer = first.log_offset + first.size
            forged_offset = outer + 88 + 10
            message = NewRecord("victim", 0, b"forged", born_host=HOST)
            forged = encode_record(message, 0, forged_offset, NOW_MS, HOST, append_crc=True)
            client.send("orders", b"x" * 10 + forged, {}, queue_id=0)
            client.send("orders", b"last", {}, queue_id=0)
        server.kill()
        edit_file(
            server.data / f"commitlog/{0:020d}", outer, (forged_offset - outer).to_bytes(4, "big")
        )
        server.start()
        with server.client() as client:
            bodies = [record.body for record in client.pull_all("orders", 0)]
            assert client.pull_all("victim", 0) == []
    assert bodies == [b"first", b"last"]
