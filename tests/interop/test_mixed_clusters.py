"""Half of it ours, half of it Apache's: our broker at its name server, its broker at ours.

Judged by Apache's Java client, which asks the one where the other is.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.interop.apache import ApacheBroker, ApacheNamesrv, has_route, wait_for_route
from tests.interop.clients.play import Told, play
from tests.interop.escrowmq_server import EscrowMQ
from tests.interop.jars import Unavailable
from tests.interop.remoting import Client

pytestmark = [pytest.mark.apache, pytest.mark.slow, pytest.mark.nightly]


def send_and_receive(
    version: str, namesrv: str, topic: str, directory: Path, *, scenario: str = "sync"
) -> Told:
    try:
        return play(
            f"java-{version}",
            scenario,
            namesrv=namesrv,
            topic=topic,
            group="readers",
            directory=directory / topic,
        )
    except Unavailable as reason:
        pytest.skip(f"client java-{version}: {reason}")


def assert_all_arrived(told: Told) -> None:
    assert told.all("done"), str(told)
    assert [line["status"] for line in told.sent] == ["ok"] * 8, str(told)
    assert sorted(line["body"] for line in told.got) == [f"sync-{number}" for number in range(8)]


def test_our_broker_registers_with_their_name_server(version: str, tmp_path: Path) -> None:
    with ApacheNamesrv(version, tmp_path / "theirs") as names:
        where = names.namesrv_address
        with EscrowMQ(tmp_path / "ours", role="broker", namesrv_address=where) as ours:
            with Client(where) as client:
                assert client.route("orders") is None
            ours.create_topic("orders")
            assert_all_arrived(send_and_receive(version, where, "orders", tmp_path))
            # A topic that a producer's first message creates is made known at once, too.
            told = send_and_receive(version, where, "made", tmp_path, scenario="autocreate")
            assert_all_arrived(told)
            assert has_route(where, "made", ours.address)
        assert not has_route(where, "orders", ours.address)  # it said goodbye


def test_their_broker_registers_with_our_name_server(version: str, tmp_path: Path) -> None:
    with EscrowMQ(tmp_path / "ours", role="namesrv") as ours:
        where = ours.namesrv_address
        with ApacheBroker(version, tmp_path / "theirs", namesrv_address=where) as broker:
            with Client(where) as client:
                assert client.route("orders") is None
            with Client(broker.address) as client:
                client.create_topic("orders")
            wait_for_route(where, "orders", broker.address)
            assert_all_arrived(send_and_receive(version, where, "orders", tmp_path))
            told = send_and_receive(version, where, "made", tmp_path, scenario="autocreate")
            assert_all_arrived(told)
            assert has_route(where, "made", broker.address)
        assert not has_route(where, "orders", broker.address)
