"""A real broker whose wall clock is wrong at one start and right at the next, or jumps."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from tests.interop.remoting import COMMIT, Client
from tests.support.brokers import Server
from tests.support.faulty_system import FaultySystem
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

DAY_MS = 86_400_000
CONF = {
    "mappedFileSizeCommitLog": 1 << 20,
    "maxMessageSize": 1 << 18,
    "deleteWhen": ";".join(f"{hour:02d}" for hour in range(24)),
    "cleanResourceInterval": 50,
    "fileReservedTime": 1,
    "transactionTimeOut": 200,
    "transactionCheckInterval": 500,
    "transactionCheckMax": 1_000,
}
MESSAGES = 40


def send_and_park(client: Client, name: str) -> None:
    for number in range(MESSAGES):
        client.send("orders", f"{name} {number} ".encode() + b"x" * 100_000)
    client.send_half("orders", name.encode(), {"UNIQ_KEY": name}, group="g")


def commit_when_checked(client: Client, count: int) -> set[bytes]:
    """Answer checks until `count` halves are committed; return their bodies."""
    client.heartbeat("p", producer_groups=("g",))
    names: set[bytes] = set()
    while len(names) < count:
        header, _ = client.next_frame()
        if header["code"] == 39:  # CHECK_TRANSACTION_STATE
            fields = header["extFields"]
            names.add(fields["transactionId"].encode())
            client.send_one_way(
                37,
                {
                    "producerGroup": "g",
                    "tranStateTableOffset": fields["tranStateTableOffset"],
                    "commitLogOffset": fields["commitLogOffset"],
                    "commitOrRollback": COMMIT,
                    "fromTransactionCheck": True,
                    "msgId": fields["msgId"],
                    "transactionId": fields["transactionId"],
                },
            )
    return names


def has_noticed(server: Server, jumps: int) -> bool:
    return server.errors.count("while the broker runs") == jumps


@pytest.mark.parametrize("wrong_ms", [-400 * DAY_MS, 400 * DAY_MS], ids=["behind", "ahead"])
def test_nothing_is_deleted_or_stranded_because_of_a_wrong_clock(
    tmp_path: Path, wrong_ms: int
) -> None:
    system = FaultySystem(tmp_path)
    server = Server(tmp_path, conf=CONF, environment=system.environment)
    offsets_ms = (0, wrong_ms, 0, -wrong_ms, 0)
    for number, offset_ms in enumerate(offsets_ms):
        system.set_clock(offset_ms=offset_ms)
        with server, server.client() as client:
            if number == 0:
                client.create_topic("orders", queues=1)
            send_and_park(client, f"run{number}")
            if number == 2:  # it jumps while the broker runs, and back
                for jumps, jump_ms in enumerate((wrong_ms, 0), 1):
                    system.set_clock(offset_ms=jump_ms)
                    wait_until(partial(has_noticed, server, jumps), lambda: server.errors)
        if number == 1:  # an unclean end as well: what is not saved is not believed either
            server.start()
            server.kill()
    with server, server.client() as client:
        names = commit_when_checked(client, len(offsets_ms))
        stored = [record.body for record in client.pull_all("orders", 0)]
        wait_until(
            lambda: client.max_offset("orders", 0) == len(offsets_ms) * (MESSAGES + 1),
            "all halves are delivered",
        )
        assert client.min_offset("orders", 0) == 0
    assert names == {f"run{number}".encode() for number in range(len(offsets_ms))}
    runs, numbers = range(len(offsets_ms)), range(MESSAGES)
    expected = [f"run{run} {number} ".encode() for run in runs for number in numbers]
    assert [body[: len(start)] for body, start in zip(stored, expected, strict=False)] == expected
    assert "stranded" not in server.errors
