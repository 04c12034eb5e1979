"""The figures of clients: the driver really sends and commits as many as it says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from bench.clients import LOADS, TOPICS, Client, cpp_clients, create_topics, grpc_client, table
from bench.measure import QUICK
from tests.support.brokers import Server
from tests.support.sql_bank import delivered_bodies

pytestmark = pytest.mark.slow


def test_what_the_driver_counts_is_stored(tmp_path: Path) -> None:
    plan = replace(QUICK, seconds=1.5, warm_up_s=0.1)
    ours = Client("ours")
    with Server(tmp_path / "broker") as served:
        create_topics(int(served.address.rpartition(":")[2]))
        before = dict.fromkeys(TOPICS, 0)
        for load in (LOADS[1], LOADS[2], LOADS[4]):  # both ways, both kinds
            ours.measure(load, served.namesrv_address, plan, tmp_path)
            assert not ours.reasons
            assert ours.failed[load] == 0
            stored = len(delivered_bodies(served, TOPICS[load.kind][0]))
            assert stored - before[load.kind] >= ours.rate(load) * plan.seconds * 0.9 > 0
            before[load.kind] = stored
    told = table(ours, cpp_clients(), Client("ours", lack="not here"), grpc_client())
    assert len(told.rows) == 2 * len(LOADS)
    assert any("not here" in note for note in told.notes)


def test_a_measurement_that_comes_to_nothing_says_why(tmp_path: Path) -> None:
    nobody = "127.0.0.1:1"
    client = Client("ours")
    client.measure(LOADS[0], nobody, replace(QUICK, seconds=0.1), tmp_path)
    assert client.rate(LOADS[0]) == 0
    assert client.failed[LOADS[0]] == 1
    (reason,) = client.reasons
    assert nobody in reason
