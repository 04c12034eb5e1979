"""Our broker works with Apache's name server, and Apache's broker with escrowmq.

Apache's Java client sends and receives, with a route from one and messages from the other.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.interop.apache import ApacheBroker, ApacheNamesrv, has_route, wait_for_route
from tests.interop.clients.scenarios import ScenarioResult, run_scenario
from tests.interop.escrowmq_server import EscrowMQ
from tests.interop.remoting import Client
from tests.interop.skipping import call_or_skip

pytestmark = [pytest.mark.apache, pytest.mark.slow, pytest.mark.nightly]


def send_and_receive(
    version: str, namesrv: str, topic: str, directory: Path, *, scenario: str = "sync"
) -> ScenarioResult:
    return call_or_skip(
        f"client java-{version}",
        lambda: run_scenario(
            f"java-{version}",
            scenario,
            namesrv=namesrv,
            topic=topic,
            group="readers",
            directory=directory / topic,
        ),
    )


def assert_all_received(result: ScenarioResult) -> None:
    assert result.all("done"), str(result)
    assert [event["status"] for event in result.sent] == ["ok"] * 8, str(result)
    bodies = sorted(event["body"] for event in result.received)
    assert bodies == [f"sync-{number}" for number in range(8)]


def test_our_broker_registers_with_apaches_name_server(version: str, tmp_path: Path) -> None:
    with ApacheNamesrv(version, tmp_path / "apache") as namesrv:
        address = namesrv.namesrv_address
        with EscrowMQ(tmp_path / "ours", role="broker", namesrv_address=address) as escrowmq:
            with Client(address) as client:
                assert client.route("orders") is None
            escrowmq.create_topic("orders")
            assert_all_received(send_and_receive(version, address, "orders", tmp_path))
            # The broker also registers a topic that the first message of a producer creates.
            result = send_and_receive(version, address, "new", tmp_path, scenario="autocreate")
            assert_all_received(result)
            assert has_route(address, "new", escrowmq.address)
        assert not has_route(address, "orders", escrowmq.address)  # the broker unregistered itself


def test_apaches_broker_registers_with_our_name_server(version: str, tmp_path: Path) -> None:
    with EscrowMQ(tmp_path / "ours", role="namesrv") as escrowmq:
        address = escrowmq.namesrv_address
        with ApacheBroker(version, tmp_path / "apache", namesrv_address=address) as broker:
            with Client(address) as client:
                assert client.route("orders") is None
            with Client(broker.address) as client:
                client.create_topic("orders")
            wait_for_route(address, "orders", broker.address)
            assert_all_received(send_and_receive(version, address, "orders", tmp_path))
            result = send_and_receive(version, address, "new", tmp_path, scenario="autocreate")
            assert_all_received(result)
            assert has_route(address, "new", broker.address)
        assert not has_route(address, "orders", broker.address)
