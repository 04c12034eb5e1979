"""A real broker whose wall clock is wrong at one start and right at the next, or jumps."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from escrowmq.store.log_ages import AGES_PATH
from tests.interop.remoting import COMMIT, Client
from tests.support.brokers import Server
from tests.support.commands import run
from tests.support.faulty_system import FaultySystem
from tests.support.greedy import heartbeat_body, lock_body
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


@pytest.mark.parametrize("kills", [False, True], ids=["stopped", "killed"])
def test_delayed_messages_come_once_whatever_the_clock_says_at_restarts(
    tmp_path: Path, kills: bool
) -> None:
    system = FaultySystem(tmp_path)
    conf = CONF | {"flushDiskType": "SYNC_FLUSH"}
    server = Server(tmp_path, conf=conf, environment=system.environment)
    offsets_ms = (0, 3 * DAY_MS, 0, -3 * DAY_MS, 0, 3 * DAY_MS, -3 * DAY_MS)
    expected = set()
    for number, offset_ms in enumerate(offsets_ms):
        system.set_clock(offset_ms=offset_ms)
        with server, server.client() as client:
            if number == 0:
                client.create_topic("orders", queues=1)
            for level in (1, 2):  # a second, and five
                for count in range(10):
                    body = f"run {number}, level {level}, {count}".encode()
                    client.send("orders", body, {"DELAY": str(level)})
                    expected.add(body)
            if kills:
                server.kill()
    with server, server.client() as client:
        wait_until(
            lambda: client.max_offset("orders", 0) >= len(expected), "all of them are delivered"
        )
    with server, server.client() as client:  # what comes twice, would come after a start
        client.send("orders", b"last", {"DELAY": "2"})
        wait_until(lambda: client.max_offset("orders", 0) > len(expected), "the last one comes")
        bodies = [record.body for record in client.pull_all("orders", 0)]
    assert sorted(bodies) == sorted([*expected, b"last"])


def test_members_and_locks_stay_when_the_clock_jumps_by_days(tmp_path: Path) -> None:
    system = FaultySystem(tmp_path)
    server = Server(tmp_path, conf=CONF, environment=system.environment)
    queue = [("orders", 0)]
    with server, server.client() as client, server.client() as other:
        client.create_topic("orders", queues=1)
        for member, name in ((client, "c"), (other, "other")):
            member.expect(34, body=heartbeat_body(name, ["g"]))
        assert client.expect(41, body=lock_body("g", "c", queue)).body.count(b'"orders"') == 1
        for jumps, offset_ms in enumerate((3 * DAY_MS, -3 * DAY_MS, 0), 1):
            system.set_clock(offset_ms=offset_ms)
            wait_until(partial(has_noticed, server, jumps), lambda: server.errors)
            refused = other.expect(41, body=lock_body("g", "other", queue))
            assert b'"orders"' not in refused.body
            members = client.expect(38, {"consumerGroup": "g"}).body
            assert b'"c"' in members
            assert b'"other"' in members
        client.expect(42, body=lock_body("g", "c", queue))
        assert b'"orders"' in other.expect(41, body=lock_body("g", "other", queue)).body


def doctor_details(server: Server, level: str) -> str:
    """Return what `escrowmq doctor` says about the cluster at this level."""
    options = ("-c", server.conf, "--data", server.data, "-n", server.namesrv_address)
    checks = run("doctor", "--json", *map(str, options)).json
    return "; ".join(check["detail"] for check in checks if check["level"] == level)


def test_doctor_reports_a_clock_that_differs_and_one_that_was_set(tmp_path: Path) -> None:
    system = FaultySystem(tmp_path)
    server = Server(tmp_path, conf=CONF, environment=system.environment)
    with server:
        assert "its clock agrees" in doctor_details(server, "ok")
    system.set_clock(offset_ms=DAY_MS)
    with server, server.client() as client:
        assert "ahead of this machine's clock" in doctor_details(server, "problem")
        warnings = doctor_details(server, "warning")
        assert "when it started, its clock had been set forwards by" in warnings
        client.create_topic("orders", queues=1)
        client.send("orders", b"from tomorrow")
        system.set_clock(offset_ms=0)
        wait_until(partial(has_noticed, server, 1), "the broker notices that the clock was set")
        assert "its clock agrees" in doctor_details(server, "ok")  # the wall clock, not its own
        warnings = doctor_details(server, "warning")
        assert "its clock was set 1 time since it started" in warnings
        assert "its newest message was stored" in warnings


def test_damaged_ages_are_reported_by_doctor_and_store_check(tmp_path: Path) -> None:
    server = Server(tmp_path, conf=CONF)
    with server, server.client() as client:
        client.create_topic("orders", queues=1)
        client.send("orders", b"x")
    ages = server.data / AGES_PATH
    ages.write_bytes(ages.read_bytes().replace(b"measured", b"measurer"))
    assert f"{AGES_PATH} has a wrong checksum" in doctor_details(server, "warning")
    result = run("store", "check", str(server.data), "--json")
    assert result.code == 1
    assert AGES_PATH in result.out
    with server:
        assert "damage found kind=ages" in server.errors
        assert "it has found damage in its files 1 time" in doctor_details(server, "problem")
