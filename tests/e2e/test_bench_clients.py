"""The benchmark of clients: the driver sends and commits as many messages as it counts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from bench.clients import LOADS, TOPICS, Client, cpp_clients, create_topics, grpc_client, table
from bench.measure import QUICK
from tests.support.brokers import Server

pytestmark = pytest.mark.slow


def test_messages_that_the_driver_counts_are_stored(tmp_path: Path) -> None:
    plan = replace(QUICK, seconds=1.5, warm_up_s=0.1)
    ours = Client("ours")
    with Server(tmp_path / "broker") as server:
        create_topics(int(server.address.rpartition(":")[2]))
        counts = dict.fromkeys(TOPICS, 0)
        for load in (LOADS[1], LOADS[2], LOADS[4]):  # threads, in flight, transactions
            ours.measure(load, server.namesrv_address, plan, tmp_path)
            assert not ours.reasons
            assert ours.failed[load] == 0
            count = len(server.messages(TOPICS[load.kind][0]))
            assert count - counts[load.kind] >= ours.rate(load) * plan.seconds * 0.9 > 0
            counts[load.kind] = count
    results = table(ours, cpp_clients(), Client("ours", lack="not here"), grpc_client())
    assert len(results.rows) == 2 * len(LOADS)
    assert any("not here" in note for note in results.notes)


def test_a_measurement_that_fails_has_a_reason(tmp_path: Path) -> None:
    unreachable = "127.0.0.1:1"
    client = Client("ours")
    client.measure(LOADS[0], unreachable, replace(QUICK, seconds=0.1), tmp_path)
    assert client.rate(LOADS[0]) == 0
    assert client.failed[LOADS[0]] == 1
    (reason,) = client.reasons
    assert unreachable in reason
