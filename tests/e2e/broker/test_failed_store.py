"""A store that fails, and errors that pass: real processes whose file calls fail on demand."""

from __future__ import annotations

import configparser
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.e2e.broker.test_several_brokers import Cluster
from tests.interop.remoting import Client, ResponseError
from tests.support.brokers import Server, StartFailed
from tests.support.faulty_system import FOREVER, MEMORY_ERROR, Fault, FaultySystem
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

FAILED = 1
NOT_STARTED = 2
UNIT = Path(__file__).parents[3] / "deploy" / "escrowmq.service"
# Nothing but the failure itself may be what a server notices: the steps of maintenance are rare.
RARE_STEPS = {"cleanResourceInterval": 600_000, "flushIntervalConsumeQueue": 600_000}


@pytest.fixture
def system(tmp_path: Path) -> FaultySystem:
    return FaultySystem(tmp_path)


@pytest.fixture
def server(tmp_path: Path, system: FaultySystem) -> Iterator[Server]:
    server = Server(tmp_path, environment=system.environment)
    yield server
    if server.is_alive:
        server.kill()


def try_send(client: Client, body: bytes) -> bool:
    """Return whether the broker has acknowledged a message."""
    try:
        client.send("orders", body)
    except (ResponseError, OSError):
        return False
    return True


def bodies(server: Server) -> list[bytes]:
    with server.client() as client:
        return [record.body for record in client.pull_all("orders", 0)]


def exit_codes_without_restart() -> set[int]:
    """Return the exit codes after which the shipped unit does not start the broker again."""
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment, method-assign]  # keys keep their case
    unit.read(UNIT)
    assert unit["Service"]["Restart"] == "on-failure"
    assert unit["Unit"]["StartLimitIntervalSec"] == "0", "it must not give up"
    return {0, *map(int, unit["Service"]["RestartPreventExitStatus"].split())}


@pytest.mark.parametrize("flush_mode", ["SYNC_FLUSH", "ASYNC_FLUSH"])
def test_a_failed_flush_of_the_log_ends_the_process_and_the_unit_starts_it_again(
    tmp_path: Path, system: FaultySystem, flush_mode: str
) -> None:
    server = Server(
        tmp_path,
        conf={"flushDiskType": flush_mode, **RARE_STEPS},
        environment=system.environment,
    )
    server.start()
    with server.client() as client:
        client.send("orders", b"before")
        system.inject(Fault("fdatasync", "commitlog", "EIO", times=FOREVER))
        try_send(client, b"during")
        exit_code = server.wait_exit()
    assert exit_code == FAILED
    assert exit_code not in exit_codes_without_restart()
    assert "Traceback" not in server.errors
    assert "the store has failed" in server.errors
    system.inject()
    with server:
        assert bodies(server)[0] == b"before"
        with server.client() as client:
            client.send("orders", b"after")
        assert bodies(server)[-1] == b"after"
    server.assert_clean()


def test_a_disk_that_hangs_does_not_keep_a_failed_broker_alive(
    tmp_path: Path, system: FaultySystem
) -> None:
    server = Server(tmp_path, conf={"flushDiskType": "SYNC_FLUSH"}, environment=system.environment)
    server.start()
    with server.client() as client:
        client.send("orders", b"before")
        system.inject(Fault("fdatasync", "consumequeue", "EIO", hangs=True))
        wait_until(lambda: try_send(client, b"x"), "a send is acknowledged")
        system.inject(
            Fault("fdatasync", "consumequeue", "EIO", hangs=True),
            Fault("fdatasync", "commitlog", "EIO", times=FOREVER),
        )
        while try_send(client, b"more"):  # until a flush has failed
            pass
        assert server.wait_exit() == FAILED
    system.inject()
    with server:
        assert bodies(server)[0] == b"before"
    server.assert_clean()


PASSING_FAULTS = [
    Fault("pwrite", "commitlog", "ENOSPC", times=3),
    Fault("pwrite", "commitlog", "EIO"),
    Fault("pwrite", "commitlog", "EINTR"),
    Fault("pwrite", "commitlog", MEMORY_ERROR, times=3),
    Fault("open", "consumequeue", "EMFILE", times=3),
    Fault("open", "consumequeue", "ENOMEM", times=3),
    Fault("pwrite", "consumequeue", "ENOSPC", times=3),
    Fault("open", "commitlog", "ENFILE", times=3),
    Fault("open", "config", "EMFILE", times=3),
    Fault("rename", "topics.json", "EIO", times=3),
    Fault("fsync", "config", "EIO"),
    Fault("open", "checkpoint", "EMFILE", times=3),
]


def test_a_passing_error_does_not_end_the_service(server: Server, system: FaultySystem) -> None:
    acknowledged = []
    server.start()
    with server.client() as client:
        for index, fault in enumerate(PASSING_FAULTS):
            system.inject(fault)
            for number in range(8):
                topic = {"topic": f"t{index}-{number}", "readQueueNums": 1, "writeQueueNums": 1}
                client.request(17, topic)
                body = b"%d.%d" % (index, number)
                if try_send(client, body):
                    acknowledged.append(body)
            system.inject()
            body = b"after %d" % index
            wait_until(partial(try_send, client, body), f"a send after {fault}")
            acknowledged.append(body)
    server.stop()
    assert stored(server) == acknowledged
    server.assert_clean()


def stored(server: Server) -> list[bytes]:
    with server:
        return bodies(server)


def test_the_exit_code_of_a_failed_start_says_whether_to_try_again(
    server: Server, system: FaultySystem
) -> None:
    with server, server.client() as client:
        client.send("orders", b"before")
    for fault, exit_code in (
        (Fault("open", "commitlog", "EIO"), FAILED),
        (Fault("open", "commitlog", "EMFILE"), FAILED),
        (Fault("open", "data/abort", "ENOMEM"), FAILED),
        (Fault("fsync", "data", "EIO"), FAILED),
        (Fault("open", "data/lock", "ENOSPC"), FAILED),
        (Fault("listdir", "data", "EIO"), FAILED),
        (Fault("open", "data/lock", MEMORY_ERROR), FAILED),
        (Fault("open", "data/lock", "EACCES"), NOT_STARTED),
    ):
        system.inject(fault)
        with pytest.raises(StartFailed) as refused:
            server.start()
        server.forget_exited()
        assert refused.value.exit_code == exit_code, fault
        assert (exit_code in exit_codes_without_restart()) == (exit_code == NOT_STARTED)
        assert "Traceback" not in refused.value.errors
    system.inject()
    assert stored(server) == [b"before"]


def test_a_supervisor_starts_a_broker_with_a_failed_store_again(
    tmp_path: Path, system: FaultySystem
) -> None:
    with Cluster(tmp_path, 1, environment=system.environment) as cluster:
        [address] = cluster.addresses().values()
        with Client(address, timeout_s=20) as client:
            client.send("orders", b"before")
            system.inject(Fault("fdatasync", "commitlog", "EIO"))
            try_send(client, b"during")
        cluster.wait_until(
            lambda: "broker died" in cluster.errors and "exit_code=1" in cluster.errors,
            "the broker has failed",
        )
        system.inject()
        cluster.wait_until(lambda: cluster.get("/health/ready")[0] == 200, "it is ready again")
        [address] = cluster.addresses().values()
        with Client(address, timeout_s=20) as client:
            assert client.pull_all("orders", 0)[0].body == b"before"
