"""Transactions under load with SYNC_FLUSH: every commit is visible, and no check is sent."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import generator
from bench.generator import Load, NoCompiler, run
from bench.servers import EscrowMQ, client
from tests.support.ports import free_ports
from tests.support.scraping import scrape
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow

QUEUES = 2
VISIBLE_TIMEOUT_S = 20


@pytest.mark.parametrize("acknowledged", [False, True], ids=["one-way", "acknowledged"])
def test_every_commit_is_visible_and_no_check_is_sent(tmp_path: Path, acknowledged: bool) -> None:
    try:
        generator.built("load")
    except NoCompiler as error:
        pytest.skip(str(error))
    [metrics_port] = free_ports(1)
    settings = {
        "flushDiskType": "SYNC_FLUSH",
        # Longer than an end takes on a busy machine, and shorter than this test.
        "transactionTimeOut": 5_000,
        "metricsExporterType": "PROM",
        "metricsPromExporterPort": metrics_port,
    }
    server = EscrowMQ(tmp_path / "broker", settings)
    server.start()
    try:
        with client(server) as admin:
            admin.create_topic("paid", queues=QUEUES)
        load = Load(
            "tx",
            connections=16,
            depth=8,
            seconds=1.5,
            warm_up_s=0.1,
            topic="paid",
            queues=QUEUES,
            acknowledged=acknowledged,
        )
        result = run(load, server.ports, server.pids)
        assert (result.errors, result.unasked, result.unanswered) == ({}, {}, 0)
        committed = result.messages_in_all
        assert committed > 0
        with client(server) as reader:

            def visible() -> int:
                return sum(reader.max_offset("paid", queue) for queue in range(QUEUES))

            wait_until(
                lambda: visible() >= committed,
                f"{committed} messages are visible",
                timeout_s=VISIBLE_TIMEOUT_S,
            )
            assert visible() == committed
        page = scrape(f"127.0.0.1:{metrics_port}")
        assert page.value("rocketmq_commit_messages_total", topic="paid") == committed
        assert page.value("escrowmq_open_transactions") == 0
        assert page.value("escrowmq_checks_sent_total") == 0
        assert page.value("escrowmq_checks_unsent_total") == 0
    finally:
        server.stop()
