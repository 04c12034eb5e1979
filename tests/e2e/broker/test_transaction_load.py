"""Ends under load, every one flushed before it is answered: none is dropped, nobody is asked."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from bench import generator
from bench.generator import Load, NoCompiler, run
from bench.servers import EscrowMQ, client
from tests.support.ports import free_ports
from tests.support.scraping import scrape

pytestmark = pytest.mark.slow

QUEUES = 2
VISIBLE_S = 20


@pytest.mark.parametrize("acknowledged", [False, True], ids=["one-way", "acknowledged"])
def test_every_commit_is_seen_and_none_is_asked_about(tmp_path: Path, acknowledged: bool) -> None:
    try:
        generator.built("load")
    except NoCompiler as error:
        pytest.skip(str(error))
    [metrics_port] = free_ports(1)
    settings = {
        "flushDiskType": "SYNC_FLUSH",
        # Long enough for a busy machine, and over before this test is.
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
        told = run(load, server.ports, server.pids)
        assert (told.errors, told.unasked, told.unanswered) == ({}, {}, 0)
        committed = told.messages_in_all
        assert committed > 0
        with client(server) as reader:
            deadline = time.monotonic() + VISIBLE_S
            seen = 0
            while seen < committed and time.monotonic() < deadline:
                seen = sum(reader.max_offset("paid", queue) for queue in range(QUEUES))
        assert seen == committed
        page = scrape(f"127.0.0.1:{metrics_port}")
        assert page.value("rocketmq_commit_messages_total", topic="paid") == committed
        assert page.value("escrowmq_open_transactions") == 0
        assert page.value("escrowmq_checks_sent_total") == 0
        assert page.value("escrowmq_checks_unsent_total") == 0
    finally:
        server.stop()
